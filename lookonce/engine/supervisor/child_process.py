"""Child processes that are started with one line of JSON on stdin, and restarted when they die.

A child's stdin stays open as long as its parent lives; end of file tells the child that the parent
is gone. Each child has a process group of its own: Ctrl-C on the terminal reaches the parent alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lookonce.errors import EngineDeadError, LookOnceError
from lookonce.ipc.fork_server import ForkedProcess, ForkRequest, start_forked

if TYPE_CHECKING:  # `types.ports` needs numpy, which a supervisor does not import
    from lookonce.types.ports import Clock

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 4
"""A process that has never served is given up when so many starts in a row have failed."""
MAX_FAILED_RESTARTS = 10
"""The same for one that has served before: the machine may be short of something for a while."""
FIRST_DELAY = 0.5
MAX_DELAY = 30.0
"""Seconds. The first restart is immediate, the second waits about `FIRST_DELAY`, each further one
twice as long, `MAX_DELAY` at most."""
STEADY_SECONDS = 60.0
"""A process that has served for so long is restarted without delay again."""
STATUS_POLL_SECONDS = 0.02
EXIT_REFUSED = 2
"""The exit status of a child that refuses its settings: starting it again would not help."""


class RestartBackoff:
    """How long to wait before a process that has ended is started again, and when to give it up.

    Restarts go on for as long as they succeed, with exponential delays: a start has succeeded once
    the process says that it serves. Delays are shortened by up to half at random, so that processes
    that died together do not start together.
    """

    def __init__(
        self,
        clock: Clock = time.monotonic,
        jitter: Callable[[], float] = random.random,
        max_delay: float | None = None,
    ) -> None:
        """`jitter` answers a number from 0 to 1. `max_delay`: of a process that has served, where
        it is less than `MAX_DELAY`."""
        self._max_delay = MAX_DELAY if max_delay is None else max_delay
        self._clock = clock
        self._jitter = jitter
        self._serving_since: float | None = None
        self._has_served = False
        self._num_failed = 0
        self._num_ends = 0
        """Ends in a row of processes that did not serve for `STEADY_SECONDS`."""

    @property
    def has_served(self) -> bool:
        return self._has_served

    @property
    def num_failed(self) -> int:
        """Starts in a row that did not come to serve."""
        return self._num_failed

    def serving(self) -> None:
        """The process serves."""
        self._serving_since = self._clock()
        self._has_served = True
        self._num_failed = 0

    def ended(self) -> float | None:
        """The process has ended, or could not be started: seconds to wait; None: give up."""
        since, self._serving_since = self._serving_since, None
        if since is None:
            self._num_failed += 1
        elif self._clock() - since >= STEADY_SECONDS:
            self._num_ends = 0
        self._num_ends += 1
        if self._num_failed >= (MAX_FAILED_RESTARTS if self._has_served else MAX_FAILED_STARTS):
            return None
        if self._num_ends == 1:
            return 0.0
        most = MAX_DELAY if since is None else self._max_delay
        longest = min(most, FIRST_DELAY * 2.0 ** min(self._num_ends - 2, 16))
        return longest * (1.0 - self._jitter() / 2)


class Process(Protocol):
    """What is used of `asyncio.subprocess.Process`."""

    @property
    def stdin(self) -> asyncio.StreamWriter | None: ...

    @property
    def stdout(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class _Forked:
    """The `Process` of a fork server."""

    def __init__(
        self, process: ForkedProcess, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader
    ) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.terminate, self.kill = process.terminate, process.kill
        self._process = process
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(process.fileno(), self._end)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def _end(self) -> None:
        """It has ended; its status is told by the fork server, which may be busy."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.fileno())
        status = self._process.poll()
        if status is None:
            loop.call_later(STATUS_POLL_SECONDS, self._end)
        elif not self._ended.done():
            self._ended.set_result(status)


