"""A bounded queue of media jobs that is fair by tenant: deficit round robin over estimated cost.

    tenant a: long, short, short      pop ─▶ the job of the tenant whose turn it is
    tenant b: short

Costs are CPU seconds, estimated from headers. When a job has ended, `settle` charges what it really
took, so a tenant whose jobs cost more than their headers say waits that much longer, also if its
queue was empty meanwhile.

Within a tenant, jobs are served in the order of arrival, except that `pop(long=False)` passes its
long jobs over: see `pool`, which keeps a worker free of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

from lookonce.errors import QueueFullError
from lookonce.types.fair_queue import DeficitRoundRobin, TenantWeights

QUANTUM = 0.1
"""CPU seconds of one round: a few ordinary pictures."""
LONG_SECONDS = 0.7
"""Jobs with a larger estimate are long. A photo of 12 megapixels is estimated at 0.4 to 0.6."""

J = TypeVar("J")


@dataclass(eq=False, slots=True)
class QueuedJob(Generic[J]):
    """A job, who pays for it, and its estimated CPU seconds."""

    job: J
    tenant: str
    seconds: float
    arrival: int = 0

    @property
    def is_long(self) -> bool:
        return self.seconds > LONG_SECONDS


@dataclass(slots=True)
class _Tenant(Generic[J]):
    """A tenant's waiting jobs, each list in the order of arrival."""

    short: deque[QueuedJob[J]] = field(default_factory=deque)
    long: deque[QueuedJob[J]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    @property
    def dearest(self) -> float:
        """CPU seconds of the dearer next job."""
        return max(jobs[0].seconds for jobs in (self.short, self.long) if jobs)

    def first(self, *, long: bool) -> QueuedJob[J] | None:
        heads = [jobs[0] for jobs in ((self.short, self.long) if long else (self.short,)) if jobs]
        return min(heads, key=lambda queued: queued.arrival, default=None)

    def jobs_like(self, queued: QueuedJob[J]) -> deque[QueuedJob[J]]:
        return self.long if queued.is_long else self.short


class QueueLimitError(QueueFullError):
    """The queue is full: of this tenant's jobs (`reason` "tenant"), or of all ("queue")."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "queue",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.reason = reason


class MediaQueue(Generic[J]):
    """Not for several threads: the pool holds a lock."""

    def __init__(
        self,
        *,
        max_waiting: int,
        max_waiting_per_tenant: int,
        weights: TenantWeights | None = None,
    ) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._weights = weights or TenantWeights()
        self._turns = DeficitRoundRobin(QUANTUM)
        self._tenants: dict[str, _Tenant[J]] = {}
        """Those that wait."""
        self._num_waiting = 0
        self._num_arrived = 0

    def __len__(self) -> int:
        return self._num_waiting

    def check_room(self, tenant: str, spare: int = 0) -> None:
        """Raises `QueueFullError` if `push` would."""
        if self._num_waiting >= self._max_waiting + spare:
            raise QueueLimitError("too many media items are waiting to be processed")
        held = self._tenants.get(tenant)
        if held is not None and len(held) >= self._max_waiting_per_tenant + spare:
            raise QueueLimitError(
                "too many of your media items are waiting to be processed", reason="tenant"
            )

    def push(self, queued: QueuedJob[J], spare: int = 0) -> None:
        """`spare` jobs beyond the limits may wait, because free workers are about to take them.

        Raises `QueueFullError`.
        """
        self.check_room(queued.tenant, spare)
        if queued.tenant not in self._tenants:
            self._tenants[queued.tenant] = _Tenant()
            self._turns.join(queued.tenant, self._weights.of(queued.tenant))
        self._num_arrived += 1
        queued.arrival = self._num_arrived
        self._tenants[queued.tenant].jobs_like(queued).append(queued)
        self._num_waiting += 1

    def pop(self, *, long: bool = True) -> QueuedJob[J] | None:
        """The next job, whose cost its tenant pays now; None if none waits. `long` allows jobs of
        more than `LONG_SECONDS`."""
        firsts = {name: tenant.first(long=long) for name, tenant in self._tenants.items()}
        heads = {name: first.seconds for name, first in firsts.items() if first is not None}
        if not heads:
            return None
        waiting = {name: tenant.dearest for name, tenant in self._tenants.items()}
        chosen = firsts[self._turns.choose(heads, waiting)]
        assert chosen is not None, "only tenants with a job are chosen"
        self._turns.charge(chosen.tenant, chosen.seconds)
        self._take_out(chosen)
        return chosen

    def remove(self, queued: QueuedJob[J]) -> bool:
        """Drop a waiting job; False if it does not wait."""
        tenant = self._tenants.get(queued.tenant)
        if tenant is None or queued not in tenant.jobs_like(queued):
            return False
        self._take_out(queued)
        return True

    def settle(self, tenant: str, seconds: float) -> None:
        """Charge CPU seconds beyond the estimates already paid; negative ones are given back."""
        self._turns.charge(tenant, seconds)
        if tenant not in self._tenants:
            self._turns.leave(tenant)

    def drain(self) -> list[QueuedJob[J]]:
        """Take all waiting jobs out; nobody pays."""
        waiting = [
            queued
            for tenant in self._tenants.values()
            for queued in chain(tenant.short, tenant.long)
        ]
        self._tenants.clear()
        self._turns.forget_all()
        self._num_waiting = 0
        return waiting

    def debt(self, tenant: str) -> float:
        """CPU seconds that the tenant has used beyond its share."""
        return max(0.0, -self._turns.deficit(tenant))

    def check_integrity(self) -> None:
        """Raises `AssertionError` if the counts disagree."""
        assert self._num_waiting == sum(len(tenant) for tenant in self._tenants.values())
        for tenant in self._tenants.values():
            assert tenant.short or tenant.long
            assert all(queued.is_long for queued in tenant.long)
            assert not any(queued.is_long for queued in tenant.short)

    def _take_out(self, queued: QueuedJob[J]) -> None:
        tenant = self._tenants[queued.tenant]
        tenant.jobs_like(queued).remove(queued)
        self._num_waiting -= 1
        if not tenant:
            del self._tenants[queued.tenant]
            self._turns.leave(queued.tenant)
