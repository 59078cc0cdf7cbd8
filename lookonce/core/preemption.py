"""Which sequences give up their KV blocks: preempted ones, and idle live sessions.

Preemption is by recompute: the victim waits again, at its place of arrival. It happens where KV
blocks are short, and where one tenant has all places while another one waits. A live session cannot
be computed again, since its items are dropped once they are computed: it is the last victim, and
ends. A request that is `non_preemptible` gets all its blocks when it is admitted, so it is never a
victim and never needs one.
"""

from __future__ import annotations

from collections.abc import Callable

from lookonce.core.request import Sequence
from lookonce.core.scheduler_state import SchedulerState
from lookonce.errors import SessionEvictedError

IDLE_SECONDS = 30.0
"""How long a session may be idle while another request waits for its place."""


class Preemption:
    """Frees KV blocks for sequences that must go on."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def grow(self, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence `num_blocks` more blocks, preempting others or itself until it has."""
        state = sequence.state
        while sequence.state is state and not self._state.try_grow(sequence, num_blocks):
            self._preempt(self._choose_victim())

    def make_place(
        self, num_places: int, blocks_wanted: Callable[[Sequence], int]
    ) -> Sequence | None:
        """Where all places are taken: preempt a sequence of a tenant that has more than its share,
        for one that waits and whose tenant has less than half of its own, or none; if the blocks
        that it gives back are enough.

        Returns the sequence whose place it is. No two tenants take a place from each other in turn:
        afterwards the one that lost it still has as many as the other, and more than half of its
        share.
        """
        queues = self._state.queues
        if not queues.waiting:
            return None
        alone = queues.active_of.keys() == {queues.waiting[0].request.tenant}
        if alone and not queues.turns.several:
            return None
        waiting = queues.first_waiting_by_tenant()
        weights = {s.request.tenant: s.request.weight for s in (*waiting, *queues.active())}
        share = {t: num_places * w / sum(weights.values()) for t, w in weights.items()}
        held = queues.active_of
        needy = min(waiting, key=lambda s: held[s.request.tenant] / share[s.request.tenant])
        wanted = held[needy.request.tenant] + 1
        if wanted > max(1, share[needy.request.tenant] / 2):
            return None
        lacking = blocks_wanted(needy) + queues.num_active - 1 - self._state.block_pool.num_free
        victims = [
            sequence
            for sequence in self._latest_first()
            if sequence.request.session is None
            and held[tenant := sequence.request.tenant] > max(share[tenant], wanted)
            and len(sequence.block_ids) >= lacking
        ]
        if not victims:
            return None
        largest = max(held[victim.request.tenant] for victim in victims)
        chosen = (victim for victim in victims if held[victim.request.tenant] == largest)
        self._preempt(min(chosen, key=_loss))
        return needy

    def _preempt(self, victim: Sequence) -> None:
        if victim.request.session is None:
            self._state.counters.num_preemptions += 1
            self._state.preempt(victim)
        else:
            error = SessionEvictedError("the KV cache has no room for this session any more")
            self._state.end(victim.request, "error", error)

    def _choose_victim(self) -> Sequence:
        """The latest arrival among those that lose least."""
        victims = self._latest_first()
        if not victims:
            raise RuntimeError("KV blocks are short but no sequence holds any")
        return min(victims, key=_loss)

    def _latest_first(self) -> list[Sequence]:
        active = self._state.queues.active()
        victims = (sequence for sequence in active if not sequence.request.non_preemptible)
        return sorted(victims, key=lambda sequence: sequence.order, reverse=True)


def _loss(sequence: Sequence) -> int:
    """What preemption costs: 0 computing again, 1 also asking for items again, 2 the session."""
    if sequence.request.session is not None:
        return 2
    return 1 if sequence.request.missing else 0


class SessionEviction:
    """Ends sessions that have been idle for `IDLE_SECONDS` while a request waits for their place.

    A session that waits for its client counts as a running sequence and keeps its KV blocks. It may
    do so for hours while no request waits. A session in use is extended many times a second, and is
    never idle for long.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.next_time: float | None = None
        """Clock time at which another session may be evicted; None while no request waits."""

    def try_evict(self, waiting: Sequence, blocks_wanted: Callable[[Sequence], int]) -> bool:
        """End the session that has been idle the longest, if that may admit `waiting`."""
        idle = self._state.queues.idle
        if not idle:
            return False
        idle_before = self._state.clock() - IDLE_SECONDS
        evictable = [sequence for sequence in idle if sequence.idle_since <= idle_before]
        if evictable and self._are_enough(evictable, blocks_wanted(waiting)):
            self._evict(min(evictable, key=lambda sequence: sequence.idle_since))
            return True
        others = (sequence.idle_since for sequence in idle if sequence.idle_since > idle_before)
        self.next_time = min((since + IDLE_SECONDS for since in others), default=None)
        return False

    def _are_enough(self, evictable: list[Sequence], blocks_wanted: int) -> bool:
        """Whether evicting all of them would admit the waiting sequence: else none is evicted.

        Blocks are counted as if the sessions shared none, which takes no walk over them.
        """
        num_free = self._state.block_pool.num_free
        num_free += sum(len(sequence.block_ids) for sequence in evictable)
        return num_free >= blocks_wanted + self._state.queues.num_active - len(evictable)

    def _evict(self, sequence: Sequence) -> None:
        error = SessionEvictedError(
            f"the session was idle for {IDLE_SECONDS:g} seconds and another request needs its place"
        )
        self._state.end(sequence.request, "error", error)
