"""Arrays that somebody else processed, judged by what this model's processor would have made."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lookonce.errors import BadRequestError
from lookonce.render.families.arrays import cast_floats, stored_array
from lookonce.types.media import Array

Arrays = Mapping[str, Array]
Shape = tuple[int | None, ...]
"""None: any length from 1 on."""


def refuse_arrays(message: str) -> BadRequestError:
    """The item cannot be what the model's processor made."""
    return BadRequestError(message, code="invalid_item")


def check_arrays(arrays: Arrays, expected: Mapping[str, tuple[str, Shape]]) -> None:
    """Names, dtypes and shapes exactly as expected. Raises `BadRequestError` naming the array."""
    if arrays.keys() != expected.keys():
        names = ", ".join(sorted(expected))
        raise refuse_arrays(f"the item must have the arrays {names} and no others")
    for name, (dtype, shape) in expected.items():
        array = arrays[name]
        if array.dtype != dtype:
            raise refuse_arrays(f"{name} is {array.dtype}; it must be {dtype}")
        if not _fits(array.shape, shape):
            wanted = ", ".join("n" if length is None else str(length) for length in shape)
            raise refuse_arrays(f"{name} has shape {array.shape}; it must be ({wanted})")


def in_model_dtype(arrays: Arrays, dtype: str) -> dict[str, Array]:
    """float32 arrays cast to the model's dtype, as our own processors do; others as they are."""
    return {
        name: _cast(array, dtype) if array.dtype == "float32" != dtype else array
        for name, array in arrays.items()
    }


def integers(array: Array) -> tuple[int, ...]:
    """The values of a small int64 array."""
    return tuple(int(value) for value in np.frombuffer(array.data, "<i8"))


def _cast(array: Array, dtype: str) -> Array:
    values = np.frombuffer(array.data, "<f4").reshape(array.shape)
    return stored_array(cast_floats(values, dtype), dtype)


def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        length == want or (want is None and length > 0)
        for length, want in zip(shape, wanted, strict=True)
    )
