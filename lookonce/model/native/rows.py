"""RMS norms and gated activations in one pass of compiled code, on the CPU, in fp32 or bf16.

torch takes half a dozen operators for either in bf16, each through memory. Arithmetic is fp32, the
result is rounded once. Where compiled code is missing, or on another device, torch does it.
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
