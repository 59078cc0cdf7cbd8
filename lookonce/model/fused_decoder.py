"""A plain decoder on a transformers model's weights, with fused linear layers and paged attention.

transformers' own forward is general, and in a decode step of a small model it costs more than the
arithmetic. The layers of a plain decoder compute only this:

    x += W_o · attention(rope(W_qkv · norm(x)))
    x += W_down · (act(gate) * up),   [gate | up] = W_gate_up · norm(x)

`text_model.choose_decoder` uses it only where it agrees with transformers on a random step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lookonce.model.attention.backend import (
    AttentionCall,
    ForwardContext,
)
from lookonce.model.fused_modules import GatedActivation, Linear, RMSNorm, fuse_linears
from lookonce.model.kv_pages import LayerPages


class FusedDecoder:
    """Runs embeddings through all layers and the last norm; shares the model's weights."""

    def __init__(self, decoder: nn.Module, asked: list[AttentionCall]) -> None:
        """`asked` [layers] is what transformers asks of each layer's attention.

        Raises `AttributeError` or `ValueError` for a decoder of another shape.
        """
        layers = list(decoder.layers)  # type: ignore[arg-type]
        self.layers = [FusedLayer(*pair) for pair in zip(layers, asked, strict=True)]
        self.sliding_windows = [call.sliding_window for call in asked]
        """[layers] the number of keys that each layer sees; None: all."""
        self.norm = RMSNorm(decoder.norm)
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = decoder.rotary_emb  # type: ignore[assignment]

    def __call__(
        self, embeds: Tensor, position_ids: Tensor, step: ForwardContext, extras: dict[str, Any]
    ) -> Tensor:
        if extras:
            raise ValueError("a plain decoder takes nothing beside embeddings")
        cos, signed = self.rotation(embeds, position_ids)
        cos, signed = cos.unsqueeze(1), signed.unsqueeze(1)
        hidden = embeds
        for layer, pages in zip(self.layers, step.kv_pages.layers, strict=True):
            hidden = layer(hidden, cos, signed, pages, step)
        return self.norm(hidden)

    def rotation(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, D] of the positions, in the dtype of `like`.

        rotate_half(x) * sin == swap_halves(x) * signed: the sign moves from data to table.
        """
        cos, sin = self._rotary(like, position_ids)
        half = cos.shape[-1] // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        return cos[0], signed


class FusedLayer:
    """One decoder layer. Raises `AttributeError` or `ValueError` for a layer of another shape."""

    def __init__(self, layer: Any, asked: AttentionCall) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        _require_children(
            layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        )
        _require_children(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
        _require_children(attention, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
        self.head_dim = int(attention.head_dim)
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.asked = asked
        self.qkv = fuse_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _linear(attention.o_proj)
        self.gate_up = fuse_linears([mlp.gate_proj, mlp.up_proj])
        self.down = _linear(mlp.down_proj)
        self.gate = GatedActivation(mlp.act_fn)
        self.before = RMSNorm(layer.input_layernorm)
        self.between = RMSNorm(layer.post_attention_layernorm)
        has_norms = hasattr(attention, "q_norm")
        self.q_norm = RMSNorm(attention.q_norm) if has_norms else None
        self.k_norm = RMSNorm(attention.k_norm) if has_norms else None

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        pages: LayerPages,
        step: ForwardContext,
    ) -> Tensor:
        """hidden [T, H], cos and signed_sin [T, 1, D] → [T, H]."""
        tokens, rotated = hidden.shape[0], self.num_heads + self.num_kv_heads
        qkv = functional.linear(self.before(hidden), *self.qkv)
        heads = qkv.view(tokens, rotated + self.num_kv_heads, self.head_dim)
        query_key = self._rope(self._normed(heads[:, :rotated]), cos, signed_sin)
        attended = step.backend.forward(
            pages,
            query_key[:, : self.num_heads],
            query_key[:, self.num_heads :],
            heads[:, rotated:],
            step.metadata,
            self.asked,
        )
        hidden = _add_linear(hidden, attended.view(tokens, -1), self.out)
        gate_up = functional.linear(self.between(hidden), *self.gate_up)
        return _add_linear(hidden, self.gate(gate_up), self.down)

    def _normed(self, query_key: Tensor) -> Tensor:
        if self.q_norm is None or self.k_norm is None:
            return query_key
        query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
        return torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)

    def _rope(self, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        swapped = heads.roll(self.head_dim // 2, dims=-1)
        return torch.addcmul(heads * cos, swapped, signed_sin)


def _linear(module: nn.Linear) -> Linear:
    return module.weight, module.bias


def _add_linear(hidden: Tensor, inputs: Tensor, linear: Linear) -> Tensor:
    weight, bias = linear
    if bias is not None:
        hidden = hidden + bias
    return torch.addmm(hidden, inputs, weight.t())


def _require_children(
    module: nn.Module, required: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> None:
    names = {name for name, _ in module.named_children()}
    if not required <= names <= required | optional:
        raise ValueError(f"{type(module).__name__} has the parts {', '.join(sorted(names))}")


def plain_positions(count: int, axes: int) -> Tensor:
    """The position ids of a text without media: [1, count], or [axes, 1, count] with mrope."""
    positions = torch.arange(count).unsqueeze(0)
    return positions if axes == 1 else positions.expand(axes, 1, -1)
