"""Voxtral Realtime: 80 ms of sound are added to the embedding of each token.

    position   0      1      2     …          the token sampled at position p is the input of p + 1,
    token     <s>   [PAD]  [PAD]   …          together with frame p + 1
    frame      0      1      2     …          one row of the encoder, 8 mel frames of 10 ms

The decoder is told how far its text is behind the sound (`default_num_delay_tokens`) by a scale in
every layer. It is the same for all requests, so it is multiplied into the weights of a norm once;
what is left is a plain decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lookonce.model.attention.backend import ForwardContext
from lookonce.model.attention.hf_attention import ATTENTION_NAME, paged_forward_context
from lookonce.model.families.base import Model, ModelFamily, Tensors
from lookonce.model.streaming_encoder import (
    ConvState,
    EncoderShape,
    FrameEncoder,
    StreamingEncoder,
)
from lookonce.types.media import Modality


class VoxtralRealtimeFamily(ModelFamily):
    """Items: `input_features` [frames, mel bins, mel frames of a frame]."""

    model_types = ("voxtral_realtime",)
    modalities = ("audio",)

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._tower = model.model.audio_tower
        self._tower.set_attn_implementation(ATTENTION_NAME)
        audio = self._tower.config
        self._encoder_shape = EncoderShape(
            num_layers=int(audio.num_hidden_layers),
            num_kv_heads=int(audio.num_key_value_heads),
            head_dim=int(audio.head_dim),
            window=int(audio.sliding_window),
            positions_per_frame=int(self.config.downsample_factor),
        )
        self._clip_encoder: StreamingEncoder | None = None
        """Made for the first clip: its attention kernel is tried out, and its pages allocated."""
        fold_delay(model, self.num_delay_tokens)

    @property
    def num_delay_tokens(self) -> int:
        """Tokens that the text is behind the sound."""
        return int(self.config.default_num_delay_tokens)

    @property
    def encoder_shape(self) -> EncoderShape:
        return self._encoder_shape

    @property
    def frame_shape(self) -> tuple[int, ...]:
        return (int(self._tower.config.num_mel_bins), int(self.config.audio_length_per_tok))

    @property
    def frame_encoder(self) -> FrameEncoder:
        return self

    def place(self, embeds: Tensor, at: Tensor, rows: Tensor) -> dict[str, Any]:
        embeds.index_add_(0, at, rows)
        return {}

    def encode(self, modality: Modality, items: Sequence[Tensors]) -> list[Tensor]:
        sounds = [item["input_features"] for item in items]
        if self._clip_encoder is None:
            self._clip_encoder = StreamingEncoder(self, sounds[0].dtype, sounds[0].device)
        return self._clip_encoder.encode_whole(sounds)

    def batch_key(self, modality: Modality, item: Tensors) -> str:
        return modality

    # --- the encoder ----------------------------------------------------------------------------

    def initial_conv_state(self) -> ConvState:
        return tuple(
            torch.zeros(conv.in_channels, conv.left_pad, dtype=conv.weight.dtype).to(
                conv.weight.device
            )
            for conv in self._convolutions
        )

    @property
    def _convolutions(self) -> tuple[Any, Any]:
        return self._tower.embedder.conv1, self._tower.embedder.conv2

    def convolve(self, frames: Tensor, states: ConvState) -> tuple[Tensor, ConvState]:
        hidden = frames.transpose(1, 2).flatten(2)  # [B, mel bins, mel frames]
        after = []
        for conv, state in zip(self._convolutions, states, strict=True):
            hidden = torch.cat((state, hidden), dim=-1)
            after.append(hidden[..., hidden.shape[-1] - conv.left_pad :])
            hidden = functional.gelu(
                functional.conv1d(hidden, conv.weight, conv.bias, stride=conv.stride)
            )
        return hidden.transpose(1, 2), tuple(after)

    def attend(self, hidden: Tensor, positions: Tensor, step: ForwardContext) -> Tensor:
        rotation = self._rotation(positions, hidden.dtype)
        hidden = hidden[None]
        with paged_forward_context(step):
            for layer in self._tower.layers:
                hidden = layer(hidden, attention_mask=None, position_embeddings=rotation)
        joined = self._tower.norm(hidden)[0].reshape(
            -1, hidden.shape[-1] * self.encoder_shape.positions_per_frame
        )
        rows: Tensor = self.model.model.multi_modal_projector(joined)
        return rows

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, P, D]. In float64: after a day float32 would be off by a tenth of a
        turn."""
        rope = self._tower.rotary_emb
        angles = positions.double()[:, None] * rope.inv_freq.double()
        both = torch.cat((angles, angles), dim=-1)[None]
        scale = rope.attention_scaling
        return (both.cos() * scale).to(dtype), (both.sin() * scale).to(dtype)


def fold_delay(model: Model, num_delay_tokens: int) -> None:
    """Multiply each layer's scale for this delay into the norm before it, once.

    transformers computes `norm(x) * (1 + ada_rms_norm(t))`; afterwards `ada_rms_norm` gives 0.
    """
    weight = model.get_input_embeddings().weight
    time = torch.full((1,), num_delay_tokens, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        condition = model.model.time_embedding(time)
        for layer in model.get_decoder().layers:
            if isinstance(layer.ada_rms_norm, nn.Module):
                norm = layer.post_attention_layernorm.weight
                scale = 1.0 + layer.ada_rms_norm(condition).float()
                norm.copy_(norm.float() * scale)
                del layer.ada_rms_norm
                layer.ada_rms_norm = _folded


def _folded(condition: Tensor | None) -> float:
    """Stands for a scale that is in the weights already."""
    return 0.0
