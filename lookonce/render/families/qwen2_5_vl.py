"""Qwen2-VL to Qwen3-VL: pictures of any size, between the template's vision start and end."""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image

from lookonce.render.families.base import Decoded, Options, ProcessorFamily, token_id
from lookonce.render.families.external_arrays import Arrays
from lookonce.render.families.folder import FolderFiles
from lookonce.render.families.qwen_images import OPTION_NAMES, QwenImages
from lookonce.types.media import Expansion, Modality, ProcessedItem


class Qwen2_5VLProcessing(ProcessorFamily):  # noqa: N801
    model_types = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    modalities = ("image",)

    def __init__(self, files: FolderFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        token = token_id(files.config, "image_token_id")
        self.images = QwenImages(files.image_processor, token, dtype)

    def placeholder_token_id(self, modality: Modality) -> int:
        return self.images.token_id

    def option_names(self) -> tuple[str, ...]:
        return OPTION_NAMES

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options:
        return self.images.options(kwargs)

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        return self.images.expansion(size[0], size[1], options)

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        return self.images.expansion_of_arrays(arrays)

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        return self.images.largest_size(max_tokens)

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        assert isinstance(decoded, Image.Image)
        return self.images.process(decoded, options)
