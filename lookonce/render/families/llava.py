"""LLaVA 1.5: one square picture (CLIP or SigLIP), a fixed number of tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from lookonce.errors import ModelLoadError
from lookonce.render.families.arrays import Arrays, PixelTable, check_arrays, resized
from lookonce.render.families.base import Decoded, Options, ProcessorFamily, token_id
from lookonce.render.families.processor_files import Json, ProcessorFiles, image_processor
from lookonce.types.media import Expansion, Modality, ProcessedItem


class LlavaProcessing(ProcessorFamily):
    model_types: ClassVar[tuple[str, ...]] = ("llava",)
    modalities = ("image",)

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        self._token = token_id(files.config, "image_token_id", "image_token_index")
        self._height, self._width = _output_size(files.image_processor)

    def placeholder_token_id(self, modality: Modality) -> int:
        return self._token

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        return Expansion(((self._token, self._num_tokens),), self._token)

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        check_arrays(arrays, {"pixel_values": (self.dtype, (3, self._height, self._width))})
        return Expansion(((self._token, self._num_tokens),), self._token)

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        """All pictures have the same number of tokens."""
        return (self._width, self._height) if self._num_tokens <= max_tokens else None

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """`pixel_values` [3, height, width]."""
        assert isinstance(decoded, Image.Image)
        width, height = self._resize_target(*decoded.size)
        pixels = resized(decoded, width, height, self._processor.resample)
        if getattr(self._processor, "do_center_crop", False):
            planes = self._processor.center_crop(
                np.moveaxis(pixels, -1, 0), self._processor.crop_size
            )
            pixels = np.moveaxis(planes, 0, -1)
        arrays = {"pixel_values": self._table.planes(pixels)}
        return ProcessedItem("image", arrays, self.expansion_of_size("image", decoded.size, {}))

    def _resize_target(self, width: int, height: int) -> tuple[int, int]:
        """CLIP fixes the shorter side and crops; SigLIP fixes both."""
        short = self._processor.size.shortest_edge
        if not short:
            return self._width, self._height
        long = int(short * max(width, height) / min(width, height))
        return (short, long) if width <= height else (long, short)

    @property
    def _num_tokens(self) -> int:
        """As `LlavaProcessor` counts; folders older than it leave that to the model's config."""
        vision = self.files.config.get("vision_config") or {}
        has_class_token = "siglip" not in str(vision.get("model_type", "clip_vision_model"))
        stated = self.files.processor
        patch = int(stated.get("patch_size") or vision.get("patch_size", 14))
        extra = stated.get("num_additional_image_tokens", int(has_class_token))
        strategy = stated.get("vision_feature_select_strategy") or self.files.config.get(
            "vision_feature_select_strategy", "default"
        )
        dropped = 1 if strategy == "default" else 0
        return (self._height // patch) * (self._width // patch) + int(extra) - dropped

    @cached_property
    def _processor(self) -> Any:
        processor = image_processor(
            self.files.image_processor, "CLIPImageProcessor", "SiglipImageProcessor"
        )
        if not processor.do_resize:
            raise ModelLoadError("an image processor that does not resize is not supported")
        return processor

    @cached_property
    def _table(self) -> PixelTable:
        return PixelTable(self._processor, self.dtype, self.memory)


def _output_size(config: Json) -> tuple[int, int]:
    """Height and width of what the processor returns, from its JSON alone."""
    clip = "Siglip" not in str(config.get("image_processor_type", "CLIPImageProcessor"))
    cropped = config.get("do_center_crop", clip)
    size = config.get("crop_size" if cropped else "size", 224)
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and {"height", "width"} <= size.keys():
        return int(size["height"]), int(size["width"])
    raise ModelLoadError("the image processor's output has no fixed size")
