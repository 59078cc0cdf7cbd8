"""Qwen3.5, dense and MoE: Qwen's encoder of pictures and films before layers with states."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from lookonce.model.families.base import PositionAxes, Tensors
from lookonce.model.families.general import GeneralTextFamily
from lookonce.model.families.qwen2_5_vl import Qwen2_5VLFamily, encode_patches
from lookonce.types.media import Modality


class Qwen3_5Family(GeneralTextFamily):  # noqa: N801
    """Items as Qwen2.5-VL's. Its text model is looked at and compared as those of the general
    family are."""

    model_types = ("qwen3_5", "qwen3_5_moe")
    modalities: tuple[Modality, ...] = ("image", "video")
    position_axes: PositionAxes = 3
    host_arrays = Qwen2_5VLFamily.host_arrays

    @property
    def reserved_tokens(self) -> frozenset[int]:
        config = self.config
        return frozenset((config.image_token_id, config.video_token_id))

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return modality

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        return list(encode_patches(self.model.model, items, modality).pooler_output)
