"""Keeps an engine process running; needs neither torch nor transformers."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from lookonce.engine.process_io import (
    EngineAlive,
    EngineLoading,
    EngineSettings,
    Serving,
    StartFailed,
    parse_progress,
)
from lookonce.engine.supervisor.child_process import ChildProcess, RestartBackoff, SupervisedProcess
from lookonce.errors import error_from_wire

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "lookonce.engine.process")
STOP_SECONDS = 5.0
"""How long the engine may take to finish its step when it is told to stop."""

OnLoading = Callable[[int, int], None]
"""Called with the number of weights loaded and of weights in all (0: not known yet)."""


class EngineSupervisor:
    """Starts the engine process and starts it again when it dies or hangs.

    An engine that sends no event for twice `stall_timeout` seconds, or whose step takes that long,
    is killed. After `stall_timeout` its clients have called it stuck already.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        stall_timeout: float,
        on_loading: OnLoading | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        backoff: RestartBackoff | None = None,
    ) -> None:
        self._settings = settings
        self._hang_limit = 2 * stall_timeout
        self._on_loading = on_loading
        self._command = command
        self._process = SupervisedProcess("the engine process", self._start, self._follow, backoff)
        self._serving = asyncio.Event()

    async def run(self) -> None:
        """Keep the process running until `stop`. Raises the `ConfigError` or `ModelLoadError` that
        it refuses to start with, and `EngineDeadError` when restarting does not help."""
        await self._process.run()

    async def wait_serving(self) -> None:
        """Returns once the engine has been ready to serve."""
        await self._serving.wait()

    async def stop(self) -> None:
        await self._process.stop(STOP_SECONDS)

    def kill(self) -> None:
        self._process.kill()

    async def _start(self) -> ChildProcess:
        settings = msgspec.json.encode(replace(self._settings, restarted=self._serving.is_set()))
        return await ChildProcess.start(
            self._process.name, self._command, settings, read_output=True
        )

    async def _follow(self, child: ChildProcess) -> None:
        limit: float | None = None  # loading may be silent for long
        while True:
            try:
                async with asyncio.timeout(limit):
                    line = await child.read_line()
            except TimeoutError:
                self._end_hanging(child)
                continue
            if not line:
                return
            match parse_progress(line):
                case EngineLoading(done, total):
                    if self._on_loading is not None:
                        self._on_loading(done, total)
                case Serving(seconds):
                    self._process.serving()
                    logger.info("the engine serves after %.1f s", seconds)
                    self._serving.set()
                    limit = self._hang_limit
                case EngineAlive(stalled_seconds):
                    if stalled_seconds > self._hang_limit:
                        self._end_hanging(child)
                case StartFailed(error):
                    await child.wait()
                    raise error_from_wire(*error)

    def _end_hanging(self, child: ChildProcess) -> None:
        logger.error("the engine has not answered for %.0f s: it is killed", self._hang_limit)
        child.kill()
