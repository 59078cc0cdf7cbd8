"""One planning pass: what the next step computes, within its budgets.

Every sequence that decodes comes first, then running prompts in chunks, then waiting sequences that
are admitted; each group in order of arrival, except that a sequence which got nothing may go first
in the next step (`Fairness`). Where prompts of several tenants wait, tenants take turns, and each
one's prompts are planned in that order (`TenantPass`); one that decodes many sequences beside
another tenant decodes some of them in a step (`DecodeShares`).

Every request finishes: a decode gets its block by preempting later arrivals; a prompt gets all its
blocks when it is admitted; no sequence is admitted that could take tokens or room that a running
prompt waits for; and idle sessions are evicted for requests that wait (`preemption`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

import msgspec

from lookonce.config import SchedulerConfig
from lookonce.core.decode_shares import DecodeShares
from lookonce.core.encoder_connector_state import EncoderConnectorState
from lookonce.core.encoder_scheduling import (
    EncodedRows,
    EncodeOwners,
    EncoderBudget,
    EncoderPrefetcher,
    EncoderScheduler,
    Shortage,
    StepPass,
)
from lookonce.core.kv_connector_state import KVConnectorState, LoadDecision
from lookonce.core.mm_features import MultiModalFeatures
from lookonce.core.preemption import Preemption, SessionEviction
from lookonce.core.request import Request, Sequence, SequenceState
from lookonce.core.scheduler_state import SchedulerState
from lookonce.core.state_snapshots import SnapshotPlanner
from lookonce.types.kv import ExternalCacheStats
from lookonce.types.media import Array, Modality
from lookonce.types.model import ModelInfo
from lookonce.types.step import NewSequence, ScheduledSequence, StepPlan


class Planner:
    """Makes the plan of each step."""

    def __init__(
        self,
        state: SchedulerState,
        model: ModelInfo,
        config: SchedulerConfig,
        preemption: Preemption,
        kv_connector: KVConnectorState | None,
        encoder_connector: EncoderConnectorState | None = None,
    ) -> None:
        self._state = state
        self._queues = state.queues
        self._preemption = preemption
        self._fairness = Fairness(state)
        self._admission = Admission(state, kv_connector, encoder_connector)
        self._chunker = Chunker(
            EncoderScheduler(state, model.unsplittable, encoder_connector),
            model.unsplittable,
            whole_prompts=model.encoder_only,
            snapshots=state.snapshot_planner,
        )
        self._prefetcher = (
            EncoderPrefetcher(
                state,
                ahead_of_admission=kv_connector is None and encoder_connector is None,
                connector=encoder_connector,
            )
            if config.encoder_prefetch
            else None
        )
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        """At most as many as a step has tokens, so that all of them can decode in one step."""
        self._max_tokens = config.max_num_batched_tokens
        self.encoded_rows = EncodedRows(config.max_encoder_tokens)
        self.step_id = 0
        """Of the last plan; counts them."""
        self._was_stalled = False
        """In the last step a running prompt waited for tokens or room."""
        self.session_eviction = SessionEviction(state)
        self.decode_shares = DecodeShares(
            state,
            cuts_prompts=not (
                model.unsplittable or model.encoder_only or model.longest_bidirectional_prompt
            ),
        )
        self._encoder_connector = encoder_connector
        self._notes: dict[int, PlanNotes] = {}
        """Of the steps under way."""

    @property
    def max_decodes(self) -> int:
        """Most sequences that decode in one step."""
        return self._max_tokens

    @property
    def has_starved(self) -> bool:
        """Whether a sequence may go first in the next step, as it got nothing in the last one."""
        return bool(self._fairness.starved)

    def plan(self) -> StepPlan | None:
        """The next step, or None with nothing to compute and nothing to tell the runner.

        A sequence whose token a step under way samples is planned with that token's place; not
        where the token ends the sequence whatever it is, or its request `lands_each_step`.
        """
        step = self._plan_pass()
        if self._state.has_runner_updates:
            return self._plan_with_updates(step)
        if not (step.scheduled or step.encode):
            return None
        self.step_id += 1
        self._note(step)
        return StepPlan(
            self.step_id,
            received=tuple(step.received),
            new=tuple(step.new),
            encode=tuple(step.encode),
            scheduled=tuple(step.scheduled),
        )

    def _plan_with_updates(self, step: StepPass) -> StepPlan:
        """A plan that also names what the runner must forget, move or extend."""
        self.step_id += 1
        self._note(step)
        extended, finished = self._state.take_extensions(), self._state.take_finished()
        moves = self._state.encoder_cache.take_moves()
        return StepPlan(
            self.step_id,
            finished=finished,
            dropped_host=moves.dropped,
            offload=moves.offload,
            dropped_outputs=self._state.encoder_cache.take_dropped(),
            restore=moves.restore,
            received=tuple(step.received),
            new=tuple(step.new),
            extended=extended,
            encode=tuple(step.encode),
            scheduled=tuple(step.scheduled),
        )

    def _note(self, step: StepPass) -> None:
        """Remember what its update needs, since the next plan may be made before that."""
        shares, connector = self.decode_shares, self._encoder_connector
        if not (step.new or step.encode or shares.measures):
            self._notes[self.step_id] = NO_NOTES
            return
        self._notes[self.step_id] = PlanNotes(
            shares.planned_at,
            shares.measures,
            step.encode_owners,
            self._state.clock() if step.encode else 0.0,
            step.encoder.spent,
            [] if connector is None else connector.take_encoding(),
        )

    @property
    def is_ahead(self) -> bool:
        """Whether a plan was made whose result is not there."""
        return bool(self._notes)

    def take_notes(self, plan: StepPlan) -> PlanNotes:
        """What was noted when this plan was made; its result is there."""
        return self._notes.pop(plan.step_id)

    def _plan_pass(self) -> StepPass:
        fairness, shares = self._fairness, self.decode_shares
        self.session_eviction.next_time = None
        ended = self._ended_prompts()
        decodes = shares.choose(self._decodes(ended))
        tokens = self._max_tokens
        if (most := shares.prompt_tokens) is not None:
            tokens = min(tokens, len(decodes) + most)
        step = StepPass(self.step_id + 1, tokens, self._encoder_budget())
        if decodes:
            self._grow_decodes(decodes)
        first = self._plan_first(step) if fairness.starved else None
        needy = None
        if first is None and self._queues.waiting:
            needy = self._make_way()
        if shares.set_aside:
            shares.drop_preempted()
        num_decodes = self._plan_decodes(decodes, step) if decodes else 0
        if shares.behind and not (step.scheduled or shares.set_aside):
            shares.note_no_decodes()
        if needy is not None and step.tokens > 0 and self._try_admit(needy, step):
            first = needy
        if self._queues.has_prompts:
            if self._queues.turns.several:
                self._plan_by_tenant(first, step)
            else:
                if shares.behind:
                    shares.let_more_compute()  # there is nobody else's prompt
                self._plan_prefills(first, step)
                self._plan_admissions(step)
            self._was_stalled = step.stalled
            if self._prefetcher is not None and not step.stalled and step.encoder.most > 0:
                self._prefetcher.plan(step)
        if shares.set_aside:
            self._plan_set_aside(step, step.scheduled[num_decodes:])
        if step.starved or fairness.starved:
            fairness.note_starved(step.starved, ended)
        return step

    def _encoder_budget(self) -> EncoderBudget:
        """All that the configuration allows, but beside others no more than is worth it."""
        rows, queues = self.encoded_rows, self._queues
        alone = queues.num_computing + len(queues.waiting) == 1
        return EncoderBudget(rows.most, rows.most if alone else rows.worth)

    def _ended_prompts(self) -> list[Sequence]:
        """Sequences whose prompt ends in the step under way."""
        if not self._notes:  # no step is under way
            return []
        return [s for s in self._queues.prefilling if s.is_planned]

    def _decodes(self, ended: list[Sequence]) -> list[Sequence]:
        """Sequences of which the next step may compute one token, known or being sampled."""
        if not self._notes:
            return self._queues.decoding.head(self._max_tokens)
        begun = [s for s in ended if _samples(s)]
        ready = [s for s in (*self._queues.decoding, *begun) if s.num_planned + 1 < s.token_limit]
        return ready[: self._max_tokens]

    def _make_way(self) -> Sequence | None:
        """The waiting sequence for which others were preempted, if any."""
        wanted = self._admission.blocks_wanted
        if self._queues.num_active >= self._max_num_seqs:
            return self._preemption.make_place(self._max_num_seqs, wanted)
        return self._preemption.make_room(wanted)

    def _grow_decodes(self, decodes: list[Sequence]) -> None:
        """One more block for each decode whose last block is full.

        Afterwards every sequence that still decodes can compute its next token.
        """
        for sequence in decodes:
            # one without blocks was preempted for one before it
            if sequence.block_ids and not self._try_grow_decode(sequence):
                self._preemption.grow(sequence, 1)

    def _try_grow_decode(self, sequence: Sequence) -> bool:
        """Whether its next token has room: in its last block, or in one that is free."""
        is_full = (
            sequence.num_planned == len(sequence.block_ids) * self._state.block_pool.block_size
        )
        return not is_full or self._state.try_grow(sequence, 1)

    def _plan_first(self, step: StepPass) -> Sequence | None:
        """Plan for a starved sequence before all others. Returns the one that went first, if any.

        Where it lacks room in the encoder cache, the others may not take any (`room_kept`).
        """
        for sequence in self._fairness.first_candidates():
            if sequence.request.tenant in self.decode_shares.behind:
                continue
            waiting = sequence.state is SequenceState.WAITING
            if waiting and sequence is self._queues.turns.first(self._queues.waiting):
                self._try_admit(sequence, step)
            elif sequence.state is SequenceState.PREFILLING:
                self._plan_chunk(sequence, step)
            if step.scheduled:
                self._fairness.note_first()
                return sequence
            if step.stalled:
                step.room_kept = True
                return sequence
        return None

    def _plan_decodes(self, decodes: list[Sequence], step: StepPass) -> int:
        """Decodes are listed first in the plan, also where a starved sequence was planned first.
        Returns how many."""
        scheduled, decoding, prefilling = [], SequenceState.DECODING, SequenceState.PREFILLING
        for sequence in decodes[: step.tokens]:
            if sequence.state is decoding or sequence.state is prefilling:
                grown = len(sequence.block_ids) != sequence.num_delivered
                blocks = sequence.deliver_blocks() if grown else ()
                start = sequence.num_planned
                sequence.num_planned = start + 1
                scheduled.append(ScheduledSequence(sequence.seq_id, start, 1, blocks, (), (), True))
        snapshots = self._state.snapshot_planner
        if snapshots is not None:
            scheduled = [self._with_snapshots(each, snapshots) for each in scheduled]
        step.scheduled[:0] = scheduled
        step.tokens -= len(scheduled)
        return len(scheduled)

    def _plan_set_aside(self, step: StepPass, prompts: list[ScheduledSequence]) -> None:
        """Plan those of the decodes that were set aside which need not wait for these prompts.

        One that needs a block while none is free waits for a later step: its tenant has used more
        than another one, whose sequence it might preempt. Only where the step would compute nothing
        at all it gets the block as any decode does, so that every request finishes.
        """
        sequences, shares = self._queues.sequences, self.decode_shares
        tenants = {sequences[chunk.seq_id].request.tenant for chunk in prompts}
        beside = shares.beside_prompts(tenants)
        decodes = [sequence for sequence in beside if self._try_grow_decode(sequence)]
        if beside and not (decodes or step.scheduled or step.encode or self.is_ahead):
            self._grow_decodes(beside)
            decodes = [sequence for sequence in beside if sequence.block_ids]
        shares.take_turns(decodes)
        num_tokens = sum(chunk.num_tokens for chunk in step.scheduled)
        step.tokens = min(len(decodes), self._max_tokens - num_tokens)
        self._plan_decodes(decodes, step)

    def _with_snapshots(
        self, decode: ScheduledSequence, snapshots: SnapshotPlanner
    ) -> ScheduledSequence:
        taken = snapshots.of_decode(self._queues.sequences[decode.seq_id])
        return msgspec.structs.replace(decode, snapshots=taken) if taken else decode

    def _plan_prefills(self, first: Sequence | None, step: StepPass) -> None:
        """All but the one that went first. Where room is kept, those that hold outputs come first:
        the others could not start an item."""
        prompts = self._queues.prefilling.head(self._max_num_seqs)
        if step.room_kept:
            prompts.sort(key=_holds_nothing)
        for sequence in prompts:
            if sequence is first or sequence.is_planned:
                continue
            if step.tokens > 0 and sequence.request.tenant not in self.decode_shares.behind:
                self._plan_chunk(sequence, step)
            else:
                step.starved.append(sequence)

    def _plan_by_tenant(self, first: Sequence | None, step: StepPass) -> None:
        """Prompts of several tenants, running ones and such that wait, as long as there are tokens.

        Within a tenant running prompts come first. Those that wait are not admitted before the
        running ones of others where one of these lacked room in the last step: they could take it.
        """
        running = self._queues.prefilling.head(self._max_num_seqs)
        if step.room_kept:
            running.sort(key=_holds_nothing)
        tenants = TenantPass(
            [s for s in running if s is not first and not s.is_planned], self._queues.waiting
        )
        num_before = len(step.scheduled)
        while step.tokens > 0:
            admits = not step.stalled and not (self._was_stalled and tenants.running)
            heads = {
                tenant: cost
                for tenant, cost in tenants.heads(step.tokens, admits=admits).items()
                if tenant not in self.decode_shares.behind
            }
            if not heads:
                waited_for = len(step.scheduled) > num_before or (first and step.scheduled)
                if waited_for or not self.decode_shares.let_more_compute():
                    break
                continue
            tenant = self._queues.turns.choose(heads)
            sequence = tenants.take(tenant)
            if sequence.state is SequenceState.PREFILLING:
                self._plan_chunk(sequence, step)
            elif not self._try_admit(sequence, step):
                tenants.stop_admitting()
        step.starved += tenants.running
        waiting = self._queues.turns.first(self._queues.waiting)
        if waiting is not None:
            step.starved.append(waiting)

    def _plan_admissions(self, step: StepPass) -> None:
        while step.tokens > 0 and not step.stalled:
            sequence = self._queues.waiting.first
            if sequence is None or sequence.request.tenant in self.decode_shares.behind:
                return
            if not self._try_admit(sequence, step):
                return
        step.starved += self._queues.waiting.head(1)

    def _try_admit(self, sequence: Sequence, step: StepPass) -> bool:
        """Whether the sequence left the waiting queue, if need be by evicting idle sessions.

        Plans what it can compute in this step.
        """
        queues, admission = self._queues, self._admission
        while queues.num_active >= self._max_num_seqs or not admission.try_admit(sequence):
            if not self.session_eviction.try_evict(sequence, admission.blocks_wanted):
                return False
        if sequence.state is SequenceState.PREFILLING:
            self._state.accept_once_covered(sequence)
            self._plan_chunk(sequence, step)
        return True

    def _plan_chunk(self, sequence: Sequence, step: StepPass) -> None:
        shortage = self._chunker.plan(sequence, step)
        if shortage is None:
            self._queues.turns.charge(sequence.request, step.scheduled[-1].num_tokens)
        elif shortage is Shortage.ITEM:
            needed = self._admission.needed_keys(sequence, sequence.num_planned)
            self._state.wait_for_items(sequence, needed)
        else:
            step.starved.append(sequence)
            step.stalled |= shortage is not Shortage.ENCODER_BUDGET


class PlanNotes(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of a plan until its result is there."""

    planned_at: float
    shared: bool
    """It was planned for several tenants (`DecodeShares.measures`)."""
    encode_owners: EncodeOwners
    """The requests that its items are encoded for."""
    encodes_from: float
    """When it was made, if it encodes anything."""
    encoded_rows: int
    """By its encoder runs."""
    encoding: list[tuple[bytes, int]]
    """(key, rows) that it encodes and that external tiers are to keep."""


