"""The API process: `python -m lookonce.server.process`, started and watched by `launch`.

It reads one `ApiStart` as a line of JSON from its standard input, serves on the socket it has
inherited, and says so on its standard output (`Serving`). On SIGTERM, or when its standard input
ends because its parent is gone, it drains: new requests get 503, running ones end, then it exits.

If it cannot start because of the configuration or the model, it writes one `StartFailed` to its
standard output and exits with status 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import uvicorn
import uvloop

from lookonce.config import Config
from lookonce.engine.process_io import ProgressPipe, Serving, StartFailed
from lookonce.engine.supervisor.child_process import EXIT_REFUSED
from lookonce.errors import ConfigError, ModelLoadError, error_to_wire
from lookonce.server.http.app import build_app
from lookonce.server.http.responses import HttpProtocol
from lookonce.server.services import Drain, Services, open_services
from lookonce.server.warmup import warming_up

logger = logging.getLogger("lookonce.server")

ENGINE_SECONDS = 10.0
"""How long a process that was restarted waits for the engine before it takes requests, which it
would have to refuse; the other API processes take them meanwhile."""
YOUNG_OBJECTS = 5000
"""Allocations between collections of the youngest objects. With Python's 700 the objects of a dozen
streams would be searched again and again for cycles that are not there."""


class ApiStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the API process reads from stdin: one line of JSON."""

    config: Config
    listen_fd: int
    """A bound socket the process inherits and listens on."""
    restarted: bool = False
    """An earlier process of this number has ended: clients are served by others meanwhile."""
    index: int = 0
    """0-based number of this API process among `config.server.api_processes`."""


class ApiServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to `DrainOnSignal`; `on_serving` is called once."""

    def __init__(
        self, config: uvicorn.Config, on_serving: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self._on_serving = on_serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_serving()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(start: ApiStart, progress: ProgressPipe) -> None:
    """Serve until SIGTERM, then drain."""
    began = time.monotonic()
    async with open_services(
        start.config, index=start.index, restarted=start.restarted
    ) as services:
        logger.info("the renderer is ready")
        app = build_app(services)
        server = ApiServer(
            uvicorn_config(app), lambda: progress.tell(Serving(time.monotonic() - began))
        )
        drainer = DrainOnSignal(server, services.drain, start.config.server.drain_timeout)
        with socket.socket(fileno=start.listen_fd) as listener, drainer:
            if start.restarted:
                await _wait_for_engine(services)
            async with warming_up(services, app, settle_memory, hold_ready=not start.restarted):
                await server.serve(sockets=[listener])


async def _wait_for_engine(services: Services) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENGINE_SECONDS):
            await services.engine.wait_ready()


def settle_memory() -> None:
    """Exempt all objects that exist now from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def uvicorn_config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        interface="asgi3",
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # no route uses the client's address or scheme
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )


class DrainOnSignal:
    """Inside the block SIGTERM, or the parent's death, drains; a second SIGTERM ends at once.

    Ctrl-C is ignored: the parent gets it too, and sends SIGTERM. Without a parent (`has_parent`
    False) Ctrl-C drains, and standard input is not read.
    """

    def __init__(
        self, server: uvicorn.Server, drain: Drain, timeout: float, *, has_parent: bool = True
    ) -> None:
        self._has_parent = has_parent
        self._server = server
        self._drain = drain
        self._timeout = timeout
        self._tasks: list[asyncio.Task[None]] = []

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        if self._has_parent:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)
        else:
            loop.add_signal_handler(signal.SIGINT, self._on_signal)

    def __exit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()

    def _on_signal(self) -> None:
        if self._drain.draining:
            self._server.should_exit = self._server.force_exit = True
            return
        self._drain.draining = True
        self._tasks.append(asyncio.get_running_loop().create_task(self._finish()))

    async def _finish(self) -> None:
        logger.info("draining: %d requests are being served", self._drain.active)
        try:
            async with asyncio.timeout(self._timeout):
                await self._drain.wait_idle()
        except TimeoutError:
            logger.warning("draining took too long: %d requests are cut off", self._drain.active)
        self._server.should_exit = True

    def _on_stdin(self) -> None:
        """The parent writes one line only: standard input is readable again when it ends."""
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            logger.warning("the parent process is gone")
            self._on_signal()


def main() -> None:
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=ApiStart)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s api {start.index}: %(message)s"
    )
    for library in ("uvicorn", "httpx"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logger.info("opening %s", start.config.model.folder)
    progress = ProgressPipe(sys.stdout.fileno())
    try:
        uvloop.run(serve(start, progress))
    except (ConfigError, ModelLoadError) as error:
        progress.tell(StartFailed(error_to_wire(error)))
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
