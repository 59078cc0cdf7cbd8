"""Turns one step's schedule into what the model takes: ids, positions, metadata, embed rows.

All T tokens of a step lie one after the other, sequence by sequence, in static buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.model.attention.backend import AttentionBuffers, AttentionMetadata
from lookonce.model.buffers import CopyFence, StaticBuffer
from lookonce.model.input_batch import SequenceTable
from lookonce.types.step import EmbedSlice, ScheduledSequence

fill_decodes: Callable[..., int] | None
try:
    from lookonce.model._decode_inputs import fill_decodes
except ImportError:  # no compiler where it was installed
    fill_decodes = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors are views of static buffers, valid until the next `build`."""

    token_ids: Tensor
    """[T]; placeholders that encoder rows replace are 0, since their ids may exceed the vocabulary.
    """
    position_ids: Tensor
    """[1, T], or [axes, 1, T] with multi-axis rope."""
    metadata: AttentionMetadata
    embeds: tuple[EmbedSlice, ...]
    embed_at: Tensor | None
    """[N] indices into T of the rows of `embeds`, one after the other; None without any."""
    sample_rows: Tensor | None
    """[S] indices into T of each sampled sequence's last token; None: every token is one."""


class StepInputBuilder:
    def __init__(
        self,
        table: SequenceTable,
        *,
        position_axes: int,
        max_num_seqs: int,
        max_num_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._table = table
        self._axes = position_axes
        self._token_ids = StaticBuffer((max_num_tokens,), torch.int64, device)
        one = () if position_axes == 1 else (1,)
        self._positions = StaticBuffer((position_axes, *one, max_num_tokens), torch.int64, device)
        self._host_positions = self._positions.host.reshape(position_axes, max_num_tokens)
        self._embed_at = StaticBuffer((max_num_tokens,), torch.int64, device)
        self._sample_rows = StaticBuffer((max_num_seqs,), torch.int64, device)
        self._fence = CopyFence(device)
        self._attention = AttentionBuffers(
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_blocks_per_seq=table.block_tables.shape[1],
            block_size=block_size,
            device=device,
        )
        self._block_size = block_size
        self._decode_arrays = (
            table.tokens,
            table.block_tables,
            table.tail_starts,
            table.tail_deltas,
            self._token_ids.host,
            self._host_positions,
            *self._attention.decode_arrays,
        )

    def build(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        """`scheduled` is not empty and its blocks are already in the table."""
        self._fence.wait()
        inputs = self._build_decodes(scheduled) or self._build_any(scheduled)
        self._fence.mark()
        return inputs

    def _build_decodes(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs | None:
        """By compiled code; None if that is missing or a sequence does more than decode."""
        if fill_decodes is None:
            return None
        rows, starts, row_of = [], [], self._table.row_of
        for chunk in scheduled:
            if chunk.num_tokens != 1 or not chunk.sample or chunk.embeds or chunk.bidirectional:
                return None
            rows.append(row_of(chunk.seq_id))
            starts.append(chunk.start)
        columns = fill_decodes(rows, starts, self._block_size, *self._decode_arrays)
        if columns == 0:
            return None  # a token is in reach of media: its position is not a plain sum
        count = len(rows)
        return StepInputs(
            token_ids=self._token_ids.push(count),
            position_ids=self._positions.push(count),
            metadata=self._attention.decodes(tuple([start + 1 for start in starts]), columns),
            embeds=(),
            embed_at=None,
            sample_rows=None,
        )

    def _build_any(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        lens = [chunk.num_tokens for chunk in scheduled]
        rows = np.array([self._table.row_of(chunk.seq_id) for chunk in scheduled])
        starts = np.array([chunk.start for chunk in scheduled])
        ends = np.cumsum(lens)
        total = int(ends[-1])
        index = _indices(starts, np.asarray(lens), ends)
        owner = rows if total == len(rows) else np.repeat(rows, lens)
        self._token_ids.host[:total] = self._table.tokens[owner, index]
        self._fill_positions(scheduled, rows, owner, index, ends)
        embeds, embed_at = self._place_embeds(scheduled, ends)
        return StepInputs(
            token_ids=self._token_ids.push(total),
            position_ids=self._positions.push(total),
            metadata=self._metadata(scheduled, lens, rows),
            embeds=embeds,
            embed_at=embed_at,
            sample_rows=self._fill_sample_rows(scheduled, ends),
        )

    def _fill_positions(
        self,
        scheduled: Sequence[ScheduledSequence],
        rows: NDArray[np.int64],
        owner: NDArray[np.int64],
        index: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        positions = self._host_positions[:, : len(index)]
        if self._axes != 3:
            positions[0] = index
        if self._axes == 1:
            return
        mrope = positions[-3:]
        mrope[:] = index + self._table.tail_deltas[owner]
        tails = self._table.tail_starts[rows]
        places = zip(scheduled, rows, tails.tolist(), ends.tolist(), strict=True)
        for chunk, row, tail, end in places:
            if chunk.start < tail:
                self._table.fill_mrope(row, chunk.start, mrope[:, end - chunk.num_tokens : end])

    def _metadata(
        self,
        scheduled: Sequence[ScheduledSequence],
        lens: list[int],
        rows: NDArray[np.int64],
    ) -> AttentionMetadata:
        spans = [chunk.bidirectional for chunk in scheduled]
        decodes = next((i for i, length in enumerate(lens) if length != 1), len(lens))
        return self._attention.fill(
            lens,
            [chunk.start + chunk.num_tokens for chunk in scheduled],
            self._table.block_tables,
            rows=rows,
            num_decodes=decodes,
            bidirectional=spans if any(spans) else (),
        )

    def _place_embeds(
        self, scheduled: Sequence[ScheduledSequence], ends: NDArray[np.int64]
    ) -> tuple[tuple[EmbedSlice, ...], Tensor | None]:
        if not any(chunk.embeds for chunk in scheduled):
            return (), None
        embeds: list[EmbedSlice] = []
        count = 0
        for chunk, end in zip(scheduled, ends.tolist(), strict=True):
            for part in chunk.embeds:
                first, length = end - chunk.num_tokens + part.row, part.end - part.start
                self._embed_at.host[count : count + length] = np.arange(first, first + length)
                self._token_ids.host[first : first + length] = 0
                count += length
                embeds.append(part)
        return tuple(embeds), self._embed_at.push(count)

    def _fill_sample_rows(
        self, scheduled: Sequence[ScheduledSequence], ends: NDArray[np.int64]
    ) -> Tensor | None:
        sampled = [chunk.sample for chunk in scheduled]
        if all(sampled) and int(ends[-1]) == len(sampled):
            return None
        last = ends[sampled] - 1
        self._sample_rows.host[: len(last)] = last
        return self._sample_rows.push(len(last))


def _indices(
    starts: NDArray[np.int64], lens: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[T] each token's index in its own sequence."""
    if int(ends[-1]) == len(starts):
        return starts
    offsets: NDArray[np.int64] = np.repeat(starts - (ends - lens), lens)
    return np.arange(int(ends[-1])) + offsets
