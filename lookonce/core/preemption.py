"""Finds KV blocks for sequences that grow, giving up the latest arrivals if it must."""

from __future__ import annotations

from lookonce.core.block_pool import BlockPool
from lookonce.core.counters import Counters
from lookonce.core.lifecycle import Lifecycle
from lookonce.core.request import Sequence, State
from lookonce.core.request_queues import Roster
from lookonce.errors import SessionEvictedError


class Preemption:
    """Preempts by recompute: the victim waits again, at its place of arrival.

    A live session cannot be computed again: it is the last victim, and ends. An irreplaceable
    request has all its blocks from the start, so it need be nobody's victim.
    """

    def __init__(
        self, pool: BlockPool, roster: Roster, lifecycle: Lifecycle, counters: Counters
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
        while sequence.state is State.DECODING:
            blocks = self._pool.try_allocate(1)
            if blocks is not None:
                sequence.block_ids += blocks
                return
            self._give_up(self._choose_victim())

    def complete_blocks(self, sequence: Sequence) -> None:
        """All blocks for the tokens of a live session that was extended, or its end."""
        missing = self._pool.blocks_for(len(sequence.tokens)) - len(sequence.block_ids)
        while missing > 0 and sequence.state is State.PREFILLING:
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
