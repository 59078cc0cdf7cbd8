"""Qwen2-VL and Qwen2.5-VL: pictures of any size, all patches in one sequence, multi-axis rope."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lookonce.model.families.base import ModelFamily, PositionAxes, Tensors
from lookonce.types.media import Modality


class Qwen2_5VLFamily(ModelFamily):  # noqa: N801
    """Items: `pixel_values` [t * h * w, patch], `image_grid_thw` [3] in patches."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl", "qwen2_5_vl")
    modalities: tuple[Modality, ...] = ("image",)
    position_axes: PositionAxes = 3

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return modality

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        return list(self.encode_images(items).pooler_output)

    def encode_images(self, items: Sequence[Tensors]) -> Any:
        """transformers' output for all items, from one call."""
        grids = torch.stack([item["image_grid_thw"].view(3) for item in items])
        patches = [item["pixel_values"] for item in items]
        # Checked here, because the vision encoder would allocate whatever a wrong grid asks for;
        # not in 64 bits, where products of huge or negative numbers may come out right.
        for grid, patch in zip(grids.tolist(), patches, strict=True):
            if min(grid) < 1 or math.prod(grid) != len(patch):
                raise ValueError("image_grid_thw does not match the number of patches")
        joined = patches[0] if len(patches) == 1 else torch.cat(patches)
        return self.media_model.get_image_features(joined, grids)

    @property
    def media_model(self) -> Any:
        """The part of transformers' model that encodes pictures."""
        return self.model.model
