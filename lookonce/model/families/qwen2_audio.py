"""Qwen2-Audio: a Whisper-like encoder over a fixed span of sound, of which the real part counts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.types.media import Modality


class Qwen2AudioFamily(ModelFamily):
    """Items: `input_features` [mel bins, frames] padded with the mel of silence to the encoder's
    span (frames near the end see it), `feature_attention_mask` [frames]."""

    model_types = ("qwen2_audio",)
    modalities = ("audio",)

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return modality

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        tower = self.model.model.audio_tower
        mels = torch.stack([item["input_features"].squeeze(0) for item in items])
        frames = torch.stack([item["feature_attention_mask"].sum() for item in items])
        positions, rows = tower._get_feat_extract_output_lengths(frames)
        hidden = tower(mels, attention_mask=self._mask(positions, mels)).last_hidden_state
        projected = self.model.model.multi_modal_projector(hidden)
        counts = rows.tolist()
        return [output[:count] for output, count in zip(projected, counts, strict=True)]

    def _mask(self, lengths: Tensor, like: Tensor) -> Tensor | None:
        """Each sound attends to its own positions only."""
        config = self.model.model.audio_tower.config
        span = config.max_source_positions
        real = torch.arange(span, device=like.device) < lengths[:, None]
        mask: Tensor | None = create_bidirectional_mask(
            config=config,
            inputs_embeds=like.new_zeros(len(lengths), span, 1),
            attention_mask=real.long(),
        )
        return mask
