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
        credits = FlowControl(10)
        await credits.acquire(4)
        await credits.acquire(6)
        assert credits.used == 10

    asyncio.run(scenario())


def test_waiters_are_served_in_order_even_if_a_later_one_would_fit():
    async def scenario():
        credits, order = FlowControl(10), []

        async def want(nbytes):
            await credits.acquire(nbytes)
            order.append(nbytes)

        await credits.acquire(8)
        tasks = [asyncio.create_task(want(n)) for n in (5, 1, 3)]
        await asyncio.sleep(0)
        assert credits.num_waiting == 3
        credits.release(8)
        await asyncio.gather(*tasks)
        assert order == [5, 1, 3]

    asyncio.run(scenario())


def test_more_than_everything_passes_alone():
    async def scenario():
        credits = FlowControl(10)
        await credits.acquire(1)
        huge = asyncio.create_task(credits.acquire(100))
        await asyncio.sleep(0)
        assert not huge.done()
        credits.release(1)
        await huge
        assert credits.used == 100

    asyncio.run(scenario())


def test_failing_wakes_every_waiter_and_leaves_holders_alone():
    async def scenario():
        credits = FlowControl(10)
        await credits.acquire(10)
        waiting = asyncio.create_task(credits.acquire(1))
        await asyncio.sleep(0)
        credits.fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await waiting
        credits.release(10)
        assert credits.used == 0

    asyncio.run(scenario())


operations = st.lists(
    st.tuples(st.sampled_from(["acquire", "cancel", "release", "yield"]), st.integers(0, 15)),
    max_size=60,
)


@given(operations)
def test_whatever_is_cancelled_and_released_nothing_is_lost(script):
    """Grants that race with cancellation go to the next waiter; in the end all is free."""

    async def scenario():
        credits = FlowControl(10)
        tasks: list[tuple[asyncio.Task[None], int]] = []
        held: list[int] = []

        async def want(nbytes):
            await credits.acquire(nbytes)
            held.append(nbytes)

        for action, number in script:
            if action == "acquire":
                tasks.append((asyncio.create_task(want(number)), number))
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)][0].cancel()
            elif action == "release" and held:
                credits.release(held.pop(number % len(held)))
            elif action == "yield":
                await asyncio.sleep(0)
            credits.check_integrity()
        while not all(task.done() for task, _ in tasks) or held:
            await asyncio.sleep(0)
            while held:
                credits.release(held.pop())
        assert credits.used == 0
        assert credits.num_waiting == 0

    asyncio.run(scenario())
