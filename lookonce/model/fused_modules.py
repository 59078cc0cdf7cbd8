"""Modules that compute what a transformers model computes with fewer operators, on its weights.

At batch 1 a small model spends most of a decode step between operators, not in them.

`fuse_norms` and `patch_vision_modules` replace modules inside the model:

    every RMS norm           torch's single operator instead of six
    vision patch embedding   one matrix product instead of a convolution whose kernel is the patch
    vision attention         compiled code with rope in it. Without compiled code, windows of equal
                             length are attended to in one call, and rope takes three operators
                             over queries and keys together instead of fourteen
    vision norms and gates   compiled code in one pass; gate and up are one product

A module is replaced only if the replacement gives the same results on a random input: to the last
bit for norms, else within `TOLERANCE`.

`FusedDecoder` runs the text model, if its layers compute only this:

    x += W_o · attention(rope(W_qkv · norm(x)))
    x += W_down · (act(gate) * up),   [gate | up] = W_gate_up · norm(x)

`text_model.choose_decoder` uses it only if it agrees with transformers on a random step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lookonce.model.attention.backend import AttentionCall, ForwardContext
from lookonce.model.bf16_products import Weight, add_linear, linear
from lookonce.model.int8_weights import Int8Linear, Int8Weight
from lookonce.model.kv_pages import LayerPages
from lookonce.model.native.layers import attend_windows, attends_windows, rms_norm, silu_gate

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference, relative to the largest result, that another order of additions may make."""
SAMPLE_LENGTHS = (8, 8, 4)
"""Window lengths of the random input."""


def fuse_norms(model: nn.Module) -> int:
    """Replace RMS norms by torch's operator; returns how many were replaced."""
    return sum(_fuse_norm(module) for module in model.modules() if _is_rms_norm(module))


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


@torch.inference_mode()
def _fuse_norm(norm: nn.Module) -> bool:
    weight = norm.weight
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return False
    fused = partial(
        functional.rms_norm,
        normalized_shape=weight.shape,
        weight=weight,
        eps=float(norm.variance_epsilon),  # type: ignore[arg-type]
    )
    sample = _noise((4, len(weight)), weight)
    if not torch.equal(norm(sample), fused(sample)):
        return False
    norm.forward = fused
    return True


def patch_vision_modules(model: nn.Module) -> int:
    """Replace modules of the vision encoder; returns how many were replaced."""
    modules = list(model.modules())
    blocks = [module for module in modules if type(module).__name__.endswith("VisionBlock")]
    return sum(map(_patch_vision_module, modules)) + sum(map(_patch_vision_block, blocks))


@torch.inference_mode()
def _patch_vision_module(module: nn.Module) -> bool:
    """Replace a patch embedding or a vision attention."""
    if isinstance(module, nn.Conv3d) and _is_patch_embedding(module):
        patches = _noise((3, *module.weight.shape[1:]), module.weight)
        return _replace_forward(module, _PatchEmbedding(module), (patches,))
    if _is_vision_attention(module):
        with suppress(AttributeError):  # of the same name and another kind
            return _replace_forward(module, _VisionAttention(module), _sample_windows(module))
    return False


@torch.inference_mode()
def _patch_vision_block(block: nn.Module) -> int:
    """Replace the RMS norms and the gated product of one block."""
    count = 0
    for module in block.children():
        replacement = _norm_or_gated_product(module)
        if replacement is not None:
            weight = next(module.parameters())
            sample = _noise((7, weight.shape[-1]), weight)
            count += _replace_forward(module, replacement, (sample,))
    return count


def _norm_or_gated_product(module: Any) -> Callable[[Tensor], Tensor] | None:
    if _is_rms_norm(module):
        return RMSNorm(module)
    if {name for name, _ in module.named_children()} == GatedProduct.PARTS:
        with suppress(ValueError):  # its linear layers cannot be fused
            return GatedProduct(module)
    return None


def _replace_forward(
    module: nn.Module, replacement: Callable[..., Tensor], arguments: tuple[Any, ...]
) -> bool:
    """Replace the module's forward if both give the same for these arguments."""
    try:
        theirs, ours = module(*arguments), replacement(*arguments)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # a module of the same name and another shape
    tolerance = TOLERANCE.get(theirs.dtype, 0.0) * max(1.0, float(theirs.abs().max()))
    if ours.numel() != theirs.numel():
        return False
    if not torch.allclose(ours.view(theirs.shape), theirs, rtol=0.0, atol=tolerance):
        return False
    module.forward = replacement
    return True


def _is_patch_embedding(module: nn.Conv3d) -> bool:
    return (
        module.kernel_size == module.stride
        and module.padding == (0, 0, 0)
        and module.dilation == (1, 1, 1)
        and module.groups == 1
    )


