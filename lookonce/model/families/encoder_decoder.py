"""Encoder-decoder families: Whisper, Moonshine and Moonshine Streaming.

An item's encoder output is not the encoder's hidden states but what the decoder's cross-attention
makes of them, keys and values of every layer: they are computed once per item, and no step, sample
or preemption computes them again. In memory they are [2 · layers, Hkv, S, D]; the encoder cache
sees S rows of W = 2 · layers · Hkv · D numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lookonce.model.families.base import Model, ModelFamily, Tensors
from lookonce.types.media import Modality


class CrossAttendingDecoder(nn.Module):
    """transformers' decoder, told that there is an encoder. Attention ignores the states given
    here: it reads those that are held (`attention/cross.py`)."""

    def __init__(self, decoder: Any, encoder_width: int) -> None:
        super().__init__()
        self.decoder = decoder
        self._width = encoder_width

    def forward(self, *, inputs_embeds: Tensor, **options: Any) -> Any:
        nothing = inputs_embeds.new_zeros(1, 1, self._width)
        return self.decoder(inputs_embeds=inputs_embeds, encoder_hidden_states=nothing, **options)


class EncoderDecoderFamily(ModelFamily):
    """A decoder whose layers have `encoder_attn` over the output of an audio encoder."""

    modalities = ("audio",)
    encoder_decoder: ClassVar[bool] = True

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._cross = [layer.encoder_attn for layer in self.decoder.layers]
        self.decoder = CrossAttendingDecoder(self.decoder, self.encoder_width)

    @classmethod
    def transformers_class(cls) -> Any:
        return import_module("transformers").AutoModelForSpeechSeq2Seq

    @property
    def encoder_width(self) -> int:
        """Width of the encoder's hidden states as the decoder takes them."""
        return self.hidden_size

    @property
    def row_width(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def cross_states(self, output: Tensor) -> Tensor:
        """An item's output [S, W] as keys and values [2 · layers, Hkv, S, D], without a copy."""
        shape = (2 * self.num_layers, self.num_kv_heads, len(output), self.head_dim)
        return output.view(shape)

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        hidden = self.hidden_states(items)
        return [self._keys_and_values(states) for states in hidden]

    @abstractmethod
    def hidden_states(self, items: Sequence[Tensors]) -> Tensor:
        """The encoder's last hidden states [items, S, H]."""

    def _keys_and_values(self, hidden: Tensor) -> Tensor:
        """[S, H] → [S, W]."""
        rows = len(hidden)
        states = hidden.new_empty(2 * self.num_layers, self.num_kv_heads, rows, self.head_dim)
        for layer, attention in enumerate(self._cross):
            for offset, project in enumerate((attention.k_proj, attention.v_proj)):
                heads = project(hidden).view(rows, self.num_kv_heads, -1).transpose(0, 1)
                states[2 * layer + offset] = pad(heads, (0, self.head_dim - heads.shape[-1]))
        return states.view(rows, self.row_width)


class WhisperFamily(EncoderDecoderFamily):
    """Whisper, Distil-Whisper and turbo. Items: `input_features` [mel bins, frames], one window."""

    model_types = ("whisper",)

    @property
    def longest_sequence(self) -> int:
        return int(self.config.max_target_positions)

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        return modality

    def hidden_states(self, items: Sequence[Tensors]) -> Tensor:
        mels = torch.stack([item["input_features"] for item in items])
        hidden: Tensor = self.model.model.encoder(mels).last_hidden_state
        return hidden


class MoonshineFamily(EncoderDecoderFamily):
    """Moonshine. Items: `input_values` [samples]."""

    model_types = ("moonshine",)

    @property
    def head_dim(self) -> int:
        """With the zeros that attention pads heads with."""
        width, multiple = super().head_dim, self.config.pad_head_dim_to_multiple_of or 1
        return -(-width // multiple) * multiple

    def batch_key(self, modality: Modality, item: Tensors) -> Hashable:
        """Equal lengths: the first convolution's norm is over the whole clip, padding included."""
        return len(item["input_values"])

    def hidden_states(self, items: Sequence[Tensors]) -> Tensor:
        waves = torch.stack([item["input_values"] for item in items])
        hidden: Tensor = self.model.model.encoder(waves).last_hidden_state
        return hidden


class MoonshineStreamingFamily(MoonshineFamily):
    """Moonshine Streaming. Items: `input_values` [samples, whole frames], `num_samples` [1] of them
    without padding."""

    model_types = ("moonshine_streaming",)

    @property
    def encoder_width(self) -> int:
        return int(self.config.encoder_config.hidden_size)

    def hidden_states(self, items: Sequence[Tensors]) -> Tensor:
        waves = torch.stack([item["input_values"] for item in items])
        lengths = torch.cat([item["num_samples"] for item in items])
        # With a mask the layers attend in their windows; without one they would not.
        mask = (torch.arange(waves.shape[1], device=waves.device) < lengths[:, None]).long()
        decoder = self.decoder.decoder
        hidden = self.model.model.encoder(waves, attention_mask=mask).last_hidden_state
        at = torch.arange(hidden.shape[1], device=hidden.device)
        projected: Tensor = decoder.proj(hidden + decoder.pos_emb(at))
        return projected
