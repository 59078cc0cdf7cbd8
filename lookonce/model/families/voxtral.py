"""Voxtral: sound in chunks of 30 seconds, each encoded by itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lookonce.model.families.base import ModelFamily, Tensors
from lookonce.types.media import Modality


class VoxtralFamily(ModelFamily):
    """Items: `input_features` [chunks, mel bins, frames]."""

    model_types = ("voxtral",)
    modalities = ("audio",)

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return modality

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        chunks = torch.cat([item["input_features"] for item in items])
        rows: Tensor = self.model.model.get_audio_features(chunks).pooler_output
        per_chunk = len(rows) // len(chunks)
        sizes = [per_chunk * len(item["input_features"]) for item in items]
        return list(torch.split(rows, sizes))
