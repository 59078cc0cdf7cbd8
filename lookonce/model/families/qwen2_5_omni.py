"""Qwen2.5-Omni's thinker, as in nano: Qwen2.5-VL's pictures, and sound at 25 tokens a second.
Qwen3-Omni's: Qwen3-VL's pictures, and sound at 13 tokens a second."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lookonce.model.device import to_device
from lookonce.model.families.base import Tensors
from lookonce.model.families.qwen2_5_vl import Qwen2_5VLFamily
from lookonce.model.families.qwen3_vl import Qwen3VLFamily
from lookonce.types.media import Modality

HOST_ARRAYS = Qwen2_5VLFamily.host_arrays | {"feature_attention_mask"}


class Qwen2_5OmniFamily(Qwen2_5VLFamily):  # noqa: N801
    """Pictures as Qwen2.5-VL's; sounds: `input_features` [mel bins, frames] without padding, or
    padded beside `feature_attention_mask` [frames]."""

    model_types = ("qwen2_5_omni_thinker", "qwen2_5_omni")
    modalities = ("image", "audio")
    host_arrays = HOST_ARRAYS

    @classmethod
    def transformers_class(cls) -> Any:
        """The thinker's class, which also reads its weights from a folder of the whole model."""
        return import_module("transformers").Qwen2_5OmniThinkerForConditionalGeneration

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        if modality == "image":
            return super().encode(modality, items)
        mels = [_unpadded(item) for item in items]
        frames = torch.tensor([mel.shape[1] for mel in mels])
        encoder = self.model.model.audio_tower
        _, rows = encoder._get_feat_extract_output_lengths(frames)
        joined = torch.cat(mels, 1)
        chunks = _chunks(encoder, joined, frames)
        pairs = to_device(_functions(encoder).get_pool_indices(frames), joined.device)
        output = encoder(joined, feature_lens=frames, pool_indices=pairs, **chunks)
        return list(output.last_hidden_state.split(rows.tolist()))


class Qwen3OmniFamily(Qwen3VLFamily):
    """Pictures and films as Qwen3-VL's; sounds as Qwen2.5-Omni's, with rows that are 0 beyond their
    embedding: nothing of them is added to later layers.

    A sound is encoded in a call of its own: among longer ones, transformers pads the last span of
    one that is shorter than a span, which changes its rows.
    """

    model_types = ("qwen3_omni_moe_thinker", "qwen3_omni_moe")
    modalities = ("image", "audio", "video")
    host_arrays = HOST_ARRAYS
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
        frames = torch.tensor([mel.shape[1]])
        encoder = self.model.model.audio_tower
        windows = (frames, encoder.n_window_infer, encoder.n_window)
        chunks = _chunks(encoder, mel, frames, (encoder.n_window,), windows)
        rows: Tensor = encoder(mel, feature_lens=frames, **chunks).last_hidden_state
        return functional.pad(rows, (0, self.row_width - self.hidden_size))


def _unpadded(item: Tensors) -> Tensor:
    """Mel features [mel bins, frames] without padding."""
    mel = item["input_features"]
    mel = mel.view(mel.shape[-2:])
    mask = item.get("feature_attention_mask")
    if mask is None:
        return mel
    return mel.index_select(1, to_device(mask.view(-1).nonzero().view(-1), mel.device))


def _functions(encoder: Any) -> Any:
    """The module of transformers that the encoder is of."""
    return import_module(type(encoder).__module__)


def _chunks(
    encoder: Any,
    mel: Tensor,
    frames: Tensor,
    of_indices: Sequence[Any] = (),
    of_bounds: Sequence[Any] = (),
) -> dict[str, Tensor]:
    """What transformers' encoder computes of the lengths of sounds [items] on the host, value by
    value. What is computed with goes to the device; the bounds of windows, which each layer reads,
    stay. `of_indices` and `of_bounds`: what its functions take beside the lengths of chunks."""
    functions = _functions(encoder)
    padded, lengths = functions.chunk_and_pad_features(mel, frames, encoder.n_window)
    indices = functions.get_valid_indices(lengths, *of_indices)
    return {
        "padded_feature": padded,
        "chunk_lengths": to_device(lengths, mel.device),
        "valid_indices": to_device(indices, mel.device),
        "cu_seqlens": functions.get_audio_cu_seqlens(lengths, *of_bounds),
    }
