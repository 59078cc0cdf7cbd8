"""Cuts the next chunk of a prompt and makes sure every encoder output it touches will be there.

    computed │ chunk ....................│ later chunks
    ─────────┼──────[item 3]────[item 4]─┼──[item 5]──
             start                       end

The end moves back to the start of the first item that cannot be had in this step (budget, room,
or the item is missing), and to the edge of an unsplittable item that it would cut.
"""

from __future__ import annotations

from collections.abc import Collection

from lookonce.core.budget import StepPass
from lookonce.core.encoder_scheduling import Acquirer, Shortage
from lookonce.core.mm_features import Features
from lookonce.core.request import Sequence
from lookonce.types.media import Modality
from lookonce.types.step import NewSequence, ScheduledSequence


class Chunker:
    """Plans prefill chunks; holds every encoder output a planned chunk touches."""

    def __init__(self, acquirer: Acquirer, unsplittable: Collection[Modality]) -> None:
        self._acquirer = acquirer
        self._unsplittable = frozenset(unsplittable)

    def plan(self, sequence: Sequence, step: StepPass) -> Shortage | None:
        """Schedule as much of the sequence as the step affords; what is short if that is nothing.

        Nothing is held for a sequence that gets nothing.
        """
        start = sequence.num_computed
        end = min(len(sequence.tokens), start + step.tokens)
        end = self._keep_whole(sequence.request.features, start, end)
        if end <= start:
            return Shortage.TOKENS
        end, shortage = self._acquirer.acquire(sequence, start, end, step)
        if end <= start:
            return shortage
        self._schedule(sequence, start, end, step)
        return None

    def _keep_whole(self, features: Features, start: int, end: int) -> int:
        """Move `end` before an unsplittable item that it would cut; `start` if none fits."""
        if not self._unsplittable or end <= start:
            return end
        for index in features.overlapping(end - 1, end):
            feature = features[index]
            if feature.end > end and feature.modality in self._unsplittable:
                return max(feature.offset, start)
        return end

    def _schedule(self, sequence: Sequence, start: int, end: int, step: StepPass) -> None:
        features = sequence.request.features
        if not sequence.announced:
            step.new.append(_announce(sequence))
        step.scheduled.append(
            ScheduledSequence(
                seq_id=sequence.seq_id,
                start=start,
                num_tokens=end - start,
                new_block_ids=sequence.deliver_blocks(),
                embeds=features.embed_slices(start, end),
                bidirectional=self._bidirectional(features, start, end),
                sample=end == len(sequence.tokens),
            )
        )
        step.tokens -= end - start

    def _bidirectional(
        self, features: Features, start: int, end: int
    ) -> tuple[tuple[int, int], ...]:
        if not self._unsplittable:
            return ()
        touched = (features[index] for index in features.overlapping(start, end))
        return tuple((f.offset, f.end) for f in touched if f.modality in self._unsplittable)


def _announce(sequence: Sequence) -> NewSequence:
    sequence.announced = True
    request = sequence.request
    return NewSequence(
        seq_id=sequence.seq_id,
        token_ids=sequence.tokens.view(),
        num_prompt_tokens=request.num_prompt_tokens,
        features=request.features.as_tuple(),
        sampling=request.sampling,
        sample_index=sequence.index,
        grammar=request.grammar,
    )
