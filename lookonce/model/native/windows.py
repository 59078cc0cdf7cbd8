"""Attention inside windows of patches by compiled code, on the CPU, in fp32 or bf16.

torch's own is slow in bf16 on a CPU, above all for many short windows, and leaves rope to half a
dozen operators over all queries and keys; here rope happens where they are packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lookonce.model.native import compiled


def attends_windows(like: Tensor) -> bool:
    """Whether tensors of this type and place can be given to `attend_windows`."""
    kernels = compiled.kernels
    if kernels is None or like.device.type != "cpu":
        return False
    return like.dtype is torch.float32 or (
        like.dtype is torch.bfloat16 and bool(kernels.multiplies_bf16)
    )


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
