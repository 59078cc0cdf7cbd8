"""FlowControl: first come, first served; never lost; an amount above the capacity passes alone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.errors import EngineDeadError
from lookonce.ipc.channel import FlowControl


def test_what_fits_is_granted_at_once():
    async def scenario():
        flow = FlowControl(10)
        await flow.acquire(4)
        await flow.acquire(6)
        assert flow.used == 10

    asyncio.run(scenario())


def test_waiters_are_served_in_order_even_if_a_later_one_would_fit():
    async def scenario():
        flow, order = FlowControl(10), []

        async def want(nbytes):
            await flow.acquire(nbytes)
            order.append(nbytes)

        await flow.acquire(8)
        tasks = [asyncio.create_task(want(n)) for n in (5, 1, 3)]
        await asyncio.sleep(0)
        assert flow.num_waiting == 3
        flow.release(8)
        await asyncio.gather(*tasks)
        assert order == [5, 1, 3]

    asyncio.run(scenario())


def test_more_than_everything_passes_alone():
    async def scenario():
        flow = FlowControl(10)
        await flow.acquire(1)
        huge = asyncio.create_task(flow.acquire(100))
        await asyncio.sleep(0)
        assert not huge.done()
        flow.release(1)
        await huge
        assert flow.used == 100

    asyncio.run(scenario())


def test_failing_wakes_every_waiter_and_leaves_holders_alone():
    async def scenario():
        flow = FlowControl(10)
        await flow.acquire(10)
        waiting = asyncio.create_task(flow.acquire(1))
        await asyncio.sleep(0)
        flow.fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await waiting
        flow.release(10)
        assert flow.used == 0

    asyncio.run(scenario())


operations = st.lists(
    st.tuples(st.sampled_from(["acquire", "cancel", "release", "yield"]), st.integers(0, 15)),
    max_size=60,
)


@given(operations)
def test_whatever_is_cancelled_and_released_nothing_is_lost(script):
    """Grants that race with cancellation go to the next waiter; in the end all is free."""

    async def scenario():
        flow = FlowControl(10)
        tasks: list[tuple[asyncio.Task[None], int]] = []
        held: list[int] = []

        async def want(nbytes):
            await flow.acquire(nbytes)
            held.append(nbytes)

        for action, number in script:
            if action == "acquire":
                tasks.append((asyncio.create_task(want(number)), number))
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)][0].cancel()
            elif action == "release" and held:
                flow.release(held.pop(number % len(held)))
            elif action == "yield":
                await asyncio.sleep(0)
            flow.check_integrity()
        while not all(task.done() for task, _ in tasks) or held:
            await asyncio.sleep(0)
            while held:
                flow.release(held.pop())
        assert flow.used == 0
        assert flow.num_waiting == 0

    asyncio.run(scenario())
