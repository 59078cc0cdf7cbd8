"""Which sequences give up their KV blocks: preempted ones, and idle live sessions.

Preemption is by recompute: the victim waits again, at its place of arrival. It happens where KV
blocks are short, and where one tenant has all places, or all blocks, while another one waits. A
live session cannot be computed again, since its items are dropped once they are computed: it is the
last victim, and ends. A request that is `non_preemptible` gets all its blocks when it is admitted,
so it is never a victim and never needs one.

Where several tenants have sequences, the one that holds most blocks for its weight gives some up,
but not its earliest sequence: that one always goes on, so every request finishes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

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
        if self._is_one_tenant:
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

    def make_room(self, blocks_wanted: Callable[[Sequence], int]) -> Sequence | None:
        """Where a sequence waits for KV blocks: preempt such of tenants that hold more of them for
        their weight than its own tenant would with it; if what they give back is enough.

        Returns the sequence whose blocks they are, also where enough are free but one of those
        tenants waits for more of them, and would be asked first. Afterwards each of those tenants
        still holds as much as that one, so no two take blocks from each other in turn.
        """
        queues, pool = self._state.queues, self._state.block_pool
        if self._is_one_tenant:
            return None
        # A tenant's prompts keep their order. The first attempt of one that is `non_preemptible`
        # decides whether it stays so.
        busy = {_tenant(s) for s in queues.prefilling if not s.is_planned}
        waiting = [
            s
            for s in queues.first_waiting_by_tenant()
            if _tenant(s) not in busy and (s.admissible_with or not s.request.non_preemptible)
        ]
        if not waiting:
            return None
        held = self._held_blocks()
        needy = min(waiting, key=lambda s: held[_tenant(s)] / s.request.weight)
        wanted = blocks_wanted(needy)
        lacking = wanted + queues.num_active - pool.num_free
        used = (held[_tenant(needy)] + wanted) / needy.request.weight
        if lacking <= 0:
            blocked = any(
                s.admissible_with  # its admission has failed
                and s.admissible_with + queues.num_active > pool.num_free
                and held[_tenant(s)] / s.request.weight >= used
                for s in waiting
            )
            return needy if blocked else None
        victims = self._victims_for(lacking, used, _tenant(needy), held)
        for victim in victims:
            self._preempt(victim)
        return needy if victims else None

    @property
    def _is_one_tenant(self) -> bool:
        """Whether what waits is of the tenant that has everything else."""
        queues = self._state.queues
        waiting = queues.waiting.first
        alone = waiting is None or queues.active_of.keys() <= {_tenant(waiting)}
        return alone and not queues.turns.several

    def _victims_for(
        self, lacking: int, used: float, needy: str, held: Counter[str]
    ) -> list[Sequence]:
        """Sequences of other tenants that give back `lacking` blocks, the latest of the tenant that
        holds most first; each tenant keeps `used` blocks for its weight. Empty if too few.

        `held` is changed. Blocks that are shared are not counted: others may go on using them.
        """
        latest_first, pool = self._latest_first(), self._state.block_pool
        kept = _earliest(latest_first)
        candidates = [
            s
            for s in latest_first
            if s not in kept and s.request.session is None and _tenant(s) != needy
        ]

        def kept_without(victim: Sequence) -> float:
            return (held[_tenant(victim)] - len(victim.block_ids)) / victim.request.weight

        victims: list[Sequence] = []
        while lacking > 0:
            able = [victim for victim in candidates if kept_without(victim) >= used]
            if not able:
                return []
            victim = max(able, key=lambda victim: held[_tenant(victim)] / victim.request.weight)
            victims.append(victim)
            candidates.remove(victim)
            held[_tenant(victim)] -= len(victim.block_ids)
            lacking -= sum(not pool.is_shared(block) for block in victim.block_ids) + 1
        return victims

    def _held_blocks(self) -> Counter[str]:
        """Tenant → blocks of its sequences; those that they share count for each."""
        held: Counter[str] = Counter()
        for sequence in self._state.queues.active():
            held[_tenant(sequence)] += len(sequence.block_ids)
        return held

    def _preempt(self, victim: Sequence) -> None:
        if victim.request.session is None:
            self._state.counters.num_preemptions += 1
            self._state.preempt(victim)
        else:
            error = SessionEvictedError("the KV cache has no room for this session any more")
            self._state.end(victim.request, "error", error)

    def _choose_victim(self) -> Sequence:
        """The latest arrival among those that lose least; of several tenants one of that which
        holds most blocks for its weight, but for its earliest."""
        victims = self._latest_first()
        if not victims:
            raise RuntimeError("KV blocks are short but no sequence holds any")
        if len(self._state.queues.active_of) == 1:
            return min(victims, key=_loss)
        held, kept = self._held_blocks(), _earliest(victims)

        def order(victim: Sequence) -> tuple[bool, bool, float, int]:
            used = held[_tenant(victim)] / victim.request.weight
            is_kept, loss = victim in kept, _loss(victim)
            return loss == 2, is_kept, 0.0 if is_kept else -used, loss

        return min(victims, key=order)

    def _latest_first(self) -> list[Sequence]:
        active = self._state.queues.active()
        victims = (sequence for sequence in active if not sequence.request.non_preemptible)
        return sorted(victims, key=lambda sequence: sequence.order, reverse=True)


def _tenant(sequence: Sequence) -> str:
    return sequence.request.tenant


def _earliest(latest_first: Iterable[Sequence]) -> frozenset[Sequence]:
    """Of each tenant the sequence that arrived first, but for sessions."""
    last = {_tenant(s): s for s in latest_first if s.request.session is None}
    return frozenset(last.values())


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
