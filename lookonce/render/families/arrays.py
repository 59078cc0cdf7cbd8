"""Arrays of items: in the model's dtype, from pixels, and checks of arrays made elsewhere.

NumPy has no bfloat16: its bits are computed here and stored as uint16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.types.media import Array

Arrays = Mapping[str, Array]
Levels = NDArray[np.uint8]
Shape = tuple[int | None, ...]
"""None: any length of at least 1."""
STORAGE: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
"""dtype name → NumPy type with the same bits."""
EXPONENTS: dict[str, tuple[str, int]] = {
    "float64": ("<u8", 0x7FF0 << 48),
    "float32": ("<u4", 0x7F80 << 16),
    "float16": ("<u2", 0x7C00),
    "bfloat16": ("<u2", 0x7F80),
}
"""dtype name → unsigned integers of its width, and the bits that only NaN and infinity all have."""
CHECKED_AT_ONCE = 1 << 18
"""Elements; their intermediate values stay in the processor's caches."""


class ArrayMemory:
    """Where processors put the large arrays of an item: private memory, or what `source` gives.

    A media worker's source is memory that the engine reads in place.
    """

    def __init__(self) -> None:
        self.source: Callable[[int], NDArray[np.uint8] | None] | None = None
        """That many bytes of memory, or None: use private memory."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """An array to be written once, of the type that has the bits of `dtype` (`STORAGE`)."""
        storage = np.dtype(STORAGE[dtype])
        if self.source is not None:
            memory = self.source(math.prod(shape) * storage.itemsize)
            if memory is not None:
                return memory.view(storage).reshape(shape)
        return np.empty(shape, storage)


def float_array(values: NDArray[np.float32], dtype: str) -> Array:
    """An `Array` of the model's dtype."""
    return stored_array(cast_floats(values, dtype), dtype)


def int64_array(*values: int) -> Array:
    """An `Array` of shape [len(values)]."""
    return stored_array(np.array(values, np.int64), "int64")


def stored_array(storage: NDArray[np.generic], dtype: str) -> Array:
    """An `Array` over NumPy memory that has the bits of `dtype` (see `STORAGE`)."""
    flat = np.ascontiguousarray(storage)
    return Array(dtype, flat.shape, flat.view(np.uint8).reshape(-1).data)


