"""What each tenant gets of a step, where several are served.

**Decodes.** On a CPU a step takes longer the more sequences it computes, so one tenant's many
answers would slow every token of another tenant's few. So the tenants with most sequences decode
only some of them in a step, in turn, such that for each tenant

    seconds of the step ≤ sum of all weights / its weight x seconds of a step of its own sequences

which is what it would have alone with its share of the machine. Where a step of no sequence would
take little (`TURN_OVERHEAD`), steps are divided further: tenants take turns at them, the one that
has used least time for its weight first, and no step of decodes takes more than `SLICE_SECONDS`.
Whoever comes then waits for the rest of one such step, and its own ones are as short as alone.

**Prompts.** A step computes no more tokens of prompts than take `SLICE_SECONDS`, so that nobody
waits long for a step of another one; and none of a tenant that has used more time, for its weight,
than another one that decodes in this step or has a prompt that can be computed in it. A tenant that
comes, or comes back, counts as having used `CREDIT_SECONDS` less than those at work: one that asks
for less than its share waits for the rest of one step, and not behind a prompt of another one
(as Linux's fair scheduler places a task that wakes). Models whose items or prompts are never cut
are exempt.

What steps cost is measured (`StepTimes`); where it does not grow with the sequences, as on most
GPUs, no decodes are limited.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lookonce.core.encoder_scheduling import EncodeOwners
from lookonce.core.request import Sequence
from lookonce.core.scheduler_state import SchedulerState
from lookonce.types.step import StepPlan

LINGER_SECONDS = 1.0
"""A tenant without sequences counts as served for so long: whoever asks one question after another
would otherwise wait, at each, for a step of all sequences of the others."""
RECENT = 0.8
"""Weight of what was measured so far beside a new measurement of the same."""
NUM_MEASURED = 4
"""Steps of the fewest sequences that are measured before their time is believed."""
DECAY = 0.98
"""The same for steps of various numbers of sequences."""
NEGLIGIBLE = 1e6
"""A step that takes so many times as long as each of its sequences adds takes always as long."""
SLICE_SECONDS = 0.006
"""For tokens of prompts; as long as a step of no sequence where that is longer."""
MIN_SLICE_TOKENS = 32
FIRST_SLICE_TOKENS = 128
"""As long as it is not known how long tokens take."""
CREDIT_SECONDS = 0.05
"""That a tenant may use, times its weight, before the others' prompts when it comes back."""
LENGTHENED = 0.25
"""By how much of its time a step with a prompt may be longer for the decodes of others."""
UNKNOWN_SECONDS = 1e-6
"""For a token, before it was measured how long it takes: only that all are alike counts."""
NOBODY: frozenset[str] = frozenset()
TURN_OVERHEAD = 0.4
"""Most of a slice that the fixed part of its time may be for tenants to take turns at steps: what
two tenants' steps take more than one of both."""


