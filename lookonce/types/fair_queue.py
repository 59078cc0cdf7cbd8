"""Tenants that wait take turns by the cost of their jobs: deficit round robin.

Shreedhar and Varghese, "Efficient Fair Queuing using Deficit Round Robin" (SIGCOMM 1995): in every
round each tenant that waits gets a quantum, times its weight, and a tenant whose deficit covers its
next job is served and pays the job's cost. A tenant of large jobs gets as much as one of small
jobs, not more.

    DeficitRoundRobin   whose turn it is; it holds no jobs
    ├── FairQueue       jobs in the order of arrival: grammars, long texts, stored responses
    ├── MediaQueue      (render.media.fair_queue) bounded, passes over long jobs
    ├── LoopTurns       work of milliseconds on an event loop
    └── RequestQueues   (core.scheduler_state) sequences whose prompts are to be computed
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantWeights:
    """How many times another one's share a tenant gets where tenants take turns."""

    def __init__(self) -> None:
        self._weights: Mapping[str, float] = {}
        self._default = 1.0

    def replace(self, weights: Mapping[str, float], default: float) -> None:
        """`default` is that of all others."""
        self._weights, self._default = dict(weights), default

    def of(self, tenant: str) -> float:
        return self._weights.get(tenant, self._default)


@dataclass(slots=True)
class _Account:
    weight: float
    deficit: float = 0.0


class DeficitRoundRobin:
    """The turns of tenants; `quantum` is in units of cost. Not for several threads.

    A tenant that does not wait has no credit, but keeps its debt: it is paid off with the quanta of
    later rounds, as long as others wait.
    """

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._accounts: dict[str, _Account] = {}
        """Tenants that wait, in the order of their turns, and those in debt."""

    def join(self, tenant: str, weight: float = 1.0) -> None:
        """A tenant begins to wait: its turn is the last."""
        account = self._accounts.pop(tenant, None) or _Account(weight)
        account.weight = weight
        self._accounts[tenant] = account

    def reweigh(self, tenant: str, weight: float) -> None:
        """Of a tenant that waits."""
        self._accounts[tenant].weight = weight

    def leave(self, tenant: str) -> None:
        """A tenant waits no more."""
        account = self._accounts.get(tenant)
        if account is not None and account.deficit >= 0:
            del self._accounts[tenant]

    def choose(self, heads: Mapping[str, float], waiting: Mapping[str, float] | None = None) -> str:
        """The tenant whose turn it is, of those in `heads`: tenant → cost of its next job.

        Passes as many rounds as that tenant needs; it is asked again until it is charged. `waiting`
        has the dearest job of every tenant that waits, if some of them may not be served now: they
        are paid all the same, up to that cost and a quantum.
        """
        rounds, place, chosen = self._turns(heads)[0]
        if rounds:
            self._pass_rounds(rounds, place, heads if waiting is None else waiting)
        return chosen

    def peek(self, heads: Mapping[str, float]) -> str:
        """The tenant that `choose` would choose; no round passes."""
        return self._turns(heads)[0][2]

    def charge(self, tenant: str, cost: float) -> None:
        """Take `cost` from what the tenant may use; a negative cost is given back."""
        if not math.isfinite(cost):
            raise ValueError("a cost must be finite")
        self._accounts.setdefault(tenant, _Account(1.0)).deficit -= cost

    def deficit(self, tenant: str) -> float:
        account = self._accounts.get(tenant)
        return 0.0 if account is None else account.deficit

    def forget_all(self) -> None:
        self._accounts.clear()

    def _turns(self, heads: Mapping[str, float]) -> list[tuple[int, int, str]]:
        """(rounds until its deficit covers its job, place, tenant), the next turn first.

        The first tenant has had its quantum in this round: it gets the next one last.
        """
        turns = []
        for place, (tenant, account) in enumerate(self._accounts.items()):
            if tenant in heads:
                share = self._quantum * account.weight
                rounds = max(0, math.ceil((heads[tenant] - account.deficit) / share))
                turns.append((rounds, place, tenant))
        last = len(self._accounts)
        turns.sort(key=lambda turn: (turn[0], turn[1] or last * bool(turn[0])))
        return turns

    def _pass_rounds(self, rounds: int, place: int, waiting: Mapping[str, float]) -> None:
        """Pay out so many rounds, beginning behind the first tenant; the last one ends with the
        tenant at `place`, which becomes the first.

        Tenants that do not wait are paid too, until they are out of debt.
        """
        tenants = list(self._accounts)
        for number, tenant in enumerate(tenants):
            account = self._accounts[tenant]
            share = self._quantum * account.weight
            in_last_round = 0 < number <= place or not place
            earned = share * (rounds if in_last_round else rounds - 1)
            most = waiting[tenant] + share if tenant in waiting else 0.0
            account.deficit = max(account.deficit, min(account.deficit + earned, most))
        for tenant in tenants[:place]:
            self._accounts[tenant] = self._accounts.pop(tenant)
        for tenant in tenants:
            if tenant not in waiting:
                self.leave(tenant)


