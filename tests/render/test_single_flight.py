"""One execution per key, for any number of callers, also when some of them are cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.render.media.single_flight import SingleFlight


class Work:
    """Work that runs until it is told how to end, and counts its starts and cancellations."""

    def __init__(self) -> None:
        self.starts: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self._ends: dict[str, asyncio.Future[str]] = {}

    async def run(self, key: str) -> str:
        self.starts[key] += 1
        self._ends[key] = asyncio.get_running_loop().create_future()
        try:
            return await self._ends[key]
        except asyncio.CancelledError:
            self.cancelled[key] += 1
            raise

    def end(self, key: str, value: str) -> None:
        self._ends[key].set_result(value)

    def fail(self, key: str, error: Exception) -> None:
        self._ends[key].set_exception(error)


async def settle() -> None:
    """Let everything that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


def call(flights: SingleFlight[str, str], work: Work, key: str = "k") -> asyncio.Task[str]:
    return asyncio.create_task(flights.run(key, lambda: work.run(key)))


def test_concurrent_callers_of_one_key_share_one_execution() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[str, str](), Work()
        callers = [call(flights, work) for _ in range(64)]
        await settle()
        work.end("k", "done")
        assert await asyncio.gather(*callers) == ["done"] * 64
        assert work.starts == {"k": 1}

    asyncio.run(scenario())


def test_different_keys_fly_apart() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[str, str](), Work()
        first, second = call(flights, work, "a"), call(flights, work, "b")
        await settle()
        work.end("b", "B")
        assert await second == "B"
        assert not first.done()
        work.end("a", "A")
        assert await first == "A"

    asyncio.run(scenario())


def test_a_failure_reaches_every_caller_and_is_forgotten() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[str, str](), Work()
        callers = [call(flights, work) for _ in range(3)]
        await settle()
        work.fail("k", LookupError("broken"))
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert all(isinstance(result, LookupError) for result in results)
        again = call(flights, work)
        await settle()
        work.end("k", "better")
        assert await again == "better"
        assert work.starts == {"k": 2}

    asyncio.run(scenario())


def test_nothing_is_kept_after_landing() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[str, str](), Work()
        caller = call(flights, work)
        await settle()
        assert "k" in flights
        work.end("k", "done")
        await caller
        await settle()
        assert len(flights) == 0

    asyncio.run(scenario())


def test_who_comes_while_the_result_is_on_its_way_boards_no_second_flight() -> None:
    """Between the work's end and the first caller's next step, the loop runs others."""

    async def scenario() -> None:
        flights, work = SingleFlight[str, str](), Work()
        first = call(flights, work)
        await settle()

        async def latecomer() -> str | None:
            return None if first.done() else await flights.run("k", lambda: work.run("k"))

        work.end("k", "done")
        late = []
        while not first.done():
            late.append(asyncio.create_task(latecomer()))
            await asyncio.sleep(0)
        await settle()
        assert work.starts == {"k": 1}
        results = [task.result() for task in late]
        assert len([result for result in results if result == "done"]) > 1
        assert len(flights) == 0

    asyncio.run(scenario())


def test_one_caller_leaving_does_not_disturb_the_others() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[str, str](), Work()
        leaver, stayer = call(flights, work), call(flights, work)
        await settle()
        leaver.cancel()
        await settle()
        assert leaver.cancelled()
        work.end("k", "done")
        assert await stayer == "done"
        assert not work.cancelled

    asyncio.run(scenario())


def test_the_work_is_cancelled_with_its_last_caller() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[str, str](), Work()
        leavers = [call(flights, work) for _ in range(2)]
        await settle()
        for leaver in leavers:
            assert not work.cancelled
            leaver.cancel()
            await settle()
        assert work.cancelled == {"k": 1}
        assert len(flights) == 0

    asyncio.run(scenario())


def test_a_caller_boards_a_new_flight_while_the_abandoned_one_ends() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[str, str](), Work()
        leaver = call(flights, work)
        await settle()
        leaver.cancel()
        await asyncio.sleep(0)
        late = call(flights, work)
        await settle()
        work.end("k", "second")
        assert await late == "second"
        assert work.starts == {"k": 2}

    asyncio.run(scenario())


def test_a_failure_without_callers_is_not_reported_as_lost() -> None:
    """asyncio reports no unretrieved exception for a flight whose callers were all cancelled."""

    async def scenario() -> None:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))
        flights, work = SingleFlight[str, str](), Work()
        leaver = call(flights, work)
        await settle()
        leaver.cancel()
        work.fail("k", LookupError("broken"))  # while its caller is leaving
        await settle()
        del leaver
        assert complaints == []

    asyncio.run(scenario())


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["call", "leave", "end", "fail", "settle"]), st.integers(0, 9)),
        max_size=40,
    )
)
def test_at_most_one_execution_is_in_the_air_and_every_caller_gets_an_end(
    steps: list[tuple[str, int]],
) -> None:
    async def scenario() -> None:
        flights, in_air, most = SingleFlight[str, int](), 0, 0
        ends: list[asyncio.Future[int]] = []
        callers: list[asyncio.Task[int]] = []

        async def work() -> int:
            nonlocal in_air, most
            in_air += 1
            most = max(most, in_air)
            ends.append(asyncio.get_running_loop().create_future())
            try:
                return await ends[-1]
            finally:
                in_air -= 1

        def finish(fail: bool) -> None:
            for end in ends:
                if not end.done() and fail:
                    end.set_exception(LookupError("broken"))
                elif not end.done():
                    end.set_result(7)

        for step, number in steps:
            if step == "call":
                callers.append(asyncio.create_task(flights.run("k", work)))
            elif step == "leave" and callers:
                callers[number % len(callers)].cancel()
            elif step in ("end", "fail"):
                finish(step == "fail")
            else:
                await asyncio.sleep(0)
        await settle()
        finish(False)
        results = await asyncio.gather(*callers, return_exceptions=True)
        await settle()
        assert all(
            result == 7 or isinstance(result, LookupError | asyncio.CancelledError)
            for result in results
        )
        assert most <= 1
        assert len(flights) == 0
        assert in_air == 0

    asyncio.run(scenario())


def test_callers_may_fly_different_keys_with_any_hashable() -> None:
    async def scenario() -> None:
        flights = SingleFlight[tuple[bytes, str], str]()

        async def work() -> str:
            return "x"

        assert await flights.run((b"s", "u"), work) == "x"

    asyncio.run(scenario())


def test_an_error_raised_at_once_reaches_the_caller() -> None:
    async def scenario() -> None:
        flights = SingleFlight[str, str]()

        async def work() -> str:
            raise LookupError("at once")

        with pytest.raises(LookupError, match="at once"):
            await flights.run("k", work)
        await settle()
        assert len(flights) == 0

    asyncio.run(scenario())
