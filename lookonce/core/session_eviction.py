"""Idle sessions make way: who computes nothing for long does not keep others out for ever.

A session that waits for its client holds a seat and KV blocks. While nobody waits for them it may
do so for hours; a session in use, extended every 80 ms or so, is never idle for long.
"""

from __future__ import annotations

from collections.abc import Callable

from lookonce.core.block_pool import BlockPool
from lookonce.core.lifecycle import Lifecycle
from lookonce.core.request import Sequence
from lookonce.core.request_queues import Roster
from lookonce.errors import SessionEvictedError
from lookonce.types.ports import Clock

IDLE_SECONDS = 30.0
"""For so long a session may be idle though another request waits for its place."""


class IdleSessions:
    """Ends sessions that were idle for `IDLE_SECONDS`, for a request that waits."""

    def __init__(self, pool: BlockPool, roster: Roster, lifecycle: Lifecycle, clock: Clock) -> None:
        self._pool = pool
        self._roster = roster
        self._lifecycle = lifecycle
        self._clock = clock
        self.next_look: float | None = None
        """When another session will have been idle for so long; None where nobody waits for it."""

    @property
    def seconds_to_next_look(self) -> float | None:
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