class _PatchEmbedding:
    """[patches, C, T, P, P] → [patches, out, 1, 1, 1], as the convolution that has that kernel."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        self._convolution = convolution

    def __call__(self, patches: Tensor) -> Tensor:
        convolution = self._convolution
        if patches.shape[2:] != convolution.weight.shape[2:]:
            return nn.Conv3d.forward(convolution, patches)
        weight = convolution.weight.flatten(1)
        product = linear(patches.flatten(1), weight, convolution.bias)
        return product[:, :, None, None, None]


class GatedProduct:
    """down(act(gate(x)) * up(x)) with gate and up in one product."""

    PARTS: ClassVar[set[str]] = {"gate_proj", "up_proj", "down_proj", "act_fn"}

    def __init__(self, module: Any) -> None:
        """Raises `ValueError` if gate and up cannot be fused."""
        self._gate_up = fuse_linears([module.gate_proj, module.up_proj])
        self._gate = GatedActivation(module.act_fn)
        self._down: nn.Linear = module.down_proj

    def __call__(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self._down(self._gate(linear(hidden, *self._gate_up)))
        return projected


def _is_vision_attention(module: nn.Module) -> bool:
    """Attention of Qwen's vision encoders: one linear layer for queries, keys and values."""
    children = {name for name, _ in module.named_children()}
    return type(module).__name__.endswith("VisionAttention") and children == {"qkv", "proj"}


class _VisionAttention:
    """Attention inside windows: hidden states [S, H] of all windows in order → [S, H]."""

    def __init__(self, module: Any) -> None:
        self._qkv: nn.Linear = module.qkv
        self._proj: nn.Linear = module.proj
        self._num_heads = int(module.num_heads)
        self._scale = float(module.scaling)

    def __call__(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **unused: object,
    ) -> Tensor:
        """cu_seqlens [windows + 1]: where windows begin and the last ends; cos and sin [S, D]."""
        qkv = self._qkv(hidden_states).view(len(hidden_states), 3, self._num_heads, -1)
        if attends_windows(qkv) and qkv.shape[-1] % 2 == 0:
            cos, sin = position_embeddings
            joined = attend_windows(qkv, cos, sin, cu_seqlens, self._scale)
            return self._project(joined)
        query, key = _rotate(qkv[:, :2], *position_embeddings).unbind(1)
        attended = [
            self._attend(query[rows], key[rows], qkv[rows, 2], length)
            for rows, length in _runs(cu_seqlens.tolist())
        ]
        return self._project(attended[0] if len(attended) == 1 else torch.cat(attended))

    def _project(self, attended: Tensor) -> Tensor:
        projected: Tensor = self._proj(attended)
        return projected

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
        """Windows of `length` rows, each [windows * length, heads, D] → [windows * length, H]."""
        shape = (-1, length, *query.shape[1:])
        output = functional.scaled_dot_product_attention(
            query.view(shape).transpose(1, 2),
            key.view(shape).transpose(1, 2),
            value.view(shape).transpose(1, 2),
            scale=self._scale,
        )
        return output.transpose(1, 2).reshape(len(query), -1)


