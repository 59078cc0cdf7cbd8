"""Quantized checkpoints, unpacked to the type that is served while they load, matrix by matrix.

    gptq                2, 4 or 8 bits, groups of inputs in any order
    awq                 4 bits, as AutoAWQ's "gemm" packs them
    fp8, fbgemm_fp8     float8 with a scale for a block, an output or the whole matrix
    compressed-tensors  packed integers, int8 and float8
    bitsandbytes        int8, and nf4 and fp4 with plain or nested scales

Each is plain tensors in safetensors. A matrix is made of those whose names share a prefix, when
transformers asks for it, so no more than the model and a few matrices are in memory. What a
checkpoint says of rounding activations is ignored: answers are those of the unpacked weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from lookonce.errors import ModelLoadError

Json = Mapping[str, Any]
Parts = Mapping[str, Tensor]
"""Tensors of one matrix by the rest of their names."""
ROWS = 64
"""Outputs that are unpacked at a time, or as many times more as `BLOCK` elements have: whole words
of every method."""
BLOCK = 1 << 18


class Method(NamedTuple):
    """How a method's tensors are found and unpacked."""

    suffixes: Mapping[str, bool]
    """Rest of a tensor's name → whether a tensor of that name says that there is a matrix."""
    shape: Callable[[Parts], tuple[int, int]]
    """→ (N, K) of the matrix."""
    rows: Callable[[Parts, slice], Tensor]
    """→ rows [n, K] float32. Raises `ValueError`."""


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight neighbours stands among the 4-bit numbers of an int32."""
OF_ACTIVATIONS = re.compile(
    r"\.((input|output|activation|[qkv])_scale|(input|output)_zero_point|weight_format|scale_ub)$"
)
"""Of what is computed with unrounded activations and keys."""


class PackedWeights:
    """The tensors of a quantized checkpoint. It is given to transformers as a state dict."""

    def __init__(self, folder: str, declared: Json, dtype: torch.dtype) -> None:
        """Matrices are unpacked to `dtype`. `declared` is the config's `quantization_config`.

        Raises `ModelLoadError` for a kind of its method that is not unpacked here.
        """
        self._files: list[Any] = [safe_open(p, framework="pt") for p in _weight_files(folder)]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self._method = _METHODS[declared["quant_method"]](declared)
        self._dtype = dtype

    def state_dict(self) -> dict[str, Any]:
        """Name → a tensor or something that is read by `[...]`, as a slice of safetensors is."""
        found: dict[str, Any] = {}
        packed: set[str] = set()
        for name in self._file_of:
            prefix = self._prefix_of(name)
            if prefix is not None:
                parts = {
                    rest: part
                    for rest in self._method.suffixes
                    if (part := f"{prefix}{rest}") in self._file_of
                }
                found[f"{prefix}.weight"] = _Matrix(self, f"{prefix}.weight", parts)
                packed.update(parts.values())
        for name, file in self._file_of.items():
            if name not in packed and not OF_ACTIVATIONS.search(name):
                found[name] = file.get_slice(name)
        return found

    def _prefix_of(self, name: str) -> str | None:
        """The prefix of the matrix whose first tensor this is, by the first suffix."""
        marks = [rest for rest, marks in self._method.suffixes.items() if marks]
        rest = next((rest for rest in marks if name.endswith(rest)), None)
        return None if rest is None else name.removesuffix(rest)

    def matrix(self, name: str, parts: Mapping[str, str]) -> Tensor:
        """Raises `ModelLoadError` that names the matrix."""
        tensors = {rest: self._file_of[part].get_tensor(part) for rest, part in parts.items()}
        try:
            return self._unpacked(tensors)
        except (KeyError, RuntimeError, IndexError, ValueError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ModelLoadError(
                f"the quantized weight {name} cannot be unpacked: {why}"
            ) from error

    def _unpacked(self, parts: Parts) -> Tensor:
        outputs, inputs = self._method.shape(parts)
        found = torch.empty((outputs, inputs), dtype=self._dtype)
        step = ROWS * max(1, BLOCK // (ROWS * inputs))
        for first in range(0, outputs, step):
            block = slice(first, min(first + step, outputs))
            found[block] = self._method.rows(parts, block)
        return found


class _Matrix:
    """One matrix, unpacked when it is read."""

    def __init__(self, weights: PackedWeights, name: str, parts: Mapping[str, str]) -> None:
        self._weights, self._name, self._parts = weights, name, parts

    def __getitem__(self, _: Any) -> Tensor:
        return self._weights.matrix(self._name, self._parts)


def unpacked_methods() -> tuple[str, ...]:
    return tuple(sorted(_METHODS))


def _refuse(method: str, what: str) -> ModelLoadError:
    return ModelLoadError(f"weights quantized by {method!r} {what} are not supported")


# --- Integers in words of 32 bits ----------------------------------------------------------------


def _spread(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] → [..., W * 32 / bits] int32, from the lowest bits of each word on."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _words(numbers: slice, bits: int) -> slice:
    """Words that hold a range of numbers, the first of which begins one."""
    return slice(numbers.start * bits // 32, -(-numbers.stop * bits // 32))


def _count(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _bits(declared: Json, method: str, allowed: tuple[int, ...]) -> int:
    bits = declared.get("bits", declared.get("w_bit"))
    if bits not in allowed:
        raise _refuse(method, f"in {bits} bits")
    return int(bits)


def _group_of_input(inputs: int, groups: int, size: int) -> Tensor:
    """[K] the group of each input."""
    if size <= 0:
        size = inputs
    if math.ceil(inputs / size) != groups:
        raise ValueError(f"{groups} groups of {size} do not make {inputs} inputs")
    return torch.arange(inputs) // size


def _gptq(declared: Json) -> Method:
    bits = _bits(declared, "gptq", (2, 4, 8))
    layout = declared.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _refuse("gptq", f"as {layout!r}")
    first = 1 if layout == "gptq" else 0
    size = int(declared.get("group_size", -1))

    def shape(parts: Parts) -> tuple[int, int]:
        words, outputs = parts[".qweight"].shape
        return outputs, words * 32 // bits

    def rows(parts: Parts, block: slice) -> Tensor:
        values = _spread(parts[".qweight"][:, block].t(), bits)  # [n, K]
        zeros = _spread(parts[".qzeros"][:, _words(block, bits)], bits) + first
        scales = parts[".scales"][:, block].float()  # [G, n]
        inputs = values.shape[1]
        group = parts.get(".g_idx")
        if group is None:
            group = _group_of_input(inputs, len(scales), size)
        if group.shape != (inputs,):
            raise ValueError(f"g_idx of {tuple(group.shape)} does not fit {inputs} inputs")
        group, zeros = group.long(), zeros[:, : _count(block)]
        return (values - zeros.t()[:, group]).float() * scales.t()[:, group]

    suffixes = {".qweight": True, ".qzeros": False, ".scales": False, ".g_idx": False}
    return Method(suffixes, shape, rows)


def _awq(declared: Json) -> Method:
    bits = _bits(declared, "awq", (4,))
    layout = str(declared.get("version") or "gemm").lower()
    if layout != "gemm":
        raise _refuse("awq", f"as {layout!r}")
    size = int(declared.get("group_size", declared.get("q_group_size", 128)))

    def columns(words: Tensor) -> Tensor:
        """[rows, W] → [rows, 8 W]."""
        spread = _spread(words, bits)
        numbers = spread.view(*spread.shape[:-1], -1, 8)
        return numbers[..., list(AWQ_ORDER)].flatten(-2)

    def shape(parts: Parts) -> tuple[int, int]:
        inputs, words = parts[".qweight"].shape
        return words * 8, inputs

    def rows(parts: Parts, block: slice) -> Tensor:
        part = _words(block, bits)
        values, scales = columns(parts[".qweight"][:, part]), parts[".scales"][:, block].float()
        group = _group_of_input(len(values), len(scales), size)
        if ".qzeros" in parts:
            values = values - columns(parts[".qzeros"][:, part])[group]
        else:
            values = values - (1 << bits - 1)
        return (values.float() * scales[group]).t()

    return Method({".qweight": True, ".qzeros": False, ".scales": False}, shape, rows)


# --- Scales of blocks ----------------------------------------------------------------------------


def _over(
    scales: Tensor, shape: tuple[int, int], rows: slice, block: tuple[int, int] | None
) -> Tensor:
    """Scales of a matrix [N, K], its rows, or its blocks → those of some rows [n, K], or what is
    spread to that."""
    if scales.numel() == 1:
        return scales.float().reshape(1, 1)
    if scales.dim() == 1:
        scales = scales.unsqueeze(1)
    sizes = [
        math.ceil(length / count) if asked is None or count in (1, length) else asked
        for length, count, asked in zip(shape, scales.shape, block or (None, None), strict=True)
    ]
    if any(
        math.ceil(length / size) != count
        for length, size, count in zip(shape, sizes, scales.shape, strict=True)
    ):
        raise ValueError(f"scales of {tuple(scales.shape)} do not fit {shape} in blocks of {sizes}")
    of_rows = scales[torch.arange(rows.start, rows.stop) // sizes[0]].float()
    return of_rows if scales.shape[1] == 1 else of_rows[:, torch.arange(shape[1]) // sizes[1]]


def _weight_shape(parts: Parts) -> tuple[int, int]:
    rows, columns = parts[".weight"].shape
    return rows, columns


def _fp8(declared: Json) -> Method:
    size = declared.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if size else None

    def rows(parts: Parts, part: slice) -> Tensor:
        weight = parts[".weight"]
        scales = parts.get(".weight_scale_inv", parts.get(".weight_scale"))
        assert scales is not None  # there is a matrix where there is one of them
        return weight[part].float() * _over(scales, _weight_shape(parts), part, block)

    suffixes = {".weight": False, ".weight_scale_inv": True, ".weight_scale": True}
    return Method(suffixes, _weight_shape, rows)


PLAIN_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")


def _compressed_tensors(declared: Json) -> Method:
    groups = list((declared.get("config_groups") or {}).values())
    layouts = {declared.get("format")} | {group.get("format") for group in groups}
    for layout in sorted(filter(None, layouts)):
        if layout not in PLAIN_FORMATS and layout != "mixed-precision":
            raise _refuse("compressed-tensors", f"as {layout!r}")
    sparsity = (declared.get("sparsity_config") or {}).get("format", "dense")
    if sparsity not in ("dense", None):
        raise _refuse("compressed-tensors", f"with sparsity {sparsity!r}")
    if declared.get("transform_config"):
        raise _refuse("compressed-tensors", "with transforms")
    blocks = {_block(group.get("weights") or {}) for group in groups}
    block = blocks.pop() if len(blocks) == 1 else None

    def shape(parts: Parts) -> tuple[int, int]:
        if ".weight_packed" not in parts:
            return _weight_shape(parts)
        outputs, inputs = (int(size) for size in parts[".weight_shape"])
        return outputs, inputs

    def rows(parts: Parts, part: slice) -> Tensor:
        whole, offsets = shape(parts), parts.get(".weight_zero_point")
        inputs, group = whole[1], parts.get(".weight_g_idx")

        def over(numbers: Tensor) -> Tensor:
            if group is not None and bool((group >= 0).all()):
                return numbers[part].float()[:, group.long()]
            return _over(numbers, whole, part, block)

        if ".weight_packed" not in parts:
            values = parts[".weight"][part].float()
        else:
            words = parts[".weight_packed"]
            bits = words.shape[1] * 32 // inputs
            if bits not in (4, 8) or words.shape != (whole[0], math.ceil(inputs * bits / 32)):
                raise ValueError(f"words of {tuple(words.shape)} do not hold {whole}")
            values = (_spread(words[part], bits)[:, :inputs] - (1 << bits - 1)).float()
            if offsets is not None and offsets.dtype is torch.int32:  # packed, too
                offsets = _spread(offsets.t(), bits).t()[: whole[0]] - (1 << bits - 1)
        if offsets is not None:
            values = values - over(offsets)
        return values * over(parts[".weight_scale"])

    names = ("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx")
    suffixes = {f".{name}": False for name in names} | {".weight_scale": True}
    return Method(suffixes, shape, rows)


def _block(weights: Json) -> tuple[int, int] | None:
    """The sizes of a block of one scale, where they are said."""
    if weights.get("block_structure"):
        high, wide = weights["block_structure"]
        return int(high), int(wide)
    size = weights.get("group_size")
    return (1, int(size)) if size and size > 0 else None


# --- bitsandbytes --------------------------------------------------------------------------------

STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


def _bitsandbytes(declared: Json) -> Method:
    def state_of(parts: Parts) -> Json:
        raw = next(parts[state] for state in STATES if state in parts)
        state: Json = json.loads(bytes(raw.tolist()))
        return state

    def shape(parts: Parts) -> tuple[int, int]:
        if ".SCB" in parts:
            return _weight_shape(parts)
        outputs, inputs = state_of(parts)["shape"]
        return outputs, inputs

    def rows(parts: Parts, part: slice) -> Tensor:
        weight = parts[".weight"]
        if ".SCB" in parts:
            return weight[part].float() * (parts[".SCB"][part].float() / 127).unsqueeze(1)
        state, inputs = state_of(parts), shape(parts)[1]
        first, last = part.start * inputs, part.stop * inputs  # `ROWS` make `first` even
        packed = weight.flatten()[first // 2 : -(-last // 2)]
        numbers = torch.stack((packed >> 4, packed & 15), -1).flatten()[: last - first].long()
        absmax = parts[".weight.absmax"]
        if absmax.dtype is torch.uint8:  # scales that are quantized themselves
            inner = parts[".weight.nested_quant_map"][absmax.long()]
            outer = parts[".weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))
            absmax = inner * outer[: len(inner)] + float(state["nested_offset"])
        values = parts[".weight.quant_map"].float()[numbers]
        scales = absmax.float()[torch.arange(first, last) // int(state["blocksize"])]
        return (values * scales).view(-1, inputs)

    names = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    optional = {".weight": False, **{f".weight.{name}": False for name in names}}
    suffixes = {**optional, ".SCB": True, **dict.fromkeys(STATES, True)}
    return Method(suffixes, shape, rows)


_METHODS: dict[str, Callable[[Json], Method]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}


# --- Files ---------------------------------------------------------------------------------------


def _weight_files(folder: str) -> Iterator[Path]:
    """The safetensors files of a folder or hub id. Raises `ModelLoadError`."""
    index = _file(folder, "model.safetensors.index.json")
    if index is None:
        whole = _file(folder, "model.safetensors")
        if whole is None:
            raise ModelLoadError(f"{folder} has no model.safetensors")
        yield whole
        return
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (KeyError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{folder}: model.safetensors.index.json is broken") from error
    for shard in sorted(shards):
        path = _file(folder, shard)
        if path is None:
            raise ModelLoadError(f"{folder} has no {shard}, which its index names")
        yield path


def _file(folder: str, name: str) -> Path | None:
    path = cached_file(folder, name, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)
