"""Idefics3 and SmolVLM: a picture is cut into tiles, and the whole picture follows scaled down."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.types.media import Modality


class Idefics3Family(ModelFamily):
    """Items: `pixel_values` [tiles, 3, height, width]. Items that a client processed also have
    `pixel_attention_mask` [tiles, height, width], 0 in padding. Each is encoded in its own call."""

    model_types = ("idefics3", "smolvlm")
    modalities = ("image",)

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        return [self._encode_tiles(item) for item in items]

    def _encode_tiles(self, item: Tensors) -> Tensor:
        """The rows of all tiles. `get_image_features` computes the same, but drops a tile of zeros
        as padding: a tile of one colour may be all zeros and has placeholders in the prompt."""
        model = self.model.model
        hidden = model.vision_model(
            pixel_values=item["pixel_values"], patch_attention_mask=self._real_patches(item)
        ).last_hidden_state
        rows: Tensor = model.connector(hidden).flatten(0, 1)
        return rows

    def _real_patches(self, item: Tensors) -> Tensor | None:
        """[tiles, rows, columns] whether a patch has pixels that are not padding; None: all do."""
        mask = item.get("pixel_attention_mask")
        if mask is None:
            return None
        side = self.config.vision_config.patch_size
        patches = mask.unfold(1, side, side).unfold(2, side, side)
        return patches.sum((-1, -2)) > 0
