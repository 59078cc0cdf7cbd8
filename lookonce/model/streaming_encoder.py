"""A causal audio encoder that hears many sounds at once, each frame by frame and at its own place.

What the encoder must remember of a sound is a `Stream`:

    convolutions   the last inputs of each convolution, in a row (`slot`) of tensors that all
                   streams share
    attention      keys and values of the positions that are still within the sliding window, in
                   pages of a pool that all streams share

    blocks      [ 7 ][ 2 ][ 9 ]          pages of the pool, in order of their positions
    positions   ├────┼────┼──┐           `origin` is the first row's; `position` is the next one
             origin          position

A page whose positions are all behind the window is given back, so a stream has as many pages after
a day as after a minute. Keys are stored after their rotation, and attention depends on distances
alone: it counts positions from `origin`, and never sees how far the sound has come. One run takes
frames of any number of streams, one after the other without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import gt
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.model.attention.backend import (
    AttentionBackend,
    AttentionFeatures,
    AttentionMetadata,
    ForwardContext,
)
from lookonce.model.attention.select import select_backend
from lookonce.model.kv_pages import KVPages, kv_layout
from lookonce.model.step_inputs import AttentionMetadataBuilder, CopyFence

MAX_FRAMES = 256
"""Frames of one run."""


class EncoderShape(NamedTuple):
    """The sizes of an encoder that a pool of its states depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int
    """Positions that a position attends to, its own included."""
    positions_per_frame: int


ConvState = tuple[Tensor, ...]
"""The last inputs of each convolution, each [channels, inputs]."""


class FrameEncoder(Protocol):
    """What a family computes of its encoder."""

    @property
    def encoder_shape(self) -> EncoderShape: ...

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Of what it makes one row of."""
        ...

    def initial_conv_state(self) -> ConvState:
        """That of a sound which has not begun: zeros."""
        ...

    def convolve(self, frames: Tensor, states: ConvState) -> tuple[Tensor, ConvState]:
        """Frames [B, n, *frame_shape] and states, each [B, channels, inputs] → inputs of the first
        layer [B, n * positions_per_frame, E] and the states after them."""
        ...

    def attend(self, hidden: Tensor, positions: Tensor, step: ForwardContext) -> Tensor:
        """The layers and the projector: hidden [P, E] at absolute positions [P] → rows
        [P / positions_per_frame, H]."""
        ...


def runs_of(counts: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Sound → its frames, cut into runs of at most `MAX_FRAMES` frames in all."""
    left = {sound: count for sound, count in counts.items() if count}
    while left:
        room, run = MAX_FRAMES, {}
        for sound, count in left.items():
            if room:
                run[sound] = min(count, room)
                room -= run[sound]
        yield run
        left = {
            sound: count - run.get(sound, 0)
            for sound, count in left.items()
            if count > run.get(sound, 0)
        }