class StepTimes:
    """Seconds of a step that only decodes, by its number of sequences: the line from the fewest
    that were measured to the mean of all others, where older measurements count less."""

    def __init__(self) -> None:
        self.prompt_token = 0.0
        """Seconds of each token of a prompt; 0 until it was measured."""
        self._fewest = 0
        self._fewest_seconds: deque[float] = deque(maxlen=NUM_MEASURED)
        self._weight = self._total_number = self._total_seconds = 0.0

    def note(self, num_sequences: int, seconds: float) -> None:
        if num_sequences > self._fewest > 0:
            self._note_more(num_sequences, seconds)
            return
        if num_sequences < self._fewest:
            for known in self._fewest_seconds:
                self._note_more(self._fewest, known)
            self._fewest_seconds.clear()
        self._fewest = num_sequences
        self._fewest_seconds.append(seconds)

    def _note_more(self, num_sequences: int, seconds: float) -> None:
        self._weight = self._weight * DECAY + 1
        self._total_number = self._total_number * DECAY + num_sequences
        self._total_seconds = self._total_seconds * DECAY + seconds

    def note_prompt(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """A step with so many tokens of prompts beside `num_sequences` that decode."""
        fixed, each = self.line()
        cost = max(0.0, seconds - fixed - each * num_sequences) / num_tokens
        known = self.prompt_token
        self.prompt_token = cost if not known else RECENT * known + (1 - RECENT) * cost

    def line(self) -> tuple[float, float]:
        """(seconds of any step, seconds of each sequence); neither is negative. The first is 0
        before steps of two sizes were measured often enough: steps of fewer will tell."""
        if not self._fewest:
            return 0.0, 0.0
        fewest = min(self._fewest_seconds)  # in the others this process had to wait for a core
        if not self._weight:
            return 0.0, fewest / self._fewest
        number, seconds = self._total_number / self._weight, self._total_seconds / self._weight
        if len(self._fewest_seconds) < NUM_MEASURED:
            return 0.0, seconds / number
        slope = (seconds - fewest) / (number - self._fewest)
        slope = min(max(0.0, slope), seconds / number)
        return seconds - slope * number, slope


@dataclass(slots=True)
class _Served:
    """A tenant that is served, or was a moment ago."""

    num_sequences: int
    weight: float
    until: float
    used: float = 0.0
    """Seconds of steps for its weight, counted while others were served, too."""


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
        self._put_off: list[Sequence] = []
        """Decodes of tenants that are behind, where tenants take turns at steps."""
        self.measures = False
        """Whether the last step was chosen for while several tenants were served."""
        self._planned_at = 0.0

    def choose(self, decodes: list[Sequence]) -> list[Sequence]:
        """Of `decodes`, in their order, those that the next step computes: all where one tenant is
        served."""
        self._planned_at = self._state.clock()
        self.measures = not self._is_one_tenant
        self.behind = NOBODY
        if not self.measures:
            return decodes
        self._behind_decodes, self._put_off = NOBODY, []
        self._note_served()
        limits = self._limits()
        if limits and self._takes_turns:
            self.behind = self._behind(self._working)
            self._put_off = [s for s in decodes if s.request.tenant in self.behind]
            decodes = [s for s in decodes if s.request.tenant not in self.behind]
            self._behind_decodes = self._behind(s.request.tenant for s in decodes)
            return self._within_slice(decodes)
        decodes = self._limited(decodes, limits)
        if self._cuts_prompts and self._times.prompt_token:  # else nobody pays for prompts
            self._behind_decodes = self._behind(s.request.tenant for s in decodes)
            self.behind = self._behind(self._working)
        return decodes

    def _behind(self, tenants: Iterable[str]) -> frozenset[str]:
        """Tenants that have used more than one of these."""
        least = min((self._served[tenant].used for tenant in tenants), default=math.inf)
        return frozenset(t for t, served in self._served.items() if served.used > least)

    def put_off(self) -> list[Sequence]:
        """Decodes for a step in which nothing else can be computed after all."""
        return self._within_slice(self._put_off)

    def beside(self, num_tokens: int) -> list[Sequence]:
        """Decodes that lengthen a step with so many tokens of prompts by `LENGTHENED` at most."""
        fixed, each = self._times.line()
        if not (self._put_off and each):
            return []
        seconds = fixed + self._times.prompt_token * num_tokens
        most = int(LENGTHENED * seconds / each)
        return self._in_turn(self._put_off, most) if most else []

    @property
    def _takes_turns(self) -> bool:
        """Whether a step is of one tenant: what is lost is small, as a small step is short."""
        return self._cuts_prompts and self._times.line()[0] <= TURN_OVERHEAD * SLICE_SECONDS

    def _within_slice(self, decodes: list[Sequence]) -> list[Sequence]:
        """In turn as many as take no longer than a slice."""
        fixed, each = self._times.line()
        most = max(1, int((SLICE_SECONDS - fixed) / each)) if each else len(decodes)
        if len(decodes) <= most:
            return decodes
        return self._in_turn(decodes, most)

    def _in_turn(self, decodes: list[Sequence], most: int) -> list[Sequence]:
        """Those that have waited longest, in the order of `decodes`."""
        chosen = sorted(decodes, key=lambda s: s.decode_turn)[:most]
        for sequence in chosen:
            self._num_turns += 1
            sequence.decode_turn = self._num_turns
        kept = set(chosen)
        return [sequence for sequence in decodes if sequence in kept]

    @property
    def may_limit(self) -> bool:
        """Whether the next step may be chosen for several tenants."""
        return not self._is_one_tenant

    @property
    def prompt_tokens(self) -> int | None:
        """Most tokens of prompts that the step computes; None: as many as there is room for."""
        if not (self.measures and self._cuts_prompts):
            return None
        cost = self._times.prompt_token
        if not cost:
            return FIRST_SLICE_TOKENS
        fixed, _ = self._times.line()
        return max(MIN_SLICE_TOKENS, int(max(SLICE_SECONDS, fixed) / cost))

    def note_no_decodes(self) -> None:
        """Nothing decodes after all: nobody's prompts wait for that."""
        self._behind_decodes = NOBODY

    def let_more_compute(self) -> bool:
        """No prompt of a tenant that is not behind can be computed now. Whether there are tenants
        that need wait for these prompts no more."""
        changed, self.behind = self.behind != self._behind_decodes, self._behind_decodes
        return changed

    def _limits(self) -> dict[str, int]:
        return row_limits(
            {tenant: (s.num_sequences, s.weight) for tenant, s in self._served.items()},
            *self._times.line(),
        )

    def _limited(self, decodes: list[Sequence], limits: dict[str, int]) -> list[Sequence]:
        if not limits:
            return decodes
        chosen = {s for s in decodes if s.request.tenant not in limits}
        for tenant, limit in limits.items():
            own = [s for s in decodes if s.request.tenant == tenant]
            chosen.update(self._in_turn(own, limit))
        return [sequence for sequence in decodes if sequence in chosen]

    def note_done(self, plan: StepPlan, encode_owners: EncodeOwners) -> None:
        """The step has ended; nothing was updated yet. `encode_owners`: for whose requests its
        items were encoded.

        Called for steps with new prompts while one tenant is served, too: what they cost is known
        then once another one comes.
        """
        seconds = self._state.clock() - self._planned_at
        num_decodes = sum(chunk.num_tokens == 1 for chunk in plan.scheduled)
        num_tokens = sum(chunk.num_tokens for chunk in plan.scheduled if chunk.num_tokens > 1)
        if plan.encode or plan.restore:
            fixed, each = self._times.line()
            known = fixed + each * num_decodes + self._times.prompt_token * num_tokens
            self._charge_encodes(encode_owners, max(0.0, seconds - known))
            seconds = min(seconds, known)
        elif num_tokens >= MIN_SLICE_TOKENS:
            self._times.note_prompt(num_tokens, num_decodes, seconds)
        elif self.measures and num_decodes and not num_tokens:
            self._times.note(num_decodes, seconds)
        if self.measures:
            self._charge(plan, seconds)

    def _charge(self, plan: StepPlan, seconds: float) -> None:
        """Each tenant with its part of the step's seconds, by what its sequences cost alone."""
        _, each = self._times.line()
        costs = defaultdict[str, float](float)
        for chunk in plan.scheduled:
            sequence = self._state.queues.sequences.get(chunk.seq_id)
            if sequence is not None:
                token = each if chunk.num_tokens == 1 else self._times.prompt_token
                costs[sequence.request.tenant] += chunk.num_tokens * (token or UNKNOWN_SECONDS)
        total = sum(costs.values())
        for tenant, cost in costs.items():
            if (served := self._served.get(tenant)) is not None:
                served.used += seconds * cost / total / served.weight

    def _charge_encodes(self, owners: EncodeOwners, seconds: float) -> None:
        """Each tenant with its part of the items."""
        total = sum(len(indices) for _, indices in owners)
        for request, indices in owners if self.measures else ():
            served = self._served.get(request.tenant)
            if served is not None:
                served.used += seconds * len(indices) / total / served.weight

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
