"""Qwen3-VL, dense and MoE: pictures also feed the first decoder layers (deepstack)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lookonce.model.families.base import Model, Tensors
from lookonce.model.families.qwen2_5_vl import Qwen2_5VLFamily
from lookonce.types.media import Modality


class Qwen3VLFamily(Qwen2_5VLFamily):
    """Items as Qwen2.5-VL's. A row is its embedding, then one more for each deepstack layer."""

    model_types = ("qwen3_vl", "qwen3_vl_moe")
    position_axes = 4

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.decoder._deepstack_process = _add_at

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
        return {"visual_pos_masks": at, "deepstack_visual_embeds": deeper}


def _add_at(hidden: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    """Hidden states [1, T, H] of which those at the indices `at` [N] have `rows` [N, H] added. By a
    mask, as transformers does it, the host would wait for the number of rows."""
    return hidden.index_add(1, at, rows[None].to(hidden.dtype))