class Stream:
    """What the encoder remembers of one sound; made by `StreamingEncoder.open`."""

    __slots__ = ("blocks", "origin", "position", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.blocks: list[int] = []
        self.origin = 0
        self.position = 0


class StreamingEncoder:
    """Encodes frames of many streams in one run."""

    def __init__(self, family: FrameEncoder, dtype: torch.dtype, device: torch.device) -> None:
        self._family, self.device = family, device
        self.shape = shape = family.encoder_shape
        self.window = shape.window
        features = AttentionFeatures(dtype, shape.head_dim, sliding_window=True)
        self._backend: AttentionBackend = select_backend(device, features)
        self._block_size = self._backend.default_block_size
        self._layout = kv_layout(
            shape.num_layers, self._block_size, shape.num_kv_heads, shape.head_dim, dtype
        )
        self._pages = KVPages(self._layout, self._pages_of(MAX_FRAMES), device)
        self._free = list(range(self._pages.num_blocks))
        self._metadata = _MetadataBuffers(self._block_size, device)
        self._conv_states = _ConvStates(family.initial_conv_state())

    def _pages_of(self, num_frames: int) -> int:
        """Pages of a stream that takes so many frames at once."""
        positions = self.window + num_frames * self.shape.positions_per_frame
        return -(-positions // self._block_size) + 1

    @property
    def num_pages_used(self) -> int:
        """Pages that streams hold."""
        return self._pages.num_blocks - len(self._free)

    def open(self) -> Stream:
        return Stream(self._conv_states.take())

    def close(self, stream: Stream) -> None:
        """Give back what a stream that hears no more holds."""
        self._conv_states.give(stream.slot)
        self._free += stream.blocks
        stream.blocks = []

    def encode(self, work: Sequence[tuple[Stream, Tensor]]) -> Tensor:
        """Rows [N, H] for the next frames [n, *frame shape] of each stream, n >= 1, in their order.

        At most `MAX_FRAMES` frames in all. A stream is changed only once all are encoded, so after
        an error the same frames can be encoded again.
        """
        hidden, conv_states = self._convolve(work)
        streams = [stream for stream, _ in work]
        steps = [len(frames) * self.shape.positions_per_frame for _, frames in work]
        for stream, step in zip(streams, steps, strict=True):
            self._grow(stream, step)
        positions = torch.from_numpy(_positions([s.position for s in streams], steps))
        metadata = self._metadata.build(streams, steps)
        context = ForwardContext(metadata, self._backend, self._pages)
        rows = self._family.attend(hidden, positions.to(self.device), context)
        self._metadata.mark()
        for slots, state in conv_states:
            self._conv_states.write(slots, state)
        for stream, step in zip(streams, steps, strict=True):
            stream.position += step
            self._drop_behind(stream)
        return rows

    def encode_whole(self, sounds: Sequence[Tensor]) -> list[Tensor]:
        """Rows [n, H] of each sound, given from beginning to end, [n, *frame shape]."""
        streams = [self.open() for _ in sounds]
        parts: list[list[Tensor]] = [[] for _ in sounds]
        done = [0] * len(sounds)
        try:
            for run in runs_of({index: len(sound) for index, sound in enumerate(sounds)}):
                work = [
                    (streams[index], sounds[index][done[index] : done[index] + count])
                    for index, count in run.items()
                ]
                rows_of_each = torch.split(self.encode(work), list(run.values()))
                for index, rows in zip(run, rows_of_each, strict=True):
                    parts[index].append(rows)
                    done[index] += len(rows)
            return [torch.cat(rows) for rows in parts]
        finally:
            for stream in streams:
                self.close(stream)

    def _convolve(
        self, work: Sequence[tuple[Stream, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, ConvState]]]:
        """Inputs of the first layer [P, E] in the order of `work`, and the states after them by
        slots. Streams with equally many frames are in one call: in most runs all have one."""
        by_length: dict[int, list[int]] = {}
        for index, (_, frames) in enumerate(work):
            by_length.setdefault(len(frames), []).append(index)
        parts, after = [], []
        for indices in by_length.values():
            given = torch.stack([work[index][1] for index in indices])
            slots = torch.tensor([work[index][0].slot for index in indices], device=self.device)
            out, states = self._family.convolve(given, self._conv_states.read(slots))
            parts.append(out)
            after.append((slots, states))
        if len(parts) == 1:
            return parts[0].flatten(0, 1), after
        hidden: list[Tensor] = [parts[0]] * len(work)
        for indices, out in zip(by_length.values(), parts, strict=True):
            for index, each in zip(indices, out.unbind(), strict=True):
                hidden[index] = each
        return torch.cat(hidden), after

    def _grow(self, stream: Stream, num_positions: int) -> None:
        end = stream.position + num_positions - stream.origin
        missing = -(-end // self._block_size) - len(stream.blocks)
        if missing > len(self._free):
            self._enlarge(missing)
        for _ in range(missing):
            stream.blocks.append(self._free.pop())

    def _enlarge(self, missing: int) -> None:
        """More pages, at least twice as many; what the old ones hold is copied."""
        old, count = self._pages, self._pages.num_blocks
        pages = KVPages(self._layout, max(2 * count, count + missing), self.device)
        for before, after in zip(old.layers, pages.layers, strict=True):
            after.keys[:count].copy_(before.keys)
            after.values[:count].copy_(before.values)
        self._free += range(count, pages.num_blocks)
        self._pages = pages

    def _drop_behind(self, stream: Stream) -> None:
        """Give back the pages of which the next position sees nothing."""
        first_seen = stream.position - self.window + 1
        passed = max(0, (first_seen - stream.origin) // self._block_size)
        if passed:
            self._free += stream.blocks[:passed]
            del stream.blocks[:passed]
            stream.origin += passed * self._block_size


def _positions(starts: Sequence[int], steps: Sequence[int]) -> NDArray[np.int64]:
    """[P] `start`, `start + 1`, … of each stream, `steps` of them."""
    counts = np.asarray(steps, np.int64)
    before = np.cumsum(counts) - counts
    found: NDArray[np.int64] = np.repeat(np.asarray(starts, np.int64) - before, counts)
    return found + np.arange(len(found))


class _ConvStates:
    """The convolutions' last inputs of all streams: for each convolution [slots, channels, inputs],
    with twice as many slots when all are taken."""

    def __init__(self, initial: ConvState) -> None:
        self._initial = initial
        self._states = tuple(each[None].clone() for each in initial)
        self._free = [0]

    @torch.inference_mode()
    def take(self) -> int:
        """A slot with the state of a sound that has not begun."""
        if not self._free:
            count = len(self._states[0])
            self._states = tuple(torch.cat((each, each)) for each in self._states)
            self._free += range(count, 2 * count)
        slot = self._free.pop()
        for states, initial in zip(self._states, self._initial, strict=True):
            states[slot] = initial
        return slot

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def read(self, slots: Tensor) -> ConvState:
        return tuple(states[slots] for states in self._states)

    @torch.inference_mode()
    def write(self, slots: Tensor, after: ConvState) -> None:
        for states, new in zip(self._states, after, strict=True):
            states[slots] = new


class _MetadataBuffers:
    """Attention metadata of a run, in buffers that grow with the largest run so far."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size, self._device = block_size, device
        self._sizes = [0, 0, 0]
        """Streams, positions of a run, and pages of a stream that the buffers have room for."""
        self._builder: AttentionMetadataBuilder | None = None
        self._fence = CopyFence(device)

    def build(self, streams: Sequence[Stream], steps: Sequence[int]) -> AttentionMetadata:
        """`steps`: new positions of each stream. Positions count from each stream's origin."""
        longest = max(len(stream.blocks) for stream in streams)
        needed = (len(streams), sum(steps), longest)
        self._fence.wait()
        if self._builder is None or any(map(gt, needed, self._sizes)):
            self._sizes = [max(2 * n, size) for n, size in zip(needed, self._sizes, strict=True)]
            self._builder = AttentionMetadataBuilder(
                max_num_seqs=self._sizes[0],
                max_num_tokens=self._sizes[1],
                max_blocks_per_seq=self._sizes[2],
                block_size=self._block_size,
                device=self._device,
            )
        tables = np.zeros((len(streams), longest), np.int32)
        for row, stream in zip(tables, streams, strict=True):
            row[: len(stream.blocks)] = stream.blocks
        ends = [s.position + n - s.origin for s, n in zip(streams, steps, strict=True)]
        return self._builder.build(steps, ends, tables)

    def mark(self) -> None:
        """The run is enqueued."""
        self._fence.mark()
