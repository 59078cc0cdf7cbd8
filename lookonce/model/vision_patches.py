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
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lookonce.model.decoders import Gate, Norm, fuse_linears
from lookonce.model.native.windows import attend_windows, attends_windows

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of unit-sized results: what another order of additions may change."""
SAMPLE_LENGTHS = (8, 8, 4)


def lean_towers(model: nn.Module) -> int:
    """Replace what can be replaced; returns how many modules that were."""
    modules = list(model.modules())
    blocks = [module for module in modules if type(module).__name__.endswith("VisionBlock")]
    return sum(map(_lean, modules)) + sum(_lean_block(block) for block in blocks)


@torch.inference_mode()
def _lean_block(block: nn.Module) -> int:
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
        return Norm(module)
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
        self._gate = Gate(module.act_fn)
        self._down: nn.Linear = module.down_proj

    def __call__(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self._down(self._gate(functional.linear(hidden, *self._gate_up)))
        return projected


@torch.inference_mode()
def _lean(module: nn.Module) -> bool:
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
