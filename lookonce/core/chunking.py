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
from lookonce.core.counters import Counters
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.features import Features, next_embed
from lookonce.core.request import Request, Sequence
from lookonce.types.media import MediaFeature, Modality
from lookonce.types.request import EncoderOutcome
from lookonce.types.step import EncodeItem, NewSequence, ScheduledSequence


class Chunker:
    """Plans prefill chunks; holds every encoder output a planned chunk touches."""

    def __init__(
        self, encoder_cache: EncoderCache, counters: Counters, unsplittable: Collection[Modality]
    ) -> None:
        self._encoder_cache = encoder_cache
        self._counters = counters
        self._unsplittable = frozenset(unsplittable)

    def plan(self, sequence: Sequence, step: StepPass) -> bool:
        """Schedule as much of the sequence as the step affords; False when that is nothing."""
        start = sequence.num_computed
        end = min(len(sequence.tokens), start + step.tokens)
        end = self._keep_whole(sequence.request.features, start, end)
        end = self._acquire_window(sequence, start, end, step)
        if end <= start:
            return False
        self._schedule(sequence, start, end, step)
        return True

    def first_missing(self, sequence: Sequence) -> bool:
        """Whether the very next position needs an item that the engine lacks."""
        start = sequence.num_computed
        request = sequence.request
        return any(
            self._lacks(request, request.features[index])
            for index in request.features.overlapping(start, start + 1)
        )

    def _lacks(self, request: Request, feature: MediaFeature) -> bool:
        return feature.key in request.missing and feature.key not in self._encoder_cache

    def _keep_whole(self, features: Features, start: int, end: int) -> int:
        """Move `end` before an unsplittable item that it would cut; `start` if none fits."""
        if not self._unsplittable:
            return end
        for index in features.overlapping(end - 1, end):
            feature = features[index]
            if feature.end > end and feature.modality in self._unsplittable:
                return max(feature.offset, start)
        return end

    def _acquire_window(self, sequence: Sequence, start: int, end: int, step: StepPass) -> int:
        """Hold the outputs of items in `[start, end)`; the end up to which all could be had."""
        features = sequence.request.features
        for index in features.overlapping(start, end):
            feature = features[index]
            needed_from = next_embed(feature, start)
            if needed_from is None or needed_from >= end:
                continue
            if not self._acquire(sequence, index, feature, step):
                whole = feature.modality in self._unsplittable
                return max(feature.offset, start) if whole else needed_from
        return end

    def _acquire(
        self, sequence: Sequence, index: int, feature: MediaFeature, step: StepPass
    ) -> bool:
        if sequence.held and index <= sequence.held[-1]:
            return True
        outcome: EncoderOutcome = "hit"
        if feature.key not in self._encoder_cache:
            if not self._encode(sequence.request, index, feature, step):
                return False
            outcome = "miss"
        self._encoder_cache.hold(sequence.seq_id, feature.key)
        sequence.held.append(index)
        self._count(sequence.request, index, outcome)
        return True

    def _encode(self, request: Request, index: int, feature: MediaFeature, step: StepPass) -> bool:
        """Plan an encoder run; False when the item is missing or budget or room is short."""
        item = request.items.get(feature.key)
        if item is None or not step.encoder.affords(feature.num_embeds):
            return False
        if self._encoder_cache.try_allocate(feature.key, feature.num_embeds) is None:
            return False
        step.encoder.spend(feature.num_embeds)
        step.encode.append(EncodeItem(feature.key, item))
        step.encode_owners[feature.key] = (request, index)
        return True

    def _count(self, request: Request, index: int, outcome: EncoderOutcome) -> None:
        self._counters.encoder_cache_queries += 1
        self._counters.encoder_cache_hits += outcome == "hit"
        if request.facts is not None:
            request.facts.note(index, outcome)

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
    )
