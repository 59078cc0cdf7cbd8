"""Qwen2-Audio: a Whisper-like encoder over a fixed span; rows of padding are left out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.model.families.padding import padding_mask
from lookonce.types.media import Modality


class Qwen2AudioFamily(ModelFamily):
    """Items: `input_features` [mel bins, frames], padded to the encoder's span with the mel of
    silence, which frames near the end see; `feature_attention_mask` [frames]."""

    model_types = ("qwen2_audio",)
    modalities = ("audio",)
    host_arrays = frozenset({"feature_attention_mask"})

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return modality

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        encoder = self.model.model.audio_tower
        mels = torch.stack([item["input_features"].squeeze(0) for item in items])
        frames = torch.stack([item["feature_attention_mask"].sum() for item in items])
        positions, rows = encoder._get_feat_extract_output_lengths(frames)
        mask = self.padding_mask(positions, mels)
        hidden = encoder(mels, attention_mask=mask).last_hidden_state
        projected = self.model.model.multi_modal_projector(hidden)
        counts = rows.tolist()
        return [output[:count] for output, count in zip(projected, counts, strict=True)]

    def padding_mask(self, lengths: Tensor, like: Tensor) -> Tensor | None:
        """A mask with which no sound attends to its padding."""
        config = self.model.model.audio_tower.config
        real = torch.arange(config.max_source_positions) < lengths[:, None]
        return padding_mask(config, real, like)
