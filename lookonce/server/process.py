"""The API process: `python -m lookonce.server.process`, started and watched by `launch`.

It reads one `ApiStart` as a line of JSON from its standard input, serves on the socket it has
inherited, and says so on its standard output (`Serving`). Each line that follows on its standard
input is a `ReloadedSettings`. On SIGTERM, or when its standard input
ends because its parent is gone, it drains: new requests get 503, running ones end, then it exits.

If it cannot start because of the configuration or the model, it writes one `StartFailed` to its
standard output and exits with status 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from lookonce.config import (
    Config,
    ConnectionConfig,
    ModelConfig,
    ReloadedSettings,
    ServerConfig,
    load_certificate,
    reloaded_settings,
    tls_context,
)
from lookonce.engine.process_io import ProgressPipe, Serving, StartFailed
from lookonce.engine.supervisor.child_process import EXIT_REFUSED
from lookonce.engine.supervisor.socket_folder import joined_socket_folder
from lookonce.errors import ConfigError, DrainingError, ModelLoadError, error_to_wire
from lookonce.render.media.fetch import fetch_ssl_context
from lookonce.render.prompt.encoder import PromptEncoder
from lookonce.render.renderer import preloaded_encoder
from lookonce.server.http.app import WEBSOCKETS, build_app
from lookonce.server.http.connections import Connections
from lookonce.server.http.uvicorn_server import AcceptingServer
from lookonce.server.otlp import exporting
from lookonce.server.services import Services, open_services
from lookonce.server.warmup import warming_up
from lookonce.types.logs import configure_logging
from lookonce.types.memory import settle_memory
from lookonce.types.scheduling import prefer_event_loop
from lookonce.types.stack_samples import listen_for_samples

logger = logging.getLogger("lookonce.server")

CLOSING_SECONDS = 0.7
"""For clients to agree to the end of their connections, as TLS and WebSockets ask them to. uvicorn
waits a second (`timeout_graceful_shutdown`), and then writes an error."""
CUT_OFF_SECONDS = 2.0
"""For requests that are cut off to tell their clients."""
ENGINE_SECONDS = 10.0
"""How long a process that was restarted waits for the engine before it takes requests, which it
would have to refuse; the other API processes take them meanwhile."""


class ApiStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the API process reads from stdin: one line of JSON."""

    config: Config
    listen_fd: int
    """A bound socket the process inherits and listens on."""
    restarted: bool = False
    """An earlier process of this number has ended: clients are served by others meanwhile."""
    index: int = 0
    """0-based number of this API process among `config.server.api_processes`."""
    fork_server: str | None = None
    """The socket of the process that media workers are forked from."""
    telemetry: dict[str, str] = {}
    """Variables of the environment that the fork server does not have, nor its workers."""


