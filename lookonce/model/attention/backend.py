"""What every attention backend is given, and what it must do.

T is the number of new tokens in the step (all sequences, one after the other), B the number of
sequences, Hq and Hkv the query and key-value heads, D the head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.model.buffers import StaticBuffer
from lookonce.model.kv_pages import LayerPages

Span = tuple[int, int]
"""Absolute `(start, end)` positions of one sequence."""


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """What a model asks of its attention beyond causal softmax."""

    dtype: torch.dtype
    head_dim: int
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    bidirectional: bool = False
    """Some media items attend to themselves in both directions."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the step's tokens sit; built once per step, shared by all layers.

    Tensors are views of static buffers on the model's device; the tuples are host copies for
    backends that loop over sequences, so that nobody reads a device tensor back.
    """

    num_tokens: int
    """T."""
    num_decodes: int
    """The first `num_decodes` sequences have one query token each."""
    query_lens: tuple[int, ...]
    """[B] new tokens per sequence, at least 1 each."""
    context_lens: tuple[int, ...]
    """[B] keys per sequence after this step, the new tokens included."""
    query_start: Tensor
    """[B + 1] int32; sequence i's tokens are rows query_start[i] to query_start[i + 1]."""
    kv_start: Tensor
    """[B + 1] int32; running sums of `kv_lens`, which some kernels want beside them."""
    kv_lens: Tensor
    """[B] int32; `context_lens` on the device."""
    block_tables: Tensor
    """[B, C] int32, C >= blocks of the longest sequence; entries past a sequence's end are junk.
    Rows are contiguous, the row stride may exceed C."""
    slot_mapping: Tensor
    """[T] int64; where each new token's key and value are written."""
    visible_end: Tensor | None = None
    """[T] int32, None when purely causal. A token at position p sees keys
    `[max(0, p - window + 1), visible_end)`: `p + 1`, or the end of the bidirectional item it is in,
    which is `sliding AND (causal OR same item)` since items do not overlap."""

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens)

    @property
    def max_kv_len(self) -> int:
        return max(self.context_lens)


class AttentionCall(NamedTuple):
    """What a layer asks of attention beside its tensors."""

    scale: float
    """Multiplies scores."""
    sliding_window: int | None = None
    """A token sees at most this many keys up to and with its own; None: all."""
    softcap: float | None = None
    """After scaling, `softcap * tanh(score / softcap)`."""
    sinks: Tensor | None = None
    """[Hq] extra scores per head that take probability and give no value."""


