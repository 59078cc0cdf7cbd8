"""Tenants take turns by the cost of their jobs."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.types.fair_queue import (
    LOOP_QUANTUM,
    DeficitRoundRobin,
    FairQueue,
    LoopTurns,
    TenantWeights,
)

QUANTUM = 10
LARGEST = 50


def drained(queue):
    return [job for _, job in iter(queue.pop, None)]


def test_a_small_job_does_not_wait_for_another_tenant_s_large_ones():
    queue = FairQueue(QUANTUM)
    for number in range(6):
        queue.push("large", f"large {number}", 1000)
    queue.push("small", "small", 3)
    assert drained(queue)[0] == "small"


def test_a_tenant_that_may_not_begin_keeps_its_place():
    queue = FairQueue(QUANTUM)
    queue.push("a", "a", 5)
    queue.push("b", "b", 5)
    assert queue.pop(lambda tenant: tenant == "b") == ("b", "b")
    assert queue.pop(lambda tenant: tenant == "b") is None
    assert queue.pop() == ("a", "a")


def test_a_tenant_of_twice_the_weight_gets_twice_as_much():
    weights = TenantWeights()
    weights.replace({"heavy": 3.0}, 1.5)
    queue = FairQueue(QUANTUM, weights)
    for number in range(300):
        for tenant in ("heavy", "light"):
            queue.push(tenant, number, 10)
    taken = Counter(queue.pop()[0] for _ in range(300))
    assert abs(taken["heavy"] - 200) <= 3


def test_debts_are_paid_before_the_next_turn():
    turns = DeficitRoundRobin(QUANTUM)
    for tenant in ("a", "b"):
        turns.join(tenant)
    turns.charge("a", 5 * QUANTUM)
    served = []
    for _ in range(10):
        served.append(turns.choose(dict.fromkeys("ab", QUANTUM)))
        turns.charge(served[-1], QUANTUM)
    assert "".join(served) == "bbbbbbabab"


def test_a_removed_job_is_not_taken():
    queue = FairQueue(QUANTUM)
    jobs = [["first"], ["second"]]
    for job in jobs:
        queue.push("a", job, 5)
    assert queue.remove("a", jobs[0])
    assert not queue.remove("a", jobs[0])
    assert not queue.remove("b", jobs[1])
    assert drained(queue) == [["second"]]
    assert len(queue) == 0


JOBS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, LARGEST)), max_size=60)


@given(JOBS)
def test_nothing_is_lost_and_each_tenant_s_order_is_kept(jobs):
    queue = FairQueue(QUANTUM)
    for number, (tenant, cost) in enumerate(jobs):
        queue.push(tenant, number, cost)
    taken = drained(queue)
    assert sorted(taken) == list(range(len(jobs)))
    for tenant in "abc":
        own = [number for number in taken if jobs[number][0] == tenant]
        assert own == sorted(own)


@given(JOBS)
def test_waiting_tenants_get_equal_shares(jobs):
    """Within what a turn can add and the largest job can take (Shreedhar and Varghese, theorem 1:
    credit stays below quantum + largest cost)."""
    queue = FairQueue(QUANTUM)
    waiting = {tenant: deque() for tenant in "abc"}
    for number, (tenant, cost) in enumerate(jobs):
        queue.push(tenant, number, cost)
        waiting[tenant].append(cost)
    waiting = {tenant: costs for tenant, costs in waiting.items() if costs}
    served = Counter()
    while all(waiting.values()) and waiting:
        tenant, number = queue.pop()
        served[tenant] += waiting[tenant].popleft()
        shares = [served[tenant] for tenant in waiting]
        assert max(shares) - min(shares) <= 2 * (QUANTUM + LARGEST)


def test_pieces_on_a_loop_are_in_turn_by_tenant_with_the_rest_of_the_loop_between_them():
    async def scenario():
        turns, log = LoopTurns(), []

        async def piece(tenant):
            await turns.turn(tenant, LOOP_QUANTUM)
            log.append(tenant)

        def tick():
            log.append(".")
            if len(log) < 30:
                asyncio.get_running_loop().call_soon(tick)

        pieces = [asyncio.create_task(piece(tenant)) for tenant in "aaaaab"]
        asyncio.get_running_loop().call_soon(tick)
        await asyncio.gather(*pieces)
        order = "".join(log)
        assert order.replace(".", "")[:3].count("b") == 1
        assert order.replace(".", "").count("a") == 5
        assert "aa" not in order
        assert "ab" not in order
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        begun = turns.turn("a", 1)
        with pytest.raises(StopIteration):  # at once: nothing was waited for
            begun.send(None)

    asyncio.run(scenario())


def test_a_piece_that_is_left_takes_no_turn():
    async def scenario():
        turns = LoopTurns()
        pieces = [asyncio.create_task(turns.turn(tenant, 1)) for tenant in "aab"]
        await asyncio.sleep(0)
        pieces[1].cancel()  # it waits for the first one's
        done = await asyncio.gather(*pieces, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in done] == [False, True, False]

    asyncio.run(scenario())
