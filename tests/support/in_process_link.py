"""Links inside one process, for tests: the same frames in the same order, without a socket.

Closing the engine's end stands for the engine's death, taking a new one from the hub for its
restart.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Sequence

from lookonce.ipc.channel import LinkEvents
from lookonce.types.media import Buffer


class InProcessHub:
    """Connects the two kinds of ends; stands for the socket's address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[str, InProcessClientLink] = {}
        self._engine: InProcessEngineLink | None = None

    def engine_link(self) -> InProcessEngineLink:
        """The end of a new engine; every open client connects to it."""
        engine = InProcessEngineLink(self)
        with self._lock:
            self._engine = engine
            clients = list(self._clients.values())
        for client in clients:
            client.announce_up()
        return engine

    def client_link(self, sender: str) -> InProcessClientLink:
        return InProcessClientLink(self, sender)

    def attach(self, client: InProcessClientLink) -> None:
        with self._lock:
            self._clients[client.sender] = client
            engine = self._engine
        if engine is not None:
            client.announce_up()

    def detach(self, client: InProcessClientLink) -> None:
        with self._lock:
            self._clients.pop(client.sender, None)

    def to_engine(self, sender: str, frames: Sequence[Buffer]) -> None:
        engine = self._engine
        if engine is not None:
            engine.deliver(sender, frames)

    def to_client(self, sender: str, frames: Sequence[Buffer], fds: Sequence[int]) -> bool:
        client = self._clients.get(sender)
        if client is None:
            return False
        return client.deliver(frames, fds)

    def engine_closed(self, engine: InProcessEngineLink) -> None:
        with self._lock:
            if self._engine is not engine:
                return
            self._engine = None
            clients = list(self._clients.values())
        for client in clients:
            client.announce_down()


class InProcessClientLink:
    def __init__(self, hub: InProcessHub, sender: str) -> None:
        self.sender = sender
        self._hub = hub
        self._fds_expected = False

    def open(self, events: LinkEvents) -> None:
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._hub.attach(self)

    def send(self, frames: Sequence[Buffer]) -> None:
        self._hub.to_engine(self.sender, _frozen(frames))

    def send_soon(self, frames: Sequence[Buffer]) -> None:
        self.send(frames)

    def expect_fds(self, expected: bool) -> None:
        self._fds_expected = expected

    def close(self) -> None:
        self._hub.detach(self)

    def deliver(self, frames: Sequence[Buffer], fds: Sequence[int]) -> bool:
        """False when the event loop has ended meanwhile, in its own thread."""
        assert self._fds_expected or not fds
        copies = [os.dup(fd) for fd in fds]
        try:
            self._loop.call_soon_threadsafe(self._events.link_frames, frames, copies)
        except RuntimeError:
            for fd in copies:
                os.close(fd)
            if self._loop.is_closed():
                return False
            raise
        return True

    def announce_up(self) -> None:
        self._loop.call_soon_threadsafe(self._events.link_up)

    def announce_down(self) -> None:
        self._loop.call_soon_threadsafe(self._events.link_down)


class InProcessEngineLink:
    def __init__(self, hub: InProcessHub) -> None:
        self._hub = hub
        self._inbox: deque[tuple[str, Sequence[Buffer]]] = deque()
        self._arrived = threading.Event()

    def poll(self, timeout: float) -> list[tuple[str, Sequence[Buffer]]]:
        if not self._inbox:
            self._arrived.wait(timeout)
        self._arrived.clear()
        received = []
        while self._inbox:
            received.append(self._inbox.popleft())
        return received

    def send(self, sender: str, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> bool:
        return self._hub.to_client(sender, _frozen(frames), fds)

    def wake(self) -> None:
        self._arrived.set()

    def close(self) -> None:
        self._hub.engine_closed(self)

    def deliver(self, sender: str, frames: Sequence[Buffer]) -> None:
        self._inbox.append((sender, frames))
        self._arrived.set()


def _frozen(frames: Sequence[Buffer]) -> list[Buffer]:
    """Received frames are read-only, as they are behind a socket."""
    return [memoryview(frame).toreadonly() for frame in frames]
