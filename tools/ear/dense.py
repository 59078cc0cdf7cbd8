"""The model's forward pass over whole rows of one length, as plain fused operations.

It computes what transformers' modules compute, with their parameters, several times as fast on a
CPU: masks and rotations are made once, and `torch.compile` joins what is elementwise.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from tools.ear import folder


class DenseForward(nn.Module):
    """Over rows of `frames` tokens."""

    def __init__(self, model: Any, frames: int) -> None:
        super().__init__()
        self.model = model
        text, audio = model.config.text_config, model.config.audio_config
        positions = frames * folder.ENCODER_PER_TOKEN
        self.register_buffer("audio_mask", _window(positions, audio.sliding_window))
        self.register_buffer("text_mask", _window(frames, text.sliding_window))
        self.register_buffer("audio_turns", _turns(model.model.audio_tower.rotary_emb, positions))
        self.register_buffer("text_turns", _turns(model.model.language_model.rotary_emb, frames))
        delay = torch.full((1,), float(folder.DELAY))
        self.register_buffer("condition", model.model.time_embedding(delay))

    def forward(self, mel: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """`mel` [rows, bins, mel frames] and `token_ids` [rows, frames] → logits [rows, frames,
        words] and the encoder's outputs [rows, positions, width]."""
        heard = self._encode(mel)
        base = self.model.model
        joined = heard.flatten(1).unflatten(1, (token_ids.shape[1], -1))
        hidden = base.language_model.embed_tokens(token_ids) + base.multi_modal_projector(joined)
        for layer in base.language_model.layers:
            hidden = hidden + _attend(
                layer.self_attn, _norm(layer.input_layernorm, hidden), self.text_turns,
                self.text_mask,
            )  # fmt: skip
            scale = 1 + layer.ada_rms_norm(self.condition)
            hidden = hidden + layer.mlp(_norm(layer.post_attention_layernorm, hidden) * scale)
        return self.model.lm_head(_norm(base.language_model.norm, hidden)), heard

    def _encode(self, mel: Tensor) -> Tensor:
        tower = self.model.model.audio_tower
        hidden = mel
        for conv in (tower.embedder.conv1, tower.embedder.conv2):
            padded = functional.pad(hidden, (conv.left_pad, 0))
            hidden = functional.gelu(
                functional.conv1d(padded, conv.weight, conv.bias, stride=conv.stride)
            )
        hidden = hidden.transpose(1, 2)
        for layer in tower.layers:
            hidden = hidden + _attend(
                layer.self_attn, _norm(layer.self_attn_layer_norm, hidden), self.audio_turns,
                self.audio_mask,
            )  # fmt: skip
            hidden = hidden + layer.mlp(_norm(layer.final_layer_norm, hidden))
        return _norm(tower.norm, hidden)


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return hidden * scale * norm.weight


def _attend(attention: Any, hidden: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
    def split(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    query, key = (_turned(split(p(hidden)), turns) for p in (attention.q_proj, attention.k_proj))
    scores = query @ key.transpose(-1, -2) * attention.scaling + mask
    found = torch.softmax(scores, -1) @ split(attention.v_proj(hidden))
    return attention.o_proj(found.transpose(1, 2).flatten(2))


def _turned(rows: Tensor, turns: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    return rows * turns[0] + torch.cat((-second, first), -1) * turns[1]


def _window(length: int, window: int) -> Tensor:
    """[length, length]: 0 where a position is attended to, minus infinity elsewhere."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    return torch.where((back >= 0) & (back < window), 0.0, float("-inf"))


def _turns(rotary: Any, length: int) -> Tensor:
    """Cosines and sines [2, length, head_dim]."""
    cosine, sine = rotary(torch.zeros(1), torch.arange(length)[None])
    return torch.cat((cosine, sine))
