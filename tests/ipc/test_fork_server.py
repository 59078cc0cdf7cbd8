"""A real fork server, and processes of it that say what they are."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import socket
import subprocess
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from lookonce.engine.supervisor import child_process, fork_supervisor
from lookonce.engine.supervisor.child_process import ChildProcess
from lookonce.engine.supervisor.fork_supervisor import ForkSupervisor
from lookonce.errors import UnavailableError
from lookonce.ipc.fork_server import ForkRequest, Preload, start_forked
from lookonce.ipc.worker_process import fork_worker

MODULE = "tests.support.forked"
PATIENCE = 100.0
SECRETS = {"LOOKONCE_SECRET", "HF_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "https_proxy"}


@asynccontextmanager
async def fork_server(folder):
    """The supervisor of one, whose socket folder this is."""
    supervisor = ForkSupervisor(folder, Preload((MODULE,), {"answer": "preloaded"}))
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        await supervisor.stop()
        await running


def with_fork_server(folder, scenario):
    async def whole():
        async with asyncio.timeout(60), fork_server(folder) as supervisor:
            await scenario(supervisor)

    asyncio.run(whole())


def request(*arguments, places=(), group=0, dies_with_link=False, module=MODULE):
    return ForkRequest(module, arguments, places, group, dies_with_link)


class Told:
    """A process that writes what it is into a pipe."""

    def __init__(self, path, place=7, **options):
        self.output, theirs = os.pipe()
        self.process = start_forked(path, request(str(place), places=(place,), **options), [theirs])
        os.close(theirs)
        with os.fdopen(self.output, closefd=False) as lines:
            self.told = json.loads(lines.readline())

    def end(self):
        self.process.kill()
        os.close(self.output)
        return self.process.wait(PATIENCE)

    def is_alive(self):
        """The pipe has another end."""
        return not select.select([self.output], [], [], 0.0)[0]


def pid_of(supervisor):
    return supervisor._process.child._process.pid


async def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_a_process_has_its_arguments_descriptors_and_group_and_nothing_else(tmp_path, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "x")

    async def scenario(supervisor):
        first = await asyncio.to_thread(Told, supervisor.path)
        second = await asyncio.to_thread(Told, supervisor.path, 0)
        for each, place in ((first, "7"), (second, "0")):
            told = each.told
            assert told["answer"] == "preloaded"
            assert told["arguments"] == [MODULE, place]
            assert told["command"][1:] == ["-m", MODULE, place]
            assert told["group"] == each.process.pid
            pipes = [name for name in told["descriptors"] if name != os.devnull]
            assert len(pipes) == 1, "none of another process's, nor the fork server's"
            assert told["threads"] == 1
            assert not told["has_torch"]
            assert not SECRETS & told["environment"].keys()
        assert first.process.poll() is None
        assert first.end() == second.end() == -signal.SIGKILL
        first.process.kill()  # it has ended: nothing happens

    with_fork_server(tmp_path, scenario)


@pytest.mark.parametrize(("how", "status"), [("die", -signal.SIGTERM), ("refuse", 2)])
def test_the_exit_status_is_told(tmp_path, how, status):
    async def scenario(supervisor):
        process = await asyncio.to_thread(start_forked, supervisor.path, request(how), [])
        assert await asyncio.to_thread(process.wait, PATIENCE) == status
        assert process.poll() == status
        child = await ChildProcess.fork("it", supervisor.path, MODULE, b"", [])
        assert await child.wait() == 1, "it has no argument"
        assert await child.read_line() == b""

    with_fork_server(tmp_path, scenario)


def test_wait_gives_up(tmp_path):
    async def scenario(supervisor):
        it = await asyncio.to_thread(Told, supervisor.path)
        with pytest.raises(subprocess.TimeoutExpired):
            it.process.wait(0.01)
        it.end()

    with_fork_server(tmp_path, scenario)


def test_nobody_waits_for_a_fork_server_that_is_busy(tmp_path):
    """The end of a process is seen at once; its status when the fork server tells it."""

    async def scenario(supervisor):
        it = await asyncio.to_thread(Told, supervisor.path)
        forks = pid_of(supervisor)
        os.kill(forks, signal.SIGSTOP)
        try:
            os.kill(it.process.pid, signal.SIGTERM)
            select.select([it.process.fileno()], [], [], PATIENCE)
            assert it.process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                it.process.wait(0.01)
        finally:
            os.kill(forks, signal.SIGCONT)
        await until(lambda: it.process.poll() is not None)
        assert it.process.wait() == -signal.SIGTERM
        os.close(it.output)

    with_fork_server(tmp_path, scenario)


def test_a_process_that_nobody_waited_for_leaves_no_descriptor(tmp_path):
    async def scenario(supervisor):
        (await asyncio.to_thread(Told, supervisor.path)).end()  # the fork server has started
        before = len(os.listdir("/proc/self/fd"))
        it = await asyncio.to_thread(Told, supervisor.path, dies_with_link=True)
        with pytest.raises(subprocess.TimeoutExpired):
            it.process.wait(0.0)
        del it.process
        gc.collect()
        await until(lambda: not it.is_alive())
        os.close(it.output)
        assert len(os.listdir("/proc/self/fd")) == before

    with_fork_server(tmp_path, scenario)


def test_only_a_process_that_shall_dies_with_who_asked(tmp_path):
    async def scenario(supervisor):
        dying = await asyncio.to_thread(Told, supervisor.path, dies_with_link=True)
        living = await asyncio.to_thread(Told, supervisor.path)
        for each in (dying, living):
            each.process._link.close()
        await until(lambda: not dying.is_alive())
        assert living.is_alive()
        living.end()
        assert pid_of(supervisor)

    with_fork_server(tmp_path, scenario)


def test_processes_outlive_the_fork_server_and_a_new_one_starts_more(tmp_path):
    async def scenario(supervisor):
        old = await asyncio.to_thread(Told, supervisor.path, dies_with_link=True)
        first = pid_of(supervisor)
        os.kill(first, signal.SIGKILL)
        new = await asyncio.to_thread(Told, supervisor.path)
        assert pid_of(supervisor) != first
        assert old.is_alive()
        assert old.process.poll() is None
        assert old.end() == -signal.SIGKILL
        assert new.end() == -signal.SIGKILL

    with_fork_server(tmp_path, scenario)


def test_bad_requests_are_refused_and_harm_nobody(tmp_path):
    async def scenario(supervisor):
        it = await asyncio.to_thread(Told, supervisor.path)
        before = len(os.listdir(f"/proc/{pid_of(supervisor)}/fd"))
        for bad in (request("0", module="os"), request("0", places=(0, 1))):
            with pytest.raises(UnavailableError):
                await asyncio.to_thread(start_forked, supervisor.path, bad, [0])
        unplaced = start_forked(supervisor.path, request("0", places=(1 << 30,)), [0])
        assert await asyncio.to_thread(unplaced.wait, PATIENCE) == 1
        for data in (b"", b"\xc1", msgspec.msgpack.encode([MODULE, 1])):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
                link.connect(str(supervisor.path))
                socket.send_fds(link, [data], [0, 1])
                link.settimeout(PATIENCE)
                assert await asyncio.to_thread(link.recv, 10) == b""
        await until(lambda: len(os.listdir(f"/proc/{pid_of(supervisor)}/fd")) <= before)
        assert it.is_alive()
        it.end()

    with_fork_server(tmp_path, scenario)


def test_without_a_fork_server_workers_start_on_their_own(tmp_path, monkeypatch):
    assert fork_worker(MODULE, Path("/no/such/socket")) is None
    monkeypatch.setattr(fork_supervisor, "fork_server_command", lambda fd: ["false"])
    monkeypatch.setattr(child_process, "FIRST_DELAY", 0.01)
    before = len(os.listdir("/proc/self/fd"))

    async def scenario():
        supervisor = ForkSupervisor(tmp_path, Preload((MODULE,), {}))
        waiting = asyncio.create_task(asyncio.to_thread(fork_worker, MODULE, supervisor.path))
        await supervisor.run()  # it gives up
        assert await waiting is None
        assert fork_worker(MODULE, supervisor.path) is None

    asyncio.run(scenario())
    assert len(os.listdir("/proc/self/fd")) <= before
