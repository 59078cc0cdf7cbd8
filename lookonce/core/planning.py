"""One planning pass: what the next step computes, within its budgets."""

from __future__ import annotations

from lookonce.core.acquiring import Shortage
from lookonce.core.admission import Admission
from lookonce.core.budget import StepPass
from lookonce.core.chunking import Chunker
from lookonce.core.lifecycle import Lifecycle
from lookonce.core.preemption import Preemption
from lookonce.core.prefetching import Prefetcher
from lookonce.core.request import Sequence, State
from lookonce.core.roster import Roster
from lookonce.types.step import ScheduledSequence


class Planner:
    """First every sequence that decodes, then running prompts in chunks, then waiting sequences.

    Each in order of arrival. Everything eventually finishes: a decode gets its block by preempting
    later arrivals, a prompt has all its blocks from the start, and nobody is admitted who could
    take the tokens or the room that a running prompt waits for.
    """

    def __init__(
        self,
        roster: Roster,
        lifecycle: Lifecycle,
        admission: Admission,
        preemption: Preemption,
        chunker: Chunker,
        prefetcher: Prefetcher | None,
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
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_tokens
        self._max_encoder_rows = max_encoder_rows

    def plan(self) -> StepPass:
        step = StepPass(self._max_tokens, self._max_encoder_rows)
        self._plan_decodes(step)
        if self._roster.has_prompts:
            self._plan_prefills(step)
            self._plan_admissions(step)
            if self._prefetcher is not None and not step.stalled and step.encoder.left > 0:
                self._prefetcher.plan(step)
        return step

    def _plan_decodes(self, step: StepPass) -> None:
        decodes = self._roster.decoding.head(step.tokens)
        self._preemption.make_room(decodes)
        scheduled, decoding = step.scheduled, State.DECODING
        for sequence in decodes:
            if sequence.state is decoding:
                grown = len(sequence.block_ids) != sequence.num_delivered
                blocks = sequence.deliver_blocks() if grown else ()
                scheduled.append(
                    ScheduledSequence(
                        sequence.seq_id, sequence.num_computed, 1, blocks, (), (), True
                    )
                )
        step.tokens -= len(scheduled)

    def _plan_prefills(self, step: StepPass) -> None:
        for sequence in self._roster.prefilling.head(self._max_num_seqs):
            if step.tokens <= 0:
                return
            self._plan_chunk(sequence, step)

    def _plan_admissions(self, step: StepPass) -> None:
        while step.tokens > 0 and not step.stalled and self._roster.num_active < self._max_num_seqs:
            sequence = self._roster.waiting.first
            if sequence is None or not self._admission.try_admit(sequence):
                return
            if sequence.state is State.PREFILLING:
                self._lifecycle.accept_once_covered(sequence)
                self._plan_chunk(sequence, step)

    def _plan_chunk(self, sequence: Sequence, step: StepPass) -> None:
        shortage = self._chunker.plan(sequence, step)
        if shortage is Shortage.ITEM:
            needed = self._admission.needed_keys(sequence, sequence.num_computed)
            self._lifecycle.set_aside(sequence, needed)
        elif shortage is Shortage.TOKENS or shortage is Shortage.ROOM:
            step.stalled = True
