"""What each tenant gets of a step, where several are served.

**Decodes.** On a CPU a step takes longer the more sequences it computes, so one tenant's many
answers would slow every token of another tenant's few. So the tenants with most sequences decode
only some of them in a step, in turn, such that for each tenant

    seconds of the step ≤ sum of all weights / its weight x seconds of a step of its own sequences

which is what it would have alone with its share of the machine. Of these, a tenant that has used
more time, for its weight, than another one that decodes, or that has a prompt which is computed in
this step, decodes nothing in it: who asks for less than its share has its tokens as if it were
alone. A tenant that is alone in a step is charged for all of it, so that its use comes to that of
the others, and they share from then on.

**Prompts.** A step computes no more tokens of prompts than fit `SLICE_SECONDS`, so that nobody
waits long for a step of another one (`STEP_SECONDS` where one tenant is served, and another one was
in the last `SHARED_SECONDS`); and none of a tenant that has used more time, for its weight, than
another one that decodes in this step or has a prompt that can be computed in it. A tenant that
comes, or comes back, counts as having used `CREDIT_SECONDS` less than those at work: one that asks
for less than its share waits for the rest of one step, and not behind a prompt of another one
(as Linux's fair scheduler places a task that wakes). Models whose items or prompts are never cut
are exempt.

What steps cost is measured (`StepTimes`); where it does not grow with the sequences, as on most
GPUs, no decodes are limited.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from lookonce.core.encoder_scheduling import EncodeOwners
from lookonce.core.request import Sequence
from lookonce.core.scheduler_state import SchedulerState
from lookonce.types.step import StepPlan

LINGER_SECONDS = 0.25
"""A tenant without sequences counts as served for so long: whoever asks one question after another
would otherwise wait, at each, for a step of all sequences of the others."""
PROMPT_DECAY = 0.8
"""Weight of what is known of a prompt's token beside a new measurement."""
LEAST_PROMPT_TOKEN = 1e-9
"""Seconds of a prompt's token once it was measured: thousands of steps that seem to cost nothing
would else make it so small that nothing can be divided by it."""
KEPT_STEPS = 9
"""Of each class of sizes."""
STALE_TIMES = 2.0
"""Steps of fewer sequences that took so many times as long as those of more were measured while the
machine was slower."""
SLICE_SECONDS = 0.002
"""Of a step with prompts; twice a step of no sequence where that is longer."""
MIN_SLICE_TOKENS = 32
LEAST_SLICE_TOKENS = 8
"""Where all that wait have used more than a tenant that was served a moment ago, and may be back
before the step has ended."""
FEW_TOKENS = LEAST_SLICE_TOKENS - 1
"""A step with so few tokens of prompts takes about as long as one that decodes as many sequences
more. Beside prompts of others, such steps may be all that tells what a step takes."""
FEW_SEQUENCES = 4
"""Such a step takes little more than any does, however wrong it is what each of them needs."""
FIRST_SLICE_TOKENS = 128
"""As long as it is not known how long tokens take."""
SHARED_SECONDS = 60.0
"""So long after requests of two tenants one that is alone computes prompts in steps that nobody
would wait long for: a tenant that asks every few seconds would else wait for a step of as many
tokens as there is room for, each time."""
STEP_SECONDS = 0.02
"""For tokens of prompts in such a step."""
CREDIT_SECONDS = 0.05
"""That a tenant may use, times its weight, before the others' prompts when it comes back."""
NOBODY: frozenset[str] = frozenset()


