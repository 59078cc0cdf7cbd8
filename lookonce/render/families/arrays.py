"""NumPy arrays → `Array`s of the model's dtype. NumPy has no bfloat16: its bits are made here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookonce.types.media import Array

STORAGE: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
"""dtype name → the NumPy type that holds its bits."""


def cast_floats(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """The values in `dtype`, as an array of its storage type, same shape."""
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    return values.astype(STORAGE[dtype], copy=False)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper 16 bits of each float32, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    high = (rounded >> np.uint32(16)).astype(np.uint16)
    # Adding may carry a NaN's mantissa over into infinity or zero.
    return np.where(np.isnan(values), np.uint16(0x7FC0), high)


def float_array(values: NDArray[np.float32], dtype: str) -> Array:
    """An `Array` of the model's dtype."""
    return stored_array(cast_floats(values, dtype), dtype)


def stored_array(storage: NDArray[np.generic], dtype: str) -> Array:
    """An `Array` over memory that already holds `dtype`'s bits (see `STORAGE`)."""
    flat = np.ascontiguousarray(storage)
    return Array(dtype, flat.shape, flat.view(np.uint8).reshape(-1).data)


def int64_array(*values: int) -> Array:
    """An `Array` of shape [len(values)]."""
    return stored_array(np.array(values, np.int64), "int64")
