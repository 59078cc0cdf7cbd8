"""A queue that serves tenants fairly: deficit round robin over the estimated cost of their jobs.

Shreedhar and Varghese, "Efficient Fair Queuing using Deficit Round Robin" (SIGCOMM 1995): tenants
that wait take turns, each turn adds a quantum to the tenant's credit, and a job is taken once the
credit covers its cost. A tenant with large jobs gets as much as one with small jobs, not more.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Tenant(Generic[T]):
    jobs: deque[tuple[T, int]] = field(default_factory=deque)
    """(job, cost), the oldest first."""
    credit: int = 0


class FairQueue(Generic[T]):
    """Jobs of many tenants, taken by one owner; not safe to share between threads without a lock.

    `quantum` is in units of cost. Jobs of one tenant keep their order.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._tenants: OrderedDict[str, _Tenant[T]] = OrderedDict()
        """The tenants with waiting jobs; the first one's turn is next."""

    def __len__(self) -> int:
        return sum(len(waiting.jobs) for waiting in self._tenants.values())

    def __iter__(self) -> Iterator[T]:
        return (job for waiting in self._tenants.values() for job, _ in waiting.jobs)

    def push(self, tenant: str, job: T, cost: int) -> None:
        waiting = self._tenants.setdefault(tenant, _Tenant())
        waiting.jobs.append((job, max(1, cost)))

    def pop(self, allowed: Callable[[str], bool] = lambda tenant: True) -> tuple[str, T] | None:
        """The next tenant and its job, of the tenants that `allowed` lets have one now.

        None where no such tenant waits. Tenants that are not allowed keep their turn and credit.
        """
        ready = [tenant for tenant in self._tenants if allowed(tenant)]
        if not ready:
            return None
        self._skip_idle_rounds(ready)
        while True:
            for tenant in ready:
                waiting = self._tenants[tenant]
                waiting.credit += self._quantum
                if waiting.credit >= waiting.jobs[0][1]:
                    return tenant, self._take(tenant, waiting)
                self._tenants.move_to_end(tenant)

    def remove(self, tenant: str, job: T) -> bool:
        """Take a waiting job out of the queue; false where it does not wait."""
        waiting = self._tenants.get(tenant)
        if waiting is None:
            return False
        kept = deque(entry for entry in waiting.jobs if entry[0] is not job)
        found = len(kept) < len(waiting.jobs)
        waiting.jobs = kept
        if not kept:
            del self._tenants[tenant]
        return found

    def _skip_idle_rounds(self, ready: list[str]) -> None:
        """Give every tenant the turns of those rounds in which none could have taken a job."""
        quantum = self._quantum
        short = [
            self._tenants[tenant].jobs[0][1] - self._tenants[tenant].credit for tenant in ready
        ]
        rounds = max(0, min(-(-missing // quantum) for missing in short) - 1)
        for tenant in ready:
            self._tenants[tenant].credit += rounds * quantum

    def _take(self, tenant: str, waiting: _Tenant[T]) -> T:
        """A tenant whose credit is left over goes on with its turn; one without jobs loses it."""
        job, cost = waiting.jobs.popleft()
        waiting.credit -= cost
        if not waiting.jobs:
            del self._tenants[tenant]
        elif waiting.credit >= waiting.jobs[0][1]:
            waiting.credit -= self._quantum  # its turn goes on: the next `pop` adds the quantum
        else:
            self._tenants.move_to_end(tenant)
        return job
