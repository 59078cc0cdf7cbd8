"""Qwen2.5-Omni's thinker, as in nano: Qwen2.5-VL's pictures, and sound at 25 tokens a second.
Qwen3-Omni's: Qwen3-VL's pictures, and sound at 13 tokens a second."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lookonce.model.families.base import Tensors
from lookonce.model.families.qwen2_5_vl import Qwen2_5VLFamily
from lookonce.model.families.qwen3_vl import Qwen3VLFamily
from lookonce.types.media import Modality


class Qwen2_5OmniFamily(Qwen2_5VLFamily):  # noqa: N801
    """Pictures as Qwen2.5-VL's; sounds: `input_features` [mel bins, frames] without padding, or
    padded beside `feature_attention_mask` [frames]."""

    model_types = ("qwen2_5_omni_thinker", "qwen2_5_omni")
    modalities = ("image", "audio")

    @classmethod
    def transformers_class(cls) -> Any:
        """The thinker's class, which also reads its weights from a folder of the whole model."""
        return import_module("transformers").Qwen2_5OmniThinkerForConditionalGeneration

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        if modality == "image":
            return super().encode(modality, items)
        mels = [_unpadded(item) for item in items]
        frames = torch.tensor([mel.shape[1] for mel in mels], device=mels[0].device)
        encoder = self.model.model.audio_tower
        _, rows = encoder._get_feat_extract_output_lengths(frames)
        output = encoder(torch.cat(mels, 1), feature_lens=frames).last_hidden_state
        return list(output.split(rows.tolist()))


class Qwen3OmniFamily(Qwen3VLFamily):
    """Pictures and films as Qwen3-VL's; sounds as Qwen2.5-Omni's, with rows that are 0 beyond their
    embedding: nothing of them is added to later layers.

    A sound is encoded in a call of its own: among longer ones, transformers pads the last span of
    one that is shorter than a span, which changes its rows.
    """

    model_types = ("qwen3_omni_moe_thinker", "qwen3_omni_moe")
    modalities = ("image", "audio", "video")
    text_after_film_time = True

    @classmethod
    def transformers_class(cls) -> Any:
        """The thinker's class, which also reads its weights from a folder of the whole model."""
        return import_module("transformers").Qwen3OmniMoeThinkerForConditionalGeneration

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return None if modality == "audio" else modality

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        if modality != "audio":
            return super().encode(modality, items)
        return [self._encode_sound(_unpadded(item)) for item in items]

    def _encode_sound(self, mel: Tensor) -> Tensor:
        frames = torch.tensor([mel.shape[1]], device=mel.device)
        rows: Tensor = self.model.model.audio_tower(mel, feature_lens=frames).last_hidden_state
        return functional.pad(rows, (0, self.row_width - self.hidden_size))


def _unpadded(item: Tensors) -> Tensor:
    """Mel features [mel bins, frames] without padding."""
    mel = item["input_features"]
    mel = mel.view(mel.shape[-2:])
    mask = item.get("feature_attention_mask")
    return mel if mask is None else mel[:, mask.view(-1).bool()]
