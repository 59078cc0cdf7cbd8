"""RMS norms and gated activations in one pass of compiled code, on the CPU, in fp32 or bf16.

torch takes half a dozen operators for either in bf16, each through memory. Arithmetic is fp32, the
result is rounded once. Where compiled code is missing, or on another device, torch does it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lookonce.model.native.compiled import _native

_DTYPES = (torch.float32, torch.bfloat16)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden [..., H] over its last dimension, times weight [H]."""
    if not _is_plain(hidden) or not _is_plain(weight) or weight.dtype is not hidden.dtype:
        return functional.rms_norm(hidden, weight.shape, weight, eps)
    width = hidden.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"a weight of {tuple(weight.shape)} does not fit {tuple(hidden.shape)}")
    output = torch.empty_like(hidden)
    _native.norm_rows(
        hidden.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        hidden.numel() // width,
        width,
        eps,
        torch.get_num_threads(),
        hidden.dtype is torch.bfloat16,
    )
    return output


def silu_gate(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 F], the gates first → silu(gate) * up [..., F]."""
    if not _is_plain(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
    width = gate_up.shape[-1] // 2
    output = gate_up.new_empty((*gate_up.shape[:-1], width))
    _native.gate_rows(
        gate_up.data_ptr(),
        output.data_ptr(),
        gate_up.numel() // (2 * width),
        width,
        torch.get_num_threads(),
        gate_up.dtype is torch.bfloat16,
    )
    return output


def _is_plain(tensor: Tensor) -> bool:
    return (
        _native is not None
        and tensor.device.type == "cpu"
        and tensor.dtype in _DTYPES
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )
