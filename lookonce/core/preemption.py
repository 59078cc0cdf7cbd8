"""Finds KV blocks for sequences that grow, giving up the latest arrivals if it must."""

from __future__ import annotations

from collections.abc import Callable

from lookonce.core.block_pool import BlockPool
from lookonce.core.request import Sequence, SequenceState
from lookonce.core.scheduler_state import Counters, RequestQueues, SchedulerState
from lookonce.errors import SessionEvictedError
from lookonce.types.ports import Clock


class Preemption:
    """Preempts by recompute: the victim waits again, at its place of arrival.

    A live session cannot be computed again: it is the last victim, and ends. An irreplaceable
    request has all its blocks from the start, so it need be nobody's victim.
    """

    def __init__(
        self, pool: BlockPool, roster: RequestQueues, lifecycle: SchedulerState, counters: Counters
    ) -> None:
        self._pool = pool
        self._roster = roster
        self._lifecycle = lifecycle
        self._counters = counters

    def make_room(self, decodes: list[Sequence]) -> None:
        """One more block for each decode whose last block is full.

        Afterwards every sequence still in the lane of decodes can compute its next token.
        """
        block_size = self._pool.block_size
        for sequence in decodes:
            if sequence.num_computed == len(sequence.block_ids) * block_size:
                self._grow(sequence)

    def _grow(self, sequence: Sequence) -> None:
        while sequence.state is SequenceState.DECODING:
            blocks = self._pool.try_allocate(1)
            if blocks is not None:
                sequence.block_ids += blocks
                return
            self._give_up(self._choose_victim())

    def complete_blocks(self, sequence: Sequence) -> None:
        """All blocks for the tokens of a live session that was extended, or its end."""
        missing = self._pool.blocks_for(len(sequence.tokens)) - len(sequence.block_ids)
        while missing > 0 and sequence.state is SequenceState.PREFILLING:
            blocks = self._pool.try_allocate(missing)
            if blocks is not None:
                sequence.block_ids += blocks
                return
            self._give_up(self._choose_victim())

    def _give_up(self, victim: Sequence) -> None:
        if victim.request.session is None:
            self._counters.num_preemptions += 1
            self._lifecycle.preempt(victim)
        else:
            error = SessionEvictedError("the KV cache has no room for this session any more")
            self._lifecycle.end(victim.request, "error", error)

    def _choose_victim(self) -> Sequence:
        """The latest arrival of those that can best be computed again."""
        victims = self._latest_first()
        if not victims:
            raise RuntimeError("KV blocks are short but no sequence holds any")
        return min(victims, key=_loss)

    def _latest_first(self) -> list[Sequence]:
        active = [*self._roster.prefilling, *self._roster.decoding, *self._roster.idle]
        victims = (sequence for sequence in active if not sequence.request.irreplaceable)
        return sorted(victims, key=lambda sequence: sequence.order, reverse=True)


def _loss(sequence: Sequence) -> int:
    """What giving a sequence up costs: computing, asking for items as well, or the session."""
    if sequence.request.session is not None:
        return 2
    return 0 if sequence.request.self_sufficient else 1


IDLE_SECONDS = 30.0
"""For so long a session may be idle though another request waits for its place."""


class SessionEviction:
    """Ends sessions that were idle for `IDLE_SECONDS`, for a request that waits."""

    def __init__(
        self, pool: BlockPool, roster: RequestQueues, lifecycle: SchedulerState, clock: Clock
    ) -> None:
        self._pool = pool
        self._roster = roster
        self._lifecycle = lifecycle
        self._clock = clock
        self.next_look: float | None = None
        """When another session will have been idle for so long; None where nobody waits for it."""

    @property
    def seconds_to_next_eviction(self) -> float | None:
        return None if self.next_look is None else max(0.0, self.next_look - self._clock())

    def make_way(self, waiting: Sequence, blocks_wanted: Callable[[Sequence], int]) -> bool:
        """End the session idle the longest, if that may admit `waiting`; whether it did."""
        idle = self._roster.idle
        if not idle:
            return False
        begun = self._clock() - IDLE_SECONDS
        long_idle = [sequence for sequence in idle if sequence.idle_since <= begun]
        if long_idle and self._are_enough(long_idle, blocks_wanted(waiting)):
            self._end(min(long_idle, key=_idle_since))
            return True
        others = (sequence.idle_since for sequence in idle if sequence.idle_since > begun)
        self.next_look = min((since + IDLE_SECONDS for since in others), default=None)
        return False

    def _are_enough(self, long_idle: list[Sequence], blocks_wanted: int) -> bool:
        """No session ends in vain: what those that may end have is enough.

        Their blocks are counted as if they shared none: that takes no walk over them.
        """
        blocks = self._pool.num_free + sum(len(sequence.block_ids) for sequence in long_idle)
        return blocks >= blocks_wanted + self._roster.num_active - len(long_idle)

    def _end(self, sequence: Sequence) -> None:
        error = SessionEvictedError(
            f"the session was idle for {IDLE_SECONDS:g} seconds and another request needs its place"
        )
        self._lifecycle.end(sequence.request, "error", error)


def _idle_since(sequence: Sequence) -> float:
    return sequence.idle_since
