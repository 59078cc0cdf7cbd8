"""Matrices of a text model in int8 with a scale for each output: `--quantize int8`.

A quarter of float32's memory, and of what a decode step reads. Compiled code multiplies them by
tokens rounded to 16 bits, with a scale for each token, and sums exact integers; without it torch
multiplies blocks that are widened to float32. Norms, embeddings and encoders keep their type, and
so do experts, which are not linear layers in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from lookonce.model.native import compiled

LARGEST = 127
BLOCK_BYTES = 4 << 20
"""Of weights that torch widens at a time."""
QUANTIZED_BYTES = 1 << 18
"""Of weights that are quantized at a time, so that little memory is taken beside the result."""
TRIED_TOLERANCE = 1e-3
"""Largest difference of compiled products to torch's, relative to the largest result."""
_DTYPES = (torch.float32, torch.bfloat16)
_KEPT = ("kv_b_proj",)
"""Layers whose weights attention itself reads (`attention.latent`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A matrix [N, K]: `values[n] * scales[n]`."""

    values: Tensor
    """[N, K] int8."""
    scales: Tensor
    """[N] float32."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, rows: slice) -> Int8Weight:
        return Int8Weight(self.values[rows], self.scales[rows])

    def dequantized(self) -> Tensor:
        """[N, K] float32."""
        return self.values.float() * self.scales.unsqueeze(1)


def quantize(weight: Tensor) -> Int8Weight:
    """Each row [K] of a weight [N, K] to the nearest of 255 values, the largest exact."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    step = max(1, QUANTIZED_BYTES // (4 * weight.shape[1]))
    for begin in range(0, len(weight), step):
        rows = weight[begin : begin + step].float()
        part = slice(begin, begin + len(rows))
        lowest, highest = rows.aminmax(dim=1)
        scales[part] = torch.maximum(-lowest, highest) / LARGEST
        divisors = torch.where(scales[part] > 0, scales[part], 1.0)
        values[part] = (rows / divisors.unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)
    return Int8Weight(values, scales)


def linear(inputs: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """inputs [..., K], weight [N, K], bias [N] → [..., N] in the type of the inputs."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    if _is_compiled() and rows.dtype in _DTYPES and len(rows):
        output = _compiled_product(rows.contiguous(), weight, bias)
    else:
        output = _widened_product(rows, weight, bias)
    return output.view(*inputs.shape[:-1], len(weight.scales))


class Int8Linear(nn.Module):
    """A linear layer [N, K] with int8 weights."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def quantized(self) -> Int8Weight:
        return Int8Weight(self.weight.data, self.scales.data)

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.quantized, self.bias)


@torch.no_grad()
def quantize_linears(model: nn.Module, only: nn.Module | None = None) -> int:
    """Replace each plain linear layer in the model, or `only` one, and count them.

    A weight that is shared, as an output head's with the embedding, stays what it is elsewhere.
    """
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in _KEPT or type(child) is not nn.Linear:
                continue
            if only is None or child is only:
                bias = None if child.bias is None else child.bias.data
                setattr(module, name, Int8Linear(quantize(child.weight.data), bias))
                count += 1
    return count


def _compiled_product(rows: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    kernels = compiled.kernels
    if kernels is None:
        raise RuntimeError("products with int8 weights are not compiled")
    output = rows.new_empty((len(rows), len(weight.scales)))
    kernels.linear_rows(rows, weight.values, weight.scales, bias, output, torch.get_num_threads())
    return output


def _widened_product(rows: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    wide = rows.float()
    output = rows.new_empty((len(rows), len(weight.scales)))
    step = max(1, BLOCK_BYTES // (4 * weight.shape[1]))
    for begin in range(0, len(weight.scales), step):
        part = slice(begin, begin + step)
        results = wide @ weight[part].dequantized().t()
        if bias is not None:
            results += bias[part]
        output[:, part] = results
    return output


def _is_compiled() -> bool:
    return compiled.kernels is not None and _agrees()


@cache
def _agrees() -> bool:
    """Whether compiled products are torch's, for sizes that no vector divides."""
    kernels = compiled.kernels
    if kernels is None:
        return False
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(53, 77, generator=generator))
    rows = torch.randn(11, 77, generator=generator)
    expected = rows @ weight.dequantized().t()
    for count in (1, 2, 4, 11):
        found = rows.new_empty((count, 53))
        kernels.linear_rows(rows[:count], weight.values, weight.scales, None, found, 1)
        difference = (found - expected[:count]).abs().max()
        if not difference <= TRIED_TOLERANCE * expected.abs().max():
            return False
    return True
