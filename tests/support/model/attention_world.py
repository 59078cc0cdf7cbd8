"""Random attention problems on shuffled, NaN-poisoned pages, and a dense answer to each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from lookonce.model.attention.backend import AttentionBackend, AttentionCall, AttentionMetadata
from lookonce.model.kv_pages import KVPages, LayerPages, kv_layout
from lookonce.model.step_inputs import AttentionMetadataBuilder

JUNK_BLOCK = -7
"""Fills block tables past a sequence's end: reading it is an error."""


@dataclass(frozen=True)
class Problem:
    """`sequences` are (new tokens, tokens before them); decodes may stand anywhere."""

    sequences: list[tuple[int, int]]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    spans: list[list[tuple[int, int]]] = field(default_factory=list)
    heads_first: bool = False
    """Queries and keys laid out [H, T, D] in memory, as transformers' rope leaves them."""
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.sequences)


@dataclass
class Scene:
    """A problem's tensors. `keys[i]` and `values[i]` [L, Hkv, D] are dense, per sequence."""

    problem: Problem
    layer: LayerPages
    metadata: AttentionMetadata
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def features(self) -> dict[str, Any]:
        return {
            "sliding_window": self.problem.sliding_window,
            "softcap": self.problem.softcap,
            "sinks": self.sinks,
        }

    def run(self, backend: AttentionBackend, **overrides: Any) -> Tensor:
        arguments = {"scale": self.problem.head_dim**-0.5, **self.features, **overrides}
        return backend.forward(
            self.layer, self.query, self.key, self.value, self.metadata, AttentionCall(**arguments)
        )


def build(problem: Problem) -> Scene:
    """Scatter random sequences over shuffled blocks; every slot not in use holds NaN."""
    generator = torch.Generator().manual_seed(problem.seed)
    totals = [new + before for new, before in problem.sequences]
    tables = _shuffled_tables(problem, totals)
    layout = kv_layout(1, problem.block_size, problem.num_kv_heads, problem.head_dim, problem.dtype)
    pages = KVPages(layout, int(tables.max()) + 3)
    layer = pages.layers[0]
    layer.keys.fill_(torch.nan)
    layer.values.fill_(torch.nan)
    num_heads = problem.num_kv_heads * problem.group
    sinks = torch.randn(num_heads, generator=generator) if problem.sinks else None
    query = torch.randn(problem.num_tokens, num_heads, problem.head_dim, generator=generator)
    keys, values = (
        [
            torch.randn(total, problem.num_kv_heads, problem.head_dim, generator=generator).to(
                problem.dtype
            )
            for total in totals
        ]
        for _ in range(2)
    )
    for index, (_, before) in enumerate(problem.sequences):
        for position in range(before):
            block = tables[index, position // problem.block_size]
            layer.keys[block, position % problem.block_size] = keys[index][position]
            layer.values[block, position % problem.block_size] = values[index][position]
    new = [slice(before, None) for _, before in problem.sequences]
    return Scene(
        problem=problem,
        layer=layer,
        metadata=_metadata(problem, totals, tables),
        query=_lay_out(problem, query.to(problem.dtype)),
        key=_lay_out(problem, torch.cat([k[n] for k, n in zip(keys, new, strict=True)])),
        value=torch.cat([v[n] for v, n in zip(values, new, strict=True)]),
        sinks=sinks,
        keys=keys,
        values=values,
    )


def dense_answer(scene: Scene, **changes: Any) -> Tensor:
    """[T, Hq, D] float32 by the definition, in double precision; `changes` alter the problem."""
    problem = replace(scene.problem, **changes)
    outputs, start = [], 0
    for index, (new, before) in enumerate(problem.sequences):
        seen = _seen(problem, index, new, before)
        query = scene.query[start : start + new].double()
        keys = scene.keys[index].double().repeat_interleave(problem.group, 1)
        values = scene.values[index].double().repeat_interleave(problem.group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * problem.head_dim**-0.5
        if problem.softcap is not None:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        exponents = scores.masked_fill(~seen, -torch.inf).exp()
        total = exponents.sum(-1, keepdim=True)
        if problem.sinks:
            assert scene.sinks is not None
            total = total + scene.sinks.double().exp()[:, None, None]
        outputs.append(torch.einsum("hqk,khd->qhd", exponents / total, values))
        start += new
    return torch.cat(outputs).float()


def _seen(problem: Problem, index: int, new: int, before: int) -> Tensor:
    """[new, total] by the rule as the families state it: sliding AND (causal OR same item)."""
    total = new + before
    items = torch.full((total,), -1)
    for number, (start, end) in enumerate(problem.spans[index] if problem.spans else []):
        items[start:end] = number
    rows, columns = torch.arange(before, total)[:, None], torch.arange(total)[None]
    same_item = (items[rows] == items[columns]) & (items[rows] >= 0)
    seen = (columns <= rows) | same_item
    if problem.sliding_window is not None:
        seen &= columns > rows - problem.sliding_window
    return seen


def _shuffled_tables(problem: Problem, totals: list[int]) -> np.ndarray:
    counts = [-(-total // problem.block_size) for total in totals]
    blocks = np.random.default_rng(problem.seed).permutation(sum(counts) + 2).astype(np.int32)
    tables = np.full((len(totals), max(counts) + 1), JUNK_BLOCK, np.int32)
    for index, count in enumerate(counts):
        tables[index, :count] = blocks[:count]
        blocks = blocks[count:]
    return tables


def _metadata(problem: Problem, totals: list[int], tables: np.ndarray) -> AttentionMetadata:
    buffers = AttentionMetadataBuilder(
        max_num_seqs=len(totals) + 1,
        max_num_tokens=problem.num_tokens + 3,
        max_blocks_per_seq=tables.shape[1] + 1,
        block_size=problem.block_size,
    )
    new = [count for count, _ in problem.sequences]
    return buffers.build(new, totals, tables, bidirectional=problem.spans)


def _lay_out(problem: Problem, tensor: Tensor) -> Tensor:
    if not problem.heads_first:
        return tensor
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@st.composite
def problems(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Problem:
    """Mixed decodes and chunks, every feature on or off."""
    new = st.one_of(st.just(1), st.integers(1, 9), st.integers(30, 80))
    before = st.one_of(st.just(0), st.integers(0, 20), st.integers(60, 140))
    sequences = draw(st.lists(st.tuples(new, before), min_size=1, max_size=4))
    return Problem(
        sequences=sequences,
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 12])),
        head_dim=draw(st.sampled_from([16, 17, 24, 32, 64, 72, 80, 128])),
        block_size=draw(st.sampled_from([1, 3, 16, 32])),
        dtype=dtype,
        sliding_window=draw(st.sampled_from([None, 1, 5, 64])),
        softcap=draw(st.sampled_from([None, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        spans=draw(spans_of(sequences)) if draw(st.booleans()) else [],
        heads_first=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def spans_of(draw: st.DrawFn, sequences: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Disjoint items, each wholly before or wholly among the new tokens (never split)."""
    result = []
    for new, before in sequences:
        edges = [(0, before), (before, before + new)]
        spans = []
        for low, high in edges:
            if high - low >= 2 and draw(st.booleans()):
                start = draw(st.integers(low, high - 2))
                spans.append((start, draw(st.integers(start + 1, high))))
        result.append(spans)
    return result