class ChildProcess:
    """One process from its start to its end."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        settings: bytes,
        *,
        pass_fds: Sequence[int] = (),
        read_output: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> ChildProcess:
        """Start `command` and write `settings` to its stdin; `read_output`: `read_line` is used."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE if read_output else None,
            pass_fds=pass_fds,
            process_group=0,
            env=environment,
        )
        return await cls._told(name, process, settings)

    @classmethod
    async def fork(
        cls, name: str, fork_server: Path, module: str, settings: bytes, pass_fds: Sequence[int]
    ) -> ChildProcess:
        """The same for `main()` of a module, by the fork server whose socket has this path.

        Raises `UnavailableError` where it cannot.
        """
        loop = asyncio.get_running_loop()
        stdin, ours = os.pipe()
        output, stdout = os.pipe()
        request = ForkRequest(module, (), (0, 1, *pass_fds), 0, False)
        try:
            fds = (stdin, stdout, *pass_fds)
            process = await asyncio.to_thread(start_forked, fork_server, request, fds)
        except BaseException:
            os.close(ours)
            os.close(output)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(output, "rb", 0))
        transport, flow = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(ours, "wb", 0)
        )
        writer = asyncio.StreamWriter(transport, flow, None, loop)
        return await cls._told(name, _Forked(process, writer, reader), settings)

    @classmethod
    async def _told(cls, name: str, process: Process, settings: bytes) -> ChildProcess:
        assert process.stdin is not None
        with suppress(ConnectionError):  # it died at once: `wait` tells
            process.stdin.write(settings + b"\n")
            await process.stdin.drain()
        return cls(name, process)

    async def read_line(self) -> bytes:
        """The next line of its stdout; empty at the end."""
        assert self._process.stdout is not None, "started without read_output"
        return await self._process.stdout.readline()

    async def wait(self) -> int:
        """Its exit status; negative: the signal that ended it."""
        return await self._process.wait()

    def tell(self, line: bytes) -> None:
        """Write another line to its stdin."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line + b"\n")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, timeout: float) -> None:
        """SIGTERM, and SIGKILL `timeout` seconds later."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(timeout):
                await self.wait()
        except TimeoutError:
            logger.warning("%s did not end within %.0f s: killed", self.name, timeout)
            self.kill()
            await self.wait()


class SupervisedProcess:
    """Starts a process, and starts it again when it ends before `stop` (`RestartBackoff`).

    `follow` runs beside each child until the child has ended, and calls `serving` when the child
    says that it serves. A `LookOnceError` that it raises is why the child refuses to start: `run`
    raises it where no child has served before; later the machine may be short of something, and
    the start has merely failed.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[ChildProcess]],
        follow: Callable[[ChildProcess], Awaitable[None]] | None = None,
        backoff: RestartBackoff | None = None,
    ) -> None:
        self.name = name
        self.child: ChildProcess | None = None
        self._start = start
        self._follow = follow
        self._backoff = backoff if backoff is not None else RestartBackoff()
        self._stopping = asyncio.Event()

    def serving(self) -> None:
        """The child that runs now serves."""
        self._backoff.serving()

    async def run(self) -> None:
        """Keep it running until `stop`. Raises `EngineDeadError` when restarting does not help."""
        while not self._stopping.is_set():
            ended = await self._run_once()
            if self._stopping.is_set():
                return
            delay = self._backoff.ended()
            if delay is None:
                failed = self._backoff.num_failed
                raise EngineDeadError(f"{ended}; {failed} starts in a row have failed")
            logger.error("%s; it is started again in %.1f s", ended, delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _run_once(self) -> str:
        """Start a child and follow it to its end; how it ended. Raises why it refuses to start."""
        try:
            child = self.child = await self._start()
        except OSError as error:  # no process, descriptor or memory is left
            return f"{self.name} could not be started: {error.strerror}"
        self._kill_if_stopped(child)
        try:
            if self._follow is not None:
                await self._follow(child)
        except LookOnceError as error:
            if not self._backoff.has_served:
                raise
            return f"{self.name} could not be started: {error.message}"
        status = await child.wait()
        ended = f"{self.name} ended {_how(status)}"
        refused = status == EXIT_REFUSED and not self._backoff.has_served
        if refused and not self._stopping.is_set():
            raise EngineDeadError(ended)
        return ended

    def _kill_if_stopped(self, child: ChildProcess) -> None:
        """`stop` may have been called while this child was being started."""
        if self._stopping.is_set():
            child.kill()

    def tell(self, line: bytes) -> None:
        """Write a line to its stdin, if it runs."""
        if self.child is not None:
            self.child.tell(line)

    def kill(self) -> None:
        self._stopping.set()
        if self.child is not None:
            self.child.kill()

    async def stop(self, timeout: float) -> None:
        """SIGTERM, and SIGKILL `timeout` seconds later; the process is not started again."""
        self._stopping.set()
        if self.child is not None:
            await self.child.stop(timeout)


def _how(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with status {status}"
