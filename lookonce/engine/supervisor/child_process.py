"""Child processes that are started with one line of JSON on stdin, and restarted when they die.

A child's stdin stays open as long as its parent lives; end of file tells the child that the parent
is gone. Each child has a process group of its own: Ctrl-C on the terminal reaches the parent alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lookonce.errors import EngineDeadError

if TYPE_CHECKING:  # `types.ports` needs numpy, which a supervisor does not import
    from lookonce.types.ports import Clock

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
RESTART_WINDOW = 600.0
"""Seconds in which a process may be restarted `MAX_RESTARTS` times."""
EXIT_REFUSED = 2
"""The exit status of a child that refuses its settings: starting it again would not help."""


class RestartBudget:
    """Limits how often a process is restarted within `window` seconds."""

    def __init__(
        self,
        limit: int = MAX_RESTARTS,
        window: float = RESTART_WINDOW,
        clock: Clock = time.monotonic,
    ) -> None:
        self.limit = limit
        self._window = window
        self._clock = clock
        self._restarts: deque[float] = deque()

    def try_take(self) -> int | None:
        """Take a restart: its number within the window, from 1, or None when none is left."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] >= self._window:
            self._restarts.popleft()
        if len(self._restarts) >= self.limit:
            return None
        self._restarts.append(now)
        return len(self._restarts)


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
    ) -> ChildProcess:
        """Start `command` and write `settings` to its stdin; `read_output`: `read_line` is used."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE if read_output else None,
            pass_fds=pass_fds,
            process_group=0,
        )
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
    """Starts a process, and starts it again when it ends before `stop`.

    `follow` runs beside each child until the child has ended; what `follow` raises, `run` raises.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[ChildProcess]],
        follow: Callable[[ChildProcess], Awaitable[None]] | None = None,
        restarts: RestartBudget | None = None,
    ) -> None:
        self.name = name
        self.child: ChildProcess | None = None
        self._start = start
        self._follow = follow
        self._restarts = restarts if restarts is not None else RestartBudget()
        self._stopping = False

    async def run(self) -> None:
        """Keep it running until `stop`. Raises `EngineDeadError` when restarting does not help."""
        while not self._stopping:
            child = self.child = await self._start()
            self._kill_if_stopped(child)
            if self._follow is not None:
                await self._follow(child)
            status = await child.wait()
            self._consider_restart(status)

    def _kill_if_stopped(self, child: ChildProcess) -> None:
        """`stop` may have been called while this child was being started."""
        if self._stopping:
            child.kill()

    def _consider_restart(self, status: int) -> None:
        if self._stopping:
            return
        ended = f"{self.name} ended {_how(status)}"
        if status == EXIT_REFUSED:
            raise EngineDeadError(ended)
        number = self._restarts.try_take()
        if number is None:
            raise EngineDeadError(f"{ended}; it was restarted {self._restarts.limit} times already")
        logger.error("%s; restart %d of %d", ended, number, self._restarts.limit)

    def tell(self, line: bytes) -> None:
        """Write a line to its stdin, if it runs."""
        if self.child is not None:
            self.child.tell(line)

    def kill(self) -> None:
        self._stopping = True
        if self.child is not None:
            self.child.kill()

    async def stop(self, timeout: float) -> None:
        """SIGTERM, and SIGKILL `timeout` seconds later; the process is not started again."""
        self._stopping = True
        if self.child is not None:
            await self.child.stop(timeout)


def _how(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with status {status}"
