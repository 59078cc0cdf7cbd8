"""RMS norms, gated activations and window attention in compiled code, on the CPU.

In fp32 or bf16; arithmetic is fp32, the result is rounded once. torch needs several operators for
each, and each of these goes through memory: half a dozen for a norm or a gate in bf16, and as many
for the rotary embedding of queries and keys, which `attend_windows` applies where it packs them.
Without compiled kernels, or on another device, norms and gates are computed by torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lookonce.model.native import compiled

_DTYPES = (torch.float32, torch.bfloat16)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden [..., H] over its last dimension, times weight [H]."""
    kernels, plain = compiled.kernels, _is_plain(hidden) and _is_plain(weight)
    if kernels is None or not plain or weight.dtype is not hidden.dtype:
        return functional.rms_norm(hidden, weight.shape, weight, eps)
    width = hidden.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"a weight of {tuple(weight.shape)} does not fit {tuple(hidden.shape)}")
    output = torch.empty_like(hidden)
    kernels.norm_rows(hidden, weight, output, eps, torch.get_num_threads())
    return output


def silu_gate(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 F], the gates first → silu(gate) * up [..., F]."""
    kernels = compiled.kernels
    if kernels is None or not _is_plain(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
    width = gate_up.shape[-1] // 2
    output = gate_up.new_empty((*gate_up.shape[:-1], width))
    kernels.gate_rows(gate_up, output, torch.get_num_threads())
    return output


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in _DTYPES
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )


def attends_windows(like: Tensor) -> bool:
    """Whether tensors of this type and place can be given to `attend_windows`."""
    return compiled.kernels is not None and like.device.type == "cpu" and like.dtype in _DTYPES


def attend_windows(qkv: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """qkv [S, 3, heads, D], cos and sin [S, D], bounds [windows + 1] → [S, heads * D].

    Every row attends to the rows of its window, in both directions. D is even. Raises `ValueError`
    where the windows do not cover the rows one after the other.
    """
    rows, _, heads, dim = qkv.shape
    if cos.shape != (rows, dim) or sin.shape != (rows, dim) or dim % 2:
        raise ValueError(f"rope of {tuple(cos.shape)} does not fit {tuple(qkv.shape)}")
    qkv, cos, sin = qkv.contiguous(), cos.float().contiguous(), sin.float().contiguous()
    bounds = bounds.to(torch.int32).contiguous()
    output = torch.empty((rows, heads * dim), dtype=qkv.dtype)
    if compiled.kernels is None:
        raise RuntimeError("window attention is not compiled")
    compiled.kernels.attend_windows(qkv, cos, sin, bounds, output, scale, torch.get_num_threads())
    return output