def _rotate(query_key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [S, 2, heads, D] by cos and sin [S, D], in float32 as transformers does."""
    half = cos.shape[-1] // 2
    # rotate_half(x) * sin == swap_halves(x) * signed: the sign moves from data to table.
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1).float()[:, None, None]
    whole = query_key.float()
    rotated = torch.addcmul(whole * cos.float()[:, None, None], whole.roll(half, -1), signed)
    return rotated.to(query_key.dtype)


def _runs(bounds: list[int]) -> Iterator[tuple[slice, int]]:
    """The rows of neighbouring windows of equal length, and that length."""
    start = bounds[0]
    for length, same in itertools.groupby(b - a for a, b in itertools.pairwise(bounds)):
        end = start + length * len(list(same))
        if length:
            yield slice(start, end), length
        start = end


def _sample_windows(module: Any) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Random arguments for a vision attention."""
    weight = module.qkv.weight
    bounds = torch.tensor([0, *itertools.accumulate(SAMPLE_LENGTHS)], dtype=torch.int32)
    rows = int(bounds[-1])
    angles = _noise((rows, weight.shape[1] // module.num_heads // 2), weight.float())
    angles = torch.cat((angles, angles), dim=-1)
    hidden = _noise((rows, weight.shape[1]), weight)
    return hidden, bounds.to(weight.device), (angles.cos(), angles.sin())


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
        hidden = embeds
        for hidden in self.residuals(embeds, position_ids, step):  # noqa: B007
            pass
        return self.norm(hidden)

    def residuals(
        self, embeds: Tensor, position_ids: Tensor, step: ForwardContext
    ) -> Iterator[Tensor]:
        """The residual stream [T, H] after each layer, before the last norm."""
        cos, signed = self.rotation(embeds, position_ids)
        hidden = embeds
        for layer, pages in zip(self.layers, step.kv_pages.layers, strict=True):
            hidden = layer(hidden, cos.unsqueeze(1), signed.unsqueeze(1), pages, step)
            yield hidden

    def layer_output(
        self, index: int, hidden: Tensor, position_ids: Tensor, step: ForwardContext
    ) -> Tensor:
        """The residual stream [T, H] after one layer that is given `hidden` [T, H]."""
        cos, signed = self.rotation(hidden, position_ids)
        pages = step.kv_pages.layers[index]
        return self.layers[index](hidden, cos.unsqueeze(1), signed.unsqueeze(1), pages, step)

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
        # Of several ranks each has a part of these sums (`model.tensor_parallel`).
        self.out_reduce: Reduce | None = getattr(attention.o_proj, "reduce", None)
        self.down_reduce: Reduce | None = getattr(mlp.down_proj, "reduce", None)
        # By these adapters find what they add to a product: in the order of native/lora.h.
        self.qkv_modules = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.out_modules = (attention.o_proj,)
        self.gate_up_modules = (mlp.gate_proj, mlp.up_proj)
        self.down_modules = (mlp.down_proj,)
        self.modules = (
            *self.qkv_modules,
            *self.out_modules,
            *self.gate_up_modules,
            *self.down_modules,
        )
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
        normed = self.before(hidden)
        qkv = linear(normed, *self.qkv)
        if step.lora is not None:
            step.lora.add(self.qkv_modules, normed, qkv)
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
        attended = attended.view(tokens, -1)
        hidden = _added(hidden, attended, self.out, self.out_reduce)
        if step.lora is not None:
            step.lora.add(self.out_modules, attended, hidden)
        normed = self.between(hidden)
        gate_up = linear(normed, *self.gate_up)
        if step.lora is not None:
            step.lora.add(self.gate_up_modules, normed, gate_up)
        gated = self.gate(gate_up)
        hidden = _added(hidden, gated, self.down, self.down_reduce)
        if step.lora is not None:
            step.lora.add(self.down_modules, gated, hidden)
        return hidden

    def _normed(self, query_key: Tensor) -> Tensor:
        if self.q_norm is None or self.k_norm is None:
            return query_key
        query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
        return torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)

    def _rope(self, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        swapped = heads.roll(self.head_dim // 2, dims=-1)
        return torch.addcmul(heads * cos, swapped, signed_sin)


Reduce = Callable[[Tensor], Tensor]
"""This rank's part of a sum [T, H] → the sum of all ranks."""


def _added(hidden: Tensor, inputs: Tensor, weights: Linear, reduce: Reduce | None) -> Tensor:
    if reduce is None:
        return add_linear(hidden, inputs, *weights)
    return hidden + reduce(linear(inputs, *weights))


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


class RMSNorm:
    """An RMS norm over the last dimension."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self.eps = float(module.variance_epsilon)

    def __call__(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class GatedActivation:
    """act(gate) * up, from [..., 2 F] with the gates first → [..., F]."""

    @torch.inference_mode()
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        self._activation = activation
        sample = torch.linspace(-9.0, 9.0, 37)
        # Tried on numbers, because the names of activations vary.
        self.is_silu = torch.allclose(
            activation(sample), functional.silu(sample), rtol=1e-6, atol=1e-7
        )

    def __call__(self, gate_up: Tensor) -> Tensor:
        if self.is_silu:
            return silu_gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate) * up


Linear = tuple[Weight, Tensor | None]
"""Weight [out, in] and bias [out]."""


def fuse_linears(modules: list[nn.Linear] | list[Int8Linear]) -> Linear:
    """One weight and bias for layers of the same input; each module keeps a view of its part.

    Raises `ValueError` for layers that are not plain, or of which only some have a bias.
    """
    kinds = {type(module) for module in modules}
    if kinds not in ({nn.Linear}, {Int8Linear}):
        raise ValueError("only plain linear layers can be fused")
    weight = torch.cat([module.weight.data for module in modules])
    scales = [module.scales.data for module in modules if isinstance(module, Int8Linear)]
    biases = [module.bias for module in modules if module.bias is not None]
    if len(biases) not in (0, len(modules)):
        raise ValueError("either all layers or none have a bias")
    bias = torch.cat([bias.data for bias in biases]) if biases else None
    start = 0
    for module in modules:
        end = start + module.out_features
        module.weight.data = weight[start:end]
        if bias is not None and module.bias is not None:
            module.bias.data = bias[start:end]
        start = end
    return (Int8Weight(weight, torch.cat(scales)) if scales else weight), bias


def _linear(module: nn.Linear | Int8Linear) -> Linear:
    return linear_weight(module), module.bias


def linear_weight(module: nn.Linear | Int8Linear) -> Weight:
    return module.quantized if isinstance(module, Int8Linear) else module.weight


def _noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return noise.to(like.device, like.dtype)