class StepTimes:
    """Seconds of a step that only decodes, by its number of sequences: what steps of few and of
    many took, and straight lines between.

    Sizes that differ by less than twice are one class, of which the last `KEPT_STEPS` steps count:
    steps of the size that is computed most would else be all that is known. Of each class the
    median is taken, so that a step in which the process was interrupted changes nothing. One line
    through all classes would not do: to twice the sequences a CPU adds much where they are few, and
    little where they are many.
    """

    def __init__(self) -> None:
        self._classes: dict[int, deque[tuple[float, int]]] = {}
        """Bits of the number of sequences → (seconds, sequences) of its last steps."""
        self._medians: dict[int, tuple[float, int]] = {}
        self._points: list[tuple[int, float]] = [(0, 0.0)]
        """(sequences, seconds), both ascending; of no sequence first."""
        self.prompt_token = 0.0
        """Seconds of each token of a prompt; 0 until it was measured."""

    def note(self, num_sequences: int, seconds: float) -> None:
        size = num_sequences.bit_length()
        steps = self._classes.setdefault(size, deque(maxlen=KEPT_STEPS))
        steps.append((seconds, num_sequences))
        self._medians[size] = median = sorted(steps)[len(steps) // 2]
        for smaller in [each for each in self._medians if each < size]:
            if self._medians[smaller][0] > STALE_TIMES * median[0]:
                del self._classes[smaller], self._medians[smaller]
        self._join_points()

    def note_prompt(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """A step with so many tokens of prompts beside `num_sequences` that decode."""
        cost = max(0.0, seconds - self.seconds(num_sequences)) / num_tokens
        known = self.prompt_token
        if known:
            cost = max(LEAST_PROMPT_TOKEN, PROMPT_DECAY * known + (1 - PROMPT_DECAY) * cost)
        self.prompt_token = cost
        if len(self._medians) == 1:
            self._join_points()

    def _join_points(self) -> None:
        classes = [self._medians[each] for each in sorted(self._medians)]
        self._points = _ascending(classes, self.prompt_token)

    @property
    def fixed(self) -> float:
        """Seconds of any step."""
        return self._points[0][1]

    def seconds(self, num_sequences: int) -> float:
        """0 as long as nothing is known."""
        points = self._points
        for place, (count, seconds) in enumerate(points):
            if count >= num_sequences:
                return seconds - (count - num_sequences) * _slope(points, place)
        count, seconds = points[-1]
        return seconds + (num_sequences - count) * _slope(points, len(points) - 1)

    def most_sequences(self, seconds: float) -> float:
        """As many as a step of so many seconds can decode."""
        points = self._points
        for place, (count, longer) in enumerate(points):
            if longer > seconds:
                return max(0.0, count - (longer - seconds) / _slope(points, place)) if place else 0
        count, longest = points[-1]
        slope = _slope(points, len(points) - 1)
        return count + (seconds - longest) / slope if slope else math.inf


def _ascending(
    classes: Iterable[tuple[float, int]], prompt_token: float
) -> list[tuple[int, float]]:
    """(sequences, seconds) of each class, in order of sequences, such that none takes less than one
    of fewer; before them what a step of none takes, as the first two tell. Of one class alone,
    where it is of few, each sequence is taken to need what a prompt's token does; of many, and
    while that is not known, all of it: steps of fewer will tell."""
    points: list[tuple[int, float]] = []
    for seconds, count in classes:
        points.append((count, max(seconds, points[-1][1] if points else 0.0)))
    fixed = 0.0
    if len(points) > 1:
        count, seconds = points[0]
        fixed = max(0.0, seconds - count * _slope(points, 1))
    elif points and prompt_token and points[0][0] <= FEW_SEQUENCES:
        count, seconds = points[0]
        fixed = max(0.0, seconds - count * prompt_token)
    return [(0, fixed), *points]


def _slope(points: list[tuple[int, float]], place: int) -> float:
    """Seconds of each sequence between this point and the one before it; 0 before the first."""
    if not place:
        return 0.0
    (before, shorter), (count, longer) = points[place - 1], points[place]
    return (longer - shorter) / (count - before)


@dataclass(slots=True)
class _Served:
    """A tenant that is served, or was a moment ago."""

    num_sequences: int
    weight: float
    until: float
    used: float = 0.0
    """Seconds of steps for its weight, counted while others were served, too."""


class _DoneStep(msgspec.Struct, frozen=True):
    """What a step computed, until it is known how long that took."""

    num_decodes: int
    num_tokens: int
    """Of prompts."""
    encode_owners: EncodeOwners | None
    """None: it encoded nothing."""
    measured: bool


class DecodeShares:
    """Chooses what a step computes. `cuts_prompts`: whether prompts may be cut anywhere."""

    def __init__(self, state: SchedulerState, *, cuts_prompts: bool = True) -> None:
        self._state = state
        self._cuts_prompts = cuts_prompts
        self.behind = NOBODY
        """Tenants of whose prompts this step computes nothing."""
        self._behind_decodes = NOBODY
        """Of these, those that have used more than one that decodes."""
        self._served: dict[str, _Served] = {}
        self._times = StepTimes()
        self._working: set[str] = set()
        """Tenants that had something to compute in the last step."""
        self._num_turns = 0
        self.measures = False
        """Whether the last step was chosen for while several tenants were served."""
        self._last_tenant: str | None = None
        """That had something to compute in the last step of one tenant."""
        self._shared_until = 0.0
        """Until then a tenant that is alone may not be for long."""
        self.planned_at = 0.0
        """When the last step was chosen for."""
        self._done_at = 0.0
        self._untimed: dict[int, _DoneStep] = {}
        self.set_aside: list[Sequence] = []
        """Decodes that the next step computes only if it computes no prompt of a tenant that has
        used less (`beside_prompts`)."""

    def choose(self, decodes: list[Sequence]) -> list[Sequence]:
        """Of `decodes`, in their order, those that the next step computes: all where one tenant is
        served; but for those that it has `set_aside`."""
        self.planned_at = self._state.clock()
        self.measures = not self._is_one_tenant
        self.behind = NOBODY
        self.set_aside = []
        if not self.measures:
            self._note_alone()
            return decodes
        self._shared_until = self.planned_at + SHARED_SECONDS
        self._note_served()
        decodes = self._limited(decodes)
        if self._cuts_prompts and self._times.prompt_token:  # else nobody pays for prompts
            self._behind_decodes = self._behind(s.request.tenant for s in decodes)
            self.behind = self._behind(self._working)
        return decodes

    def _note_alone(self) -> None:
        """Tenants that are served one after the other share the engine, too."""
        queues = self._state.queues
        tenant = next(iter(queues.active_of), None)
        if tenant is None and queues.waiting:
            tenant = queues.waiting[0].request.tenant
        if tenant is None or tenant == self._last_tenant:
            return
        if self._last_tenant is not None:
            self._shared_until = self.planned_at + SHARED_SECONDS
        self._last_tenant = tenant

    def _behind(self, tenants: Iterable[str]) -> frozenset[str]:
        """Tenants that have used more than one of these."""
        least = min((self._served[tenant].used for tenant in tenants), default=math.inf)
        return frozenset(t for t, served in self._served.items() if served.used > least)

    @property
    def may_limit(self) -> bool:
        """Whether the next step may be chosen for several tenants."""
        return not self._is_one_tenant

    @property
    def prompt_tokens(self) -> int | None:
        """Most tokens of prompts that the step computes; None: as many as there is room for."""
        if not self._cuts_prompts:
            return None
        cost = self._times.prompt_token
        if not self.measures and (not cost or self.planned_at >= self._shared_until):
            return None
        if not cost:
            return FIRST_SLICE_TOKENS
        seconds, fixed = SLICE_SECONDS if self.measures else STEP_SECONDS, self._times.fixed
        least = MIN_SLICE_TOKENS
        if self.measures and self._working <= self._behind(self._served):
            least = LEAST_SLICE_TOKENS
        return max(least, int(max(seconds - fixed, fixed) / cost))

    def note_no_decodes(self) -> None:
        """Nothing decodes after all: nobody's prompts wait for that."""
        self._behind_decodes = NOBODY

    def let_more_compute(self) -> bool:
        """No prompt of a tenant that is not behind can be computed now. Whether there are tenants
        that need wait for these prompts no more."""
        changed, self.behind = self.behind != self._behind_decodes, self._behind_decodes
        return changed

    def _limited(self, decodes: list[Sequence]) -> list[Sequence]:
        limits = row_limits(
            {tenant: (s.num_sequences, s.weight) for tenant, s in self._served.items()},
            self._times,
        )
        if not limits:
            return decodes
        chosen = set(decodes)
        behind = behind_prompts = NOBODY
        if self._cuts_prompts:  # else its prompts would go on being charged
            behind = self._behind(s.request.tenant for s in decodes)
            if self._times.prompt_token:
                behind_prompts = self._behind(self._working)
        for tenant, limit in limits.items():
            if tenant in behind:
                limit = 0
            own = [s for s in decodes if s.request.tenant == tenant]
            own.sort(key=lambda s: s.decode_turn)
            if tenant in behind_prompts:
                self.set_aside += own[:limit]
                limit = 0
            chosen.difference_update(own[limit:])
            self.take_turns(own[:limit])
        return [sequence for sequence in decodes if sequence in chosen]

    def take_turns(self, decodes: Iterable[Sequence]) -> None:
        """The step computes these: of their tenants' decodes they come last from now on."""
        for sequence in decodes:
            self._num_turns += 1
            sequence.decode_turn = self._num_turns

    def drop_preempted(self) -> None:
        """Of the decodes that were `set_aside` keep those that have their blocks: the others may be
        admitted again in this step, and have their prompts computed in it."""
        self.set_aside = [sequence for sequence in self.set_aside if sequence.block_ids]

    def beside_prompts(self, tenants: Iterable[str]) -> list[Sequence]:
        """Of the decodes that were `set_aside` those that the step may compute after all, since no
        tenant whose prompts it computes has used less. `tenants`: those whose prompts these are."""
        behind = self._behind(tenants)
        return [s for s in self.set_aside if s.request.tenant not in behind]

    def note_done(
        self,
        plan: StepPlan,
        encode_owners: EncodeOwners,
        planned_at: float,
        *,
        measured: bool,
        device_seconds: Iterable[tuple[int, float]] | None = None,
    ) -> None:
        """A step that was planned at `planned_at` has ended; nothing was updated yet.
        `encode_owners`: for whose requests its items were encoded. `measured`: `measures`, when it
        was planned. `device_seconds`: of the step's result.

        Called for steps with new prompts while one tenant is served, too: what they cost is known
        then once another one comes.
        """
        now, before = self._state.clock(), self._done_at
        self._done_at = now
        counts = [chunk.num_tokens for chunk in plan.scheduled]
        num_decodes = counts.count(1)
        done = _DoneStep(
            num_decodes=num_decodes,
            num_tokens=sum(counts) - num_decodes,
            encode_owners=encode_owners if plan.encode or plan.restore else None,
            measured=measured,
        )
        if device_seconds is None:
            self._note_seconds(done, now - max(planned_at, before))  # it began when that one ended
        else:
            self._untimed[plan.step_id] = done
            self.note_times(device_seconds)
        if measured:
            self._charge(plan)

    def note_times(self, device_seconds: Iterable[tuple[int, float]]) -> None:
        """How long steps took, some of which are told with a later one's result."""
        if not self._untimed:
            return
        for step_id, seconds in device_seconds:
            if (done := self._untimed.pop(step_id, None)) is not None:
                self._note_seconds(done, seconds)

    def _note_seconds(self, done: _DoneStep, seconds: float) -> None:
        if done.encode_owners is not None:
            if done.measured:
                known = self._times.seconds(done.num_decodes)
                known += self._times.prompt_token * done.num_tokens
                self._charge_encodes(done.encode_owners, max(0.0, seconds - known))
        elif done.num_tokens >= LEAST_SLICE_TOKENS:
            self._times.note_prompt(done.num_tokens, done.num_decodes, seconds)
        elif done.measured and done.num_tokens <= FEW_TOKENS:
            num_computed = done.num_decodes + done.num_tokens
            if num_computed:  # else the step only told the runner what ended
                self._times.note(num_computed, seconds)

    def _charge(self, plan: StepPlan) -> None:
        """Each tenant with what its part of the step costs by itself; one that is alone in a step
        with the whole step."""
        sequences = self._state.queues.sequences
        known = [(chunk, sequences.get(chunk.seq_id)) for chunk in plan.scheduled]
        tenants = {sequence.request.tenant for _, sequence in known if sequence is not None}
        num_decodes = sum(chunk.num_tokens == 1 for chunk in plan.scheduled)
        shared = self._times.fixed if len(tenants) > 1 else 0.0
        each = (self._times.seconds(num_decodes) - shared) / max(1, num_decodes)
        if len(tenants) == 1 and not num_decodes:
            self._use(tenants.pop(), self._times.fixed)
        for chunk, sequence in known:
            if sequence is not None:
                prompt = self._times.prompt_token * chunk.num_tokens
                self._use(sequence.request.tenant, each if chunk.num_tokens == 1 else prompt)

    def _charge_encodes(self, owners: EncodeOwners, seconds: float) -> None:
        """Each tenant with its part of the items."""
        total = sum(len(indices) for _, indices in owners)
        for request, indices in owners:
            self._use(request.tenant, seconds * len(indices) / total)

    def _use(self, tenant: str, seconds: float) -> None:
        if (served := self._served.get(tenant)) is not None:
            served.used += seconds / served.weight

    @property
    def _is_one_tenant(self) -> bool:
        """Whether this is so for certain, at no cost."""
        queues, served = self._state.queues, self._served
        active, waiting = queues.active_of, queues.waiting
        if len(active) > 1 or queues.turns.several or len(served) > 1:
            return False
        tenant = next(iter(active or served), None)
        if served and tenant not in served:
            return False
        return tenant is None or not waiting or waiting[0].request.tenant == tenant

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
        # Whoever comes, or comes back, has no claim on what others used meanwhile but a credit.
        working = self._working or set(queues.active_of)
        at_work = [self._served[t].used for t in working & self._served.keys()]
        least = min(at_work, default=0.0)
        for tenant, count in computing.items():
            before = self._served.get(tenant)
            used = least if before is None else before.used
            if tenant not in working:
                credited = least - CREDIT_SECONDS
                used = credited if before is None else max(used, credited)
            until = now + LINGER_SECONDS
            self._served[tenant] = _Served(count, weights[tenant], until, used)
        self._working = set(computing)


def _all(*queues: Iterable[Sequence]) -> Iterable[Sequence]:
    for queue in queues:
        yield from queue


def row_limits(tenants: Mapping[str, tuple[int, float]], times: StepTimes) -> dict[str, int]:
    """Tenant → most of its sequences in a step, of those tenants that are limited.

    `tenants`: (sequences, weight) of each. Each tenant has one at least.
    """
    if len(tenants) < 2:
        return {}
    total = sum(weight for _, weight in tenants.values())
    longest = min(total / weight * times.seconds(count) for count, weight in tenants.values())
    most = times.most_sequences(longest) if longest else math.inf
    if sum(count for count, _ in tenants.values()) <= most + 1e-6:
        return {}
    left = math.floor(most + 1e-6)
    limits = {}
    for tenant, (count, weight) in sorted(tenants.items(), key=lambda t: t[1][0] / t[1][1]):
        share = max(1, math.floor(left * weight / total + 1e-9))
        if share < count:
            limits[tenant] = share
        left -= min(share, count)
        total -= weight
    return limits
