"""How many sequences of each tenant decode in one step.

On a CPU a step takes longer the more sequences it computes, so one tenant's many answers would slow
every token of another tenant's few. Where several tenants are served, the tenants with most
sequences decode only some of them in a step, in turn, so that for each tenant

    seconds of the step ≤ sum of all weights / its weight x seconds of a step of its own sequences

which is what it would have alone with its share of the machine. What a step costs is measured
(`StepTimes`); where it does not grow with the sequences, as on most GPUs, nothing is limited.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lookonce.core.request import Sequence
from lookonce.core.scheduler_state import SchedulerState
from lookonce.types.step import StepPlan

LINGER_SECONDS = 0.25
"""A tenant without sequences counts as served for so long: whoever asks one question after another
would otherwise wait, at each, for a step of all sequences of the others."""
DECAY = 0.98
"""Weight of the measurements so far beside a new one."""
NEGLIGIBLE = 1e6
"""A step that takes so many times as long as each of its sequences adds takes always as long."""
LEAST_SPREAD = 0.1
"""Below this relative spread of the numbers of sequences nothing is known of the part of a step's
time that does not depend on them: it counts as 0, and steps of fewer sequences will tell."""


class StepTimes:
    """Seconds of a step that only decodes, by its number of sequences: a line through what was
    measured, by least squares, where older measurements count less."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, num_sequences: int, seconds: float) -> None:
        self._count = self._count * DECAY + 1
        self._x = self._x * DECAY + num_sequences
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + num_sequences * num_sequences
        self._xy = self._xy * DECAY + num_sequences * seconds

    def line(self) -> tuple[float, float]:
        """(seconds of any step, seconds of each sequence); neither is negative."""
        if not self._count or not self._y:
            return 0.0, 0.0
        x, y = self._x / self._count, self._y / self._count
        variance = self._xx / self._count - x * x
        if variance < (LEAST_SPREAD * x) ** 2:
            return 0.0, y / x
        slope = (self._xy / self._count - x * y) / variance
        slope = min(max(0.0, slope), y / x)
        return y - slope * x, slope


@dataclass(slots=True)
class _Served:
    """A tenant that is served, or was a moment ago."""

    num_sequences: int
    weight: float
    until: float


class DecodeShares:
    """Chooses what decodes in a step."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._served: dict[str, _Served] = {}
        self._times = StepTimes()
        self._num_turns = 0
        self.measures = False
        """Whether the last step was chosen for while several tenants were served."""
        self._planned_at = 0.0

    def choose(self, decodes: list[Sequence]) -> list[Sequence]:
        """Of `decodes`, in their order, those that the next step computes: all where one tenant is
        served."""
        self.measures = not self._is_one_tenant
        if not self.measures:
            return decodes
        self._planned_at = self._state.clock()
        self._note_served()
        limits = row_limits(
            {tenant: (s.num_sequences, s.weight) for tenant, s in self._served.items()},
            *self._times.line(),
        )
        if not limits:
            return decodes
        chosen = set(decodes)
        for tenant, limit in limits.items():
            own = [s for s in decodes if s.request.tenant == tenant]
            own.sort(key=lambda s: s.decode_turn)
            chosen.difference_update(own[limit:])
            for sequence in own[:limit]:
                self._num_turns += 1
                sequence.decode_turn = self._num_turns
        return [sequence for sequence in decodes if sequence in chosen]

    def note_done(self, plan: StepPlan) -> None:
        """The step has ended."""
        if plan.scheduled and _only_decodes(plan):
            self._times.note(len(plan.scheduled), self._state.clock() - self._planned_at)

    @property
    def _is_one_tenant(self) -> bool:
        """Whether this is so for certain, at no cost."""
        queues = self._state.queues
        if len(queues.active_of) > 1 or queues.turns.several or len(self._served) > 1:
            return False
        tenants = queues.active_of.keys() | self._served.keys()
        waiting = queues.waiting.first
        if waiting is not None:
            tenants.add(waiting.request.tenant)
        return len(tenants) <= 1

    def _note_served(self) -> None:
        queues, now = self._state.queues, self._state.clock()
        computing = Counter[str]()
        weights: dict[str, float] = {}
        firsts = queues.first_waiting_by_tenant()
        for sequence in _all(queues.decoding, queues.prefilling, firsts):
            computing[sequence.request.tenant] += 1
            weights[sequence.request.tenant] = sequence.request.weight
        for tenant in [t for t, s in self._served.items() if s.until <= now]:
            del self._served[tenant]
        for tenant, count in computing.items():
            self._served[tenant] = _Served(count, weights[tenant], now + LINGER_SECONDS)


def _only_decodes(plan: StepPlan) -> bool:
    return not (plan.new or plan.encode or plan.restore) and plan.num_tokens == len(plan.scheduled)


def _all(*queues: Iterable[Sequence]) -> Iterable[Sequence]:
    for queue in queues:
        yield from queue


def row_limits(
    tenants: Mapping[str, tuple[int, float]], fixed: float, each: float
) -> dict[str, int]:
    """Tenant → most of its sequences in a step, of those tenants that are limited.

    `tenants`: (sequences, weight) of each; a step of n sequences takes `fixed` + n x `each`
    seconds. Each tenant has one at least.
    """
    if each <= 0 or fixed > NEGLIGIBLE * each or len(tenants) < 2:
        return {}
    total = sum(weight for _, weight in tenants.values())
    free = fixed / each  # sequences that would take as long as a step of none
    most = min(total / weight * (free + count) for count, weight in tenants.values())
    left = math.floor(most - free + 1e-6)
    if sum(count for count, _ in tenants.values()) <= left:
        return {}
    limits = {}
    for tenant, (count, weight) in sorted(tenants.items(), key=lambda t: t[1][0] / t[1][1]):
        share = max(1, math.floor(left * weight / total + 1e-9))
        if share < count:
            limits[tenant] = share
        left -= min(share, count)
        total -= weight
    return limits
