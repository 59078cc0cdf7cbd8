"""Finds KV blocks for sequences that decode, giving up the latest arrivals if it must."""

from __future__ import annotations

from lookonce.core.blocks import BlockPool
from lookonce.core.counters import Counters
from lookonce.core.lifecycle import Lifecycle
from lookonce.core.request import Sequence, State
from lookonce.core.roster import Roster


class Preemption:
    """Preempts by recompute: the victim waits again, at its place of arrival."""

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
            self._counters.num_preemptions += 1
            self._lifecycle.preempt(self._choose_victim())

    def _choose_victim(self) -> Sequence:
        """The latest arrival that can recompute by itself; failing that, the latest arrival."""
        last_resort: Sequence | None = None
        for sequence in self._latest_first():
            if sequence.request.self_sufficient:
                return sequence
            last_resort = last_resort or sequence
        if last_resort is None:
            raise RuntimeError("KV blocks are short but no sequence holds any")
        return last_resort

    def _latest_first(self) -> list[Sequence]:
        active = [*self._roster.prefilling, *self._roster.decoding]
        return sorted(active, key=lambda sequence: sequence.order, reverse=True)
