"""uvicorn's server behind an `Acceptor`, which limits connections: that of an API process, and that
of a fleet's front-end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn

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


def uvicorn_config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        interface="asgi3",
        loop="uvloop",
        http=HttpProtocol,
        ws=WebSocketProtocol,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_timeout=PING_TIMEOUT_SECONDS,
        ws_per_message_deflate=False,  # base64 of sound hardly shrinks, and bombs are made of it
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # no route uses the client's address or scheme
        server_header=False,
        timeout_graceful_shutdown=1,
    )


class AcceptingServer(uvicorn.Server):
    """Serves an ASGI application on one listening socket; it leaves signals to its owner."""

    descriptors = 1
    """That each connection takes."""

    def __init__(
        self, app: object, connections: Connections, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(uvicorn_config(app))
        self._connections = connections
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "serve(sockets=[listener])"
        await self.lifespan.startup()
        self._connections.most = allowed_connections(self._connections.limits, self.descriptors)
        acceptor = Acceptor(sockets[0], self._connections, self._protocol, self._tls)
        acceptor.resume()
        self.servers = [acceptor]  # type: ignore[list-item]  # closed as asyncio's servers are
        self.started = True

    def _protocol(self, address: str | None) -> HttpProtocol:
        return HttpProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            connections=self._connections,
            address=address,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn knows those connections alone of which something was received."""
        for server in self.servers:
            server.close()
        self._connections.close_silent()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_SWEEP == 0:
            self._connections.sweep(asyncio.get_running_loop().time())
            await self.swept()
        return await super().on_tick(counter)

    async def swept(self) -> None:
        """Called once a second, after connections that took too long were closed."""
