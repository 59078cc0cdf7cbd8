"""The model's inputs of one step: token ids, positions, attention metadata, encoder rows.

All T tokens of a step lie one after the other, sequence by sequence, in static buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.model.attention.backend import AttentionMetadata, Span
from lookonce.model.attention.cross import InputReaders
from lookonce.model.device import new_event, to_device
from lookonce.model.input_batch import InputBatch
from lookonce.model.lora import StepLoRA
from lookonce.model.sampled_tokens import SampledTokens
from lookonce.model.state import StepStates
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
    """[T]; 0 for placeholders that encoder rows replace, whose ids may exceed the vocabulary."""
    position_ids: Tensor
    """[1, T], or [axes, 1, T] with multi-axis rope."""
    metadata: AttentionMetadata
    embeds: tuple[EmbedSlice, ...]
    embed_at: Tensor | None
    """[N] indices into T of the rows of all `embeds` in order; None without any."""
    sample_rows: Tensor | None
    """[S] indices into T of the last token of each sampled sequence; None: all T tokens are."""
    frame_rows: Tensor | None = None
    """[N, H] rows of sound that are added to the tokens `embed_at`; then `embeds` is empty."""
    readers: tuple[InputReaders, ...] = ()
    """Of an encoder-decoder: which tokens cross-attend to which input."""
    states: StepStates | None = None
    """Of a model whose layers keep other states than keys and values."""
    lora: StepLoRA | None = None
    """Where some sequence has an adapter."""


class StepInputBuilder:
    """Fills the static buffers from the scheduled chunks and the input batch."""

    def __init__(
        self,
        batch: InputBatch,
        *,
        position_axes: int,
        max_num_seqs: int,
        max_num_tokens: int,
        block_size: int,
        device: torch.device,
        encoder_decoder: bool = False,
        sampled: SampledTokens | None = None,
    ) -> None:
        """`sampled`: the tokens that are on the device alone; None: there are none."""
        self._batch = batch
        self._sampled = SampledTokens(device) if sampled is None else sampled
        self._fed = StaticBuffer((2, max_num_seqs), torch.int64, device)
        """Where tokens from the device go to, and where they come from."""
        self._device = device
        self._encoder_decoder = encoder_decoder
        self._axes = position_axes
        self._token_ids = StaticBuffer((max_num_tokens,), torch.int64, device)
        one = () if position_axes == 1 else (1,)
        self._positions = StaticBuffer((position_axes, *one, max_num_tokens), torch.int64, device)
        self._host_positions = self._positions.host.reshape(position_axes, max_num_tokens)
        self._embed_at = StaticBuffer((max_num_tokens,), torch.int64, device)
        self._sample_rows = StaticBuffer((max_num_seqs,), torch.int64, device)
        self._fence = CopyFence(device)
        self._attention = AttentionMetadataBuilder(
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_blocks_per_seq=batch.block_tables.shape[1],
            block_size=block_size,
            device=device,
        )
        self._block_size = block_size
        self._decode_arrays = (
            batch.tokens,
            batch.block_tables,
            batch.tail_starts,
            batch.tail_deltas,
            self._token_ids.host,
            self._host_positions,
            *self._attention.decode_arrays,
        )

    def build(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        """The inputs of `scheduled`, which is not empty and whose blocks are in the batch."""
        self._fence.wait()
        inputs = self._build_decodes(scheduled) or self._build_any(scheduled)
        if self._sampled.rows:
            self._feed(scheduled, inputs.token_ids)
        if self._encoder_decoder:
            inputs = replace(inputs, readers=self._readers(scheduled))
        self._fence.mark()
        return inputs

    def _feed(self, scheduled: Sequence[ScheduledSequence], token_ids: Tensor) -> None:
        """Write the tokens to `token_ids` that the host does not know: a chunk's last one each."""
        to, rows, at = [], [], -1
        for chunk in scheduled:
            at += chunk.num_tokens
            row = self._sampled.rows.get(chunk.seq_id)
            if row is not None:
                to.append(at)
                rows.append(row)
        tokens, count = self._sampled.tokens, len(rows)
        if rows == to == list(range(len(token_ids))) and count == len(tokens):
            token_ids.copy_(tokens)  # the same sequences decode again
        elif rows:
            host = self._fed.host
            host[0, :count], host[1, :count] = to, rows
            fed = self._fed.push(2, count)
            token_ids.index_copy_(0, fed[0], tokens.index_select(0, fed[1]))

    def _readers(self, scheduled: Sequence[ScheduledSequence]) -> tuple[InputReaders, ...]:
        """Sequences that share an input are read together."""
        tokens: dict[bytes, list[tuple[int, int]]] = {}
        first = 0
        for chunk in scheduled:
            key = self._batch.input_keys[self._batch.row_of(chunk.seq_id)]
            if key is not None:
                tokens.setdefault(key, []).append((first, first + chunk.num_tokens))
            first += chunk.num_tokens
        return tuple(InputReaders(key, self._indices(spans)) for key, spans in tokens.items())

    def _indices(self, spans: list[tuple[int, int]]) -> Tensor | slice:
        if all(end == start for (_, end), (start, _) in pairwise(spans)):
            return slice(spans[0][0], spans[-1][1])
        ranges = [torch.arange(start, end) for start, end in spans]
        return to_device(torch.cat(ranges), self._device)

    def _build_decodes(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs | None:
        """The inputs of a step that only decodes, by compiled code; None for any other step."""
        if fill_decodes is None:
            return None
        rows, starts, row_of = [], [], self._batch.row_of
        for chunk in scheduled:
            if chunk.num_tokens != 1 or not chunk.sample or chunk.embeds or chunk.bidirectional:
                return None
            rows.append(row_of(chunk.seq_id))
            starts.append(chunk.start)
        columns = fill_decodes(rows, starts, self._block_size, *self._decode_arrays)
        if columns == 0:
            return None  # a token before the end of a media item: its position is not a plain sum
        count = len(rows)
        return StepInputs(
            token_ids=self._token_ids.push(count),
            position_ids=self._positions.push(count),
            metadata=self._attention.build_decodes(tuple([start + 1 for start in starts]), columns),
            embeds=(),
            embed_at=None,
            sample_rows=None,
        )

    def _build_any(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        lens = [chunk.num_tokens for chunk in scheduled]
        rows = np.array([self._batch.row_of(chunk.seq_id) for chunk in scheduled])
        starts = np.array([chunk.start for chunk in scheduled])
        ends = np.cumsum(lens)
        total = int(ends[-1])
        index = _indices(starts, np.asarray(lens), ends)
        owner = rows if total == len(rows) else np.repeat(rows, lens)
        self._token_ids.host[:total] = self._batch.tokens[owner, index]
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
        if self._axes == 1:
            positions[0] = index + self._batch.tail_deltas[owner]
            return
        if self._axes == 4:
            positions[0] = index
        mrope = positions[-3:]
        mrope[:] = index + self._batch.tail_deltas[owner]
        tails = self._batch.tail_starts[rows]
        places = zip(scheduled, rows, tails.tolist(), ends.tolist(), strict=True)
        for chunk, row, tail, end in places:
            if chunk.start < tail:
                self._batch.fill_mrope(row, chunk.start, mrope[:, end - chunk.num_tokens : end])

    def _metadata(
        self,
        scheduled: Sequence[ScheduledSequence],
        lens: list[int],
        rows: NDArray[np.int64],
    ) -> AttentionMetadata:
        spans = [chunk.bidirectional for chunk in scheduled]
        decodes = next((i for i, length in enumerate(lens) if length != 1), len(lens))
        return self._attention.build(
            lens,
            [chunk.start + chunk.num_tokens for chunk in scheduled],
            self._batch.block_tables,
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


class AttentionMetadataBuilder:
    """Builds a step's attention metadata in static buffers, whose addresses stay the same.

    Metadata is valid until the next step is built. On an accelerator the host side is pinned and
    copied asynchronously: before building again the caller must wait for the step before, as
    fetching its sampled tokens does.
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
        """The host arrays that `build_decodes` reads: its caller fills them first."""

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> StaticBuffer:
        return StaticBuffer(shape, dtype, self._device)

    def build(
        self,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: NDArray[np.int32],
        *,
        rows: NDArray[np.intp] | None = None,
        num_decodes: int = 0,
        bidirectional: Sequence[Sequence[Span]] = (),
    ) -> AttentionMetadata:
        """The metadata of a step of B sequences, decodes first.

        `block_tables` [N, C] holds block ids, one row per sequence; `rows` [B] picks the batch's
        rows (None: the first B). `kv_lens` [B] count the new tokens too. `bidirectional` is empty
        or has one list of absolute, disjoint spans per sequence.
        """
        count = len(kv_lens)
        lens, totals = np.asarray(query_lens, np.int64), np.asarray(kv_lens, np.int64)
        tokens = int(lens.sum())
        rows = np.arange(count) if rows is None else rows
        tables = self._fill_tables(totals, block_tables, rows)
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

    def build_decodes(self, kv_lens: tuple[int, ...], columns: int) -> AttentionMetadata:
        """The metadata of a step of one token per sequence; `decode_arrays` are filled already.

        `columns` is the number of blocks of the longest sequence.
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
        """Write lengths and block tables; returns the block tables [B, C]."""
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


MAX_VIEWS = 512
"""Views kept per buffer; decode steps ask for the same few again and again."""


class StaticBuffer:
    """A host array and its copy on the device; both keep their addresses.

    On the CPU both are the same memory. On an accelerator the host side is pinned, and `push` makes
    one asynchronous copy, whatever the shape: each copy costs the host microseconds. Only
    contiguous memory is copied so; rows that are used in part are packed first. See `CopyFence` for
    when the host side may be filled again.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._host = self._device = torch.zeros(shape, dtype=dtype, pin_memory=not self._on_cpu)
        if not self._on_cpu:
            self._device = torch.zeros(shape, dtype=dtype, device=device)
        self._packed: Tensor | None = None
        """Pinned, once a part was used that is not contiguous."""
        self._views: dict[tuple[int, ...], _Pushed] = {}
        self.host = self._host.numpy()

    def push(self, *used: int) -> Tensor:
        """Copy the first `used` entries of the last dimensions to the device and return them."""
        pushed = self._views.get(used)
        if pushed is None:
            pushed = self._make_view(used)
        if not self._on_cpu:
            if pushed.source is not pushed.packed:
                pushed.packed.copy_(pushed.source)
            pushed.view.copy_(pushed.packed, non_blocking=True)
        return pushed.view

    def _make_view(self, used: tuple[int, ...]) -> _Pushed:
        """Views are kept: making one costs more than filling the few numbers of a decode step."""
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        source = _first(self._host, used)
        if self._on_cpu or source.is_contiguous():
            pushed = _Pushed(_first(self._device, used), source, source)
        else:
            if self._packed is None:
                self._packed = torch.empty_like(self._host, pin_memory=True)
            view, packed = (
                memory.view(-1)[: source.numel()].view(source.shape)
                for memory in (self._device, self._packed)
            )
            pushed = _Pushed(view, source, packed)
        self._views[used] = pushed
        return pushed


class _Pushed(NamedTuple):
    """The same part of a buffer in three places."""

    view: Tensor
    """On the device."""
    source: Tensor
    """On the host."""
    packed: Tensor
    """On the host, contiguous; `source` itself where that is."""


def _first(tensor: Tensor, used: tuple[int, ...]) -> Tensor:
    for dimension, size in enumerate(used, tensor.dim() - len(used)):
        tensor = tensor.narrow(dimension, 0, size)
    return tensor


class CopyFence:
    """Keeps a step from overwriting host memory that is still copied for the step before."""

    def __init__(self, device: torch.device) -> None:
        self._event = new_event(device)

    def wait(self) -> None:
        """Wait until all copies up to the last `mark` are done."""
        if self._event is not None:
            self._event.synchronize()

    def mark(self) -> None:
        if self._event is not None:
            self._event.record()
