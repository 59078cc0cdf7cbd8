"""Decode steps by batch size: padded, and computed in buffers that stay where they are.

    step of 5 sequences ─▶ buffers of 8 rows: 5 of the step, 3 of padding ─▶ logits of 8, 5 are used

A step that only decodes takes the smallest size that holds it. Rows of padding are a token 0 at
position 0 whose key and value go to a block of their own (`SCRATCH_BLOCKS`), so nothing else sees
them. Since addresses and shapes depend on the size alone, a GPU can be given all operations of a
size at once, as a graph that was captured before (`CudaGraphs`). Elsewhere they run one by one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lookonce.model.attention.backend import AttentionMetadata
from lookonce.model.step_inputs import StepInputs

logger = logging.getLogger(__name__)

SCRATCH_BLOCKS = 1
"""KV blocks after those of the scheduler, for rows of padding."""
Body = Callable[[], Tensor]
"""Computes logits [size, V] from the buffers."""


class Capture(Protocol):
    """Makes of a body what computes it again, whatever the buffers hold then."""

    def __call__(self, body: Body) -> Body | None:
        """What it returns gives the same tensor at each call, with other values. None: there is no
        memory for it."""


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 8 up to 64 and of 32 beyond: padding stays below a half."""
    steps = (1, 2, 4, *range(8, 65, 8), *range(96, max_num_seqs + 32, 32))
    return (*(size for size in steps if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """On the device, for the largest size."""

    token_ids: Tensor
    position_ids: Tensor
    """[1, size], or [axes, 1, size]."""
    query_start: Tensor
    kv_start: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    """[size, blocks of the longest sequence]."""
    slot_mapping: Tensor


class DecodeGraphs:
    """Computes the logits of decode steps (`is_plain_decode`), by size."""

    def __init__(
        self,
        compute: Callable[[StepInputs], Tensor],
        sizes: Sequence[int],
        *,
        position_axes: int,
        block_size: int,
        max_blocks: int,
        scratch_block: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        """`compute` gives logits [size, V] of a step. `max_blocks`: of the longest sequence.
        `capture` None: the operations of each step run one by one, as on a CPU."""
        self._compute = compute
        self._sizes = sorted(sizes)
        self._max_tokens = max_blocks * block_size
        self._scratch_block, self._scratch_slot = scratch_block, scratch_block * block_size
        self._capture = capture
        self._graphs: dict[int, Body] = {}
        largest, one = self._sizes[-1], () if position_axes == 1 else (1,)

        def buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._buffers = _Buffers(
            buffer((largest,), torch.int64),
            buffer((position_axes, *one, largest), torch.int64),
            torch.arange(largest + 1, dtype=torch.int32, device=device),
            buffer((largest + 1,), torch.int32),
            buffer((largest,), torch.int32),
            buffer((largest, max_blocks), torch.int32),
            buffer((largest,), torch.int64),
        )

    def capture(self) -> None:
        """Capture all sizes, the largest first: smaller ones use the same memory. Those for which
        there is no memory run one operation after the other."""
        if self._capture is None:
            return
        for size in reversed(self._sizes):
            self._fill_padding(0, size)
            graph = self._capture(partial(self._run, size, (self._max_tokens,) * size))
            if graph is None:
                logger.warning("no memory for CUDA graphs of up to %d sequences", size)
                return
            self._graphs[size] = graph

    def logits(
        self, inputs: StepInputs, computing: Callable[[], None] = lambda: None
    ) -> Tensor | None:
        """Logits [B, V] of a decode step, valid until the next call; None for a step that is larger
        than every size, or whose size could not be captured. `computing` is called when the buffers
        are filled, before the model's first operation."""
        count = len(inputs.token_ids)
        at = bisect_left(self._sizes, count)
        if at == len(self._sizes):
            return None
        size = self._sizes[at]
        graph = self._graphs.get(size)
        if graph is None and self._capture is not None:
            return None
        self._fill(inputs, count)
        self._fill_padding(count, size)
        computing()
        if graph is not None:
            return graph()[:count]
        lengths = (*inputs.metadata.context_lens, *(1,) * (size - count))
        return self._run(size, lengths)[:count]

    def _fill(self, inputs: StepInputs, count: int) -> None:
        buffers, metadata = self._buffers, inputs.metadata
        buffers.token_ids[:count].copy_(inputs.token_ids)
        buffers.position_ids[..., :count].copy_(inputs.position_ids)
        buffers.kv_lens[:count].copy_(metadata.kv_lens)
        tables = metadata.block_tables
        buffers.block_tables[:count, : tables.shape[1]].copy_(tables)
        buffers.slot_mapping[:count].copy_(metadata.slot_mapping)

    def _fill_padding(self, first: int, size: int) -> None:
        if first == size:
            return
        buffers = self._buffers
        buffers.token_ids[first:size].zero_()
        buffers.position_ids[..., first:size].zero_()
        buffers.kv_lens[first:size].fill_(1)
        buffers.block_tables[first:size, :1].fill_(self._scratch_block)
        buffers.slot_mapping[first:size].fill_(self._scratch_slot)

    def _run(self, size: int, context_lens: tuple[int, ...]) -> Tensor:
        """All operations of a size. What is captured has the longest `context_lens` there can be:
        the host does not know them any more when it runs."""
        buffers = self._buffers
        kv_start = buffers.kv_start[: size + 1]
        torch.cumsum(buffers.kv_lens[:size], 0, dtype=torch.int32, out=kv_start[1:])
        metadata = AttentionMetadata(
            num_tokens=size,
            num_decodes=size,
            query_lens=(1,) * size,
            context_lens=context_lens,
            query_start=buffers.query_start[: size + 1],
            kv_start=kv_start,
            kv_lens=buffers.kv_lens[:size],
            block_tables=buffers.block_tables[:size],
            slot_mapping=buffers.slot_mapping[:size],
        )
        return self._compute(
            StepInputs(
                token_ids=buffers.token_ids[:size],
                position_ids=buffers.position_ids[..., :size],
                metadata=metadata,
                embeds=(),
                embed_at=None,
                sample_rows=None,
            )
        )


def is_plain_decode(inputs: StepInputs) -> bool:
    """Whether a step computes one token of each sequence and nothing else."""
    metadata = inputs.metadata
    return (
        metadata.num_decodes == metadata.num_sequences == metadata.num_tokens
        and inputs.sample_rows is None
        and inputs.embed_at is None
        and inputs.frame_rows is None
        and inputs.states is None
        and inputs.lora is None
        and not inputs.readers
        and metadata.visible_end is None
    )


class CudaGraphs:
    """Captures on a GPU, as long as graphs take no more memory than they may."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self._device = device
        self._max_bytes = max_bytes
        self._pool = torch.cuda.graph_pool_handle()
        self._before: int | None = None
        """Bytes reserved before the first capture; the KV cache is among them."""

    def __call__(self, body: Body) -> Body | None:
        reserved = torch.cuda.memory_reserved(self._device)
        if self._before is None:
            self._before = reserved
        if reserved - self._before > self._max_bytes:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            body()  # libraries set themselves up at their first call, which cannot be captured
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=self._pool):
                logits = body()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
