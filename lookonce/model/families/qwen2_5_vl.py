"""Qwen2-VL and Qwen2.5-VL: pictures of any size, all patches in one sequence, multi-axis rope.

The vision encoder's attention never crosses from one temporal patch to another (`cu_seqlens`), so
each pair of a film's frames is an item of its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from lookonce.model.device import to_device
from lookonce.model.families.base import Model, ModelFamily, PositionAxes, Tensors
from lookonce.types.media import Modality

IMAGE_ARRAYS = ("image_grid_thw", "pixel_values")


class Qwen2_5VLFamily(ModelFamily):  # noqa: N801
    """Items: `pixel_values` [t * h * w, patch], `image_grid_thw` [3] in patches; of films the same
    under `pixel_values_videos` and `video_grid_thw`."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl", "qwen2_5_vl")
    modalities: tuple[Modality, ...] = ("image", "video")
    position_axes: PositionAxes = 3
    host_arrays = frozenset({"image_grid_thw", "video_grid_thw"})

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        if getattr(self.config, "video_token_id", None) is None:
            self.modalities = ("image",)

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return modality

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        return list(self.encode_images(items, modality).pooler_output)

    def encode_images(self, items: Sequence[Tensors], modality: Modality = "image") -> Any:
        """transformers' output for all items of one modality, from one call."""
        return encode_patches(self.media_model, items, modality)

    @property
    def media_model(self) -> Any:
        """The part of transformers' model that encodes pictures."""
        return self.model.model


def encode_patches(media_model: Any, items: Sequence[Tensors], modality: Modality) -> Any:
    """transformers' output for all items of one modality, from one call of the part of its model
    that encodes pictures. Raises `ValueError` for a grid that is not that of the patches."""
    film = modality == "video"
    name, pixels = ("video_grid_thw", "pixel_values_videos") if film else IMAGE_ARRAYS
    grids = torch.stack([item[name].view(3) for item in items])
    patches = [item[pixels] for item in items]
    # Checked here, because the vision encoder would allocate whatever a wrong grid asks for; not in
    # 64 bits, where products of huge or negative numbers may come out right.
    grids = grids.cpu()  # who calls this without an engine may give them on the device
    for grid, patch in zip(grids.tolist(), patches, strict=True):
        if min(grid) < 1 or math.prod(grid) != len(patch):
            raise ValueError(f"{name} does not match the number of patches")
    joined = patches[0] if len(patches) == 1 else torch.cat(patches)
    return media_model.get_image_features(
        joined, grids, **_of_grids(media_model.visual, grids, joined.device)
    )


def _of_grids(visual: Any, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """What transformers' encoder computes of the grids [items, 3], from those on the host: it reads
    them value by value, and the bounds of its windows in each layer. Names are those of
    `accepts_precomputed_kwargs`. What is computed with goes to the device, bounds stay."""
    merge = visual.spatial_merge_size
    found = {
        "image_position_ids": to_device(get_vision_position_ids(grids, merge), device),
        "image_cu_seqlens": get_vision_cu_seqlens(grids),
    }
    if hasattr(visual, "window_size"):
        window, patch = visual.window_size, visual.patch_size
        index, bounds = get_vision_window_index(grids, merge, window, patch)
        found["image_window_index"] = to_device(index, device)
        found["image_cu_window_seqlens"] = bounds
    if hasattr(visual, "interpolation_mode"):
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        found["image_interp_indices"] = to_device(indices, device)
        found["image_interp_weights"] = to_device(weights, device)
    return found
