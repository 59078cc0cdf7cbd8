"""The queue of media jobs: bounded, in order within a tenant, and fair between tenants by cost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from lookonce.errors import QueueFullError, http_status
from lookonce.render.media.fair_queue import LONG_SECONDS, QUANTUM, FairQueue, QueuedJob

SHORT, LONG = 0.2, 5.0


def new_queue(max_waiting: int = 1000, per_tenant: int = 1000) -> FairQueue[str]:
    return FairQueue(max_waiting=max_waiting, max_waiting_per_tenant=per_tenant)


def push(queue: FairQueue[str], tenant: str, seconds: float, job: str = "") -> QueuedJob[str]:
    queued = QueuedJob(job, tenant, seconds)
    queue.push(queued)
    return queued


def served(queue: FairQueue[str], count: int, *, long: bool = True) -> list[str]:
    """The tenants of the next jobs."""
    taken = [queue.pop(long=long) for _ in range(count)]
    return [queued.tenant for queued in taken if queued is not None]


def test_one_tenants_jobs_leave_in_order_and_an_empty_queue_gives_none() -> None:
    queue = new_queue()
    for number, seconds in enumerate([SHORT, LONG, SHORT]):
        push(queue, "a", seconds, str(number))
    taken = [queue.pop() for _ in range(4)]
    assert [None if each is None else each.job for each in taken] == ["0", "1", "2", None]


def test_a_newcomer_does_not_wait_for_all_of_anothers_jobs() -> None:
    queue = new_queue()
    for _ in range(100):
        push(queue, "heavy", LONG)
    assert served(queue, 2) == ["heavy", "heavy"]
    push(queue, "light", SHORT)
    assert "light" in served(queue, 2)


def test_a_tenant_of_many_light_jobs_gets_as_much_time_as_one_of_few_heavy_jobs() -> None:
    queue = new_queue(2000, 2000)
    for _ in range(1000):
        push(queue, "light", SHORT)
        push(queue, "heavy", LONG)
    seconds = {"light": SHORT, "heavy": LONG}
    paid: Counter[str] = Counter()
    for _ in range(400):
        paid[served(queue, 1)[0]] += 1
    assert abs(paid["light"] * SHORT - paid["heavy"] * LONG) <= LONG + 2 * QUANTUM
    assert sum(paid[name] * seconds[name] for name in paid) > 50


def test_what_jobs_really_took_is_charged_afterwards() -> None:
    """One tenant's headers lie: each job takes 25 times its estimate."""
    queue = new_queue(4000, 4000)
    for _ in range(2000):
        push(queue, "liar", SHORT)
        push(queue, "honest", SHORT)
    real = {"liar": LONG, "honest": SHORT}
    used: Counter[str] = Counter()
    for _ in range(1000):
        tenant = served(queue, 1)[0]
        used[tenant] += real[tenant]
        queue.settle(tenant, real[tenant] - SHORT)
    assert abs(used["liar"] - used["honest"]) <= 2 * LONG


def test_debts_are_kept_while_a_tenant_does_not_wait_and_then_forgiven() -> None:
    queue = new_queue()
    push(queue, "liar", SHORT)
    queue.pop()
    queue.settle("liar", 3.0)
    for _ in range(100):
        push(queue, "honest", SHORT)
    push(queue, "liar", SHORT)
    order = served(queue, 50)
    assert 10 < order.index("liar") < 25  # 3 seconds, at 0.2 each
    assert queue.debt("liar") < SHORT + QUANTUM
    queue.settle("liar", 1.0)
    served(queue, 51)
    queue.check_integrity()
    assert queue.debt("liar") == 0 or len(queue) == 0


def test_a_tenant_alone_is_served_at_once_whatever_it_owes() -> None:
    queue = new_queue()
    queue.settle("a", 1000.0)
    push(queue, "a", LONG)
    assert served(queue, 1) == ["a"]


def test_long_jobs_can_be_passed_over_but_keep_their_place() -> None:
    queue = new_queue()
    push(queue, "a", LONG, "first")
    push(queue, "a", SHORT, "second")
    short = queue.pop(long=False)
    assert short is not None
    assert short.job == "second"
    assert queue.pop(long=False) is None
    assert served(queue, 1) == ["a"]