class FairQueue(Generic[T]):
    """Jobs of many tenants, taken by one owner; not safe to share between threads without a lock.

    `quantum` is in units of cost. Jobs of one tenant keep their order.
    """

    def __init__(self, quantum: float, weights: TenantWeights | None = None) -> None:
        self._turns = DeficitRoundRobin(quantum)
        self._weights = weights or TenantWeights()
        self._jobs: dict[str, deque[tuple[T, float]]] = {}
        """Tenant → (job, cost), the oldest first; none is empty."""

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def __iter__(self) -> Iterator[T]:
        return (job for jobs in self._jobs.values() for job, _ in jobs)

    def push(self, tenant: str, job: T, cost: float, weight: float | None = None) -> None:
        """`weight` is the tenant's, where the queue's `weights` do not know it."""
        if tenant not in self._jobs:
            self._jobs[tenant] = deque()
            self._turns.join(tenant, self._weights.of(tenant) if weight is None else weight)
        self._jobs[tenant].append((job, max(1, cost)))

    def pop(self, allowed: Callable[[str], bool] = lambda tenant: True) -> tuple[str, T] | None:
        """The next tenant and its job, of the tenants that `allowed` lets have one now.

        None where no such tenant waits. Tenants that are not allowed keep their turn and credit.
        """
        waiting = {tenant: jobs[0][1] for tenant, jobs in self._jobs.items()}
        heads = {tenant: cost for tenant, cost in waiting.items() if allowed(tenant)}
        if not heads:
            return None
        tenant = self._turns.choose(heads, waiting)
        job, cost = self._jobs[tenant].popleft()
        self._turns.charge(tenant, cost)
        self._leave_if_empty(tenant)
        return tenant, job

    def settle(self, tenant: str, cost: float) -> None:
        """Charge what a job that was popped cost beyond what it was pushed with; a negative cost
        is given back."""
        self._turns.charge(tenant, cost)
        if tenant not in self._jobs:
            self._turns.leave(tenant)

    def remove(self, tenant: str, job: T) -> bool:
        """Take a waiting job out of the queue; false where it does not wait."""
        jobs = self._jobs.get(tenant)
        if jobs is None:
            return False
        kept = deque(entry for entry in jobs if entry[0] is not job)
        found = len(kept) < len(jobs)
        self._jobs[tenant] = kept
        self._leave_if_empty(tenant)
        return found

    def _leave_if_empty(self, tenant: str) -> None:
        if not self._jobs[tenant]:
            del self._jobs[tenant]
            self._turns.leave(tenant)


LOOP_QUANTUM = 256 * 1024
"""Bytes of a tenant's that the event loop works on before the next one's turn."""


class LoopTurns:
    """Work that holds an event loop for a millisecond or so begins one piece at a time, in turn by
    tenant, and between two pieces the loop does whatever else is ready.

    Otherwise who asks for little waits, at each of its own few turns of the loop, for a piece of
    everyone who asks for much. For one event loop.
    """

    def __init__(self, weights: TenantWeights | None = None) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(LOOP_QUANTUM, weights)
        self._resting = True
        """No piece has begun since the loop's last turn."""

    async def turn(self, tenant: str, nbytes: int) -> None:
        """Returns when it is the turn of a piece of so many bytes, which the caller does at once;
        without waiting where there is no other."""
        loop = asyncio.get_running_loop()
        if self._resting:
            self._resting = False
            loop.call_soon(self._next)
            return
        begins = loop.create_future()
        self._queue.push(tenant, begins, nbytes)
        try:
            await begins
        except asyncio.CancelledError:
            self._queue.remove(tenant, begins)
            raise

    def _next(self) -> None:
        """The piece before was done in the loop's last turn, or will be in this one."""
        found = self._queue.pop()
        if found is None:
            self._resting = True
            return
        _, begins = found
        if not begins.done():
            begins.set_result(None)
        asyncio.get_running_loop().call_soon(self._next)