NO_NOTES = PlanNotes(0.0, False, [], 0.0, 0, [])
"""Of most plans, which only decode."""


def _holds_nothing(sequence: Sequence) -> bool:
    return not sequence.held


class TenantPass:
    """The prompts of one planning pass by tenant: what each would have computed next."""

    def __init__(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Both in the order in which each tenant's are planned."""
        self._running = _by_tenant(running)
        self._waiting = _by_tenant(waiting)

    @property
    def running(self) -> list[Sequence]:
        """Running prompts that have not been taken."""
        return [sequence for sequences in self._running.values() for sequence in sequences]

    def heads(self, num_tokens: int, *, admits: bool) -> dict[str, float]:
        """Tenant → tokens that its next prompt would have computed, `num_tokens` at most."""
        candidates = self._waiting | self._running if admits else self._running
        return {
            tenant: min(num_tokens, len(sequences[0].tokens) - sequences[0].num_planned)
            for tenant, sequences in candidates.items()
        }

    def take(self, tenant: str) -> Sequence:
        """The next prompt of a tenant that `heads` named."""
        queue = self._running if tenant in self._running else self._waiting
        sequence = queue[tenant].popleft()
        if not queue[tenant]:
            del queue[tenant]
        return sequence

    def stop_admitting(self) -> None:
        """None that waits is taken any more."""
        self._waiting.clear()


def _by_tenant(sequences: list[Sequence]) -> dict[str, deque[Sequence]]:
    found: dict[str, deque[Sequence]] = {}
    for sequence in sequences:
        found.setdefault(sequence.request.tenant, deque()).append(sequence)
    return found


class Fairness:
    """Lets sequences that got nothing in a step go first in a later one.

    A live session keeps its place of arrival for hours, and is computed before all later arrivals
    in every step in which it has been extended. It may take what another sequence needs whole: all
    tokens of a step, or all of its encoder budget. So sequences that got nothing queue up here, and
    in at most every second step the first of them that can go is planned before all others, decodes
    too. It then lacks at most room in the encoder cache, which is kept for it
    (`StepPass.room_kept`).

    Beside k sessions a sequence gets something within 2 (k + 1) steps, not counting those in which
    others finish the one item that each of them has begun.

    Live sessions queue up, and of the other sequences only the first, as these keep their order of
    arrival.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._queues = state.queues
        self.starved: dict[Sequence, None] = {}
        """Sequences that got nothing in the last step, the longest waiting first."""
        self._was_used = False
        """A starved sequence went first in the last step, so none does in this one."""

    def first_candidates(self) -> Iterable[Sequence]:
        """The sequences that may go first in the step that begins, in order of preference."""
        was_used, self._was_used = self._was_used, False
        return () if was_used else tuple(self.starved)

    def note_first(self) -> None:
        """A candidate went first, and got something."""
        self._was_used = True

    def note_starved(self, starved: list[Sequence], ended: list[Sequence]) -> None:
        """`starved`: the sequences that got nothing in this step, in order of arrival. `ended`:
        those whose whole prompt was planned before it, though it is not known to be computed."""
        first_other = self._first_other(ended)
        queued = {each: None for each in starved if self._may_queue(each, first_other)}
        staying = {sequence: None for sequence in self.starved if sequence in queued}
        self.starved = staying | queued
        self._was_used = self._was_used and bool(queued)

    def _may_queue(self, sequence: Sequence, first_other: Sequence | None) -> bool:
        if sequence is first_other:
            return True
        is_session = sequence.request.session is not None
        return is_session and sequence.state is SequenceState.PREFILLING

    def _first_other(self, ended: list[Sequence]) -> Sequence | None:
        """The earliest running prompt that is no session's and not `ended`; without one, the first
        that waits. Of several tenants the one whose turn it is."""
        turns = self._queues.turns
        prompts = [
            s for s in self._queues.prefilling if s.request.session is None and s not in ended
        ]
        return turns.first(prompts) or turns.first(self._queues.waiting)


class Admission:
    """Admits waiting sequences in order of arrival, with all blocks that their tokens need."""

    def __init__(
        self,
        state: SchedulerState,
        kv_connector: KVConnectorState | None,
        encoder_connector: EncoderConnectorState | None = None,
    ) -> None:
        self._state = state
        self._pool = state.block_pool
        self._kv_connector = kv_connector
        self._encoder_connector = encoder_connector

    def try_admit(self, sequence: Sequence) -> bool:
        """Whether the sequence left the waiting queue: admitted, or waiting for items or a load.

        The blocks of all known tokens are allocated at once, so that a prefill never stops half
        way. One more per running sequence stays free, so that their decodes do not preempt the
        sequence at once. A `non_preemptible` request gets the blocks of its whole answer; where
        there are not so many, its items are asked for again.
        """
        if self._state.try_finish_known(sequence):
            return True
        headroom = self._state.queues.num_active
        if not self._worth_trying(sequence, headroom):
            return False
        request, cached = sequence.request, self._state.cached_blocks(sequence)
        connector = self._connector_for(request)
        decision = LoadDecision.COMPUTE
        if connector is not None:
            decision = connector.decide(sequence, cached, headroom)
            if decision is LoadDecision.LOADING:
                return True
        num_cached = len(cached) * self._pool.block_size
        outputs = self._encoder_connector
        if (
            outputs is not None
            and decision is LoadDecision.COMPUTE
            and outputs.begin_load(sequence, num_cached)
        ):
            return True
        needed = self.needed_keys(sequence, num_cached)
        if needed:
            self._state.wait_for_items(sequence, needed)
            return True
        num_new = self._blocks_for(sequence) - len(cached)
        blocks = None
        if decision is not LoadDecision.NO_ROOM:
            blocks = self._pool.try_allocate(num_new, cached, reserve=headroom)
        if blocks is None and request.non_preemptible:
            self._state.wait_for_items(sequence, tuple(request.missing))
            return True
        if blocks is None:
            self._remember_failure(sequence, cached, num_new)
            return False
        external = None if connector is None else connector.note_admission(request, cached)
        self._admit(sequence, blocks, len(cached), external)
        return True

    def needed_keys(self, sequence: Sequence, num_computed: int) -> tuple[bytes, ...]:
        """Keys of missing items that the positions from `num_computed` on need.

        Not of those whose output is cached: should it be evicted before its chunk is computed, the
        item is asked for then. Nor of those whose output a tier has given.
        """
        request, outputs = sequence.request, self._encoder_connector
        if not request.missing:
            return ()
        if request.non_preemptible and len(request.sequences) > 1:  # its samples may begin apart
            return tuple(request.missing)
        features = request.features
        siblings_start = self._sibling_start(request)
        end = max(request.num_prompt_tokens, num_computed + 1)  # decodes read encoder inputs too
        window = features.overlapping(min(num_computed, siblings_start), end)
        again = features.overlapping(siblings_start, request.num_prompt_tokens)
        needed = {
            features[i].key: None
            for i in window
            if features[i].key in request.missing
            and (i in again or not self._state.encoder_cache.has_anywhere(features[i].key))
            and (i in again or outputs is None or not outputs.staged(request, features[i].key))
        }
        return tuple(needed)

    def blocks_wanted(self, sequence: Sequence) -> int:
        """Free blocks that a waiting sequence needs for admission, as far as is known.

        Walks over the prompt only if admission has not been tried.
        """
        if not sequence.admissible_with:
            cached = self._state.cached_blocks(sequence)
            self._remember_failure(sequence, cached, self._blocks_for(sequence) - len(cached))
        return sequence.admissible_with

    def _blocks_for(self, sequence: Sequence) -> int:
        num_tokens = len(sequence.tokens)
        if sequence.request.non_preemptible:  # the last token of an answer is never computed
            num_tokens = max(num_tokens, sequence.token_limit - 1)
        return self._pool.blocks_for(num_tokens)

    def _sibling_start(self, request: Request) -> int:
        """Position from which each further sample computes the prompt again for itself."""
        if len(request.sequences) == 1:
            return request.num_prompt_tokens
        num_blocks = self._state.max_cached_blocks(request.num_prompt_tokens)
        return num_blocks * self._pool.block_size

    def _worth_trying(self, sequence: Sequence, headroom: int) -> bool:
        """Whether admission can succeed since it last failed. O(1): a blocked queue does not walk
        over its first prompt in every step."""
        if self._pool.num_free >= sequence.admissible_with + headroom:
            return True
        return sequence.next_hash is not None and self._pool.holds(sequence.next_hash)

    def _remember_failure(self, sequence: Sequence, cached: list[int], num_new: int) -> None:
        sequence.admissible_with = num_new + self._pool.count_free(cached)
        hashes = sequence.block_hashes
        limit = min(len(hashes), self._state.max_reused_blocks(sequence))
        with_states = self._state.snapshots is not None  # the block may be cached without a state
        known = len(cached) < limit and not with_states
        sequence.next_hash = hashes[len(cached)] if known else None

    def _connector_for(self, request: Request) -> KVConnectorState | None:
        """External tiers are asked before a request's first admission only, which is the one that
        its statistics report; and not for a prompt whose log-probabilities are computed."""
        asked = not request.reuse_stats.admitted and request.prompt_logprobs is None
        if request.needs_every_position:
            return None
        if request.frames is not None:
            return None  # a prompt's last tokens may still wait for their frames
        return self._kv_connector if asked else None

    def _admit(
        self,
        sequence: Sequence,
        blocks: list[int],
        num_cached: int,
        external: ExternalCacheStats | None,
    ) -> None:
        """Counts a request once, at its first admission, so that totals equal its statistics."""
        request = sequence.request
        first = not request.reuse_stats.admitted
        self._state.admit(sequence, blocks, num_cached, external)
        if first:
            self._state.count_admission(request, request.reuse_stats.prefix_cached_tokens or 0)


class Chunker:
    """Plans prefill chunks, and holds every encoder output that a planned chunk needs.

        computed │ chunk ....................│ later chunks
        ─────────┼──────[item 3]────[item 4]─┼──[item 5]──
                 start                       end

    The end moves back to the start of the first item whose output cannot be had in this step
    (budget, room, or the item is missing), and to the start of an unsplittable item that it would
    cut.
    """

    def __init__(
        self,
        encoder_scheduler: EncoderScheduler,
        unsplittable: Collection[Modality],
        *,
        whole_prompts: bool = False,
        snapshots: SnapshotPlanner | None = None,
    ) -> None:
        """`whole_prompts`: no prompt is cut at all, nor generated tokens that follow it.
        `snapshots`: of a model with states."""
        self._snapshots = snapshots
        self._encoder_scheduler = encoder_scheduler
        self._unsplittable = frozenset(unsplittable)
        self._whole_prompts = whole_prompts

    def plan(self, sequence: Sequence, step: StepPass) -> Shortage | None:
        """Schedule as much of the sequence as the step affords. Returns what is short if nothing.

        Nothing is held for a sequence that gets nothing.
        """
        start = sequence.num_planned
        end = min(len(sequence.tokens), start + step.tokens)
        least = self._whole_until(sequence) if sequence.request.uncut else start + 1
        if sequence.request.frames is not None:
            end = min(end, sequence.request.frames.total)
        end = self._keep_whole(sequence.request.features, start, end)
        if end < least:
            return Shortage.TOKENS
        end, shortage = self._encoder_scheduler.acquire(sequence, start, end, step)
        if end < least:
            return shortage
        self._schedule(sequence, start, end, step)
        return None

    def _whole_until(self, sequence: Sequence) -> int:
        """The position that the next chunk must reach."""
        if self._whole_prompts:
            return len(sequence.tokens)
        return max(sequence.request.num_prompt_tokens, sequence.num_planned + 1)

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
        snapshots = self._snapshots
        if not sequence.announced:
            snapshot = None if snapshots is None else snapshots.announce(sequence)
            sequence.known_since = step.step_id
            step.new.append(_announce(sequence, snapshot))
        step.scheduled.append(
            ScheduledSequence(
                seq_id=sequence.seq_id,
                start=start,
                num_tokens=end - start,
                new_block_ids=sequence.deliver_blocks(),
                embeds=features.embed_slices(start, end),
                bidirectional=self._bidirectional(sequence.request, start, end),
                sample=end == len(sequence.tokens) and _samples(sequence),
                snapshots=() if snapshots is None else snapshots.of_chunk(sequence, start, end),
            )
        )
        step.tokens -= end - start
        sequence.num_planned = end

    def _bidirectional(self, request: Request, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The position ranges of unsplittable items in the chunk, or of the prompt."""
        if not (self._unsplittable or request.sees_whole_prompt):
            return ()
        if request.sees_whole_prompt:
            length = request.num_prompt_tokens
            return ((0, length),) if start < length else ()
        features = request.features
        touched = (features[index] for index in features.overlapping(start, end))
        return tuple((f.offset, f.end) for f in touched if f.modality in self._unsplittable)


def _samples(sequence: Sequence) -> bool:
    """Whether a token is generated once all known ones are computed."""
    if sequence.request.pooling is not None:
        return False
    session = sequence.request.session
    return session is None or session.answering


def _announce(sequence: Sequence, snapshot: int | None) -> NewSequence:
    """What the runner is told of a sequence that it does not know, and that begins with the state
    of a snapshot."""
    sequence.announced = True
    request = sequence.request
    frames: tuple[Array, ...] = ()
    if request.session is not None and request.frames is not None:
        frames = request.session.take_unsent_frames()
    return NewSequence(
        seq_id=sequence.seq_id,
        token_ids=sequence.tokens.view(),
        num_prompt_tokens=request.num_prompt_tokens,
        features=request.features.as_tuple(),
        sampling=request.sampling,
        sample_index=sequence.index,
        grammar=request.grammar,
        frames=frames,
        snapshot=snapshot,
        adapter=request.adapter,
    )
