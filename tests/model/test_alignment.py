"""When tokens were spoken: what becomes of weights that are recorded chunk by chunk."""

from __future__ import annotations

import numpy as np
import torch

from lookonce.model.alignment import Aligner
from lookonce.model.device import StepReads
from lookonce.types.sampling import Alignment, SamplingParams
from lookonce.types.step import NewSequence, ScheduledSequence

HEADS = ((0, 0), (1, 1))
LENGTH, POSITIONS = 9, 20


class Heard:
    """An aligner with one sequence, whose queries and keys are random and given chunk by chunk."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.queries, self.keys = torch.randn(2, LENGTH, 8), torch.randn(2, POSITIONS, 8)
        self.aligner = Aligner()
        alignment = Alignment(heads=HEADS, start=0, positions=POSITIONS, filter_width=3)
        sampling = SamplingParams(prompt_logprobs=0, alignment=alignment)
        self.aligner.add(NewSequence(1, np.zeros(LENGTH, np.int32), LENGTH, (), sampling))

    def compute(self, start: int, end: int) -> list[int] | None:
        chunks = [ScheduledSequence(1, start, end - start)]
        recordings = self.aligner.recordings(chunks)
        for layer, _ in HEADS:
            recordings[1].record(layer, self.queries[:, start:end], self.keys, 1.0)
        reads = StepReads(torch.device("cpu"))
        return self.aligner.align(chunks, recordings, reads)().get(1)


def test_a_chunk_that_is_computed_again_counts_once():
    """As after a failed batch, whose sequences are computed again one by one."""
    expected = Heard().compute(0, LENGTH)
    again = Heard()
    assert again.compute(0, 4) is None
    assert again.compute(0, 4) is None
    assert again.compute(4, LENGTH) == expected
    assert again.compute(4, LENGTH) == expected, "the last chunk may fail, too"
    assert len(expected) == LENGTH


def test_a_sequence_that_begins_again_is_aligned_anew():
    """As after a preemption, with chunks of other lengths."""
    expected = Heard().compute(0, LENGTH)
    again = Heard()
    assert again.compute(0, 6) is None
    assert again.compute(0, 2) is None
    assert again.compute(2, LENGTH) == expected
