"""Serves a front-end on a listening socket, with the limits of connections that a server has.

All front-ends of one machine accept from one listening socket: its owner hands a copy to each
(`ListenerOwner`, `shared_listener`). What waits to be accepted is served while any of them lives,
so that front-ends can be replaced without a refused connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from typing import Any

from lookonce.config import ServerConfig
from lookonce.fleet.frontend import Frontend
from lookonce.ipc.peer import peer_uid
from lookonce.server.http.connections import Connections
from lookonce.server.http.uvicorn_server import AcceptingServer

logger = logging.getLogger("lookonce.fleet")

BACKLOG = 2048
"""Connections that may wait to be accepted."""
HAND_OVER_SECONDS = 5.0
DRAIN_IDLE_SECONDS = 5.0
"""How long a front-end that drains leaves a connection open that has no request."""
CUT_OFF_SECONDS = 2.0
"""In which requests end that ran longer than the drain timeout."""


def listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    return listener


class ListenerOwner:
    """Holds a listening socket and hands copies of it to this user's processes on this machine."""

    def __init__(self, listener: socket.socket) -> None:
        """Raises `OSError` where this address has an owner already."""
        self._listener = listener
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._door.bind(_owner_address(*listener.getsockname()[:2]))
        except OSError:
            self._door.close()
            raise
        self._door.listen()
        self._thread = threading.Thread(target=self._run, name="listener-owner", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._door.accept()
            except OSError:
                return  # closed
            with peer, contextlib.suppress(OSError):
                if _is_same_user(peer):
                    socket.send_fds(peer, [b"l"], [self._listener.fileno()])

    def close(self) -> None:
        """No copies are handed out from now on; those that were live on."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._thread.join(HAND_OVER_SECONDS)  # the address is taken for as long as it accepts
        self._door.close()
        self._listener.close()


def shared_listener(host: str, port: int) -> tuple[socket.socket, ListenerOwner | None]:
    """The listening socket of this address: a copy of its owner's; where there is no owner, a new
    one, and its owner."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(HAND_OVER_SECONDS)
        door.connect(_owner_address(host, port))
        if _is_same_user(door):
            _, descriptors, _, _ = socket.recv_fds(door, 1, 1)
            for descriptor in descriptors:
                return socket.socket(fileno=descriptor), None
    listener = listening(host, port)
    copy = listener.dup()
    try:
        return listener, ListenerOwner(copy)
    except OSError:  # another process has become the owner meanwhile, of a socket with this port
        copy.close()
        return listener, None


def _owner_address(host: str, port: int) -> str:
    """In Linux's abstract namespace: it is free again when its owner has ended."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    resolved: Any = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
    return f"\0lookonce-fleet/{os.getuid()}/{resolved[0]}/{resolved[1]}"


def _is_same_user(peer: socket.socket) -> bool:
    """An abstract address can be taken by anybody."""
    return peer_uid(peer) == os.getuid()


class FrontendServer(AcceptingServer):
    """The server of a front-end. `stop` ends it and leaves the port to others; `drain` comes before
    that where the fleet ends and nobody else would serve."""

    descriptors = 2
    """The client's connection, and one to an engine."""

    def __init__(self, frontend: Frontend, config: ServerConfig) -> None:
        connections = Connections(config.connections, root_path=config.root_path)
        super().__init__(frontend, connections)
        self._frontend = frontend
        self._drain_timeout = config.drain_timeout
        self._drained_at: float | None = None
        """On the event loop's clock: then `drain` ends what runs."""

    async def drain(self) -> None:
        """Refuse new requests, and wait until those that run have ended: `drain_timeout` at most.
        WebSockets are not waited for: engines tell them once they drain.

        Connections are accepted as before, so that probes learn that it is not ready."""
        self._frontend.refuse_new()
        self._drained_at = asyncio.get_running_loop().time() + self._drain_timeout
        logger.info("draining: %d requests are being served", self._frontend.active)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._drained_at):
                await self._frontend.wait_idle(websockets=False)

    async def stop(self) -> None:
        """Accept no connections, and end when those that are open have ended: each after the
        answer to its next request, or when it had none for `DRAIN_IDLE_SECONDS`. After `drain`:
        accept them until no request is served."""
        if self._drained_at is not None:
            await self._end_drained(self._drained_at)
        else:
            self._frontend.draining = True
            for server in self.servers:
                server.close()
            self._connections.drain(DRAIN_IDLE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_timeout):
                    await self._connections.wait_none()
        self.should_exit = True

    async def _end_drained(self, moment: float) -> None:
        try:
            async with asyncio.timeout_at(moment):
                await self._frontend.wait_idle()
        except TimeoutError:
            logger.warning("draining took too long: %d requests are cut off", self._frontend.active)
            self._frontend.cut_off()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CUT_OFF_SECONDS):
                    await self._frontend.wait_idle()
