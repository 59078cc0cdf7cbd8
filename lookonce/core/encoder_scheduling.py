"""Sees to it that every encoder output a chunk touches will be there: held, restored or encoded.

on the device ──────▶ hold
on the host ────────▶ make room, hold, copy back
nowhere ────────────▶ make room, hold, encode        (needs the item and encoder budget)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from itertools import repeat

from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.mm_features import MANY, next_embed
from lookonce.core.request import ReuseStats, Sequence, SequenceState
from lookonce.core.scheduler_state import Counters, RequestQueues
from lookonce.types.media import MediaFeature, Modality, ProcessedItem
from lookonce.types.step import EncodeItem, NewSequence, ScheduledSequence


class Shortage(Enum):
    """Why a sequence got nothing in a step."""

    TOKENS = "token budget"
    ENCODER_BUDGET = "encoder budget"
    ROOM = "room in the encoder cache"
    ITEM = "an item the engine lacks"


class EncoderScheduler:
    """Holds outputs for sequences; what it holds is what the planned chunks need."""

    def __init__(
        self, encoder_cache: EncoderCache, counters: Counters, unsplittable: Collection[Modality]
    ) -> None:
        self._encoder_cache = encoder_cache
        self._counters = counters
        self._unsplittable = frozenset(unsplittable)

    def acquire(
        self, sequence: Sequence, start: int, end: int, step: StepPass
    ) -> tuple[int, Shortage | None]:
        """Hold the outputs of items in `[start, end)`; up to where they could be had, and why."""
        features, held = sequence.request.features, sequence.held
        indices = features.overlapping(start, end)
        if held:
            indices = range(max(indices.start, held[-1] + 1), indices.stop)
        many = len(indices) >= MANY and not step.room_kept
        if many and self._acquire_new(sequence, indices, step):
            return end, None
        for index, feature in zip(indices, features.window(indices), strict=True):
            if feature.is_embed is not None:
                needed_from = next_embed(feature, start)
                if needed_from is None or needed_from >= end:
                    continue
            shortage = self._acquire_one(sequence, index, feature, step)
            if shortage is not None:
                return self._end_before(feature, start, end), shortage
            held.append(index)
        return end, None

    def _end_before(self, feature: MediaFeature, start: int, end: int) -> int:
        """Where a chunk from `start` ends that must do without the feature's rows."""
        if feature.modality in self._unsplittable:
            return max(feature.offset, start)
        return next_embed(feature, start) or start

    def _acquire_one(
        self, sequence: Sequence, index: int, feature: MediaFeature, step: StepPass
    ) -> Shortage | None:
        """Hold one output: found, brought back or about to be encoded; what is short if none."""
        cache, facts, key = self._encoder_cache, sequence.request.facts, feature.key
        if step.room_kept:
            return Shortage.ROOM
        prefetched = index in sequence.prefetched
        if cache.try_hold(sequence.seq_id, key):
            hit = not prefetched
        elif key in cache.host.copies:
            if cache.try_restore(key, feature.num_embeds, sequence.seq_id) is None:
                return Shortage.ROOM
            self._counters.encoder_cache_restores += 1
            hit = not prefetched
        else:
            shortage = self._encode(sequence, index, feature, step)
            if shortage is not None:
                return shortage
            hit = False
        if prefetched:
            del sequence.prefetched[index]
        self._counters.encoder_cache_queries += 1
        self._counters.encoder_cache_hits += hit
        facts.note(index, "hit" if hit else "miss")
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
        step.add_encode(key, item, rows, sequence.request.facts, index)
        return None

    def _acquire_new(self, sequence: Sequence, indices: range, step: StepPass) -> bool:
        """Encode them all; False, with nothing changed, unless all are new and all can be had.

        The common case of many items in one chunk, without a round of questions for each.
        """
        request, cache = sequence.request, self._encoder_cache
        if not request.features.all_plain:
            return False
        keys = request.features.keys_of(indices)
        items = request.items_of(indices)
        if items is None:
            return False
        rows = request.features.rows(indices)
        total = sum(rows)
        if total > step.encoder.left or not cache.try_allocate_many(keys, rows, sequence.seq_id):
            return False
        step.encoder.spend(total)
        step.encode += map(EncodeItem, keys, items)
        step.encode_owners.add_many(request.facts, indices)
        for index in request.facts.listed(indices):
            request.facts.note(index, "miss")
        self._counters.encoder_cache_queries += len(keys)
        sequence.held.extend(indices)
        return True


class EncoderBudget:
    """Encoder rows one step may compute; an item above the whole budget runs alone."""

    __slots__ = ("_left", "_untouched", "rows")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._left = rows
        self._untouched = True

    def affords(self, rows: int) -> bool:
        return rows <= self._left or self._untouched

    @property
    def most(self) -> int:
        """Rows of the largest item that it affords."""
        return sys.maxsize if self._untouched else self._left

    @property
    def spent(self) -> int:
        return self.rows - self._left

    @property
    def left(self) -> int:
        """Rows that are to spare; not above zero when the budget is used up."""
        return self._left

    def spend(self, rows: int) -> None:
        self._left -= rows
        self._untouched = False


class EncodeOwners:
    """Of each encoder run of a step, in order: the receipt and the feature that caused it."""

    __slots__ = ("_indices", "_records")

    def __init__(self) -> None:
        self._records: list[ReuseStats] = []
        self._indices: list[int] = []

    def __iter__(self) -> Iterator[tuple[ReuseStats, int]]:
        return zip(self._records, self._indices, strict=True)

    def add(self, facts: ReuseStats, index: int) -> None:
        self._records.append(facts)
        self._indices.append(index)

    def add_many(self, facts: ReuseStats, indices: range) -> None:
        """Columns, not pairs: the garbage collector would count each pair."""
        self._records += repeat(facts, len(indices))
        self._indices += indices


