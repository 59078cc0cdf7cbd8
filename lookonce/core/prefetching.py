"""Encodes items ahead of the chunk that needs them, in encoder budget that a step has to spare.

    running prompts   items of later chunks, prompt by prompt in order of arrival
    waiting requests  items that no cached prefix covers, in order of arrival

So several pictures share one run of the encoder, and a prompt whose picture comes late finds its
rows ready. What is encoded ahead is held by nobody: it is awaited, leaves only when held outputs
need its room, and is encoded again then. Nobody ever waits for a prefetch, so none can block.
"""

from __future__ import annotations

from lookonce.core.admission import Admission
from lookonce.core.budget import StepPass
from lookonce.core.counters import Counters
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.request import Sequence, State
from lookonce.core.roster import Roster

MAX_SEQUENCES = 16
"""Sequences looked at in one step, of those that run and of those that wait."""
MAX_LOOKED_AT = 64
"""Items of one sequence looked at in one step; the next step goes on from there."""


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
        for sequence in self._roster.prefilling.head(MAX_SEQUENCES):
            if not self._look_ahead(sequence, step):
                return
        if self._ahead_of_admission:
            for sequence in self._roster.waiting.head(MAX_SEQUENCES):
                if not self._look_ahead(sequence, step):
                    return

    def _look_ahead(self, sequence: Sequence, step: StepPass) -> bool:
        """False once the step has nothing to spare any more."""
        features = sequence.request.features
        if sequence.looked_at == len(features):
            return True
        first = max(sequence.looked_at, features.next_index(self._spared(sequence)))
        stop = min(first + MAX_LOOKED_AT, len(features))
        for index in range(first, stop):
            if not self._prefetch(sequence, index, step):
                sequence.looked_at = index
                return False
        sequence.looked_at = stop
        return True

    def _spared(self, sequence: Sequence) -> int:
        """Positions from the start that will not be computed: they are, or the prefix is cached."""
        if sequence.state is State.WAITING:
            return self._admission.num_cached(sequence)
        return sequence.num_computed

    def _prefetch(self, sequence: Sequence, index: int, step: StepPass) -> bool:
        """False when what the item needs is not to spare; one that needs nothing is passed by."""
        request, cache = sequence.request, self._encoder_cache
        feature = request.features[index]
        item = request.items.get(feature.key)
        if item is None or cache.has_anywhere(feature.key):
            return True
        rows = feature.num_embeds
        if not step.encoder.affords(rows) or not cache.try_prefetch(feature.key, rows):
            return False
        sequence.prefetched[index] = feature.key
        self._counters.encoder_prefetches += 1
        step.add_encode(feature.key, item, rows, request.facts, index)
        return True
