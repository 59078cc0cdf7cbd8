"""Processes that are kept alive: how often, and how they end."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from lookonce.engine.supervisor.child_process import (
    EXIT_REFUSED,
    MAX_DELAY,
    MAX_FAILED_RESTARTS,
    MAX_FAILED_STARTS,
    STEADY_SECONDS,
    ChildProcess,
    RestartBackoff,
    SupervisedProcess,
)
from lookonce.errors import EngineDeadError, ModelLoadError

PATIENCE = 100.0


def python(code):
    return (sys.executable, "-c", code)


def kept(code, **options):
    async def start():
        return await ChildProcess.start("the child", python(code), b"{}", read_output=True)

    return SupervisedProcess("the child", start, **options)


def run(scenario):
    async def whole():
        async with asyncio.timeout(PATIENCE):
            await scenario()

    asyncio.run(whole())


class AtTime:
    """A clock that stands still, and a backoff without jitter that reads it."""

    def __init__(self, max_delay=None):
        self.now = 0.0
        self.backoff = RestartBackoff(lambda: self.now, lambda: 0.0, max_delay)

    def serve(self, seconds):
        self.backoff.serving()
        self.now += seconds
        return self.backoff.ended()


def test_a_process_that_served_is_restarted_at_once():
    assert AtTime().serve(STEADY_SECONDS) == 0.0


def test_restarts_that_succeed_go_on_for_ever_with_delays_that_double_up_to_a_limit():
    at = AtTime()
    delays = [at.serve(1.0) for _ in range(300)]
    assert delays[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert set(delays[10:]) == {MAX_DELAY}


def test_a_process_that_ran_steadily_is_restarted_without_delay_again():
    at = AtTime()
    assert [at.serve(1.0) for _ in range(4)][-1] > 0
    assert at.serve(STEADY_SECONDS) == 0.0
    assert at.serve(1.0) == 0.5


def test_a_shorter_limit_holds_for_processes_that_served_and_not_for_starts_that_fail():
    at = AtTime(max_delay=1.5)
    assert [at.serve(1.0) for _ in range(6)][-2:] == [1.5, 1.5]
    assert [at.backoff.ended() for _ in range(2)] == [16.0, MAX_DELAY]


def test_delays_are_shortened_by_up_to_half_at_random():
    longest = RestartBackoff(jitter=lambda: 0.0)
    shortest = RestartBackoff(jitter=lambda: 1.0)
    for _ in range(3):
        first, second = longest.ended(), shortest.ended()
    assert (first, second) == (1.0, 0.5)


def test_a_process_whose_starts_fail_is_given_up():
    never = RestartBackoff()
    assert [never.ended() is None for _ in range(MAX_FAILED_STARTS)] == [False] * 3 + [True]
    at = AtTime()
    at.serve(1.0)
    gone = [at.backoff.ended() is None for _ in range(MAX_FAILED_RESTARTS)]
    assert gone == [False] * (MAX_FAILED_RESTARTS - 1) + [True]


def test_a_start_that_succeeds_forgets_those_that_failed():
    at = AtTime()
    for _ in range(3):
        for _ in range(MAX_FAILED_STARTS - 1):
            assert at.backoff.ended() is not None
        at.serve(1.0)


def test_a_child_gets_its_line_and_sees_the_end_of_stdin_only_with_its_parent():
    code = "import sys; print(sys.stdin.readline().strip(), flush=True); sys.stdin.read()"

    async def scenario():
        child = await ChildProcess.start("c", python(code), b'{"a": 1}', read_output=True)
        assert await child.read_line() == b'{"a": 1}\n'
        await child.stop(PATIENCE)

    run(scenario)


def test_a_child_that_ignores_sigterm_is_killed(caplog):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True); time.sleep(999)"
    )

    async def scenario():
        child = await ChildProcess.start("the child", python(code), b"", read_output=True)
        await child.read_line()
        await child.stop(0.1)
        assert await child.wait() == -9

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert "the child did not end" in caplog.text


def quickly():
    """A backoff that waits half of each delay."""
    return RestartBackoff(jitter=lambda: 1.0)


def test_it_is_restarted_until_starts_have_failed_again_and_again(caplog):
    async def scenario():
        process = kept("raise SystemExit(3)", backoff=quickly())
        with pytest.raises(EngineDeadError, match="status 3; 4 starts in a row have failed"):
            await process.run()

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert caplog.text.count("the child ended with status 3; it is started again in") == 3


def test_a_command_that_cannot_be_started_is_a_failed_start():
    async def start():
        return await ChildProcess.start("the child", ("/nowhere/at/all",), b"{}")

    async def scenario():
        process = SupervisedProcess("the child", start, backoff=quickly())
        with pytest.raises(EngineDeadError, match="could not be started: No such file"):
            await process.run()

    run(scenario)


def test_a_child_that_refuses_is_not_restarted():
    async def scenario():
        process = kept(f"raise SystemExit({EXIT_REFUSED})")
        with pytest.raises(EngineDeadError, match=f"status {EXIT_REFUSED}"):
            await process.run()

    run(scenario)


def test_a_refusal_after_it_has_served_is_a_failed_start():
    """The settings were good before: the machine is short of something now."""
    starts = []

    async def follow(child):
        starts.append(child)
        if len(starts) in (1, 3):
            process.serving()
        else:
            raise ModelLoadError("a media worker process did not start")
        if len(starts) == 3:
            stopped.append(asyncio.create_task(process.stop(PATIENCE)))

    stopped = []
    process = None

    async def scenario():
        nonlocal process
        process = kept(f"raise SystemExit({EXIT_REFUSED})", follow=follow, backoff=quickly())
        await process.run()
        await stopped[0]

    run(scenario)
    assert len(starts) == 3


def test_stopped_while_it_waits_to_be_restarted_it_ends_at_once():
    class Slow(RestartBackoff):
        def ended(self):
            waiting.set()
            return 999.0

    waiting = asyncio.Event()

    async def scenario():
        process = kept("raise SystemExit(3)", backoff=Slow())
        running = asyncio.create_task(process.run())
        await waiting.wait()
        await process.stop(PATIENCE)
        await running

    run(scenario)


def test_stopped_it_is_not_restarted():
    followed = []

    async def follow(child):
        followed.append(await child.read_line())
        stopping.set()

    stopping = asyncio.Event()

    async def scenario():
        process = kept("import time; print('up', flush=True); time.sleep(999)", follow=follow)
        running = asyncio.create_task(process.run())
        await stopping.wait()
        await process.stop(PATIENCE)
        await running

    run(scenario)
    assert followed == [b"up\n"]


def test_stopped_while_it_starts_it_does_not_stay():
    async def scenario():
        process = kept("import time; time.sleep(999)")
        running = asyncio.create_task(process.run())
        await asyncio.sleep(0)
        await process.stop(PATIENCE)
        await running

    run(scenario)


def test_a_command_that_does_not_read_its_line_is_no_error():
    async def scenario():
        child = await ChildProcess.start("c", python("raise SystemExit(5)"), b"x" * 1_000_000)
        assert await child.wait() == 5

    run(scenario)
