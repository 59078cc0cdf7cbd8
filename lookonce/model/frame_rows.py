"""The rows of sound that are added to tokens, one for each position of a sequence.

    a clip           its encoder output, which the scheduler has encoded and holds: row p is at p
    a live session   its frames, encoded here as the step's positions need them

The state of a live session is in its `Stream`; it is freed with the sequence. It cannot be computed
again, because frames are dropped once they are encoded: live sessions are never preempted. After a
prefix hit the encoder still hears the frames of the prefix, and their rows are dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.model.encoder_runner import COMPUTE_ERRORS, EncoderRunner, to_tensor
from lookonce.model.streaming_encoder import Stream, StreamingEncoder, runs_of
from lookonce.types.media import Array
from lookonce.types.step import DropTokens, NewSequence, ScheduledSequence

logger = logging.getLogger(__name__)

ENCODED_AHEAD = 8
"""Frames encoded at once where a session has so many waiting: a run of several costs little more
than one of a single frame."""


class _Live:
    """One live session: frames that wait, and rows that wait for their positions."""

    __slots__ = ("_frames", "_rows", "first", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._frames: deque[Tensor] = deque()
        self._rows: list[Tensor] = []
        self.first = 0
        """Position of the first row that is kept."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._frames))

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.first + sum(map(len, self._rows))

    def push(self, frames: Tensor) -> None:
        self._frames.append(frames)

    def peek(self, count: int) -> Tensor:
        """The next `count` frames that wait, [count, ...]."""
        parts, left = [], count
        for frames in self._frames:
            if left <= 0:
                break
            parts.append(frames[:left])
            left -= len(frames)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def store(self, rows: Tensor) -> None:
        """The rows of the next frames that wait; these are dropped."""
        self._rows.append(rows)
        left = len(rows)
        while left:
            frames = self._frames.popleft()
            if len(frames) > left:
                self._frames.appendleft(frames[left:])
            left -= min(left, len(frames))

    def rows(self, start: int, end: int) -> Tensor:
        whole = self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows)
        return whole[start - self.first : end - self.first]

    def drop_before(self, position: int) -> None:
        """Positions before are computed and not asked for again."""
        while self._rows and self.first + len(self._rows[0]) <= position:
            self.first += len(self._rows.pop(0))


class FrameRows:
    """The sounds of all sequences that the runner knows."""

    def __init__(
        self, encoder: StreamingEncoder, outputs: EncoderRunner, dtype: torch.dtype
    ) -> None:
        self._encoder = encoder
        self._outputs = outputs
        self._dtype = dtype
        self._clips: dict[int, bytes] = {}
        self._live: dict[int, _Live] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_pages_used(self) -> int:
        """Pages of the encoder that live sessions hold."""
        return self._encoder.num_pages_used

    def add(self, new: NewSequence) -> None:
        if new.frames:
            self._live[new.seq_id] = _Live(self._encoder.open())
            for frames in new.frames:
                self.extend(new.seq_id, frames)
        elif new.features:
            self._clips[new.seq_id] = new.features[0].key

    def drop(self, change: DropTokens) -> None:
        """Computed tokens have left a session: later ones have smaller indices."""
        live = self._live.get(change.seq_id)
        if live is not None:
            live.first -= change.num_tokens

    def extend(self, seq_id: int, frames: Array) -> None:
        """Add frames [n, *frame shape] to a live session."""
        self._live[seq_id].push(to_tensor(frames))

    def remove(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._clips.pop(seq_id, None)
            live = self._live.pop(seq_id, None)
            if live is not None:
                self._encoder.close(live.stream)

    def prepare(
        self, chunks: Sequence[ScheduledSequence], failed_items: Container[bytes]
    ) -> dict[int, str | None]:
        """Encode what the chunks need, sessions in one run. Returns the sequences that cannot be
        computed, and why; None for those of an item that has failed."""
        failed: dict[int, str | None] = {}
        wanted: dict[int, int] = {}
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            live, clip = self._live.get(chunk.seq_id), self._clips.get(chunk.seq_id)
            if live is not None:
                live.drop_before(chunk.start)
                if end > live.end:
                    wanted[chunk.seq_id] = end - live.end
            elif clip is not None and clip not in self._outputs:
                missing = "an encoder output is missing"
                failed[chunk.seq_id] = None if clip in failed_items else missing
        if wanted:
            self._encode(wanted, failed)
            for chunk in chunks:
                if chunk.seq_id in wanted:
                    self._live[chunk.seq_id].drop_before(chunk.start)
        return failed

    def _encode(self, wanted: dict[int, int], failed: dict[int, str | None]) -> None:
        """`wanted`: frames that each session must have encoded."""
        counts = {}
        for seq_id, count in wanted.items():
            waiting = self._live[seq_id].num_waiting
            if count > waiting:
                failed[seq_id] = "a frame of sound is missing"
            else:
                counts[seq_id] = min(max(count, ENCODED_AHEAD), waiting)
        for run in runs_of(counts):
            going_on = {seq_id: count for seq_id, count in run.items() if seq_id not in failed}
            if going_on:
                self._run(going_on, failed)

    def _run(self, counts: dict[int, int], failed: dict[int, str | None]) -> None:
        """One run of the encoder; if it fails, each session alone, so that only faulty ones end."""
        try:
            work = [
                (self._live[seq_id].stream, self._frames_of(seq_id, count))
                for seq_id, count in counts.items()
            ]
            outputs = self._encoder.encode(work)
            all_finite = bool(outputs.isfinite().all())
        except torch.AcceleratorError:
            raise  # the device is lost, not the session
        except COMPUTE_ERRORS as error:
            logger.warning("encoding failed", extra={"sessions": len(counts)}, exc_info=error)
            if len(counts) > 1:
                for seq_id, count in counts.items():
                    self._run({seq_id: count}, failed)
            else:
                reason = f"the audio could not be encoded ({type(error).__name__})"
                failed[next(iter(counts))] = reason
            return
        for seq_id, rows in zip(counts, torch.split(outputs, list(counts.values())), strict=True):
            if all_finite or bool(rows.isfinite().all()):
                self._live[seq_id].store(rows.clone())  # not a view of the whole run
            else:
                failed[seq_id] = "the audio could not be encoded: the output is not finite"

    def _frames_of(self, seq_id: int, count: int) -> Tensor:
        return self._live[seq_id].peek(count).to(self._encoder.device, self._dtype)

    def rows(self, chunks: Sequence[ScheduledSequence]) -> tuple[Tensor, Tensor] | None:
        """Rows [N, H] and the indices [N] of their tokens among those of all chunks."""
        parts: list[Tensor] = []
        spans: list[NDArray[np.int64]] = []
        first = 0
        for chunk in chunks:
            start, end = chunk.start, chunk.start + chunk.num_tokens
            live, clip = self._live.get(chunk.seq_id), self._clips.get(chunk.seq_id)
            if live is not None:
                parts.append(live.rows(start, end))
            elif clip is not None:
                parts.append(self._outputs.output(clip)[start:end])
            if live is not None or clip is not None:
                spans.append(np.arange(first, first + chunk.num_tokens))
            first += chunk.num_tokens
        if not parts:
            return None
        at = torch.from_numpy(np.concatenate(spans))
        return torch.cat(parts), at.to(self._encoder.device)
