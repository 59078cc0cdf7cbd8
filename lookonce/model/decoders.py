"""Runs the text model over one step's embeddings: through transformers, or leaner over its weights.

Transformers' own forward is general, and in a decode step of a small model it costs more than the
arithmetic. Decoders of the plain shape below are run by `LeanDecoder` on the same weights:

    x += W_o · attention(rope(W_qkv · norm(x)))
    x += W_down · (act(gate) * up),   [gate | up] = W_gate_up · norm(x)

Whether it may is not assumed: `lean_decoder` compares both on a random step and refuses where they
differ. All other decoders run as transformers wrote them, with attention through the hook.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from lookonce.model.attention.backend import AttentionBackend, AttentionCall, AttentionMetadata
from lookonce.model.attention.hf_attention import paged_forward_context
from lookonce.model.attention.probe import (
    PROBE_TOKENS,
    probe_metadata,
    probe_pages,
    probe_positions,
)
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.families.base import ModelFamily
from lookonce.model.kv_pages import KVPages, LayerPages
from lookonce.model.native.rows import rms_norm, silu_gate

logger = logging.getLogger(__name__)

PLAIN_DECODERS = frozenset(
    {
        "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen2VLTextModel",
        "Qwen2_5_VLTextModel", "Qwen2_5OmniThinkerTextModel",
    }
)  # fmt: skip
"""Classes whose forward is the plain one: nothing happens between or beside their layers."""
TOLERANCE = 1e-4
"""Largest difference to transformers' hidden states, relative to their largest value."""


class Step(NamedTuple):
    """What attention needs of one step."""

    metadata: AttentionMetadata
    backend: AttentionBackend
    kv_pages: KVPages


class Decoder(Protocol):
    def __call__(
        self, embeds: Tensor, position_ids: Tensor, step: Step, extras: dict[str, Any]
    ) -> Tensor:
        """embeds [T, H], position_ids [1, T] or [axes, 1, T] → last hidden states [T, H]."""
        ...


class HookedDecoder:
    """Transformers' forward, whose attention layers find our pages through the hook."""

    def __init__(self, family: ModelFamily) -> None:
        self._decoder = family.decoder

    def __call__(
        self, embeds: Tensor, position_ids: Tensor, step: Step, extras: dict[str, Any]
    ) -> Tensor:
        with paged_forward_context(step.metadata, step.backend, step.kv_pages):
            output = self._decoder(
                inputs_embeds=embeds.unsqueeze(0),
                position_ids=position_ids,
                attention_mask=None,
                use_cache=False,  # left out, transformers would build a cache of its own
                **extras,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


class LeanDecoder:
    """The plain decoder on a transformers model's weights, which it shares."""

    def __init__(self, decoder: nn.Module, asked: list[AttentionCall]) -> None:
        """`asked` is what each layer asks of its attention, in order.

        Raises `AttributeError` or `ValueError` for a decoder of another shape.
        """
        layers = list(decoder.layers)  # type: ignore[arg-type]
        self.layers = [LeanLayer(*pair) for pair in zip(layers, asked, strict=True)]
        self.sliding_windows = [call.sliding_window for call in asked]
        """[layers] keys each layer sees; None: all."""
        self.norm = Norm(decoder.norm)
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = decoder.rotary_emb  # type: ignore[assignment]

    def __call__(
        self, embeds: Tensor, position_ids: Tensor, step: Step, extras: dict[str, Any]
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
        """Cosines and signed sines [T, D] of the positions, of the type that `like` has.

        rotate_half(x) * sin == swap_halves(x) * signed: the sign moves from data to table.
        """
        cos, sin = self._rotary(like, position_ids)
        half = cos.shape[-1] // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        return cos[0], signed


class Norm:
    """An RMS norm over the last dimension."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self.eps = float(module.variance_epsilon)

    def __call__(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class Gate:
    """act(gate) * up, of [..., 2 F] with the gates first → [..., F]."""

    @torch.inference_mode()
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        self._activation = activation
        sample = torch.linspace(-9.0, 9.0, 37)
        self.is_silu = torch.allclose(
            activation(sample), functional.silu(sample), rtol=1e-6, atol=1e-7
        )
        """Found out by trying: names tell nothing."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        if self.is_silu:
            return silu_gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate) * up


class LeanLayer:
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
        self.gate = Gate(mlp.act_fn)
        self.before = Norm(layer.input_layernorm)
        self.between = Norm(layer.post_attention_layernorm)
        has_norms = hasattr(attention, "q_norm")
        self.q_norm = Norm(attention.q_norm) if has_norms else None
        self.k_norm = Norm(attention.k_norm) if has_norms else None

    def __call__(
        self, hidden: Tensor, cos: Tensor, signed_sin: Tensor, pages: LayerPages, step: Step
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


Linear = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out]."""


def _linear(module: nn.Linear) -> Linear:
    return module.weight, module.bias


def fuse_linears(modules: list[nn.Linear]) -> Linear:
    """One weight and bias for layers of the same input; each module keeps a view of its part."""
    if any(type(module) is not nn.Linear for module in modules):
        raise ValueError("only plain linear layers can be fused")
    weight = torch.cat([module.weight.data for module in modules])
    biases = [module.bias for module in modules if module.bias is not None]
    if len(biases) not in (0, len(modules)):
        raise ValueError("either all layers or none have a bias")
    bias = torch.cat([bias.data for bias in biases]) if biases else None
    start = 0
    for module in modules:
        end = start + module.out_features
        module.weight.data = weight[start:end]
        if bias is not None:
            module.bias.data = bias[start:end]
        start = end
    return weight, bias


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


@torch.inference_mode()
def choose_decoder(family: ModelFamily, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The lean decoder where it computes what transformers computes, else transformers' own."""
    hooked = HookedDecoder(family)
    name = type(family.decoder).__name__
    if name not in PLAIN_DECODERS:
        return hooked
    recorder = _RecordingBackend()
    expected = _probe(hooked, recorder, family, dtype, device)
    try:
        lean = LeanDecoder(family.decoder, recorder.calls)
        found = _probe(lean, ReferenceBackend(), family, dtype, device)
    except (AttributeError, ValueError) as error:
        logger.warning("%s runs through transformers: %s", name, error)
        return hooked
    tolerance = TOLERANCE if dtype is torch.float32 else 5e-2
    difference = (found - expected).abs().max()
    if not difference <= tolerance * expected.abs().max():
        logger.warning("%s runs through transformers: the lean way differs", name)
        return hooked
    return lean


class _RecordingBackend(ReferenceBackend):
    """Remembers what each layer asks: the lean decoder then asks the same, whatever its class."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []

    def forward(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        call: AttentionCall,
    ) -> Tensor:
        self.calls.append(call)
        return super().forward(layer, query, key, value, metadata, call)


def _probe(
    decoder: Decoder,
    backend: AttentionBackend,
    family: ModelFamily,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Hidden states [T, H] of a small random step, float32."""
    pages = probe_pages(family.num_layers, family.num_kv_heads, family.head_dim, dtype, device)
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(PROBE_TOKENS, family.hidden_size, generator=generator)
    positions = probe_positions(family.position_axes).to(device)
    step = Step(probe_metadata(device), backend, pages)
    return decoder(embeds.to(device, dtype), positions, step, {}).float()


def plain_positions(count: int, axes: int) -> Tensor:
    """The position ids of a text: [1, count], or [axes, 1, count] with multi-axis rope."""
    positions = torch.arange(count).unsqueeze(0)
    return positions if axes == 1 else positions.expand(axes, 1, -1)
