"""One planning pass: what the next step computes, within its budgets."""

from __future__ import annotations

from lookonce.core.admission import Admission
from lookonce.core.budget import StepPass
from lookonce.core.chunking import Chunker
from lookonce.core.encoder_scheduling import Shortage
from lookonce.core.fairness import Turns
from lookonce.core.lifecycle import Lifecycle
from lookonce.core.preemption import Preemption
from lookonce.core.prefetching import Prefetcher
from lookonce.core.request import Sequence, State
from lookonce.core.request_queues import Roster
from lookonce.core.session_eviction import IdleSessions
from lookonce.types.step import ScheduledSequence


class Planner:
    """First every sequence that decodes, then running prompts in chunks, then waiting sequences.

    Each in order of arrival, but for those whose turn it is since they got nothing (`turns`).
    Everything eventually finishes: a decode gets its block by preempting later arrivals, a prompt
    has all its blocks from the start, nobody is admitted who could take the tokens or the room
    that a running prompt waits for, and idle sessions make way for those who wait (`idleness`).
    """

    def __init__(
        self,
        roster: Roster,
        lifecycle: Lifecycle,
        admission: Admission,
        preemption: Preemption,
        chunker: Chunker,
        prefetcher: Prefetcher | None,
        idle_sessions: IdleSessions,
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
        self._turns = Turns(roster)
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
            waiting = sequence.state is State.WAITING
            if waiting and sequence is self._roster.waiting.first:
                self._try_admit(sequence, step)
            elif sequence.state is State.PREFILLING:
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
        scheduled, decoding = [], State.DECODING
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
        if sequence.state is State.PREFILLING:
            self._lifecycle.accept_once_covered(sequence)
            self._plan_chunk(sequence, step)
        return True

    def _plan_chunk(self, sequence: Sequence, step: StepPass) -> None:
        shortage = self._chunker.plan(sequence, step)
        if shortage is Shortage.ITEM:
            needed = self._admission.needed_keys(sequence, sequence.num_computed)
            self._lifecycle.set_aside(sequence, needed)
        elif shortage is not None:
            step.starved.append(sequence)
            step.stalled |= shortage is not Shortage.ENCODER_BUDGET


def _holds_nothing(sequence: Sequence) -> bool:
    return not sequence.held
