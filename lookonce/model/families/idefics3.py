"""Idefics3 and SmolVLM: a picture is cut into tiles, beside which the whole goes in small."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.types.media import Modality


class Idefics3Family(ModelFamily):
    """Items: `pixel_values` [tiles, 3, height, width]; of one processed elsewhere also
    `pixel_attention_mask` [tiles, height, width], 0 in padding. One call per item."""

    model_types = ("idefics3", "smolvlm")
    modalities = ("image",)

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        return [self._encode_tiles(item) for item in items]

    def _encode_tiles(self, item: Tensors) -> Tensor:
        """As `get_image_features` does, which takes a tile of zeros for padding and drops it; but
        a tile of an even colour may be all zeros, and has its place in the prompt."""
        model = self.model.model
        hidden = model.vision_model(
            pixel_values=item["pixel_values"], patch_attention_mask=self._real_patches(item)
        ).last_hidden_state
        rows: Tensor = model.connector(hidden).flatten(0, 1)
        return rows

    def _real_patches(self, item: Tensors) -> Tensor | None:
        """[tiles, rows, columns]: which patches hold a pixel that is not padding; None: all."""
        mask = item.get("pixel_attention_mask")
        if mask is None:
            return None
        side = self.config.vision_config.patch_size
        patches = mask.unfold(1, side, side).unfold(2, side, side)
        return patches.sum((-1, -2)) > 0
