"""Which encoder outputs are computed in a step: those that its chunks need, and some ahead of them.

Of an item that a chunk touches, the encoder output is

    on the device    held
    on the host      given room on the device, held, and copied back
    in a tier        loaded before the sequence is admitted; then as if it were on the host
    nowhere          given room, held, and encoded: this needs the item, and encoder budget

Outputs of later chunks and of waiting requests are encoded ahead (prefetched) in encoder budget
that a step has left. Encoding takes as long in a later step; done earlier, it only delays the
requests that are first in line. So it is done only where it pays:

    the encoder runs anyway      several pictures in one run cost far less than one by one
    a prompt's items exceed      its later chunks would be cut
    the budget of one step
    no prompt is being computed  items of requests that wait for blocks or a place are prepared

Where several items in one run take about as long as one by one, as on a CPU, a step encodes fewer
than its budget allows while others compute or wait (`EncodedRows`): the first in line has its first
token after its own run, not after those of all others, and what needs no run waits for one.

A prefetched output is held by no sequence. It leaves only when held outputs need its room, and is
then encoded again by the chunk that needs it; nothing ever waits for a prefetch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection
from enum import Enum
from itertools import repeat
from typing import TypeAlias

from lookonce.core.encoder_connector_state import EncoderConnectorState, StagedOutput
from lookonce.core.mm_features import MANY, next_embed
from lookonce.core.request import Request, Sequence, SequenceState
from lookonce.core.scheduler_state import SchedulerState
from lookonce.types.media import MediaFeature, Modality, ProcessedItem
from lookonce.types.step import EncodeItem, NewSequence, ReceivedOutput, ScheduledSequence
from lookonce.types.step_costs import StepCosts

MAX_PREFETCHED_SEQUENCES = 16
"""Sequences considered for prefetching in one step, of those that run and of those that wait."""
MAX_PREFETCHED_ITEMS = 64
"""Items of one sequence considered in one step; the next step continues behind them."""
BROUGHT_ALONG = 3
"""Rows that are prefetched for each row that a step must encode. Even where items of one run share
no cost, the first in line then waits at most so many times its own encoding."""
FIXED_TIMES = 4.0
"""Seconds of encoding to each second that a step takes whatever it encodes."""
SHORT_SECONDS = 0.01
"""Rows that take no longer are encoded in one step."""
KEPT_STEPS = 16
TRIED = 2.5
"""Times what a step encodes: with two items instead of one, or a few more of many."""


EncodeOwners: TypeAlias = list[tuple[Request, range]]
"""For the encoder runs of a step, in order: the request and the feature indices. Many
items of one request take one entry, which the garbage collector tracks at less cost."""


class Shortage(Enum):
    """Why a sequence got nothing in a step."""

    TOKENS = "token budget"
    ENCODER_BUDGET = "encoder budget"
    ROOM = "room in the encoder cache"
    ITEM = "an item the engine lacks"


class EncoderScheduler:
    """Holds the encoder outputs that planned chunks need, and plans the encoder runs for them."""

    def __init__(
        self,
        state: SchedulerState,
        unsplittable: Collection[Modality],
        connector: EncoderConnectorState | None = None,
    ) -> None:
        self._connector = connector
        self._encoder_cache = state.encoder_cache
        self._counters = state.counters
        self._unsplittable = frozenset(unsplittable)

    def acquire(
        self, sequence: Sequence, start: int, end: int, step: StepPass
    ) -> tuple[int, Shortage | None]:
        """Hold the outputs of the items in positions `[start, end)`.

        Returns the position up to which all could be had, and why no further.
        """
        features, held = sequence.request.features, sequence.held
        indices = features.overlapping(start, end)
        if held:
            indices = range(max(indices.start, held[-1] + 1), indices.stop)
        many = len(indices) >= MANY and not step.room_kept
        if many and self._acquire_new(sequence, indices, step):
            return end, None
        acquire = self._acquire_one if self._connector is None else self._acquire_with_tiers
        for index, feature in zip(indices, features.window(indices), strict=True):
            if feature.is_embed is not None:
                needed_from = next_embed(feature, start)
                if needed_from is None or needed_from >= end:
                    continue
            shortage = acquire(sequence, index, feature, step)
            if shortage is not None:
                return self._end_before(feature, start, end), shortage
            held.append(index)
        return end, None

    def _end_before(self, feature: MediaFeature, start: int, end: int) -> int:
        """End of the chunk from `start` that needs no row of the feature."""
        if feature.modality in self._unsplittable:
            return max(feature.offset, start)
        return next_embed(feature, start) or start

    def _acquire_one(
        self, sequence: Sequence, index: int, feature: MediaFeature, step: StepPass
    ) -> Shortage | None:
        """Hold one output: cached, restored or about to be encoded. Returns what is short."""
        cache, stats, key = self._encoder_cache, sequence.request.reuse_stats, feature.key
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
        stats.note(index, "hit" if hit else "miss")
        return None

    def _acquire_with_tiers(
        self, sequence: Sequence, index: int, feature: MediaFeature, step: StepPass
    ) -> Shortage | None:
        """As `_acquire_one`, where external tiers may have given the output, and keep what is
        encoded."""
        connector, request, key = self._connector, sequence.request, feature.key
        assert connector is not None
        staged = connector.staged(request, key)
        num_encoded = len(step.encode)
        if staged is None or step.room_kept or self._encoder_cache.has_anywhere(key):
            shortage = self._acquire_one(sequence, index, feature, step)
        else:
            shortage = self._receive(sequence, index, feature, staged, step)
        if len(step.encode) > num_encoded:
            connector.note_encoding(request, [(key, feature.num_embeds)])
        if shortage is None:
            connector.release(request, key)
        return shortage

    def _receive(
        self,
        sequence: Sequence,
        index: int,
        feature: MediaFeature,
        staged: StagedOutput,
        step: StepPass,
    ) -> Shortage | None:
        """Hold an output that a tier has given: the step copies it to the device."""
        key, rows, stats = feature.key, feature.num_embeds, sequence.request.reuse_stats
        if self._encoder_cache.try_allocate(key, rows, sequence.seq_id) is None:
            return Shortage.ROOM
        step.received.append(ReceivedOutput(key, staged.output))
        sequence.prefetched.pop(index, None)
        self._counters.encoder_cache_queries += 1
        self._counters.encoder_cache_hits += 1
        stats.note(index, "hit")
        stats.note_tier(index, staged.tier)
        return None

    def _encode(
        self, sequence: Sequence, index: int, feature: MediaFeature, step: StepPass
    ) -> Shortage | None:
        """Plan an encoder run and hold its output."""
        key, rows = feature.key, feature.num_embeds
        item = sequence.request.items.get(key)
        if item is None:
            return Shortage.ITEM
        budget, live = step.encoder, sequence.request.session is not None
        if rows > budget.room and not budget.affords(rows, live=live):
            return Shortage.ENCODER_BUDGET
        if self._encoder_cache.try_allocate(key, rows, sequence.seq_id) is None:
            return Shortage.ROOM
        step.add_encode(key, item, rows, sequence.request, index)
        return None

    def _acquire_new(self, sequence: Sequence, indices: range, step: StepPass) -> bool:
        """Encode and hold all outputs at once; False, with nothing changed, where that cannot be.

        It can where no output is cached and there is enough budget and room: the common case for
        many items in one chunk, which needs no check of each.
        """
        request, cache = sequence.request, self._encoder_cache
        if not request.features.all_plain:
            return False
        if self._connector is not None and self._connector.has_staged(request):
            return False
        keys = request.features.keys_of(indices)
        items = request.items_of(indices)
        if items is None:
            return False
        rows = request.features.rows(indices)
        total = sum(rows)
        live = request.session is not None
        most = step.encoder.left if live else step.encoder.room
        if total > most or not cache.try_allocate_many(keys, rows, sequence.seq_id):
            return False
        step.encoder.spend(total, live=live)
        step.encode += map(EncodeItem, keys, items, repeat(request.encoder_adapter))
        step.encode_owners.append((request, indices))
        for index in request.reuse_stats.listed(indices):
            request.reuse_stats.note(index, "miss")
        if self._connector is not None:
            self._connector.note_encoding(request, list(zip(keys, rows, strict=True)))
        self._counters.encoder_cache_queries += len(keys)
        sequence.held.extend(indices)
        return True


class EncoderPrefetcher:
    """Plans encoder runs for items that later steps will need.

    `ahead_of_admission`: for waiting requests too. Off where external tiers may hold their prefixes
    or outputs, which need not be encoded: the tiers have not answered yet.
    """

    def __init__(
        self,
        state: SchedulerState,
        *,
        ahead_of_admission: bool,
        connector: EncoderConnectorState | None = None,
    ) -> None:
        self._state = state
        self._connector = connector
        self._prefetch = self._encode_ahead if connector is None else self._encode_ahead_and_keep
        self._ahead_of_admission = ahead_of_admission

    def plan(self, step: StepPass) -> None:
        """Add encoder runs while there is budget and room: prompts first, in order of arrival."""
        queues = self._state.queues
        rows = step.encoder.most
        if queues.prefilling:
            rows = BROUGHT_ALONG * step.encoder.spent
        for sequence in queues.prefilling.head(MAX_PREFETCHED_SEQUENCES):
            if rows > 0:
                rows = self._prefetch_items(sequence, step, rows)
            if self._exceeds_one_step(sequence, step):
                self._prefetch_items(sequence, step, step.encoder.most)
        if self._ahead_of_admission:
            for sequence in queues.waiting.head(MAX_PREFETCHED_SEQUENCES):
                if rows <= 0:
                    return
                rows = self._prefetch_items(sequence, step, rows)

    def _prefetch_items(self, sequence: Sequence, step: StepPass, rows: int) -> int:
        """Encode up to `rows` rows ahead. Returns how many are left, 0 once an item did not fit."""
        candidates = self._candidates(sequence)
        for index in candidates:
            spent = self._prefetch(sequence, index, step, rows)
            if spent is None:
                sequence.prefetch_from = index
                return 0
            rows -= spent
        sequence.prefetch_from = candidates.stop
        return rows

    def _candidates(self, sequence: Sequence) -> range:
        """Indices of the features to consider in this step: those that must still be computed."""
        features = sequence.request.features
        first = sequence.prefetch_from
        if first < len(features):
            first = max(first, features.next_index(self._num_not_computed_again(sequence)))
        return range(first, min(first + MAX_PREFETCHED_ITEMS, len(features)))

    def _exceeds_one_step(self, sequence: Sequence, step: StepPass) -> bool:
        """Whether the items still to encode are more than the encoder budget of one step."""
        features = sequence.request.features
        if sequence.prefetch_from == len(features) or step.encoder.most <= 0:
            return False
        return sum(features.rows(self._candidates(sequence))) > step.encoder.rows

    def _num_not_computed_again(self, sequence: Sequence) -> int:
        """Leading positions that are computed already, or covered by a cached prefix."""
        if sequence.state is SequenceState.WAITING:
            return self._state.num_cached_tokens(sequence)
        return sequence.num_planned

    def _encode_ahead_and_keep(
        self, sequence: Sequence, index: int, step: StepPass, rows_left: int
    ) -> int | None:
        """As `_encode_ahead`, but for what external tiers have given, or are asked for."""
        connector, feature = self._connector, sequence.request.features[index]
        assert connector is not None
        if connector.holds(feature.key):
            return 0
        rows = self._encode_ahead(sequence, index, step, rows_left)
        if rows:
            connector.note_encoding(sequence.request, [(feature.key, rows)])
        return rows

    def _encode_ahead(
        self, sequence: Sequence, index: int, step: StepPass, rows_left: int
    ) -> int | None:
        """Rows encoded for the item: 0 when it needs nothing; None when there is no room for it."""
        request, cache = sequence.request, self._state.encoder_cache
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
        self._state.counters.encoder_prefetches += 1
        step.add_encode(feature.key, item, rows, request, index)
        return rows


class StepPass:
    """One planning pass: the budgets that are left, and what has been planned so far."""

    __slots__ = (
        "encode",
        "encode_owners",
        "encoder",
        "new",
        "received",
        "room_kept",
        "scheduled",
        "stalled",
        "starved",
        "step_id",
        "tokens",
    )

    def __init__(self, step_id: int, tokens: int, encoder: EncoderBudget) -> None:
        self.step_id = step_id
        """Of the plan that the pass makes."""
        self.tokens = tokens
        """Token positions that can still be scheduled."""
        self.encoder = encoder
        self.new: list[NewSequence] = []
        self.received: list[ReceivedOutput] = []
        self.encode: list[EncodeItem] = []
        self.encode_owners: EncodeOwners = []
        self.scheduled: list[ScheduledSequence] = []
        self.stalled = False
        """A running sequence waits for tokens or room, so no sequence is admitted that could take
        them."""
        self.room_kept = False
        """The sequence that goes first waits for room in the encoder cache, so the others continue
        only with outputs that they hold."""
        self.starved: list[Sequence] = []
        """Sequences that could compute and got nothing."""

    def add_encode(
        self, key: bytes, item: ProcessedItem, rows: int, request: Request, index: int
    ) -> None:
        """Encode `item`, for the feature `index` of a request."""
        self.encoder.spend(rows, live=request.session is not None)
        self.encode.append(EncodeItem(key, item, request.encoder_adapter))
        self.encode_owners.append((request, range(index, index + 1)))


class EncodedRows:
    """How many rows one step should encode, as measured. Accelerators do not tell, and are not cut.

    So many that what a step takes whatever it encodes, its runs as all else that it computes, is a
    small part of it, or that they are encoded soon: more would save little, and make others wait.
    Where steps have encoded about the same for long nobody knows that any more, and one with about
    twice as much is tried."""

    def __init__(self, most: int) -> None:
        """`most`: that the configuration allows, and as many as are worth it until costs are
        known."""
        self._encoding, self._all_else = StepCosts(), StepCosts()
        self._others: deque[float] = deque(maxlen=KEPT_STEPS)
        """What the last such steps took for all else."""
        self.most = self.worth = most
        self._known = False

    def note(self, rows: int, seconds: float, others: float) -> None:
        """A step took `seconds` to encode this, and `others` for all else; what of that is computed
        for the rows themselves is told apart."""
        self._encoding.add(1, rows, seconds)
        self._all_else.add(1, rows, others)
        self._others.append(others)
        fixed, added = self._encoding.fixed(), self._encoding.added()
        tried = max(self.worth, round(TRIED * rows))
        if fixed is None or added is None:
            found = tried if self._known else self.most
        elif added <= 0:  # rows seem to cost nothing
            found = self.most
        else:
            all_else = min(self._all_else.fixed() or 0.0, *self._others)
            worth = max(SHORT_SECONDS, (max(0.0, fixed) + max(0.0, all_else)) * FIXED_TIMES)
            found = round(worth / added)
        if self._known:  # what few steps tell may be wrong: it rises step by step
            found = min(found, tried)
        self._known = self._known or fixed is not None
        self.worth = max(1, min(self.most, found))


class EncoderBudget:
    """Encoder rows that one step may compute. An item with more rows than that runs alone."""

    __slots__ = ("_untouched", "_worth", "left", "room", "rows")

    def __init__(self, rows: int, worth: int) -> None:
        """`rows`: of the configuration; `worth`: after the first item, more of them save
        nothing."""
        self.rows = self.left = self.room = rows
        """`left` is not spent, `room` may be for what is no live session's; neither is above zero
        when the budget is used up."""
        self._worth = worth
        self._untouched = True

    def affords(self, rows: int, *, live: bool = False) -> bool:
        """`live`: of a live session, whose frames wait for no turn as long as there is budget."""
        return rows <= (self.left if live else self.room) or self._untouched

    @property
    def most(self) -> int:
        """Rows of the largest item that the budget affords."""
        return sys.maxsize if self._untouched else self.room

    @property
    def spent(self) -> int:
        return self.rows - self.left

    def spend(self, rows: int, *, live: bool = False) -> None:
        self.left -= rows
        if live:
            self.room = min(self.room, self.left)
        else:
            self._worth -= rows
            self.room = min(self._worth, self.left)
        self._untouched = False
