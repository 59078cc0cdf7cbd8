"""Processes that are kept alive: how often, and how they end."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from lookonce.engine.supervisor.child_process import (
    EXIT_REFUSED,
    ChildProcess,
    RestartBudget,
    SupervisedProcess,
)
from lookonce.errors import EngineDeadError

PATIENCE = 30.0


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


def test_a_budget_allows_so_many_restarts_within_its_window():
    now = 0.0
    budget = RestartBudget(limit=3, window=600.0, clock=lambda: now)
    assert [budget.try_take() for _ in range(4)] == [1, 2, 3, None]
    now = 599.0
    assert budget.try_take() is None
    now = 600.0
    assert budget.try_take() == 1


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


def test_it_is_restarted_until_that_is_no_help():
    async def scenario():
        process = kept("raise SystemExit(3)", restarts=RestartBudget(limit=2))
        with pytest.raises(EngineDeadError, match="ended with status 3; it was restarted 2 times"):
            await process.run()

    run(scenario)


def test_a_child_that_refuses_is_not_restarted():
    async def scenario():
        process = kept(f"raise SystemExit({EXIT_REFUSED})")
        with pytest.raises(EngineDeadError, match=f"status {EXIT_REFUSED}"):
            await process.run()

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
