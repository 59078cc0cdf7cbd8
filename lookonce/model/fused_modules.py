"""Makes vision towers lean where transformers computes the same the long way.

    patch embedding   a convolution whose kernel is the whole patch is one matrix product
    attention         by compiled code with rope in it, where that is there; else windows of one
                      length are attended to in one call instead of one each, and rope is three
                      operators over queries and keys together instead of fourteen
    norms and gates   by compiled code in one pass; gate and up are one product

Weights are shared. Only modules whose results agree with their own on a random input are replaced.
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

from lookonce.model.native.rows import rms_norm, silu_gate
from lookonce.model.native.windows import attend_windows, attends_windows

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of unit-sized results: what another order of additions may change."""
SAMPLE_LENGTHS = (8, 8, 4)


def patch_vision_modules(model: nn.Module) -> int:
    """Replace what can be replaced; returns how many modules that were."""
    modules = list(model.modules())
    blocks = [module for module in modules if type(module).__name__.endswith("VisionBlock")]
    return sum(map(_fused, modules)) + sum(_patch_vision_block(block) for block in blocks)


@torch.inference_mode()
def _patch_vision_block(block: nn.Module) -> int:
    """What lies between a block's attention and products: its RMS norms and its gate."""
    count = 0
    for module in block.children():
        lean = _norm_or_gate(module)
        if lean is not None:
            weight = next(module.parameters())
            count += _replace_forward(module, lean, (_noise((7, weight.shape[-1]), weight),))
    return count


def _norm_or_gate(module: Any) -> Callable[[Tensor], Tensor] | None:
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return RMSNorm(module)
    if {name for name, _ in module.named_children()} == _GatedProduct.PARTS:
        with suppress(ValueError):  # its products cannot be made one
            return _GatedProduct(module)
    return None


class _GatedProduct:
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    PARTS: ClassVar[set[str]] = {"gate_proj", "up_proj", "down_proj", "act_fn"}

    def __init__(self, module: Any) -> None:
        """Raises `ValueError` where gate and up are not alike."""
        self._gate_up = fuse_linears([module.gate_proj, module.up_proj])
        self._gate = GatedActivation(module.act_fn)
        self._down: nn.Linear = module.down_proj

    def __call__(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self._down(self._gate(functional.linear(hidden, *self._gate_up)))
        return projected


@torch.inference_mode()
def _fused(module: nn.Module) -> bool:
    lean: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    if isinstance(module, nn.Conv3d) and _is_patch_embedding(module):
        lean, arguments = _PatchProduct(module), _patches(module)
    elif _is_tower_attention(module):
        lean, arguments = _WindowAttention(module), _windows(module)
    else:
        return False
    return _replace_forward(module, lean, arguments)


def _replace_forward(
    module: nn.Module, lean: Callable[..., Tensor], arguments: tuple[Any, ...]
) -> bool:
    """If both say the same of these arguments."""
    theirs, ours = module(*arguments), lean(*arguments)
    tolerance = TOLERANCE.get(theirs.dtype, 0.0) * max(1.0, float(theirs.abs().max()))
    if ours.numel() != theirs.numel():
        return False
    if not torch.allclose(ours.view(theirs.shape), theirs, rtol=0.0, atol=tolerance):
        return False
    module.forward = lean
    return True


def _is_patch_embedding(module: nn.Conv3d) -> bool:
    return (
        module.kernel_size == module.stride
        and module.padding == (0, 0, 0)
        and module.dilation == (1, 1, 1)
        and module.groups == 1
    )


class _PatchProduct:
    """[patches, C, T, P, P] → [patches, out, 1, 1, 1], as the convolution that has that kernel."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        self._convolution = convolution

    def __call__(self, patches: Tensor) -> Tensor:
        convolution = self._convolution
        if patches.shape[2:] != convolution.weight.shape[2:]:
            return nn.Conv3d.forward(convolution, patches)
        weight = convolution.weight.flatten(1)
        product = functional.linear(patches.flatten(1), weight, convolution.bias)
        return product[:, :, None, None, None]


def _patches(convolution: nn.Conv3d) -> tuple[Tensor]:
    shape = (3, *convolution.weight.shape[1:])
    return (_noise(shape, convolution.weight),)


def _is_tower_attention(module: nn.Module) -> bool:
    """Qwen's: one product for queries, keys and values; windows told by their bounds."""
    children = {name for name, _ in module.named_children()}
    return type(module).__name__.endswith("VisionAttention") and children == {"qkv", "proj"}


class _WindowAttention:
    """Hidden states [S, H] of windows one after another → [S, H]."""

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
        query, key = _roped(qkv[:, :2], *position_embeddings).unbind(1)
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


def _roped(query_key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [S, 2, heads, D] by cos and sin [S, D], in float32 as transformers does."""
    half = cos.shape[-1] // 2
    # rotate_half(x) * sin == swap_halves(x) * signed: the sign moves from data to table.
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1).float()[:, None, None]
    whole = query_key.float()
    rotated = torch.addcmul(whole * cos.float()[:, None, None], whole.roll(half, -1), signed)
    return rotated.to(query_key.dtype)


def _runs(bounds: list[int]) -> Iterator[tuple[slice, int]]:
    """Rows of neighbouring windows of one length, and that length."""
    start = bounds[0]
    for length, same in itertools.groupby(b - a for a, b in itertools.pairwise(bounds)):
        end = start + length * len(list(same))
        if length:
            yield slice(start, end), length
        start = end


def _windows(module: Any) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Arguments of a small forward."""
    weight = module.qkv.weight
    bounds = torch.tensor([0, *itertools.accumulate(SAMPLE_LENGTHS)], dtype=torch.int32)
    rows = int(bounds[-1])
    angles = _noise((rows, weight.shape[1] // module.num_heads // 2), weight.float())
    angles = torch.cat((angles, angles), dim=-1)
    hidden = _noise((rows, weight.shape[1]), weight)
    return hidden, bounds.to(weight.device), (angles.cos(), angles.sin())


def _noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return noise.to(like.device, like.dtype)


class RMSNorm:
    """An RMS norm over the last dimension."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self.eps = float(module.variance_epsilon)

    def __call__(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class GatedActivation:
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


Linear = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out]."""


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


def fuse_norms(model: nn.Module) -> int:
    """Replace what can be replaced; returns how many modules that were."""
    return sum(_fuse(module) for module in model.modules() if _is_rms_norm(module))


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


@torch.inference_mode()
def _fuse(module: nn.Module) -> bool:
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return False
    fused = partial(
        functional.rms_norm,
        normalized_shape=weight.shape,
        weight=weight,
        eps=float(module.variance_epsilon),  # type: ignore[arg-type]
    )
    sample = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0))
    sample = sample.to(weight.device, weight.dtype)
    if not torch.equal(module(sample), fused(sample)):
        return False
    module.forward = fused
    return True
