"""Serves a front-end on a listening socket, with the limits of connections that a server has."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from lookonce.config import ServerConfig
from lookonce.fleet.frontend import Frontend
from lookonce.server.http.connections import (
    Acceptor,
    Connections,
    HttpProtocol,
    allowed_connections,
)
from lookonce.server.http.websocket import (
    MAX_MESSAGE_BYTES,
    PING_TIMEOUT_SECONDS,
    WebSocketProtocol,
)

TICKS_PER_SWEEP = 10
"""uvicorn ticks ten times a second."""


class FrontendServer(uvicorn.Server):
    """uvicorn's server behind an `Acceptor`. `stop` drains it."""

    def __init__(self, frontend: Frontend, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                frontend,
                interface="asgi3",
                http=HttpProtocol,
                ws=WebSocketProtocol,
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_ping_timeout=PING_TIMEOUT_SECONDS,
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._frontend = frontend
        self._drain_timeout = config.drain_timeout
        self._connections = Connections(config.connections, root_path=config.root_path)

    async def stop(self) -> None:
        """Refuse new requests, and end when those that are served are answered."""
        self._frontend.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout):
                await self._frontend.wait_idle()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "serve(sockets=[listener])"
        await self.lifespan.startup()
        self._connections.most = allowed_connections(self._connections.limits)
        acceptor = Acceptor(sockets[0], self._connections, self._protocol, None)
        acceptor.resume()
        self.servers = [acceptor]  # type: ignore[list-item]
        self.started = True

    def _protocol(self, address: str | None) -> HttpProtocol:
        return HttpProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            connections=self._connections,
            address=address,
        )

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_SWEEP == 0:
            self._connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)