class AttentionBackend(Protocol):
    """Writes new keys and values into the pages and attends over them, one layer at a time."""

    name: str
    default_block_size: int
    block_size_multiple: int
    """Block sizes must be a multiple of this."""

    def supports(self, features: AttentionFeatures) -> bool: ...

    def forward(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        call: AttentionCall,
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D] (last dimension contiguous) → [T, Hq, D]."""
        ...


class AttentionBuffers:
    """The static buffers metadata lives in: addresses stay the same from step to step.

    One step's metadata is valid until the next `fill`. On an accelerator the host side is pinned
    and copied asynchronously: the caller must have waited for the step before (fetching its sampled
    tokens does) before it fills again.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks_per_seq: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._block_size = block_size
        self._device = torch.device(device)
        self._query_start = self._buffer((max_num_seqs + 1,), torch.int32)
        self._kv_start = self._buffer((max_num_seqs + 1,), torch.int32)
        self._kv_lens = self._buffer((max_num_seqs,), torch.int32)
        self._block_tables = self._buffer((max_num_seqs, max_blocks_per_seq), torch.int32)
        self._slot_mapping = self._buffer((max_num_tokens,), torch.int64)
        self._visible_end = self._buffer((max_num_tokens,), torch.int32)
        self._one_each = self._buffer((max_num_seqs + 1,), torch.int32)
        self._one_each.host[:] = np.arange(max_num_seqs + 1)
        self.decode_arrays = (
            self._kv_start.host,
            self._kv_lens.host,
            self._block_tables.host,
            self._slot_mapping.host,
        )
        """What `decodes` expects to be filled: its tensors of these names."""

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> StaticBuffer:
        return StaticBuffer(shape, dtype, self._device)

    def fill(
        self,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: NDArray[np.int32],
        *,
        rows: NDArray[np.intp] | None = None,
        num_decodes: int = 0,
        bidirectional: Sequence[Sequence[Span]] = (),
    ) -> AttentionMetadata:
        """Describe one step of B sequences, decodes first.

        `block_tables` [N, C] holds block ids, one row per sequence; `rows` [B] picks the batch's
        rows (None: the first B). `kv_lens` [B] count the new tokens too. `bidirectional` is empty
        or has one list of absolute, disjoint spans per sequence.
        """
        count = len(kv_lens)
        lens, totals = np.asarray(query_lens, np.int64), np.asarray(kv_lens, np.int64)
        tokens = int(lens.sum())
        tables = self._fill_tables(totals, block_tables, _rows(rows, count))
        starts = self._query_start.host[: count + 1]
        np.cumsum(lens, out=starts[1:])
        positions = self._fill_slots(lens, totals, starts, tables)
        has_spans = any(bidirectional)
        if has_spans:
            self._fill_visible_end(positions, starts, totals, bidirectional)
        return AttentionMetadata(
            num_tokens=tokens,
            num_decodes=num_decodes,
            query_lens=tuple(query_lens),
            context_lens=tuple(kv_lens),
            query_start=self._query_start.push(count + 1),
            kv_start=self._kv_start.push(count + 1),
            kv_lens=self._kv_lens.push(count),
            block_tables=self._block_tables.push(*tables.shape),
            slot_mapping=self._slot_mapping.push(tokens),
            visible_end=self._visible_end.push(tokens) if has_spans else None,
        )

    def decodes(self, kv_lens: tuple[int, ...], columns: int) -> AttentionMetadata:
        """Describe a step of one token per sequence, whose `decode_arrays` were filled before.

        `columns` is how many blocks the longest sequence has.
        """
        count = len(kv_lens)
        return AttentionMetadata(
            num_tokens=count,
            num_decodes=count,
            query_lens=(1,) * count,
            context_lens=kv_lens,
            query_start=self._one_each.push(count + 1),
            kv_start=self._kv_start.push(count + 1),
            kv_lens=self._kv_lens.push(count),
            block_tables=self._block_tables.push(count, columns),
            slot_mapping=self._slot_mapping.push(count),
        )

    def _fill_tables(
        self,
        totals: NDArray[np.int64],
        block_tables: NDArray[np.int32],
        rows: NDArray[np.intp],
    ) -> NDArray[np.int32]:
        """Write what concerns keys; returns the block tables [B, C]."""
        count = len(totals)
        np.cumsum(totals, out=self._kv_start.host[1 : count + 1])
        self._kv_lens.host[:count] = totals
        columns = -(-int(totals.max()) // self._block_size)
        tables: NDArray[np.int32] = self._block_tables.host[:count, :columns]
        np.take(block_tables[:, :columns], rows, axis=0, out=tables, mode="clip")
        return tables

    def _fill_slots(
        self,
        lens: NDArray[np.int64],
        totals: NDArray[np.int64],
        starts: NDArray[np.int32],
        tables: NDArray[np.int32],
    ) -> NDArray[np.int64]:
        """Write the slot of every new token; returns their absolute positions [T]."""
        tokens = int(starts[-1])
        owner = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(tokens) + np.repeat(totals - lens - starts[:-1], lens)
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = tables[owner, blocks].astype(np.int64)
        slots *= self._block_size
        slots += offsets
        self._slot_mapping.host[:tokens] = slots
        return positions

    def _fill_visible_end(
        self,
        positions: NDArray[np.int64],
        starts: NDArray[np.int32],
        totals: NDArray[np.int64],
        bidirectional: Sequence[Sequence[Span]],
    ) -> None:
        ends = self._visible_end.host[: len(positions)]
        ends[:] = positions + 1
        for index, spans in enumerate(bidirectional):
            first = int(positions[starts[index]]) - int(starts[index])
            last = int(totals[index])
            for start, end in spans:
                begin, stop = max(start - first, int(starts[index])), min(end, last) - first
                if begin < stop:
                    ends[begin:stop] = min(end, last)


def _rows(rows: NDArray[np.intp] | None, count: int) -> NDArray[np.intp]:
    return np.arange(count) if rows is None else rows
