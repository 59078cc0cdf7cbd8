"""LLaVA 1.5 and Mistral 3: square pictures, or pictures of any size with Pixtral's encoder."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.types.media import Modality


class LlavaFamily(ModelFamily):
    """Items: `pixel_values` [3, height, width]; with Pixtral's encoder also `image_sizes` [2]."""

    model_types: ClassVar[tuple[str, ...]] = ("llava", "mistral3")
    modalities = ("image",)
    host_arrays = frozenset({"image_sizes"})

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return None if "image_sizes" in item else item["pixel_values"].shape[-3:]

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        pixels = torch.stack([item["pixel_values"].squeeze(0) for item in items])
        sizes = {}
        if "image_sizes" in items[0]:
            sizes["image_sizes"] = torch.stack([item["image_sizes"].view(2) for item in items])
        return list(self.model.model.get_image_features(pixels, **sizes).pooler_output)
