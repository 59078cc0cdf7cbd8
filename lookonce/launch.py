"""Starts the server's processes, keeps them running, and ends them in order.

supervisor (this process: neither torch nor transformers)
  ├── engine process          restarted when it dies
  └── fork server             has imported what the others need; restarted when it dies
        ├── API process × N   share one listening socket, bound here; restarted when they die
        └── media workers     of each API process

A service manager such as systemd is told when the server is ready, reloads and stops.

A process is given up, and with it the server, only when its starts fail again and again. While no
API process serves, the supervisor answers in their place, with 503 (`UnavailableResponder`).

SIGTERM, SIGINT   API processes finish what runs, up to the drain timeout; then the engine ends
a second one      everything is killed
SIGHUP            API keys, limits and the TLS certificate are read again; nothing else changes
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from lookonce.config import (
    Config,
    ReloadedSettings,
    ServerConfig,
    reloaded_settings,
    tls_context,
)
from lookonce.engine.process_io import Serving, StartFailed, engine_settings, parse_progress
from lookonce.engine.supervisor.child_process import (
    ChildProcess,
    RestartBackoff,
    SupervisedProcess,
)
from lookonce.engine.supervisor.engine_supervisor import (
    ENGINE_COMMAND,
    EngineSupervisor,
    OnLoading,
)
from lookonce.engine.supervisor.fork_supervisor import ForkSupervisor
from lookonce.engine.supervisor.service_manager import ServiceManager
from lookonce.engine.supervisor.socket_folder import folder_of, socket_folder
from lookonce.errors import ConfigError, UnavailableError, error_from_wire
from lookonce.frontend.responses import ErrorBody, ErrorResponse
from lookonce.ipc.fork_server import Preload
from lookonce.ipc.worker_process import telemetry_variables
from lookonce.types.stack_samples import listen_for_samples

logger = logging.getLogger(__name__)

API_MODULE = "lookonce.server.process"
API_COMMAND = (sys.executable, "-m", API_MODULE)
FORKED = (API_MODULE, "lookonce.render.media.worker")
BACKLOG = 2048
DRAIN_GRACE = 5.0
"""Seconds an API process has, after the drain timeout, to end."""
MAX_API_DELAY = 2.0
"""Longest wait before an API process is started again: a start costs little, and clients wait."""
PROBE_SECONDS = 0.1
HOLD_SECONDS = 0.5
"""How long clients wait in the listening socket's queue for an API process to be started again."""
REFUSAL_SECONDS = 2.0
"""For a client to send its request and read the refusal."""
MAX_REFUSED = 256
"""Clients that are refused at a time; more are disconnected at once."""

OnReady = Callable[[str], None]
"""Called once with the server's URL, when it is ready to serve."""