class ApiServer(AcceptingServer):
    """The server of an API process; signals are for `DrainOnSignal`."""

    def __init__(
        self,
        app: object,
        connections: Connections | None = None,
        tls: ssl.SSLContext | None = None,
        on_serving: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_serving` is called once, when connections are accepted."""
        super().__init__(app, connections or Connections(ConnectionConfig()), tls)
        self._on_serving = on_serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_serving()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close every connection; those of clients that say nothing are cut. Called when no
        request is being served any more, or for long enough."""
        closing = asyncio.get_running_loop().call_later(CLOSING_SECONDS, self._cut_connections)
        await super().shutdown(sockets)
        closing.cancel()

    def _cut_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def reload_certificate(self, config: ServerConfig) -> None:
        """For handshakes from now on. Raises `ConfigError`; the old one is used then."""
        if self._tls is None or config.ssl_certfile is None:
            return
        tls_context(config.ssl_certfile, config.ssl_keyfile)  # a context half changed would break
        load_certificate(self._tls, config.ssl_certfile, config.ssl_keyfile)


def api_server(
    app: object, services: Services, on_serving: Callable[[], None] = lambda: None
) -> ApiServer:
    """The server of `app` as its configuration says. Raises `ConfigError`."""
    config = services.config.server
    connections = Connections(config.connections, services.metrics.counts, config.root_path)
    tls = None
    if config.ssl_certfile is not None:
        tls = tls_context(config.ssl_certfile, config.ssl_keyfile)
    return ApiServer(app, connections, tls, on_serving)


async def serve(
    start: ApiStart, progress: ProgressPipe, encoder: PromptEncoder | None = None
) -> None:
    """Serve until SIGTERM, then drain. `encoder` is what this process was forked with."""
    began = time.monotonic()
    with joined_socket_folder(start.config.channel.address):
        async with open_services(
            start.config,
            index=start.index,
            restarted=start.restarted,
            fork_server=Path(start.fork_server) if start.fork_server else None,
            encoder=encoder,
        ) as services:
            logger.info("the renderer is ready")
            app = build_app(services, websockets=WEBSOCKETS)
            server = api_server(
                app, services, lambda: progress.tell(Serving(time.monotonic() - began))
            )
            drainer = DrainOnSignal(server, services)
            with socket.socket(fileno=start.listen_fd) as listener, drainer:
                if start.restarted:
                    await _wait_for_engine(services)
                async with (
                    exporting(services, start.index),
                    warming_up(services, app, settle_memory, hold_ready=not start.restarted),
                ):
                    await server.serve(sockets=[listener])


async def _wait_for_engine(services: Services) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENGINE_SECONDS):
            await services.engine.wait_ready()


class DrainOnSignal:
    """Inside the block SIGTERM, or the parent's death, drains; a second SIGTERM ends at once.

    Ctrl-C and SIGHUP are ignored: the parent gets them too, sends SIGTERM or writes a line of
    `ReloadedSettings`. Without a parent (`has_parent` False) Ctrl-C drains, SIGHUP reads keys and
    certificate again, and standard input is not read.
    """

    def __init__(self, server: ApiServer, services: Services, *, has_parent: bool = True) -> None:
        self._has_parent = has_parent
        self._server = server
        self._services = services
        self._drain = services.drain
        self._timeout = services.config.server.drain_timeout
        self._tasks: list[asyncio.Task[None]] = []
        self._line = b""

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        if self._has_parent:
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)
        else:
            loop.add_signal_handler(signal.SIGINT, self._on_signal)
            loop.add_signal_handler(signal.SIGHUP, self._reload)

    def __exit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()

    def _on_signal(self) -> None:
        if self._drain.draining:
            self._server.should_exit = self._server.force_exit = True
            return
        self._drain.begin()
        self._tasks.append(asyncio.get_running_loop().create_task(self._finish()))

    async def _finish(self) -> None:
        logger.info("draining: %d requests are being served", self._drain.active)
        try:
            async with asyncio.timeout(self._timeout):
                await self._drain.wait_idle()
        except TimeoutError:
            logger.warning("draining took too long: %d requests are cut off", self._drain.active)
            self._services.engine.cut_off(DrainingError("the server shuts down: this is cut off"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CUT_OFF_SECONDS):
                    await self._drain.wait_idle()
        self._server.should_exit = True

    def _on_stdin(self) -> None:
        """Standard input ends with the parent."""
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._use(msgspec.json.decode(line, type=ReloadedSettings))
        if not data:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            logger.warning("the parent process is gone")
            self._services.engine.expect_no_restart()
            self._on_signal()

    def _reload(self) -> None:
        try:
            self._use(reloaded_settings(self._services.config.server))
        except ConfigError as error:
            logger.error("SIGHUP: %s; keys and limits stay what they were", error.message)

    def _use(self, settings: ReloadedSettings) -> None:
        keys = settings.api_keys
        self._services.keys.replace(keys)
        if self._services.rates is not None and settings.limits is not None:
            self._services.rates.replace(settings.limits)
        try:
            self._server.reload_certificate(self._services.config.server)
        except ConfigError as error:
            logger.error("SIGHUP: %s; the certificate stays what it was", error.message)
        logger.info("from now on: %s", settings.summary())


def preloaded(settings: Mapping[str, Any]) -> Callable[[], None]:
    """`main` for processes that are forked from this one, with `model` of a configuration: the
    tokenizer, the template and the certificates for fetching media are loaded here, once for all.
    Raises `ModelLoadError`."""
    fetch_ssl_context()
    return partial(main, preloaded_encoder(msgspec.convert(settings["model"], ModelConfig)))


def main(encoder: PromptEncoder | None = None) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent gets them too, and decides
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.json.decode(_first_line(), type=ApiStart)
    os.environ.update(start.telemetry)
    prefer_event_loop()
    configure_logging(f"api {start.index}", start.config.logs)
    listen_for_samples(Path(start.config.channel.address).parent, f"api {start.index}")
    logger.info("opening %s", start.config.model.folder)
    progress = ProgressPipe(sys.stdout.fileno())
    try:
        uvloop.run(serve(start, progress, encoder))
    except (ConfigError, ModelLoadError) as error:
        progress.tell(StartFailed(error_to_wire(error)))
        sys.exit(EXIT_REFUSED)


def _first_line() -> bytes:
    """Of standard input, and nothing after it: a buffer would take lines that may follow."""
    line = bytearray()
    while not line.endswith(b"\n") and (data := os.read(sys.stdin.fileno(), 1)):
        line += data
    return bytes(line)


if __name__ == "__main__":
    main()
