"""Idefics3 and SmolVLM: a picture is cut into tiles, and the whole picture follows scaled down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lookonce.model.device import to_device
from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.model.families.padding import padding_mask
from lookonce.types.media import Modality


class Idefics3Family(ModelFamily):
    """Items: `pixel_values` [tiles, 3, height, width]. Items that a client processed also have
    `pixel_attention_mask` [tiles, height, width], 0 in padding. Each is encoded in its own call."""

    model_types = ("idefics3", "smolvlm")
    modalities = ("image",)
    host_arrays = frozenset({"pixel_attention_mask"})

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        return [self._encode_tiles(item) for item in items]

    def _encode_tiles(self, item: Tensors) -> Tensor:
        """The rows of all tiles. `get_image_features` computes the same, but drops a tile of zeros
        as padding: a tile of one colour may be all zeros and has placeholders in the prompt. Masks
        are made on the host, where the encoder's own `forward` would wait for theirs."""
        model, pixels, real = self.model.model, item["pixel_values"], self._real_patches(item)
        tower = model.vision_model
        there = to_device(real, pixels.device)
        embedded = tower.embeddings(pixel_values=pixels, patch_attention_mask=there)
        mask = padding_mask(tower.config, real.flatten(1), embedded)
        hidden = tower.encoder(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
        rows: Tensor = model.connector(tower.post_layernorm(hidden)).flatten(0, 1)
        return rows

    def _real_patches(self, item: Tensors) -> Tensor:
        """[tiles, rows, columns] whether a patch has pixels that are not padding; on the host."""
        side = self.config.vision_config.patch_size
        mask = item.get("pixel_attention_mask")
        if mask is None:
            tiles, _, height, width = item["pixel_values"].shape
            return torch.ones(tiles, height // side, width // side, dtype=torch.bool)
        patches = mask.unfold(1, side, side).unfold(2, side, side)
        return patches.sum((-1, -2)) > 0
