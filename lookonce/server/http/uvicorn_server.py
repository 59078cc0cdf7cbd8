"""uvicorn's server behind an `Acceptor`, which limits connections: that of an API process, and that
of a fleet's front-end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import Iterator

import uvicorn

from lookonce.server.http.connections import (
    SPARE_DESCRIPTORS,
    Acceptor,
    Connections,
    HttpProtocol,
    allowed_connections,
    grow_descriptor_table,
)
from lookonce.server.http.websocket import (
    MAX_MESSAGE_BYTES,
    PING_TIMEOUT_SECONDS,
    WebSocketProtocol,
)
from lookonce.types.memory import give_memory_back, resident_bytes

TICKS_PER_SWEEP = 10
"""uvicorn ticks ten times a second."""
TRIM_BYTES = 256 << 20
"""Where this process has grown by so much since the last time, freed memory is given back to the
system: bodies, abandoned ones too, would leave it in pieces that stay. While it is given back, for
milliseconds, nothing can be allocated. It is more than what bodies come and go with."""
REST_BYTES, REST_CONNECTIONS = 1 << 20, 128
"""So many bytes received or connections ended are enough where nothing comes any more."""
LATER_LOOKS = 5, 30
"""Sweeps without anything new after which memory is given back again: what was begun may have
ended since the first."""


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
        proxy_headers=False,  # `ForwardedClients` reads them, of whom it may
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
        self._traffic_before = self._rested = connections.traffic
        """At the last sweep, and when memory was given back at rest."""
        self._quiet = 0
        """Sweeps since the last one before which something came."""
        self._looks_left = 0
        """Of `LATER_LOOKS`."""
        self._trimmed = resident_bytes()
        """This process's size when memory was given back, or what it was less since then."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "serve(sockets=[listener])"
        await self.lifespan.startup()
        most = allowed_connections(self._connections.limits, self.descriptors)
        self._connections.most = most
        grow_descriptor_table(most * self.descriptors + 2 * SPARE_DESCRIPTORS)
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
            await self._give_memory_back()
        return await super().on_tick(counter)

    async def _give_memory_back(self) -> None:
        """Give memory back where this process has grown enough since the last time, and where
        something was received and no more comes."""
        size = resident_bytes()
        self._trimmed = min(self._trimmed, size)
        seen = self._connections.traffic
        self._quiet = self._quiet + 1 if seen == self._traffic_before else 0
        self._traffic_before = seen
        received, ended = seen[0] - self._rested[0], seen[1] - self._rested[1]
        if self._quiet == 1 and (received >= REST_BYTES or ended >= REST_CONNECTIONS):
            self._rested, self._looks_left = seen, len(LATER_LOOKS)
        elif self._looks_left and self._quiet in LATER_LOOKS:
            self._looks_left -= 1
        elif size - self._trimmed < TRIM_BYTES:
            return
        if self._quiet:
            gc.collect()  # requests that were cut off are cycles
        await asyncio.to_thread(give_memory_back)
        self._trimmed = resident_bytes()
