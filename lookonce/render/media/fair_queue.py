"""A bounded queue of media jobs that is fair by tenant: deficit round robin over estimated cost.

    tenant a: long, short, short      pop ─▶ the job of the tenant whose turn it is
    tenant b: short

Each tenant has a deficit, in CPU seconds. In every round each tenant that waits gets a quantum; a
tenant whose deficit covers its next job is served and pays the job's cost (Shreedhar and Varghese,
1995). When the job has ended, `settle` charges what it really took, so a tenant whose jobs cost
more than their headers say waits that much longer, also if its queue was empty meanwhile.

Within a tenant, jobs are served in the order of arrival, except that `pop(long=False)` passes its
long jobs over: see `pool`, which keeps a worker free of them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

from lookonce.errors import QueueFullError

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
    """A tenant's waiting jobs, each list in the order of arrival, and what it may spend."""

    deficit: float = 0.0
    short: deque[QueuedJob[J]] = field(default_factory=deque)
    long: deque[QueuedJob[J]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    @property
    def most_credit(self) -> float:
        """What the dearest next job needs; a tenant that does not wait gets no credit."""
        heads = [jobs[0].seconds for jobs in (self.short, self.long) if jobs]
        return max(heads) + QUANTUM if heads else 0.0

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


class FairQueue(Generic[J]):
    """Not for several threads: the pool holds a lock."""

    def __init__(self, *, max_waiting: int, max_waiting_per_tenant: int) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._tenants: dict[str, _Tenant[J]] = {}
        """Tenants that wait, in the order of their turns, and those in debt."""
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
        tenant = self._tenants.setdefault(queued.tenant, _Tenant())
        if not tenant:
            self._to_the_end(queued.tenant)
        self._num_arrived += 1
        queued.arrival = self._num_arrived
        tenant.jobs_like(queued).append(queued)
        self._num_waiting += 1

    def pop(self, *, long: bool = True) -> QueuedJob[J] | None:
        """The next job, whose cost its tenant pays now; None if none waits. `long` allows jobs of
        more than `LONG_SECONDS`."""
        turns = [
            (self._rounds(tenant.deficit, head), place, name, head)
            for place, (name, tenant) in enumerate(self._tenants.items())
            if (head := tenant.first(long=long)) is not None
        ]
        if not turns:
            return None
        # The first tenant has had its quantum in this round: it gets the next one last.
        rounds, place, name, head = min(
            turns, key=lambda turn: (turn[0], turn[1] or len(self._tenants) * bool(turn[0]))
        )
        if rounds:
            self._pass_rounds(rounds, place)
        tenant = self._tenants[name]
        tenant.jobs_like(head).popleft()
        tenant.deficit -= head.seconds
        self._num_waiting -= 1
        self._forget_idle()
        return head

    def remove(self, queued: QueuedJob[J]) -> bool:
        """Drop a waiting job; False if it does not wait."""
        tenant = self._tenants.get(queued.tenant)
        if tenant is None or queued not in tenant.jobs_like(queued):
            return False
        tenant.jobs_like(queued).remove(queued)
        self._num_waiting -= 1
        self._forget_idle()
        return True

    def settle(self, tenant: str, seconds: float) -> None:
        """Charge CPU seconds beyond the estimates already paid; negative ones are given back."""
        if not math.isfinite(seconds):
            raise ValueError("seconds must be finite")
        self._tenants.setdefault(tenant, _Tenant()).deficit -= seconds
        self._forget_idle()

    def drain(self) -> list[QueuedJob[J]]:
        """Take all waiting jobs out; nobody pays."""
        waiting = [
            queued
            for tenant in self._tenants.values()
            for queued in chain(tenant.short, tenant.long)
        ]
        self._tenants.clear()
        self._num_waiting = 0
        return waiting

    def debt(self, tenant: str) -> float:
        """CPU seconds that the tenant has used beyond its share."""
        held = self._tenants.get(tenant)
        return 0.0 if held is None else max(0.0, -held.deficit)

    def check_integrity(self) -> None:
        """Raises `AssertionError` if the counts disagree."""
        assert self._num_waiting == sum(len(tenant) for tenant in self._tenants.values())
        for tenant in self._tenants.values():
            assert tenant.short or tenant.long or tenant.deficit < 0
            assert all(queued.is_long for queued in tenant.long)
            assert not any(queued.is_long for queued in tenant.short)

    def _rounds(self, deficit: float, head: QueuedJob[J]) -> int:
        """Rounds until the deficit covers the job."""
        return max(0, math.ceil((head.seconds - deficit) / QUANTUM))

    def _pass_rounds(self, rounds: int, place: int) -> None:
        """Pay out so many rounds, beginning behind the first tenant; the last one ends with the
        tenant at `place`, which becomes the first.

        Tenants that do not wait are paid too, until they are out of debt.
        """
        names = list(self._tenants)
        for number, name in enumerate(names):
            tenant = self._tenants[name]
            in_last_round = 0 < number <= place or not place
            earned = QUANTUM * (rounds if in_last_round else rounds - 1)
            tenant.deficit = max(tenant.deficit, min(tenant.deficit + earned, tenant.most_credit))
        for name in names[:place]:
            self._to_the_end(name)

    def _to_the_end(self, name: str) -> None:
        self._tenants[name] = self._tenants.pop(name)

    def _forget_idle(self) -> None:
        """A tenant without jobs keeps its debt, but no credit."""
        for name in [name for name, held in self._tenants.items() if not held]:
            if self._tenants[name].deficit >= 0:
                del self._tenants[name]