class StepPass:
    """One pass of planning: budgets going down, the plan growing."""

    __slots__ = (
        "encode",
        "encode_owners",
        "encoder",
        "new",
        "room_kept",
        "scheduled",
        "stalled",
        "starved",
        "tokens",
    )

    def __init__(self, tokens: int, encoder_rows: int) -> None:
        self.tokens = tokens
        """Token positions that can still be scheduled."""
        self.encoder = EncoderBudget(encoder_rows)
        self.new: list[NewSequence] = []
        self.encode: list[EncodeItem] = []
        self.encode_owners = EncodeOwners()
        """One of each entry of `encode`."""
        self.scheduled: list[ScheduledSequence] = []
        self.stalled = False
        """A running sequence waits for tokens or room: nobody is admitted who could take them."""
        self.room_kept = False
        """The first in turn waits for room: the others go on with the outputs they hold only."""
        self.starved: list[Sequence] = []
        """Those that could compute and got nothing."""

    def add_encode(
        self, key: bytes, item: ProcessedItem, rows: int, facts: ReuseStats, index: int
    ) -> None:
        """Run the encoder on `item`, for the feature `index` of the request with that receipt."""
        self.encoder.spend(rows)
        self.encode.append(EncodeItem(key, item))
        self.encode_owners.add(facts, index)


MAX_SEQUENCES = 16
"""Sequences looked at in one step, of those that run and of those that wait."""


MAX_LOOKED_AT = 64
"""Items of one sequence looked at in one step; the next step goes on from there."""


BROUGHT_ALONG = 3
"""Rows that may come along for each that must be encoded: even where sharing a run saves nothing,
the first in line waits for no more than so many times its own."""


class EncoderPrefetcher:
    """Plans encoder runs for what will be needed.

    `ahead_of_admission`: waiting requests too. Not where external tiers may hold their prefixes,
    which nobody knows before they are asked: what a prefix covers is never encoded.
    """

    def __init__(
        self,
        roster: RequestQueues,
        num_cached: Callable[[Sequence], int],
        encoder_cache: EncoderCache,
        counters: Counters,
        *,
        ahead_of_admission: bool,
    ) -> None:
        self._roster = roster
        self._num_cached = num_cached
        self._encoder_cache = encoder_cache
        self._counters = counters
        self._ahead_of_admission = ahead_of_admission

    def plan(self, step: StepPass) -> None:
        """Add encoder runs while there is budget and room for them."""
        rows = step.encoder.most
        if self._roster.prefilling:
            rows = BROUGHT_ALONG * step.encoder.spent
        for sequence in self._roster.prefilling.head(MAX_SEQUENCES):
            if rows > 0:
                rows = self._look_ahead(sequence, step, rows)
            if self._has_more_than_one_step_encodes(sequence, step):
                self._look_ahead(sequence, step, step.encoder.most)
        if self._ahead_of_admission:
            for sequence in self._roster.waiting.head(MAX_SEQUENCES):
                if rows <= 0:
                    return
                rows = self._look_ahead(sequence, step, rows)

    def _look_ahead(self, sequence: Sequence, step: StepPass, rows: int) -> int:
        """Encode up to `rows` rows ahead; how many are left for others, 0 once one did not fit."""
        features = sequence.request.features
        first, stop = self._looked_at(sequence)
        for index in range(first, stop):
            spent = self._prefetch(sequence, index, step, rows)
            if spent is None:
                sequence.looked_at = index
                return 0
            rows -= spent
        sequence.looked_at = min(stop, len(features))
        return rows

    def _looked_at(self, sequence: Sequence) -> tuple[int, int]:
        """Which features are looked at in this step: from the first, before the second."""
        features = sequence.request.features
        first = sequence.looked_at
        if first < len(features):
            first = max(first, features.next_index(self._spared(sequence)))
        return first, min(first + MAX_LOOKED_AT, len(features))

    def _has_more_than_one_step_encodes(self, sequence: Sequence, step: StepPass) -> bool:
        if sequence.looked_at == len(sequence.request.features) or step.encoder.left <= 0:
            return False
        first, stop = self._looked_at(sequence)
        return sum(sequence.request.features.rows(range(first, stop))) > step.encoder.rows

    def _spared(self, sequence: Sequence) -> int:
        """Positions from the start that will not be computed: they are, or the prefix is cached."""
        if sequence.state is SequenceState.WAITING:
            return self._num_cached(sequence)
        return sequence.num_computed

    def _prefetch(
        self, sequence: Sequence, index: int, step: StepPass, rows_left: int
    ) -> int | None:
        """Rows encoded for the item: 0 when it needs nothing; None when there is no room for it."""
        request, cache = sequence.request, self._encoder_cache
        feature = request.features[index]
        item = request.items.get(feature.key)
        if item is None or cache.has_anywhere(feature.key):
            return 0
        rows = feature.num_embeds
        if rows > rows_left or not step.encoder.affords(rows):
            return None
        if not cache.try_prefetch(feature.key, rows):
            return None
        sequence.prefetched[index] = feature.key
        self._counters.encoder_prefetches += 1
        step.add_encode(feature.key, item, rows, request.facts, index)
        return rows
