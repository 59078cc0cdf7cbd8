"""Matrix products of bf16 tensors on CPUs that do not multiply bf16, and the choice of a product.

torch's own bf16 products are eight times slower there than float32 ones (AVX2). So weights stay
bf16 in memory and are widened block by block to float32, multiplied by torch's float32 product, and
the results are rounded once. Sums are in float32, as they are on hardware that multiplies bf16.
`lookonce bench attention` compares both with float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lookonce.model import int8_weights
from lookonce.model.int8_weights import Int8Weight
from lookonce.types.cpu import cpu_multiplies_bf16

MIN_ROWS = 4
"""Fewer rows are left to torch: then reading the weights takes the time, and it reads them once."""
BLOCK_BYTES = 4 << 20
"""Of weights that are widened at a time: they stay in a cache while all rows meet them."""
BLOCK_ROWS = 2048
"""Rows that are widened at a time."""

Weight = Tensor | Int8Weight
"""[N, K]."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """inputs [..., K], weight [N, K], bias [N] → [..., N], by the fastest product of this CPU."""
    if isinstance(weight, Int8Weight):
        return int8_weights.linear(inputs, weight, bias)
    if not _is_widened(inputs, weight):
        return functional.linear(inputs, weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1])
    return _product(rows, weight, bias, None).view(*inputs.shape[:-1], len(weight))


def add_linear(hidden: Tensor, inputs: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """hidden [T, N] + linear(inputs [T, K]) → [T, N]."""
    if isinstance(weight, Int8Weight):
        return hidden + int8_weights.linear(inputs, weight, bias)
    if _is_widened(inputs, weight):
        return _product(inputs, weight, bias, hidden)
    if bias is not None:
        hidden = hidden + bias
    return torch.addmm(hidden, inputs, weight.t())


def _is_widened(inputs: Tensor, weight: Tensor) -> bool:
    return (
        inputs.dtype is torch.bfloat16
        and weight.dtype is torch.bfloat16
        and inputs.device.type == "cpu"
        and inputs.numel() >= MIN_ROWS * inputs.shape[-1]
        and not cpu_multiplies_bf16()
    )


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor | None) -> Tensor:
    """rows [T, K] → [T, N]. Beside its result it takes a block of rows and of weights."""
    num_outputs, width = weight.shape
    num_blocks = -(-4 * weight.numel() // BLOCK_BYTES)
    step = -(-num_outputs // max(1, num_blocks))  # blocks of equal size
    output = rows.new_empty((len(rows), num_outputs))
    widened = torch.empty((step, width))
    for first in range(0, len(rows), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        inputs = rows[block].float()
        for begin in range(0, num_outputs, step):
            part = slice(begin, min(begin + step, num_outputs))
            weights = widened[: part.stop - begin].copy_(weight[part])
            results = inputs @ weights.t()
            if bias is not None:
                results += bias[part]
            if hidden is not None:
                results += hidden[block, part]
            output[block, part] = results
    return output


def widen_products(model: nn.Module) -> int:
    """Let linear layers and convolutions of the model use these products; returns how many do.

    It changes nothing on a CPU that multiplies bf16, and nothing for tensors of another type.
    """
    return sum(map(_widen, model.modules())) if not cpu_multiplies_bf16() else 0


def _widen(module: nn.Module) -> bool:
    replacement: Callable[[Tensor], Tensor]
    if "forward" in vars(module):  # replaced already
        return False
    if type(module) is nn.Linear:
        replacement = partial(_linear_forward, module)
    elif type(module) in _CONVOLUTIONS:
        replacement = partial(_convolution_forward, module)
    else:
        return False
    module.forward = replacement
    return True


def _linear_forward(module: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(inputs, module.weight, module.bias)


def _convolution_forward(module: Any, inputs: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    if inputs.dtype is not torch.bfloat16 or inputs.device.type != "cpu":
        plain: Tensor = module._conv_forward(inputs, weight, bias)
        return plain
    widened: Tensor = module._conv_forward(
        inputs.float(), weight.float(), None if bias is None else bias.float()
    )
    return widened.to(torch.bfloat16)
