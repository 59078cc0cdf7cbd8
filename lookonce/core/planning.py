"""One planning pass: what the next step computes, within its budgets."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.encoder_scheduling import EncoderPrefetcher, EncoderScheduler, Shortage, StepPass
from lookonce.core.kv_connector_state import KVConnectorState, LoadDecision
from lookonce.core.mm_features import MultiModalFeatures
from lookonce.core.preemption import Preemption, SessionEviction
from lookonce.core.request import HASHED_AHEAD, Request, Sequence, SequenceState
from lookonce.core.scheduler_state import Counters, RequestQueues, SchedulerState
from lookonce.types.kv import ExternalFacts
from lookonce.types.media import Modality
from lookonce.types.step import NewSequence, ScheduledSequence


class Planner:
    """First every sequence that decodes, then running prompts in chunks, then waiting sequences.

    Each in order of arrival, but for those whose turn it is since they got nothing (`turns`).
    Everything eventually finishes: a decode gets its block by preempting later arrivals, a prompt
    has all its blocks from the start, nobody is admitted who could take the tokens or the room
    that a running prompt waits for, and idle sessions make way for those who wait (`idleness`).
    """

    def __init__(
        self,
        roster: RequestQueues,
        lifecycle: SchedulerState,
        admission: Admission,
        preemption: Preemption,
        chunker: Chunker,
        prefetcher: EncoderPrefetcher | None,
        idle_sessions: SessionEviction,
        *,
        max_num_seqs: int,
        max_tokens: int,
        max_encoder_rows: int,
    ) -> None:
        self._roster = roster
        self._lifecycle = lifecycle
        self._admission = admission
        self._preemption = preemption
        self._chunker = chunker
        self._prefetcher = prefetcher
        self._idle_sessions = idle_sessions
        self._turns = Fairness(roster)
        self._max_num_seqs = min(max_num_seqs, max_tokens)
        """So that all that decode can do so in one step."""
        self._max_tokens = max_tokens
        self._max_encoder_rows = max_encoder_rows

    def plan(self) -> StepPass:
        step = StepPass(self._max_tokens, self._max_encoder_rows)
        self._idle_sessions.next_look = None
        decodes = self._roster.decoding.head(step.tokens)
        if decodes:
            self._preemption.make_room(decodes)
        first = self._plan_first(step) if self._turns.queue else None
        if decodes:
            self._plan_decodes(decodes, step)
        if self._roster.has_prompts:
            self._plan_prefills(first, step)
            self._plan_admissions(step)
            if self._prefetcher is not None and not step.stalled and step.encoder.left > 0:
                self._prefetcher.plan(step)
        if step.starved or self._turns.queue:
            self._turns.note(step.starved)
        return step

    def _plan_first(self, step: StepPass) -> Sequence | None:
        """Who goes first if it is somebody's turn: served, or with the room kept that it lacks."""
        for sequence in self._turns.due():
            waiting = sequence.state is SequenceState.WAITING
            if waiting and sequence is self._roster.waiting.first:
                self._try_admit(sequence, step)
            elif sequence.state is SequenceState.PREFILLING:
                self._plan_chunk(sequence, step)
            if step.scheduled:
                self._turns.take()
                return sequence
            if step.stalled:
                step.room_kept = True
                return sequence
        return None

    def _plan_decodes(self, decodes: list[Sequence], step: StepPass) -> None:
        """Decodes stand first in the plan, whoever went first in planning."""
        scheduled, decoding = [], SequenceState.DECODING
        for sequence in decodes[: step.tokens]:
            if sequence.state is decoding:
                grown = len(sequence.block_ids) != sequence.num_delivered
                blocks = sequence.deliver_blocks() if grown else ()
                scheduled.append(
                    ScheduledSequence(
                        sequence.seq_id, sequence.num_computed, 1, blocks, (), (), True
                    )
                )
        step.scheduled[:0] = scheduled
        step.tokens -= len(scheduled)

    def _plan_prefills(self, first: Sequence | None, step: StepPass) -> None:
        """All but the one that went first; where room is kept, those first who hold some."""
        prompts = self._roster.prefilling.head(self._max_num_seqs)
        if step.room_kept:
            prompts.sort(key=_holds_nothing)
        for sequence in prompts:
            if sequence is first:
                continue
            if step.tokens > 0:
                self._plan_chunk(sequence, step)
            else:
                step.starved.append(sequence)

    def _plan_admissions(self, step: StepPass) -> None:
        while step.tokens > 0 and not step.stalled:
            sequence = self._roster.waiting.first
            if sequence is None or not self._try_admit(sequence, step):
                return
        step.starved += self._roster.waiting.head(1)

    def _try_admit(self, sequence: Sequence, step: StepPass) -> bool:
        """Whether it left the waiting lane, idle sessions making way for it where they must.

        What it can compute now is planned.
        """
        roster = self._roster
        while roster.num_active >= self._max_num_seqs or not self._admission.try_admit(sequence):
            if not self._idle_sessions.make_way(sequence, self._admission.blocks_wanted):
                return False
        if sequence.state is SequenceState.PREFILLING:
            self._lifecycle.accept_once_covered(sequence)
            self._plan_chunk(sequence, step)
        return True

    def _plan_chunk(self, sequence: Sequence, step: StepPass) -> None:
        shortage = self._chunker.plan(sequence, step)
        if shortage is Shortage.ITEM:
            needed = self._admission.needed_keys(sequence, sequence.num_computed)
            self._lifecycle.wait_for_items(sequence, needed)
        elif shortage is not None:
            step.starved.append(sequence)
            step.stalled |= shortage is not Shortage.ENCODER_BUDGET