def test_waiting_for_a_worker_that_takes_long_jobs_earns_no_endless_credit() -> None:
    queue = new_queue()
    for _ in range(50):
        push(queue, "long", LONG)
    for _ in range(500):
        push(queue, "short", SHORT)
    assert set(served(queue, 400, long=False)) == {"short"}
    order = served(queue, 52)
    assert order.count("long") <= 1 + 50 * SHORT / LONG + 1


def test_the_queue_is_bounded_over_all_and_by_tenant() -> None:
    queue = new_queue(max_waiting=4, per_tenant=3)
    for _ in range(3):
        push(queue, "a", SHORT)
    with pytest.raises(QueueFullError, match="too many of your media items") as refused:
        push(queue, "a", SHORT)
    assert (http_status(refused.value), refused.value.reason) == (429, "tenant")
    push(queue, "b", SHORT)
    with pytest.raises(QueueFullError, match="too many media items") as refused:
        push(queue, "b", SHORT)
    assert refused.value.reason == "queue"
    queue.pop()
    push(queue, "c", SHORT)


def test_a_removed_job_is_not_served_and_not_paid() -> None:
    queue = new_queue()
    gone, kept = push(queue, "a", LONG), push(queue, "a", LONG, "kept")
    assert queue.remove(gone)
    assert not queue.remove(gone)
    assert queue.pop() is kept
    assert not queue.remove(kept)
    assert len(queue) == 0


@given(
    costs=st.lists(st.lists(st.floats(0.001, LONG), min_size=1, max_size=6), min_size=2, max_size=5)
)
@settings(max_examples=50, deadline=None)
def test_tenants_that_wait_all_the_time_get_equal_shares(costs: list[list[float]]) -> None:
    """However their costs are mixed, nobody is ahead by more than two of the dearest jobs."""
    queue = new_queue(10_000, 10_000)
    for tenant, each in enumerate(costs):
        for number in range(80):
            push(queue, str(tenant), each[number % len(each)])
    paid = Counter({str(tenant): 0.0 for tenant in range(len(costs))})
    left = Counter(dict.fromkeys(paid, 80))
    while min(left.values()):
        taken = queue.pop()
        assert taken is not None
        left[taken.tenant] -= 1
        paid[taken.tenant] += taken.seconds
        assert max(paid.values()) - min(paid.values()) <= 2 * (LONG + QUANTUM)


class QueueMachine(RuleBasedStateMachine):
    """Every job leaves once, by `pop` or `remove`, in its tenant's order, within the limits."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(max_waiting=12, max_waiting_per_tenant=5)
        self.waiting: dict[str, list[QueuedJob[int]]] = {}

    @rule(target=jobs, tenant=st.sampled_from("abc"), seconds=st.floats(0.001, 10.0))
    def push(self, tenant: str, seconds: float) -> QueuedJob[int]:
        queued = QueuedJob(0, tenant, seconds)
        own = self.waiting.setdefault(tenant, [])
        if len(own) >= 5 or sum(map(len, self.waiting.values())) >= 12:
            with pytest.raises(QueueFullError):
                self.queue.push(queued)
        else:
            self.queue.push(queued)
            own.append(queued)
        return queued

    @rule(long=st.booleans(), more=st.floats(-1.0, 10.0))
    def pop(self, long: bool, more: float) -> None:
        taken = self.queue.pop(long=long)
        allowed = {
            name: [each for each in own if long or each.seconds <= LONG_SECONDS]
            for name, own in self.waiting.items()
        }
        if taken is None:
            assert not any(allowed.values())
            return
        assert allowed[taken.tenant][0] is taken
        self.waiting[taken.tenant].remove(taken)
        self.queue.settle(taken.tenant, max(more, -taken.seconds))

    @rule(queued=jobs)
    def remove(self, queued: QueuedJob[int]) -> None:
        own = self.waiting.get(queued.tenant, [])
        assert self.queue.remove(queued) == (queued in own)
        if queued in own:
            own.remove(queued)

    @rule()
    def drain(self) -> None:
        drained = self.queue.drain()
        assert {id(each) for each in drained} == {
            id(each) for own in self.waiting.values() for each in own
        }
        self.waiting.clear()

    @invariant()
    def counts_agree(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == sum(map(len, self.waiting.values()))


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
