"""Who may begin to compute now: prefix hits found, items asked for, blocks taken."""

from __future__ import annotations

from lookonce.core.block_pool import BlockPool
from lookonce.core.counters import Counters
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.kv_connector_state import ExternalPrefixes, Prospect
from lookonce.core.lifecycle import Lifecycle
from lookonce.core.request import HASHED_AHEAD, Request, Sequence
from lookonce.core.request_queues import Roster
from lookonce.types.kv import ExternalFacts


class Admission:
    """Admits waiting sequences in order of arrival, with all blocks their tokens need."""

    def __init__(
        self,
        pool: BlockPool,
        encoder_cache: EncoderCache,
        roster: Roster,
        lifecycle: Lifecycle,
        counters: Counters,
        *,
        prefix_caching: bool,
        external: ExternalPrefixes | None = None,
    ) -> None:
        self._pool = pool
        self._encoder_cache = encoder_cache
        self._roster = roster
        self._lifecycle = lifecycle
        self._counters = counters
        self._prefix_caching = prefix_caching
        self._external = external

    def try_admit(self, sequence: Sequence) -> bool:
        """True when the sequence left the waiting lane: admitted, or aside until somebody answers.

        The blocks of all known tokens are taken at once, so that a prefill never stops half way;
        one more per running sequence stays free, so that its decodes do not undo the admission.
        An irreplaceable request takes those of its whole answer, and is never preempted; where
        there are not so many, it does not wait for them but asks for its items.
        """
        headroom = self._roster.num_active
        if not self._worth_trying(sequence, headroom):
            return False
        cached = self._cached_blocks(sequence)
        prospect = self._external_prospect(sequence, cached, headroom)
        if prospect is Prospect.ASIDE:
            return True
        needed = self.needed_keys(sequence, len(cached) * self._pool.block_size)
        if needed:
            self._lifecycle.set_aside(sequence, needed)
            return True
        fresh = self._blocks_for(sequence) - len(cached)
        blocks = None
        if prospect is not Prospect.NO_ROOM:
            blocks = self._pool.try_allocate(fresh, cached, reserve=headroom)
        if blocks is None and sequence.request.irreplaceable:
            self._lifecycle.set_aside(sequence, tuple(sequence.request.missing))
            return True
        if blocks is None:
            self._remember_failure(sequence, cached, fresh)
            return False
        external = self._external_facts(sequence.request, cached)
        first = not sequence.request.facts.admitted
        self._lifecycle.admit(sequence, blocks, len(cached), external)
        if first:
            self._count_prefix(sequence.request)
        return True

    def needed_keys(self, sequence: Sequence, computed: int) -> tuple[bytes, ...]:
        """Missing items without which the positions from `computed` on cannot be computed.

        Where the device or the host has the output, the item may not be needed; should the output
        leave before its chunk, it is asked for then.
        """
        request = sequence.request
        if not request.missing:
            return ()
        if request.irreplaceable and len(request.sequences) > 1:  # its samples may begin apart
            return tuple(request.missing)
        features = request.features
        anew = self._recomputed_by_siblings(request)
        end = max(request.num_prompt_tokens, computed + 1)  # what is generated may read an input
        window = features.overlapping(min(computed, anew), end)
        again = features.overlapping(anew, request.num_prompt_tokens)
        needed = {
            features[i].key: None
            for i in window
            if features[i].key in request.missing
            and (i in again or not self._encoder_cache.has_anywhere(features[i].key))
        }
        return tuple(needed)

    def num_cached(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that a prefix hit covers; asks on from what it found last.

        So it costs the same in every step that a sequence waits, whatever its length.
        """
        block_size, found = self._pool.block_size, sequence.num_matched
        limit = self._reusable(sequence)
        while found < limit:
            if found == len(sequence.chain):
                sequence.extend_chain(block_size, min(limit, found + HASHED_AHEAD))
            if not self._pool.holds(sequence.chain[found]):
                break
            found += 1
        sequence.num_matched = found
        return found * block_size

    def blocks_wanted(self, sequence: Sequence) -> int:
        """Free blocks that a waiting sequence is admitted with, as far as is known.

        A walk over its prompt only where nobody has tried to admit it.
        """
        if not sequence.admissible_with:
            cached = self._cached_blocks(sequence)
            self._remember_failure(sequence, cached, self._blocks_for(sequence) - len(cached))
        return sequence.admissible_with

    def _blocks_for(self, sequence: Sequence) -> int:
        """The last token of an answer is never computed."""
        num_tokens = len(sequence.tokens)
        if sequence.request.irreplaceable:
            num_tokens = max(num_tokens, sequence.token_limit - 1)
        return self._pool.blocks_for(num_tokens)

    def _recomputed_by_siblings(self, request: Request) -> int:
        """Position from which each further sample computes the prompt again for itself."""
        if len(request.sequences) == 1:
            return request.num_prompt_tokens
        return self._max_cached(request.num_prompt_tokens) * self._pool.block_size

    def _max_cached(self, num_tokens: int) -> int:
        """Blocks a prefix hit may cover: at least one token is computed."""
        return (num_tokens - 1) // self._pool.block_size if self._prefix_caching else 0

    def _reusable(self, sequence: Sequence) -> int:
        """Blocks a prefix hit may cover for this sequence: log-probabilities of its prompt, where
        they are asked for, come of computing it."""
        limit = self._max_cached(len(sequence.tokens))
        scored = sequence.request.prompt_logprobs
        if scored is None or sequence.index:
            return limit
        return min(limit, len(scored) // self._pool.block_size)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        if not self._prefix_caching:
            return []
        limit = self._reusable(sequence)
        return self._pool.match(sequence.hashes(self._pool.block_size, limit))

    def _worth_trying(self, sequence: Sequence, headroom: int) -> bool:
        """Keeps the cost of a blocked queue constant: no walk over the prompt in every step."""
        if self._pool.num_free >= sequence.admissible_with + headroom:
            return True
        return sequence.next_hash is not None and self._pool.holds(sequence.next_hash)

    def _remember_failure(self, sequence: Sequence, cached: list[int], fresh: int) -> None:
        sequence.admissible_with = fresh + self._pool.count_free(cached)
        limit = min(len(sequence.chain), self._reusable(sequence))
        sequence.next_hash = sequence.chain[len(cached)] if len(cached) < limit else None

    def _external_prospect(self, sequence: Sequence, cached: list[int], headroom: int) -> Prospect:
        tiers = self._tiers_for(sequence.request)
        return Prospect.NONE if tiers is None else tiers.consider(sequence, cached, headroom)

    def _external_facts(self, request: Request, cached: list[int]) -> ExternalFacts | None:
        tiers = self._tiers_for(request)
        return None if tiers is None else tiers.admitted(request, cached)

    def _tiers_for(self, request: Request) -> ExternalPrefixes | None:
        """They are asked before a request's first admission only, which is what the receipt tells;
        and not for a prompt that is scored, since all of it is computed."""
        asked = not request.facts.admitted and request.prompt_logprobs is None
        return self._external if asked else None

    def _count_prefix(self, request: Request) -> None:
        """Counts a request once, at its first admission, so that totals equal the receipts."""
        self._counters.prompt_tokens += request.num_prompt_tokens
        if self._prefix_caching and request.prompt_logprobs is None:
            self._counters.prefix_cache_queries += request.num_prompt_tokens
            self._counters.prefix_cache_hits += request.facts.prefix_cached_tokens or 0