def _holds_nothing(sequence: Sequence) -> bool:
    return not sequence.held


class Chunker:
    """Plans prefill chunks; holds every encoder output a planned chunk touches."""

    def __init__(self, acquirer: EncoderScheduler, unsplittable: Collection[Modality]) -> None:
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

    def _keep_whole(self, features: MultiModalFeatures, start: int, end: int) -> int:
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
        self, features: MultiModalFeatures, start: int, end: int
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


class Admission:
    """Admits waiting sequences in order of arrival, with all blocks their tokens need."""

    def __init__(
        self,
        pool: BlockPool,
        encoder_cache: EncoderCache,
        roster: RequestQueues,
        lifecycle: SchedulerState,
        counters: Counters,
        *,
        prefix_caching: bool,
        external: KVConnectorState | None = None,
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
        if prospect is LoadDecision.LOADING:
            return True
        needed = self.needed_keys(sequence, len(cached) * self._pool.block_size)
        if needed:
            self._lifecycle.wait_for_items(sequence, needed)
            return True
        fresh = self._blocks_for(sequence) - len(cached)
        blocks = None
        if prospect is not LoadDecision.NO_ROOM:
            blocks = self._pool.try_allocate(fresh, cached, reserve=headroom)
        if blocks is None and sequence.request.irreplaceable:
            self._lifecycle.wait_for_items(sequence, tuple(sequence.request.missing))
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

    def _external_prospect(
        self, sequence: Sequence, cached: list[int], headroom: int
    ) -> LoadDecision:
        tiers = self._tiers_for(sequence.request)
        return LoadDecision.NONE if tiers is None else tiers.consider(sequence, cached, headroom)

    def _external_facts(self, request: Request, cached: list[int]) -> ExternalFacts | None:
        tiers = self._tiers_for(request)
        return None if tiers is None else tiers.admitted(request, cached)

    def _tiers_for(self, request: Request) -> KVConnectorState | None:
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


class Fairness:
    """Who goes first in which step."""

    def __init__(self, roster: RequestQueues) -> None:
        self._roster = roster
        self.queue: dict[Sequence, None] = {}
        """Those who got nothing in the last step, who has for the longest time first."""
        self._taken = False
        """The last step was somebody's turn: this one is in order of arrival."""

    def due(self) -> Iterable[Sequence]:
        """Who may go first in the step that begins, in this order of preference."""
        taken, self._taken = self._taken, False
        return () if taken else tuple(self.queue)

    def take(self) -> None:
        """One of them went first, and got something."""
        self._taken = True

    def note(self, starved: list[Sequence]) -> None:
        """Who got nothing in this step, in order of arrival."""
        first_other = self._first_other()
        queued = {each: None for each in starved if self._may_queue(each, first_other)}
        staying = {sequence: None for sequence in self.queue if sequence in queued}
        self.queue = staying | queued
        self._taken = self._taken and bool(queued)

    def _may_queue(self, sequence: Sequence, first_other: Sequence | None) -> bool:
        if sequence is first_other:
            return True
        return sequence.request.session is not None and sequence.state is SequenceState.PREFILLING

    def _first_other(self) -> Sequence | None:
        """The earliest running prompt that is no session's; else the first that waits."""
        prompts = (s for s in self._roster.prefilling if s.request.session is None)
        return next(prompts, self._roster.waiting.first)
