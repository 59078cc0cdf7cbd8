"""Random folders whose linear layers are written as published quantized checkpoints have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.model.copies import copied, edit

BLOCK = 32
Weights = dict[str, Tensor]
GROUP = 16
Packed = tuple[Weights, Tensor]
"""Tensors of one matrix by the rest of their names, and what they stand for."""
Packer = Callable[[Tensor], Packed]


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(*shape: int, bits: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.int32)


def words(numbers: Tensor, bits: int = 4, order: Sequence[int] = tuple(range(32))) -> Tensor:
    """[..., W * 32 / bits] → int32 [..., W]; place i of a word holds its number `order[i]`."""
    per_word = 32 // bits
    groups = numbers.unflatten(-1, (-1, per_word)).numpy().astype(np.uint32)
    total = np.zeros(groups.shape[:-1], np.uint32)
    for place in range(per_word):
        total |= groups[..., order[place]] << np.uint32(bits * place)
    return torch.from_numpy(total.view(np.int32))


def halves(scales: Tensor) -> Tensor:
    return (scales.abs() * 0.02 + 0.01).half()


def gptq(weight: Tensor, *, bits: int = 4, first: int = 1, shuffled: bool = False) -> Packed:
    outputs, inputs = weight.shape
    groups = inputs // GROUP
    values, zeros = integers(inputs, outputs, bits=bits), integers(groups, outputs, bits=bits)
    scales, group = halves(noise(groups, outputs)), torch.arange(inputs) // GROUP
    if shuffled:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(7))]
    meant = (values - (zeros[group] + first)).float() * scales.float()[group]
    return {
        "qweight": words(values.t().contiguous(), bits).t(),
        "qzeros": words(zeros, bits),
        "scales": scales,
        "g_idx": group.int(),
    }, meant.t()


def awq(weight: Tensor) -> Packed:
    outputs, inputs = weight.shape
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    values, zeros = integers(inputs, outputs), integers(inputs // GROUP, outputs)
    scales, group = halves(noise(inputs // GROUP, outputs)), torch.arange(inputs) // GROUP
    meant = (values - zeros[group]).float() * scales.float()[group]
    packed = {"qweight": words(values, order=order), "qzeros": words(zeros, order=order)}
    return {**packed, "scales": scales}, meant.t()


def float8(weight: Tensor, scales: Tensor, name: str) -> Packed:
    """`scales` are those of blocks of equal size."""
    rows, columns = weight.shape
    high, wide = scales.shape if scales.dim() else (1, 1)
    spread = scales.view(high, 1, wide, 1)
    tiles = weight.view(high, rows // high, wide, columns // wide)
    found = (tiles / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    meant = (found.float() * spread).view(rows, columns)
    return {"weight": found.view(rows, columns), name: scales}, meant


def block_float8(weight: Tensor) -> Packed:
    tiles = weight.view(weight.shape[0] // BLOCK, BLOCK, weight.shape[1] // BLOCK, BLOCK)
    return float8(weight, tiles.abs().amax((1, 3)) / 448, "weight_scale_inv")


def whole_float8(weight: Tensor) -> Packed:
    return float8(weight, weight.abs().max() / 448, "weight_scale")


def row_float8(weight: Tensor) -> Packed:
    packed, meant = float8(weight, weight.abs().amax(1, keepdim=True) / 448, "weight_scale")
    return {**packed, "input_scale": torch.ones(1)}, meant


def packed_integers(weight: Tensor, *, symmetric: bool = True, bits: int = 4) -> Packed:
    outputs, inputs = weight.shape
    offset, group = 1 << (bits - 1), torch.arange(inputs) // GROUP
    values, zeros = integers(outputs, inputs, bits=bits), integers(outputs, inputs // GROUP)
    scales = halves(noise(outputs, inputs // GROUP)).bfloat16()
    packed = {
        "weight_packed": words(values, bits),
        "weight_shape": torch.tensor([outputs, inputs]),
        "weight_scale": scales,
    }
    signed = values - offset
    if not symmetric:
        signed = signed - (zeros - offset)[:, group]
        packed["weight_zero_point"] = words(zeros.t().contiguous()).t()
    return packed, signed.float() * scales.float()[:, group]


def row_int8(weight: Tensor) -> Packed:
    values = integers(*weight.shape, bits=8).sub(128).to(torch.int8)
    scales = halves(noise(len(weight), 1)).float()
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def bitsandbytes_int8(weight: Tensor) -> Packed:
    values = integers(*weight.shape, bits=8).sub(128).to(torch.int8)
    largest = noise(len(weight)).abs() + 0.5
    packed = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return packed, values.float() * largest.unsqueeze(1) / 127


def bitsandbytes_nf4(weight: Tensor, *, nested: bool = False) -> Packed:
    numbers, levels = integers(weight.numel()), noise(16).sort().values
    blocks = weight.numel() // 64
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
    absmax = noise(blocks).abs()
    packed = {
        "weight": (numbers[::2] << 4 | numbers[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.quant_map": levels,
        "weight.absmax": absmax,
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        rounded, inner = integers(blocks, bits=8).to(torch.uint8), noise(256)
        outer = noise(-(-blocks // 256)).abs()
        packed |= {
            "weight.absmax": rounded,
            "weight.nested_quant_map": inner,
            "weight.nested_absmax": outer,
        }
        absmax = inner[rounded.long()] * outer.repeat_interleave(256)[:blocks] + 0.25
    raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    packed["weight.quant_state.bitsandbytes__nf4"] = raw
    return packed, (levels[numbers.long()] * absmax.repeat_interleave(64)).view(weight.shape)


def compressed(layout: str, **weights: object) -> dict[str, object]:
    group = {"weights": weights, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
    }


GPTQ: dict[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FP8: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
INT4 = compressed("pack-quantized", num_bits=4, group_size=GROUP)
ROWS = compressed("int-quantized", num_bits=8, strategy="channel")
BITS8: dict[str, object] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
BITS4: dict[str, object] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
KINDS: dict[str, tuple[Packer, dict[str, object]]] = {
    "gptq": (gptq, GPTQ),
    "gptq-8-bits": (partial(gptq, bits=8), {**GPTQ, "bits": 8}),
    "gptq-2-bits": (partial(gptq, bits=2), {**GPTQ, "bits": 2}),
    "gptq-any-order": (partial(gptq, shuffled=True), {**GPTQ, "desc_act": True}),
    "gptq-v2": (partial(gptq, first=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "fp8-blocks": (block_float8, FP8),
    "fp8-whole": (whole_float8, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm": (row_float8, {"quant_method": "fbgemm_fp8"}),
    "compressed-int4": (packed_integers, INT4),
    "compressed-int4-zeros": (partial(packed_integers, symmetric=False), INT4),
    "compressed-int8-packed": (partial(packed_integers, bits=8), INT4),
    "compressed-int8": (row_int8, ROWS),
    "compressed-fp8": (row_float8, {**ROWS, "format": "float-quantized"}),
    "bitsandbytes-int8": (bitsandbytes_int8, BITS8),
    "bitsandbytes-nf4": (bitsandbytes_nf4, BITS4),
    "bitsandbytes-nf4-nested": (partial(bitsandbytes_nf4, nested=True), BITS4),
}


def packed_folder(source: Path, target: Path, kind: str) -> tuple[Path, Path]:
    """A folder with quantized layers in its decoder, and a plain one of what they stand for."""
    pack, declared = KINDS[kind]
    copy, plain = copied(source, target), copied(source, target / "plain")
    weights = load_file(copy / "model.safetensors")
    packed, meant = {}, dict(weights)
    for name, weight in weights.items():
        if not name.endswith("_proj.weight") or "visual" in name:
            packed[name] = weight
            continue
        tensors, stands_for = pack(weight)
        meant[name] = stands_for.contiguous()
        prefix = name.removesuffix("weight")
        packed |= {prefix + rest: tensor.contiguous() for rest, tensor in tensors.items()}
    rewrite(copy, packed, **declared)
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    return copy, plain


def rewrite(folder: Path, weights: Weights, **quantization: object) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", quantization_config=quantization)
