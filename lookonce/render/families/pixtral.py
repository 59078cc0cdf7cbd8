"""Pixtral and Mistral 3: pictures of any size, row by row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from blake3 import blake3
from PIL import Image

from lookonce.errors import ModelLoadError, UnprocessableMediaError
from lookonce.render.families.arrays import (
    Arrays,
    PixelTable,
    check_arrays,
    int64_array,
    int64_values,
    refuse_arrays,
    resized,
)
from lookonce.render.families.base import Decoded, Options, ProcessorFamily, longest_edge, token_id
from lookonce.render.families.processor_files import (
    ProcessorFiles,
    ProcessorTokenizer,
    image_processor,
)
from lookonce.types.media import Expansion, Modality, ProcessedItem


class PixtralProcessing(ProcessorFamily):
    """One token per merged patch, a break after each row, an end after the last."""

    model_types = ("mistral3",)
    modalities = ("image",)

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        self._tokenizer = ProcessorTokenizer(files)
        self._token = token_id(files.config, "image_token_id", "image_token_index")
        stated = files.processor
        self._break = self._tokenizer.token(stated.get("image_break_token", "[IMG_BREAK]"))
        self._end = self._tokenizer.token(stated.get("image_end_token", "[IMG_END]"))
        vision = files.config.get("vision_config") or {}
        merge = stated.get("spatial_merge_size") or files.config.get("spatial_merge_size", 1)
        self._patch = int(stated.get("patch_size") or vision.get("patch_size", 16)) * int(merge)
        """Width and height of the pixels of one token."""
        size = files.image_processor.get("size") or {}
        self._longest = int(size.get("longest_edge", 1024))

    def placeholder_token_id(self, modality: Modality) -> int:
        return self._token

    def fingerprint(self) -> bytes:
        return blake3(super().fingerprint() + self._tokenizer.digest).digest()

    def option_names(self) -> tuple[str, ...]:
        return ("size",)

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options:
        return longest_edge(kwargs, self._patch, self._longest)

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        columns, rows = self._grid(size[0], size[1], options)
        return self._expansion(rows, columns)

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        pixels = (self.dtype, (3, None, None))
        check_arrays(arrays, {"pixel_values": pixels, "image_sizes": ("int64", (2,))})
        height, width = int64_values(arrays["image_sizes"])
        if arrays["pixel_values"].shape[1:] != (height, width):
            raise refuse_arrays("image_sizes must be height and width of pixel_values")
        if height % self._patch or width % self._patch:
            raise refuse_arrays(f"height and width must be multiples of {self._patch}")
        if max(height, width) >= self._longest + self._patch:
            raise refuse_arrays(f"the longest edge must be at most {self._longest} pixels")
        return self._expansion(height // self._patch, width // self._patch)

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        """The largest square."""
        fitting = (math.isqrt(4 * max(0, max_tokens) + 1) - 1) // 2
        side = min(fitting, self._longest // self._patch) * self._patch
        return (side, side) if side else None

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """`pixel_values` [3, height, width] and `image_sizes` [2], height and width in pixels."""
        assert isinstance(decoded, Image.Image)
        columns, rows = self._grid(*decoded.size, options)
        width, height = columns * self._patch, rows * self._patch
        pixels = resized(decoded, width, height, self._processor.resample)
        arrays = {
            "pixel_values": self._table.planes(pixels),
            "image_sizes": int64_array(height, width),
        }
        return ProcessedItem("image", arrays, self._expansion(rows, columns))

    def _expansion(self, rows: int, columns: int) -> Expansion:
        row = ((self._token, columns), (self._break, 1))
        last = ((self._token, columns), (self._end, 1))
        return Expansion(row * (rows - 1) + last, self._token)

    def _grid(self, width: int, height: int, options: Options) -> tuple[int, int]:
        """Columns and rows of tokens: the picture shrunk to the longest edge, rounded up."""
        longest = options.get("longest_edge", self._longest)
        assert isinstance(longest, int)
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise UnprocessableMediaError("the image is too thin for this model")
        return (width - 1) // self._patch + 1, (height - 1) // self._patch + 1

    @cached_property
    def _processor(self) -> Any:
        processor = image_processor(self.files.image_processor, "PixtralImageProcessor")
        if not processor.do_resize or processor.size.longest_edge != self._longest:
            raise ModelLoadError("preprocessor_config.json has sizes this family does not know")
        return processor

    @cached_property
    def _table(self) -> PixelTable:
        return PixelTable(self._processor, self.dtype, self.memory)
