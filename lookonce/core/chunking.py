"""Cuts the next chunk of a prompt and makes sure every encoder output it touches will be there.

    computed │ chunk ....................│ later chunks
    ─────────┼──────[item 3]────[item 4]─┼──[item 5]──
             start                       end

The end moves back to the start of the first item that cannot be had in this step (budget, room,
or the item is missing), and to the edge of an unsplittable item that it would cut.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from lookonce.core.budget import StepPass
from lookonce.core.counters import Counters
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.features import Features, next_embed
from lookonce.core.request import Sequence
from lookonce.types.media import MediaFeature, Modality
from lookonce.types.step import EncodeItem, NewSequence, ScheduledSequence


class Shortage(Enum):
    """Why a sequence got nothing in a step."""

    TOKENS = "token budget"
    ENCODER_BUDGET = "encoder budget"
    ROOM = "room in the encoder cache"
    ITEM = "an item the engine lacks"


class Chunker:
    """Plans prefill chunks; holds every encoder output a planned chunk touches."""

    def __init__(
        self, encoder_cache: EncoderCache, counters: Counters, unsplittable: Collection[Modality]
    ) -> None:
        self._encoder_cache = encoder_cache
        self._counters = counters
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
        end, shortage = self._acquire_window(sequence, start, end, step)
        if end <= start:
            return shortage
        self._schedule(sequence, start, end, step)
        return None

    def _keep_whole(self, features: Features, start: int, end: int) -> int:
        """Move `end` before an unsplittable item that it would cut; `start` if none fits."""
        if not self._unsplittable:
            return end
        for index in features.overlapping(end - 1, end):
            feature = features[index]
            if feature.end > end and feature.modality in self._unsplittable:
                return max(feature.offset, start)
        return end

    def _acquire_window(
        self, sequence: Sequence, start: int, end: int, step: StepPass
    ) -> tuple[int, Shortage | None]:
        """Hold the outputs of items in `[start, end)`; up to where they could be had, and why."""
        features, held = sequence.request.features, sequence.held
        last_held = held[-1] if held else -1
        for index in features.overlapping(start, end):
            if index <= last_held:
                continue
            feature = features[index]
            needed_from = next_embed(feature, start)
            if needed_from is None or needed_from >= end:
                continue
            shortage = self._acquire(sequence, index, feature, step)
            if shortage is not None:
                whole = feature.modality in self._unsplittable
                return max(feature.offset, start) if whole else needed_from, shortage
            held.append(index)
        return end, None

    def _acquire(
        self, sequence: Sequence, index: int, feature: MediaFeature, step: StepPass
    ) -> Shortage | None:
        """Hold one output, found or about to be encoded; what is short if it cannot be had."""
        counters, facts = self._counters, sequence.request.facts
        if self._encoder_cache.try_hold(sequence.seq_id, feature.key):
            counters.encoder_cache_hits += 1
            facts.note(index, "hit")
        else:
            shortage = self._encode(sequence, index, feature, step)
            if shortage is not None:
                return shortage
            facts.note(index, "miss")
        counters.encoder_cache_queries += 1
        return None

    def _encode(
        self, sequence: Sequence, index: int, feature: MediaFeature, step: StepPass
    ) -> Shortage | None:
        """Plan an encoder run and hold its output."""
        key, rows = feature.key, feature.num_embeds
        item = sequence.request.items.get(key)
        if item is None:
            return Shortage.ITEM
        if not step.encoder.affords(rows):
            return Shortage.ENCODER_BUDGET
        if self._encoder_cache.try_allocate(key, rows, sequence.seq_id) is None:
            return Shortage.ROOM
        step.encoder.spend(rows)
        step.encode.append(EncodeItem(key, item))
        step.encode_owners[key] = (sequence.request.facts, index)
        return None

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
