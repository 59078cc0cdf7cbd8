"""Idefics3 and SmolVLM: a picture is cut into tiles, beside which the whole goes in small."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.types.media import Modality


class Idefics3Family(ModelFamily):
    """Items: `pixel_values` [tiles, 3, height, width], `pixel_attention_mask` [tiles, height,
    width]. One call per item: a batch would need padding, which the tower drops by itself."""

    model_types = ("idefics3", "smolvlm")
    modalities = ("image",)

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        return [self._encode_tiles(item) for item in items]

    def _encode_tiles(self, item: Tensors) -> Tensor:
        tiles, mask = item["pixel_values"][None], item["pixel_attention_mask"][None]
        rows: Tensor = self.model.model.get_image_features(tiles, mask).pooler_output[0]
        return rows
