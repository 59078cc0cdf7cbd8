"""Pixels of a picture as a Hugging Face image processor (PIL backend) computes them, only faster.

Rescaling and normalising map each of 256 levels of each channel to one number. So that number is
computed once per level, by the processor itself, and looked up per pixel: bit for bit the
processor's result, in the model's dtype, without its passes over double-precision copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lookonce.errors import ModelLoadError
from lookonce.render.families.arrays import STORAGE, cast_floats, stored_array
from lookonce.types.media import Array

Levels = NDArray[np.uint8]


class PixelTable:
    """8-bit RGB levels → what the model sees."""

    def __init__(self, processor: Any, dtype: str) -> None:
        """`processor` is a transformers image processor of the PIL backend."""
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
        out = np.empty((3, *pixels.shape[:2]), STORAGE[self.dtype])
        for channel in range(3):
            out[channel] = self._levels[channel][pixels[..., channel]]
        return stored_array(out, self.dtype)

    def patches(self, pixels: Levels, patch: int, merge: int, repeat: int) -> Array:
        """[height, width, 3] → [patches, 3 * repeat * patch * patch], in Qwen's order.

        Patches of one merge x merge window are neighbours; within a patch come channel, frame
        (the picture `repeat` times), row and column.
        """
        height, width = pixels.shape[0] // patch, pixels.shape[1] // patch
        windows = pixels.reshape(
            height // merge, merge, patch, width // merge, merge, patch, 3
        ).transpose(6, 0, 3, 1, 4, 2, 5)
        out = np.empty((height * width, 3, repeat, patch * patch), STORAGE[self.dtype])
        for channel in range(3):
            levels = windows[channel].reshape(height * width, patch * patch)
            out[:, channel] = self._levels[channel][levels][:, None]
        return stored_array(out.reshape(height * width, -1), self.dtype)


def resized(image: Image.Image, width: int, height: int, resample: int | None) -> Levels:
    """The picture at a new size, [height, width, 3]."""
    kind = Image.Resampling.BILINEAR if resample is None else Image.Resampling(resample)
    return np.asarray(image.resize((width, height), kind))
