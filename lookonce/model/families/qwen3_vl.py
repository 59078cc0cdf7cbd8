"""Qwen3-VL, dense and MoE: pictures also feed the first decoder layers (deepstack)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lookonce.model.families.base import Tensors
from lookonce.model.families.qwen2_5_vl import Qwen2_5VLFamily
from lookonce.types.media import Modality


class Qwen3VLFamily(Qwen2_5VLFamily):
    """Items as Qwen2.5-VL's. A row is its embedding, then one more for each deepstack layer."""

    model_types = ("qwen3_vl", "qwen3_vl_moe")
    position_axes = 4

    @property
    def row_width(self) -> int:
        layers = len(self.config.vision_config.deepstack_visual_indexes)
        return (1 + layers) * self.hidden_size

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        output = self.encode_images(items, modality)
        per_item = zip(output.pooler_output, *output.deepstack_features, strict=True)
        return [torch.cat(parts, dim=-1) for parts in per_item]

    def place(self, embeds: Tensor, at: Tensor, rows: Tensor) -> dict[str, Any]:
        first, *deeper = torch.split(rows, self.hidden_size, dim=-1)
        embeds.index_copy_(0, at, first)
        mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
        mask[0, at] = True
        # `at` is sorted, so the mask selects positions in the order of the rows.
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": deeper}
