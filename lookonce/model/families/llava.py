"""LLaVA 1.5: one square picture per item, a fixed number of rows, plain scatter."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.types.media import Modality


class LlavaFamily(ModelFamily):
    """Items: `pixel_values` [3, height, width]."""

    model_types = ("llava",)
    modalities = ("image",)

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return item["pixel_values"].shape[-3:]

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        pixels = torch.stack([item["pixel_values"].squeeze(0) for item in items])
        return list(self.model.model.get_image_features(pixels).pooler_output)
