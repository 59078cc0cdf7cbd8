"""Encodes items ahead of the chunk that needs them, in encoder budget that a step has to spare.

    running prompts   items of later chunks, prompt by prompt in order of arrival
    waiting requests  items that no cached prefix covers, in order of arrival

Encoding takes its time in whichever step it happens: done earlier, it only delays whoever is first.
It pays in these cases, and so happens in these only:

    the encoder runs anyway     others come along: several pictures in one run cost far less than
                                one by one, and the first in line waits little longer for it
    a prompt has more to come   its later chunks would be cut
    than one step may encode
    nobody computes a prompt    what waits, for blocks or a place, is made ready meanwhile

What is encoded ahead is held by nobody: it is awaited, leaves only when held outputs need its room,
and is encoded again then. Nobody ever waits for a prefetch, so none can block.
"""

from __future__ import annotations

from lookonce.core.admission import Admission
from lookonce.core.budget import StepPass
from lookonce.core.counters import Counters
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.request import Sequence, State
from lookonce.core.request_queues import Roster

MAX_SEQUENCES = 16
"""Sequences looked at in one step, of those that run and of those that wait."""
MAX_LOOKED_AT = 64
"""Items of one sequence looked at in one step; the next step goes on from there."""
BROUGHT_ALONG = 3
"""Rows that may come along for each that must be encoded: even where sharing a run saves nothing,
the first in line waits for no more than so many times its own."""


class Prefetcher:
    """Plans encoder runs for what will be needed.

    `ahead_of_admission`: waiting requests too. Not where external tiers may hold their prefixes,
    which nobody knows before they are asked: what a prefix covers is never encoded.
    """

    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        encoder_cache: EncoderCache,
        counters: Counters,
        *,
        ahead_of_admission: bool,
    ) -> None:
        self._roster = roster
        self._admission = admission
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
        if sequence.state is State.WAITING:
            return self._admission.num_cached(sequence)
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
