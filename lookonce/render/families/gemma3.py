"""Gemma 3: one square picture, a fixed number of tokens between begin and end of image."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from PIL import Image

from lookonce.errors import ModelLoadError
from lookonce.render.families.arrays import Arrays, PixelTable, check_arrays, resized
from lookonce.render.families.base import Decoded, Options, ProcessorFamily, token_id
from lookonce.render.families.processor_files import ProcessorFiles, image_processor
from lookonce.types.media import Expansion, Modality, ProcessedItem


class Gemma3Processing(ProcessorFamily):
    """Pan and scan, which is off by default in the processor, is not supported: a folder that turns
    it on is refused."""

    model_types = ("gemma3",)
    modalities = ("image",)

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        if files.image_processor.get("do_pan_and_scan"):
            raise ModelLoadError("an image processor with do_pan_and_scan is not supported")
        if not files.image_processor.get("do_resize", True):
            raise ModelLoadError("an image processor that does not resize is not supported")
        config = files.config
        self._begin = token_id(config, "boi_token_id", "boi_token_index")
        self._end = token_id(config, "eoi_token_id", "eoi_token_index")
        self._token = token_id(config, "image_token_id", "image_token_index")
        self._num_tokens = int(config.get("mm_tokens_per_image", 256))

    def placeholder_token_id(self, modality: Modality) -> int:
        """Begin-of-image, which the template writes for the whole picture."""
        return self._begin

    def text_around_placeholder(self, modality: Modality) -> tuple[str, str]:
        return "\n\n", "\n\n"

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        runs = ((self._begin, 1), (self._token, self._num_tokens), (self._end, 1))
        return Expansion(runs, self._token)

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        height, width = self._output_size
        check_arrays(arrays, {"pixel_values": (self.dtype, (3, height, width))})
        return self.expansion_of_size(modality, (width, height), {})

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        """All pictures have the same number of tokens."""
        height, width = self._output_size
        return (width, height) if self._num_tokens + 2 <= max_tokens else None

    @property
    def _output_size(self) -> tuple[int, int]:
        """Height and width of what the processor returns, from its JSON alone."""
        size = self.files.image_processor.get("size") or {"height": 224, "width": 224}
        if isinstance(size, int):
            return size, size
        return int(size["height"]), int(size["width"])

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """`pixel_values` [3, height, width]."""
        assert isinstance(decoded, Image.Image)
        size = self._processor.size
        pixels = resized(decoded, size.width, size.height, self._processor.resample)
        arrays = {"pixel_values": self._table.planes(pixels)}
        return ProcessedItem("image", arrays, self.expansion_of_size("image", decoded.size, {}))

    @cached_property
    def _processor(self) -> Any:
        return image_processor(self.files.image_processor, "Gemma3ImageProcessor")

    @cached_property
    def _table(self) -> PixelTable:
        return PixelTable(self._processor, self.dtype, self.memory)
