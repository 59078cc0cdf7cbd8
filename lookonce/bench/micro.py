"""Attention alone: our kernel beside what plain torch offers, on the same pages.

    gather + SDPA        all keys of the batch gathered into one padded tensor, one SDPA call
    SDPA per sequence    each sequence's keys gathered, one SDPA call each

Both write new keys and values into the pages first, as the kernel does. Layers take turns on pages
of their own, so that keys come from where a whole model would find them, not from a warm cache.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lookonce.model.attention.backend import AttentionBuffers, AttentionMetadata
from lookonce.model.attention.cpu import KernelBackend, kernel_available
from lookonce.model.attention.reference import ReferenceBackend, write_pages
from lookonce.model.kv_pages import KVPages, LayerPages

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Load:
    """One step: `batch` sequences with `query` new tokens each, `context` keys before them."""

    batch: int
    query: int
    context: int


SHAPES = (Shape("135M-like", 30, 9, 3, 64), Shape("nano", 4, 4, 2, 64))
LOADS = (
    *(Load(batch, 1, 256) for batch in (1, 8, 32)),
    Load(1, 1, 4096),
    Load(1, 16, 256),
    Load(1, 64, 0),
    Load(1, 256, 0),
    Load(1, 1024, 0),
    Load(1, 512, 2048),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Milliseconds for all layers of one step, median; `ratio` is the best torch way / ours."""

    shape: str
    dtype: str
    batch: int
    query: int
    context: int
    kernel_ms: float
    gather_ms: float
    per_sequence_ms: float
    ratio: float


class _Step:
    """One load on one shape, ready to run any way of attending."""

    def __init__(self, shape: Shape, load: Load, dtype: torch.dtype) -> None:
        total = load.query + load.context
        blocks = -(-total // BLOCK_SIZE)
        num_blocks = load.batch * blocks
        rng = np.random.default_rng(0)
        tables = rng.permutation(num_blocks).astype(np.int32).reshape(load.batch, blocks)
        self.pages = KVPages(
            shape.num_layers, num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, dtype
        )
        for layer in self.pages.layers:
            layer.keys.normal_()
            layer.values.normal_()
        buffers = AttentionBuffers(
            max_num_seqs=load.batch,
            max_num_tokens=load.batch * load.query,
            max_blocks_per_seq=blocks,
            block_size=BLOCK_SIZE,
        )
        decodes = load.batch if load.query == 1 else 0
        lens = [load.query] * load.batch
        self.metadata = buffers.fill(lens, [total] * load.batch, tables, num_decodes=decodes)
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
            layer, self.query, self.key, self.value, self.metadata, scale=self.scale
        )

    def gather(self, layer: LayerPages) -> Tensor:
        return _gather_attention(
            layer, self.query, self.key, self.value, self.metadata, self.seen, self.scale
        )


def _padded_visibility(load: Load) -> Tensor:
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


def measure(shape: Shape, load: Load, dtype: torch.dtype, seconds: float) -> Figure:
    """Run the three ways in turn for about `seconds` and take each one's median."""
    step = _Step(shape, load, dtype)
    ways = (step.kernel, step.gather, step.per_sequence)
    _check_agreement(step, ways)
    times: list[list[float]] = [[], [], []]
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times[0]) < 5:
        for way, taken in zip(ways, times, strict=True):
            taken.append(_time_layers(step.pages, way))
    kernel, gather, per_sequence = (statistics.median(taken) for taken in times)
    return Figure(
        shape=shape.name,
        dtype=str(dtype).removeprefix("torch."),
        batch=load.batch,
        query=load.query,
        context=load.context,
        kernel_ms=kernel,
        gather_ms=gather,
        per_sequence_ms=per_sequence,
        ratio=min(gather, per_sequence) / kernel,
    )


def _time_layers(pages: KVPages, way: Callable[[LayerPages], Tensor]) -> float:
    """Milliseconds for every layer once."""
    start = time.perf_counter()
    for layer in pages.layers:
        way(layer)
    return (time.perf_counter() - start) * 1e3


def _check_agreement(step: _Step, ways: tuple[Callable[[LayerPages], Tensor], ...]) -> None:
    """A fast wrong answer is no figure."""
    outputs = [way(step.pages.layers[0]).float() for way in ways]
    tolerance = 1e-5 if step.query.dtype == torch.float32 else 5e-2
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=tolerance, rtol=tolerance)


def run_attention(
    json_path: Path | None = None, *, bf16: bool = False, seconds: float = 1.0
) -> list[Figure]:
    """`lookonce bench attention`: print the table; with `json_path` also write the figures."""
    if not kernel_available():
        raise SystemExit("the attention kernel is not built: run `make setup`")
    dtype = torch.bfloat16 if bf16 else torch.float32
    print(f"attention, all layers of a step, ms, {torch.get_num_threads()} thread(s), {dtype}")
    print(
        f"{'shape':10} {'batch':>5} {'query':>5} {'before':>6} {'kernel':>9} {'gather+SDPA':>12} "
        f"{'SDPA/sequence':>14} {'ratio':>6}"
    )
    figures = []
    with torch.inference_mode():
        for shape in SHAPES:
            for load in LOADS:
                figure = measure(shape, load, dtype, seconds)
                figures.append(figure)
                print(
                    f"{figure.shape:10} {figure.batch:5} {figure.query:5} {figure.context:6} "
                    f"{figure.kernel_ms:9.3f} {figure.gather_ms:12.3f} "
                    f"{figure.per_sequence_ms:14.3f} {figure.ratio:6.2f}",
                    flush=True,
                )
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    return figures
