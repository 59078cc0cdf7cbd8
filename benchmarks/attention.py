"""`lookonce bench attention`: our attention kernel beside plain torch on the same pages.

    gather + SDPA        all keys of the batch gathered into one padded tensor, one SDPA call
    SDPA per sequence    each sequence's keys gathered, one SDPA call each

Both write new keys and values into the pages first, as the kernel does. Each layer has pages of its
own and the layers take turns, so that keys come from memory as in a whole model, not from a warm
CPU cache.

Two more parts: few new tokens over 1,000 to 100,000 keys on one thread and on all, beside a plain
read of the same keys and values (`--part long`); and bf16 matrix products beside float32 ones, as
they are chosen for this CPU and as torch has them (`--part bf16`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.report import Report, median, publish
from lookonce.model.attention.backend import AttentionCall, AttentionMetadata
from lookonce.model.attention.cpu import KernelBackend, kernel_available
from lookonce.model.attention.reference import ReferenceBackend, write_pages
from lookonce.model.bf16_products import linear
from lookonce.model.kv_pages import KVPages, LayerPages, kv_layout
from lookonce.model.step_inputs import AttentionMetadataBuilder

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class AttentionShape:
    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """One step: `batch` sequences, each with `query` new tokens after `context` earlier ones."""

    batch: int
    query: int
    context: int


SHAPES = (AttentionShape("135M-like", 30, 9, 3, 64), AttentionShape("nano", 4, 4, 2, 64))
LOADS = (
    *(AttentionLoad(batch, 1, 256) for batch in (1, 8, 32)),
    AttentionLoad(1, 1, 4096),
    AttentionLoad(1, 16, 256),
    AttentionLoad(1, 64, 0),
    AttentionLoad(1, 256, 0),
    AttentionLoad(1, 1024, 0),
    AttentionLoad(1, 512, 2048),
)


COLUMNS = ("shape", "batch", "new", "before", "kernel", "gather", "per seq", "ratio")
PARTS = ("steps", "long", "bf16")
Way = Callable[[LayerPages], Tensor]


class _Step:
    """The inputs of one load on one shape, and the three ways to compute its attention."""

    def __init__(self, shape: AttentionShape, load: AttentionLoad, dtype: torch.dtype) -> None:
        total = load.query + load.context
        blocks = -(-total // BLOCK_SIZE)
        num_blocks = load.batch * blocks
        rng = np.random.default_rng(0)
        tables = rng.permutation(num_blocks).astype(np.int32).reshape(load.batch, blocks)
        layout = kv_layout(shape.num_layers, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, dtype)
        self.pages = KVPages(layout, num_blocks)
        for layer in self.pages.layers:
            layer.keys.normal_()
            layer.values.normal_()
        buffers = AttentionMetadataBuilder(
            max_num_seqs=load.batch,
            max_num_tokens=load.batch * load.query,
            max_blocks_per_seq=blocks,
            block_size=BLOCK_SIZE,
        )
        decodes = load.batch if load.query == 1 else 0
        lens = [load.query] * load.batch
        self.metadata = buffers.build(lens, [total] * load.batch, tables, num_decodes=decodes)
        tokens = self.metadata.num_tokens
        self.scale = shape.head_dim**-0.5
        # Laid out as transformers hands them over: query and key out of rope, value a projection.
        self.query = torch.randn(shape.num_heads, tokens, shape.head_dim).to(dtype).transpose(0, 1)
        self.key = torch.randn(shape.num_kv_heads, tokens, shape.head_dim).to(dtype).transpose(0, 1)
        self.value = torch.randn(tokens, shape.num_kv_heads, shape.head_dim).to(dtype)
        self.seen = _padded_visibility(load)

    def kernel(self, layer: LayerPages) -> Tensor:
        return self._backend(KernelBackend(), layer)

    def per_sequence(self, layer: LayerPages) -> Tensor:
        return self._backend(ReferenceBackend(), layer)

    def _backend(self, backend: KernelBackend | ReferenceBackend, layer: LayerPages) -> Tensor:
        return backend.forward(
            layer, self.query, self.key, self.value, self.metadata, AttentionCall(self.scale)
        )

    def gather(self, layer: LayerPages) -> Tensor:
        return _gather_attention(
            layer, self.query, self.key, self.value, self.metadata, self.seen, self.scale
        )


def _padded_visibility(load: AttentionLoad) -> Tensor:
    """[1, 1, query, keys] bool; all sequences of a load have one length."""
    positions = torch.arange(load.context, load.context + load.query)[:, None]
    return (torch.arange(load.context + load.query)[None] <= positions)[None, None]


def _gather_attention(
    layer: LayerPages,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    seen: Tensor,
    scale: float,
) -> Tensor:
    write_pages(layer, key, value, metadata.slot_mapping)
    batch, length = metadata.num_sequences, seen.shape[-1]
    keys, values = (
        page[metadata.block_tables].flatten(1, 2)[:, :length].transpose(1, 2) for page in layer
    )
    output = functional.scaled_dot_product_attention(
        query.reshape(batch, -1, *query.shape[1:]).transpose(1, 2),
        keys,
        values,
        attn_mask=seen,
        scale=scale,
        enable_gqa=True,
    )
    return output.transpose(1, 2).flatten(0, 1)


def measure(
    shape: AttentionShape, load: AttentionLoad, dtype: torch.dtype, seconds: float
) -> tuple[float, ...]:
    """Median CPU ms for one pass over all layers: kernel, gathered, per sequence.

    The three take turns, so that noise hits all alike.
    """
    step = _Step(shape, load, dtype)
    ways = (step.kernel, step.gather, step.per_sequence)
    _check_agreement(step, ways)
    times: list[list[float]] = [[] for _ in ways]
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times[0]) < 5:
        for way, taken in zip(ways, times, strict=True):
            taken.append(_time_layers(step.pages, way))
    return tuple(median(taken) for taken in times)


def _time_layers(pages: KVPages, way: Way) -> float:
    start = time.thread_time()
    for layer in pages.layers:
        way(layer)
    return (time.thread_time() - start) * 1e3


def _check_agreement(step: _Step, ways: Sequence[Way]) -> None:
    """Raises `AssertionError` where the ways compute different outputs."""
    outputs = [way(step.pages.layers[0]).float() for way in ways]
    tolerance = 1e-5 if step.query.dtype == torch.float32 else 5e-2
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=tolerance, rtol=tolerance)


def measure_all(dtype: torch.dtype, seconds: float) -> Report:
    """Measures every load on every shape, on one thread."""
    report = Report("attention", COLUMNS)
    report.notes += [
        f"ms of CPU time for all layers of one step, one thread, {dtype}; batch sequences, each of",
        "so many new tokens and tokens before; ratio: the better of gather and per seq / kernel",
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for shape in SHAPES:
                for load in LOADS:
                    kernel, *others = measure(shape, load, dtype, seconds)
                    ratio = min(others) / kernel
                    sizes = (load.batch, load.query, load.context)
                    report.add(shape.name, *sizes, kernel, *others, ratio)
    finally:
        torch.set_num_threads(threads)
    return report


LONG_COLUMNS = ("shape", "new", "keys", "read", "1 thread", "all", "torch", "of read", "threads")
LONG_SHAPES = (AttentionShape("135M-like", 1, 9, 3, 64), AttentionShape("nano", 1, 4, 2, 64))
LONG_KEYS = (1000, 4000, 11_000, 30_000, 100_000)
LONG_NEW = (1, 16)


def measure_long(
    shape: AttentionShape, load: AttentionLoad, dtype: torch.dtype, seconds: float
) -> tuple[float, ...]:
    """Median wall ms of one layer: a plain read of its pages, the kernel on one thread and on all,
    plain torch on all. They take turns."""
    layers = max(1, 40_000 // load.context)
    step = _Step(AttentionShape(shape.name, layers, *_heads(shape)), load, dtype)
    _check_agreement(step, (step.kernel, step.per_sequence))
    threads = torch.get_num_threads()
    ways: tuple[tuple[int, Way], ...] = (
        (1, _read),
        (1, step.kernel),
        (threads, step.kernel),
        (threads, step.per_sequence),
    )
    times: list[list[float]] = [[] for _ in ways]
    deadline = time.perf_counter() + seconds
    try:
        while time.perf_counter() < deadline or len(times[0]) < 3:
            for (count, way), taken in zip(ways, times, strict=True):
                torch.set_num_threads(count)
                start = time.perf_counter()
                for layer in step.pages.layers:
                    way(layer)
                taken.append((time.perf_counter() - start) * 1e3 / layers)
    finally:
        torch.set_num_threads(threads)
    return tuple(median(taken) for taken in times)


def _read(layer: LayerPages) -> Tensor:
    return layer.keys.view(torch.int32).amax() + layer.values.view(torch.int32).amax()


def _heads(shape: AttentionShape) -> tuple[int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.head_dim


@torch.inference_mode()
def measure_long_contexts(dtype: torch.dtype, seconds: float) -> Report:
    report = Report("attention-long", LONG_COLUMNS)
    report.notes += [
        f"wall ms of one layer, {dtype}, {torch.get_num_threads()} threads at most; read: a plain",
        "read of the keys and values on one thread; of read: that / kernel on one thread; threads:",
        "kernel on one thread / on all",
    ]
    for shape in LONG_SHAPES:
        for keys in LONG_KEYS:
            for new in LONG_NEW:
                load = AttentionLoad(1, new, keys - new)
                read, alone, together, plain = measure_long(shape, load, dtype, seconds)
                figures = (read, alone, together, plain, read / alone, alone / together)
                report.add(shape.name, new, keys, *figures)
    return report


PRODUCT_COLUMNS = ("inputs", "outputs", "rows", "float32", "bf16", "torch bf16", "ratio")
PRODUCTS = ((576, 3072), (1280, 3840), (2048, 8192))
PRODUCT_ROWS = (16, 128, 1024)


def measure_product(
    inputs: int, outputs: int, rows: int, seconds: float
) -> tuple[float, float, float]:
    """Median CPU ms of a product in float32, in bf16 as chosen here, and in torch's own bf16."""
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    halves = x.bfloat16(), weight.bfloat16()
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: functional.linear(x, weight),
        lambda: linear(*halves),
        lambda: functional.linear(*halves),
    )
    times: list[list[float]] = [[] for _ in ways]
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times[0]) < 3:
        for way, taken in zip(ways, times, strict=True):
            start = time.thread_time()
            way()
            taken.append((time.thread_time() - start) * 1e3)
    found = [median(taken) for taken in times]
    return found[0], found[1], found[2]


@torch.inference_mode()
def measure_products(seconds: float) -> Report:
    report = Report("bf16-products", PRODUCT_COLUMNS)
    report.notes += [
        "CPU ms of one matrix product, one thread; ratio: float32 / bf16 as chosen here"
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for inputs, outputs in PRODUCTS:
            for rows in PRODUCT_ROWS:
                wide, chosen, plain = measure_product(inputs, outputs, rows, seconds)
                report.add(inputs, outputs, rows, wide, chosen, plain, wide / chosen)
    finally:
        torch.set_num_threads(threads)
    return report


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench attention", description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=1.0, help="per row of the table")
    parser.add_argument("--part", choices=PARTS, action="append", help="of the three; else all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not kernel_available():
        print("the attention kernel is not built: run `make setup`")
        return 1
    parts, dtype = options.part or PARTS, getattr(torch, options.dtype)
    reports = []
    if "steps" in parts:
        reports.append(measure_all(dtype, options.seconds))
    if "long" in parts:
        reports.append(measure_long_contexts(dtype, options.seconds))
    if "bf16" in parts:
        reports.append(measure_products(options.seconds))
    publish(reports, options.json)
    return 0