class Supervisor:
    """One server: an engine process and the API processes in front of it."""

    def __init__(
        self,
        config: Config,
        *,
        on_loading: OnLoading | None = None,
        on_ready: OnReady | None = None,
        engine_command: Sequence[str] = ENGINE_COMMAND,
        api_command: Sequence[str] | None = None,
    ) -> None:
        """`api_command` starts an API process; None: they and their media workers are forked, where
        the system can."""
        self._config = config
        self._on_ready = on_ready
        self._api_command = API_COMMAND if api_command is None else api_command
        self._forks = api_command is None and sys.platform == "linux"
        self._fork_server: ForkSupervisor | None = None
        self._manager = ServiceManager.of_environment(os.environ)
        self._url: str | None = None
        """Known once the server is ready."""
        self._on_loading = on_loading
        self._engine = EngineSupervisor(
            engine_settings(config),
            stall_timeout=config.channel.stall_timeout,
            on_loading=self._loading,
            command=engine_command,
        )
        self._apis: list[SupervisedProcess] = []
        self._serving: set[int] = set()
        """API processes that serve, by number."""
        self._responder: UnavailableResponder | None = None
        self._stop_asked = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain.

        Raises `ConfigError` (also for an address in use), `ModelLoadError`, and `EngineDeadError`
        when a process cannot be kept running.
        """
        with (
            socket_folder(self._config.channel.address) as folder,
            bind(self._config.server) as listener,
            _Signals(self),
        ):
            listen_for_samples(folder, "server")
            try:
                await self._serve_on(listener)
            finally:
                _unlink(self._config.server.uds)
                self._manager.close()

    async def _serve_on(self, listener: socket.socket) -> None:
        if self._forks:
            config = self._config
            parts = {"model": config.model, "media": config.media}  # no keys
            preload = Preload(FORKED, msgspec.to_builtins(parts), config.logs)
            self._fork_server = ForkSupervisor(folder_of(config.channel.address), preload)
        self._responder = UnavailableResponder(listener, self._config.server)
        self._apis = [
            self._api_process(index, listener) for index in range(self._config.server.api_processes)
        ]
        announcing = asyncio.create_task(self._announce(listener))
        try:
            await self._keep_running()
        finally:
            announcing.cancel()
            self._responder.close()

    def ask_stop(self) -> None:
        """Drain and end; the second time, end at once."""
        if self._stop_asked.is_set():
            logger.warning("asked again: everything is killed")
            self._engine.kill()
            for api in self._apis:
                api.kill()
            if self._fork_server is not None:
                self._fork_server.kill()
        self._stop_asked.set()

    def reload(self) -> None:
        """Read API keys and limits again, and have the API processes use them and the certificate
        as it is now."""
        if self._url is not None:
            self._manager.reloading()
        try:
            self._reload()
        except ConfigError as error:
            logger.error("SIGHUP: %s; keys and limits stay what they were", error.message)
        finally:
            if self._url is not None:
                self._manager.ready(self._url)

    def _reload(self) -> None:
        """Raises `ConfigError`, and then nothing has changed."""
        settings = reloaded_settings(self._config.server)
        keys = settings.api_keys
        server = dataclasses.replace(self._config.server, api_keys=keys, limits=settings.limits)
        self._config = dataclasses.replace(self._config, server=server)  # of processes to come
        certificate = ", and the TLS certificate" if server.ssl_certfile is not None else ""
        logger.info("SIGHUP: %s%s", settings.summary(), certificate)
        line = msgspec.json.encode(settings)
        for api in self._apis:
            api.tell(line)

    async def _keep_running(self) -> None:
        """Until `ask_stop`, or until a process cannot be kept running; then all processes end."""
        runs = [self._engine.run(), *(api.run() for api in self._apis)]
        processes = [asyncio.create_task(run) for run in runs]
        asked = asyncio.create_task(self._stop_asked.wait())
        forking = None
        if self._fork_server is not None:
            forking = asyncio.create_task(self._fork_server.run())
        await asyncio.wait([asked, *processes], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        broken = [task for task in processes if task.done()]
        await self._end(drain=not broken)
        await asyncio.gather(*processes, *filter(None, [forking]), return_exceptions=True)
        for task in broken:
            task.result()

    async def _end(self, *, drain: bool) -> None:
        self._manager.stopping()
        timeout = DRAIN_GRACE + (self._config.server.drain_timeout if drain else 0.0)
        logger.info("stopping%s", ": running requests may finish" if drain else "")
        await asyncio.gather(*(api.stop(timeout) for api in self._apis))
        if self._fork_server is not None:
            await self._fork_server.stop()
        await self._engine.stop()
        logger.info("stopped")

    def _api_process(self, index: int, listener: socket.socket) -> SupervisedProcess:
        name = f"API process {index}"
        starts = itertools.count()
        exports = self._config.otlp.endpoint is not None

        async def spawn() -> ChildProcess:
            config = self._config
            child = await start(config)
            if self._config is not config:  # reloaded meanwhile: nobody has told this process
                server = self._config.server
                child.tell(msgspec.json.encode(ReloadedSettings(server.api_keys, server.limits)))
            return child

        async def start(config: Config) -> ChildProcess:
            given = {
                "config": config,
                "listen_fd": listener.fileno(),
                "index": index,
                "restarted": next(starts) > 0,
                "fork_server": self._fork_server and str(self._fork_server.path),
                "telemetry": telemetry_variables(os.environ) if exports else {},
            }
            settings, fds = msgspec.json.encode(given), [listener.fileno()]
            if self._fork_server is not None:
                path = self._fork_server.path
                try:
                    return await ChildProcess.fork(name, path, API_MODULE, settings, fds)
                except UnavailableError:
                    logger.warning("%s starts without the fork server", name)
            return await ChildProcess.start(
                name, self._api_command, settings, pass_fds=fds, read_output=True
            )

        def serving() -> None:
            process.serving()
            self._api_serves(index)

        async def follow(child: ChildProcess) -> None:
            try:
                await _follow_api(child, serving)
            finally:
                self._api_ended(index)

        backoff = RestartBackoff(max_delay=MAX_API_DELAY)
        process = SupervisedProcess(name, spawn, follow, backoff)
        return process

    def _api_serves(self, index: int) -> None:
        assert self._responder is not None
        self._serving.add(index)
        self._responder.pause()

    def _api_ended(self, index: int) -> None:
        assert self._responder is not None
        if index in self._serving:
            self._serving.remove(index)
            if not self._serving and not self._stop_asked.is_set():
                self._responder.resume()

    async def _announce(self, listener: socket.socket) -> None:
        """Say so when a request to /ready is answered with 200."""
        if self._on_ready is None and not self._manager.listens:
            return
        await self._engine.wait_serving()
        tls = self._config.server.ssl_certfile is not None
        while not await _is_ready(listener, tls=tls):  # noqa: ASYNC110 - only HTTP can tell
            await asyncio.sleep(PROBE_SECONDS)
        self._url = url_of(listener, tls=tls)
        self._manager.ready(self._url)
        if self._on_ready is not None:
            self._on_ready(self._url)

    def _loading(self, done: int, total: int) -> None:
        if self._url is None:  # an engine that is restarted loads again
            self._manager.loading(done, total)
        if self._on_loading is not None:
            self._on_loading(done, total)


async def _follow_api(api: ChildProcess, serving: Callable[[], None]) -> None:
    """Until the process ends. Raises the `ConfigError` or `ModelLoadError` it ends with."""
    while line := await api.read_line():
        match parse_progress(line):
            case Serving():
                serving()
            case StartFailed(error):
                await api.wait()
                raise error_from_wire(*error)


class UnavailableResponder:
    """Answers every request with 503 for as long as no API process accepts connections.

    It begins after `HOLD_SECONDS`, so that clients do not notice a quick restart.
    """

    def __init__(self, listener: socket.socket, config: ServerConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._config = config
        self._tls: ssl.SSLContext | None = None
        self._holding: asyncio.TimerHandle | None = None
        self._accepting = False
        self._clients: set[asyncio.Task[None]] = set()

    def resume(self) -> None:
        """No API process serves any more."""
        if self._holding is None and not self._accepting:
            self._holding = self._loop.call_later(HOLD_SECONDS, self._begin)

    def pause(self) -> None:
        """An API process serves. Clients that are being refused get their answer."""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())

    def close(self) -> None:
        self.pause()
        for client in self._clients:
            client.cancel()

    def _begin(self) -> None:
        self._holding = None
        try:
            if self._config.ssl_certfile is not None:
                self._tls = tls_context(self._config.ssl_certfile, self._config.ssl_keyfile)
        except ConfigError as error:
            logger.error("no API process serves, and clients cannot be told: %s", error.message)
            return
        logger.warning("no API process serves: requests are answered with 503")
        self._listener.setblocking(False)
        self._accepting = True
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor is left: again after a while
            self.pause()
            self.resume()
            return
        if len(self._clients) >= MAX_REFUSED:
            accepted.close()
            return
        client = self._loop.create_task(self._refuse(accepted))
        self._clients.add(client)
        client.add_done_callback(self._clients.discard)

    async def _refuse(self, accepted: socket.socket) -> None:
        """Answer what comes, whatever it is. The rest of it is read and dropped: a close before
        would take the answer with it."""
        accepted.setblocking(False)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(REFUSAL_SECONDS):
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, accepted, ssl=self._tls
                )
                if await reader.read(1 << 16):
                    transport.write(UNAVAILABLE)
                    if transport.can_write_eof():
                        transport.write_eof()
                    else:  # TLS: its own closing does that
                        transport.close()
                while await reader.read(1 << 16):
                    pass
        except (OSError, TimeoutError):
            pass
        finally:
            accepted.close() if transport is None else transport.abort()


def _unavailable() -> bytes:
    """A whole HTTP response."""
    error = ErrorBody(
        "no process is there to answer: it is being started again",
        "service_unavailable_error",
        None,
        "unavailable",
    )
    body = msgspec.json.encode(ErrorResponse(error))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


UNAVAILABLE = _unavailable()


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket all API processes share. Raises `ConfigError` when it cannot be."""
    try:
        return _bind_unix(config.uds) if config.uds else _bind_tcp(config.host, config.port)
    except (OSError, OverflowError) as error:
        where = config.uds or f"{config.host}:{config.port}"
        reason = (error.strerror or "") if isinstance(error, OSError) else str(error)
        reason = reason.partition(" (while attempting")[0]  # Python names the address again
        raise ConfigError(f"cannot listen on {where}: {reason}") from error


def _bind_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def _bind_unix(path: str) -> socket.socket:
    """A socket file that no process answers on is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and not _answers(path):
            Path(path).unlink()
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _unlink(path: str | None) -> None:
    if path is not None:
        with suppress(OSError):
            Path(path).unlink()


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """The server's URL; `unix:` and the path for a unix socket."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


async def _is_ready(listener: socket.socket, *, tls: bool) -> bool:
    name = listener.getsockname()
    context = _unverified() if tls else None
    try:
        if listener.family == socket.AF_UNIX:
            reader, writer = await asyncio.open_unix_connection(
                name, ssl=context, server_hostname="localhost" if tls else None
            )
        else:
            local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name[0], name[0])
            reader, writer = await asyncio.open_connection(local, name[1], ssl=context)
    except OSError:
        return False
    try:
        writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


def _unverified() -> ssl.SSLContext:
    """For asking our own server whether it is ready, whatever name its certificate has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _Signals:
    """SIGTERM and SIGINT ask the supervisor to stop, SIGHUP to reload, for as long as it runs."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._supervisor.ask_stop)
        loop.add_signal_handler(signal.SIGHUP, self._supervisor.reload)

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
