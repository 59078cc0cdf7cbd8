"""Qwen2-Audio: a Whisper-like encoder over a fixed span; rows of padding are left out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from lookonce.model.device import to_device
from lookonce.model.families.base import ModelFamily, Tensors
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
        """A mask with which no sound attends to its padding; made on the host, which reads it."""
        config = self.model.model.audio_tower.config
        span = config.max_source_positions
        real = torch.arange(span) < lengths[:, None]
        mask: Tensor | None = create_bidirectional_mask(
            config=config,
            inputs_embeds=torch.zeros(len(lengths), span, 1, dtype=like.dtype),
            attention_mask=real.long(),
        )
        return None if mask is None else to_device(mask, like.device)