def cast_floats(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """The values in `dtype`, as an array of its storage type and of the same shape."""
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    return values.astype(STORAGE[dtype], copy=False)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper 16 bits of each float32, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    high = (rounded >> np.uint32(16)).astype(np.uint16)
    # The addition may turn the mantissa of a NaN into that of infinity or zero.
    return np.where(np.isnan(values), np.uint16(0x7FC0), high)


def int64_values(array: Array) -> tuple[int, ...]:
    """The values of a small int64 array."""
    return tuple(int(value) for value in np.frombuffer(array.data, "<i8"))


class PixelTable:
    """8-bit RGB levels → the values of a Hugging Face image processor (PIL backend), bit for bit.

    Rescaling and normalising map each of the 256 levels of each channel to one number. The
    processor computes that number once per level; here it is looked up per pixel, in the model's
    dtype, which saves the processor's passes over double-precision copies.
    """

    def __init__(self, processor: Any, dtype: str, memory: ArrayMemory | None = None) -> None:
        """`processor` is a transformers image processor of the PIL backend."""
        self._memory = memory or ArrayMemory()
        if processor.backend != "pil":
            raise ModelLoadError("the image processor is not one this family knows")
        ramp = np.tile(np.arange(256, dtype=np.uint8), (3, 1))[:, None, :]
        values = processor.rescale(ramp, processor.rescale_factor) if processor.do_rescale else ramp
        if processor.do_normalize:
            values = processor.normalize(values, processor.image_mean, processor.image_std)
        self._levels = np.ascontiguousarray(
            cast_floats(np.asarray(values, np.float32)[:, 0], dtype)
        )
        self.dtype = dtype

    def planes(self, pixels: Levels) -> Array:
        """[height, width, 3] → [3, height, width]."""
        out = self._memory.empty((3, *pixels.shape[:2]), self.dtype)
        for channel in range(3):
            out[channel] = self._levels[channel][pixels[..., channel]]
        return stored_array(out, self.dtype)

    def patches(self, pixels: Levels, patch: int, merge: int, repeat: int) -> Array:
        """[height, width, 3] → [patches, 3 * repeat * patch * patch], in Qwen's order.

        Patches of one merge x merge window follow each other; a patch is ordered by channel, frame
        (the picture `repeat` times), row and column.
        """
        height, width = pixels.shape[0] // patch, pixels.shape[1] // patch
        windows = _windows(pixels, patch, merge)
        out = self._memory.empty((height * width, 3, repeat, patch * patch), self.dtype)
        for channel in range(3):
            levels = windows[channel].reshape(height * width, patch * patch)
            out[:, channel] = self._levels[channel][levels][:, None]
        return stored_array(out.reshape(height * width, -1), self.dtype)

    def film_patches(self, frames: Sequence[Levels], patch: int, merge: int) -> Array:
        """Frames [height, width, 3] of one temporal patch, in the order of `patches`."""
        height, width = frames[0].shape[0] // patch, frames[0].shape[1] // patch
        out = self._memory.empty((height * width, 3, len(frames), patch * patch), self.dtype)
        for number, frame in enumerate(frames):
            windows = _windows(frame, patch, merge)
            for channel in range(3):
                levels = windows[channel].reshape(height * width, patch * patch)
                out[:, channel, number] = self._levels[channel][levels]
        return stored_array(out.reshape(height * width, -1), self.dtype)


def _windows(pixels: Levels, patch: int, merge: int) -> Levels:
    """[height, width, 3] → [3, rows, columns of windows, merge, merge, patch, patch]."""
    height, width = pixels.shape[0] // patch, pixels.shape[1] // patch
    split = pixels.reshape(height // merge, merge, patch, width // merge, merge, patch, 3)
    return split.transpose(6, 0, 3, 1, 4, 2, 5)


def resized(image: Image.Image, width: int, height: int, resample: int | None) -> Levels:
    """The picture at a new size, [height, width, 3]."""
    kind = Image.Resampling.BILINEAR if resample is None else Image.Resampling(resample)
    return np.asarray(image.resize((width, height), kind))


def refuse_arrays(message: str) -> BadRequestError:
    """The error for an item that the model's processor cannot have made."""
    return BadRequestError(message, code="invalid_item")


def patch_grid(
    arrays: Arrays, pixels: str, grid: str, *, merge: int, note: str = ""
) -> tuple[int, int]:
    """Rows and columns of an item's patches, as its array `grid` (1, rows, columns) says.

    Both are whole multiples of `merge`, and there are as many patches in `pixels`. Raises
    `BadRequestError`; `note` is added to what it says of the grid.
    """
    time, rows, columns = int64_values(arrays[grid])
    num_patches = arrays[pixels].shape[0]
    if time != 1 or rows < 1 or columns < 1 or rows * columns != num_patches:
        raise refuse_arrays(
            f"{grid} must be 1, rows and columns of the {num_patches} patches{note}"
        )
    if rows % merge or columns % merge:
        raise refuse_arrays(f"rows and columns of patches must be multiples of {merge}")
    return rows, columns


def check_arrays(arrays: Arrays, expected: Mapping[str, tuple[str, Shape]]) -> None:
    """Require exactly these names, dtypes and shapes. Raises `BadRequestError` naming the array."""
    if arrays.keys() != expected.keys():
        names = ", ".join(sorted(expected))
        raise refuse_arrays(f"the item must have the arrays {names} and no others")
    for name, (dtype, shape) in expected.items():
        array = arrays[name]
        if array.dtype != dtype:
            raise refuse_arrays(f"{name} is {array.dtype}; it must be {dtype}")
        if not _has_shape(array.shape, shape):
            wanted = ", ".join("n" if length is None else str(length) for length in shape)
            raise refuse_arrays(f"{name} has shape {array.shape}; it must be ({wanted})")


def check_finite(arrays: Arrays) -> None:
    """Require numbers only: NaN and infinity would spoil every answer that the item is part of.

    Raises `BadRequestError` naming the array.
    """
    for name, array in arrays.items():
        layout = EXPONENTS.get(array.dtype)
        if layout is None:
            continue
        storage, mask = layout
        bits = np.frombuffer(array.data, storage)
        for start in range(0, len(bits), CHECKED_AT_ONCE):
            if ((bits[start : start + CHECKED_AT_ONCE] & mask) == mask).any():
                raise refuse_arrays(f"{name[:40]!r} has values that are NaN or infinite")


def in_model_dtype(arrays: Arrays, dtype: str) -> dict[str, Array]:
    """float32 arrays cast to the model's dtype, as families do; other arrays unchanged."""
    return {
        name: _cast(array, dtype) if array.dtype == "float32" != dtype else array
        for name, array in arrays.items()
    }


def _cast(array: Array, dtype: str) -> Array:
    values = np.frombuffer(array.data, "<f4").reshape(array.shape)
    return stored_array(cast_floats(values, dtype), dtype)


def _has_shape(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        length == want or (want is None and length > 0)
        for length, want in zip(shape, wanted, strict=True)
    )
