"""When each token of a transcript was spoken, from cross-attention: Whisper's word timestamps.

A request with `SamplingParams.alignment` has its whole prompt computed. The attention weights of
the model's alignment heads, tokens over input positions, are normalised, smoothed and averaged; the
cheapest monotonous path through them gives each token its position. As transformers'
`WhisperGenerationMixin._extract_token_timestamps` (dynamic time warping, Whisper's paper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.model.attention.cross import Recording
from lookonce.model.device import StepReads
from lookonce.types.sampling import Alignment
from lookonce.types.step import NewSequence, ScheduledSequence

STD_FLOOR = 1e-12


@dataclass(slots=True)
class _Wanted:
    alignment: Alignment
    num_prompt_tokens: int
    weights: dict[int, Tensor] = field(default_factory=dict)
    """[heads, tokens, positions] of each chunk so far, by where it starts."""


class Aligner:
    """Collects the weights of sequences that ask for an alignment, and aligns them."""

    def __init__(self) -> None:
        self._wanted: dict[int, _Wanted] = {}

    def add(self, new: NewSequence) -> None:
        """Only the first of several samples, and only before it generates."""
        alignment = new.sampling.alignment
        if alignment is None or new.sample_index or len(new.token_ids) > new.num_prompt_tokens:
            return
        self._wanted[new.seq_id] = _Wanted(alignment, new.num_prompt_tokens)

    def remove(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._wanted.pop(seq_id, None)

    def recordings(self, chunks: Sequence[ScheduledSequence]) -> dict[int, Recording]:
        """What to record in this step, by sequence; nearly always nothing."""
        if not self._wanted:
            return {}
        found, first = {}, 0
        for chunk in chunks:
            wanted = self._wanted.get(chunk.seq_id)
            if wanted is not None and chunk.start < wanted.num_prompt_tokens:
                rows = slice(first, first + chunk.num_tokens)
                found[chunk.seq_id] = Recording(rows, wanted.alignment.heads)
            first += chunk.num_tokens
        return found

    def align(
        self,
        chunks: Sequence[ScheduledSequence],
        recordings: dict[int, Recording],
        reads: StepReads,
    ) -> Callable[[], dict[int, list[int]]]:
        """The input position of each token from `Alignment.start` on, of the prompts that are
        computed now, once `reads` were waited for."""
        aligned: dict[int, tuple[Tensor, Alignment]] = {}
        for chunk in chunks:
            recording = recordings.get(chunk.seq_id)
            if recording is None:
                continue
            wanted = self._wanted[chunk.seq_id]
            # A chunk may be computed again: after a preemption, or alone where its batch failed.
            kept = {start: each for start, each in wanted.weights.items() if start < chunk.start}
            wanted.weights = {**kept, chunk.start: recording.weights}
            if chunk.start + chunk.num_tokens >= wanted.num_prompt_tokens:
                weights = torch.cat(list(wanted.weights.values()), dim=1)
                weights = weights[:, wanted.alignment.start :]
                aligned[chunk.seq_id] = reads.later(weights), wanted.alignment
        return lambda: {seq_id: aligned_positions(*each) for seq_id, each in aligned.items()}


def aligned_positions(weights: Tensor, alignment: Alignment) -> list[int]:
    """weights [heads, tokens, positions] on the host → a position per token, which never falls."""
    weights = weights[..., : alignment.positions].float()
    if weights.shape[1] == 0 or weights.shape[2] == 0:
        return [0] * weights.shape[1]
    std = weights.std(dim=-2, keepdim=True, unbiased=False)
    mean = weights.mean(dim=-2, keepdim=True)
    weights = (weights - mean) / std.clamp(min=STD_FLOOR)
    matrix = _median_filtered(weights, alignment.filter_width).mean(dim=0)
    texts, times = dynamic_time_warping(-matrix.double().numpy())
    jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
    positions: list[int] = times[jumps].tolist()
    return positions


def _median_filtered(weights: Tensor, width: int) -> Tensor:
    """The median of `width` (odd) neighbours along the last dimension, mirrored at its ends."""
    half = width // 2
    if weights.shape[-1] <= half:
        return weights
    padded = torch.nn.functional.pad(weights, (half, half), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., half]


def dynamic_time_warping(
    matrix: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cheapest monotonous path through costs [rows, columns]: its rows and its columns.

    Cells of one anti-diagonal depend only on the two before it, and are computed at once.
    """
    rows, columns = matrix.shape
    trace = np.full((rows + 1, columns + 1), -1, np.int8)
    before = np.full(rows + 1, np.inf, np.float32)  # anti-diagonal d - 2, by row
    last = before.copy()  # d - 1
    before[0] = 0.0
    for diagonal in range(2, rows + columns + 1):
        at = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        both, row_only, column_only = before[at - 1], last[at - 1], last[at]
        by_both = (both < row_only) & (both < column_only)
        by_row = (row_only < both) & (row_only < column_only)
        step = np.where(by_both, 0, np.where(by_row, 1, 2)).astype(np.int8)
        cheapest = np.where(by_both, both, np.where(by_row, row_only, column_only))
        costs = np.full(rows + 1, np.inf, np.float32)
        costs[at] = matrix[at - 1, diagonal - at - 1] + cheapest.astype(np.float64)
        trace[at, diagonal - at] = step
        before, last = last, costs
    trace[0, :], trace[:, 0] = 2, 1
    return _path(trace)


def _path(trace: NDArray[np.int8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    row, column = trace.shape[0] - 1, trace.shape[1] - 1
    path = []
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        step = trace[row, column]
        row -= step != 2
        column -= step != 1
    texts, times = np.array(path[::-1], np.int64).T
    return texts, times
