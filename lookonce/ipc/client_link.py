"""The API process's end of the link: a DEALER on the event loop itself.

libzmq's own would have a thread beside the loop, and two wake-ups and a queue between them for
every message. What it says to the engine's ROUTER is a plain protocol on a plain unix socket
(`zmtp`), which the loop reads and writes as it does every other connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import cast

from lookonce.errors import ProtocolError
from lookonce.ipc.links import LinkEvents
from lookonce.ipc.zmtp import Reader, hello, message
from lookonce.types.media import Buffer

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.05
WRITE_BYTES = 128 * 1024
"""At most so much at once: the loop has other things to do, and asyncio's own transport copies
what the socket does not take."""


class ZmqClientLink:
    """Connected to one engine after another: nothing meant for one reaches its successor."""

    def __init__(self, address: str, sender: str) -> None:
        """`address`: `ipc://PATH`."""
        self._path = address.removeprefix("ipc://")
        self._identity = sender.encode("latin-1")
        self._connection: _Connection | None = None
        self._closed = False

    def open(self, events: LinkEvents) -> None:
        self._events = events
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def send(self, frames: Sequence[Buffer]) -> None:
        if self._connection is not None:
            self._connection.send(message(frames))

    def close(self) -> None:
        self._closed = True
        self._connecting.cancel()
        if self._connection is not None:
            self._connection.transport.abort()
            self._connection = None

    # --- what the connection tells ------------------------------------------------------------

    def made(self, connection: _Connection) -> None:
        if self._closed:
            connection.transport.abort()
            return
        self._connection = connection
        connection.send([hello(self._identity)])

    def up(self) -> None:
        self._events.link_up()

    def received(self, frames: Sequence[Buffer]) -> None:
        if not self._closed:
            self._events.link_frames(frames)

    def lost(self, *, was_up: bool) -> None:
        if self._closed:
            return
        self._connection = None
        if was_up:
            self._events.link_down()
        self._connecting = asyncio.get_running_loop().create_task(self._connect(RECONNECT_SECONDS))

    async def _connect(self, delay: float = 0.0) -> None:
        """Until there is an engine that listens."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(delay)
            try:
                await loop.create_unix_connection(lambda: _Connection(self), self._path)
            except OSError:
                delay = RECONNECT_SECONDS
            else:
                return


class _Connection(asyncio.Protocol):
    """One connection, from its beginning to its end."""

    transport: asyncio.Transport

    def __init__(self, link: ZmqClientLink) -> None:
        self._link = link
        self._reader = Reader()
        self._up = False
        self._unsent: deque[Buffer] = deque()
        self._paused = False

    def send(self, pieces: Iterable[Buffer]) -> None:
        self._unsent.extend(pieces)
        self._write()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self._link.made(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frames in self._reader.feed(data):
                self._note_ready()
                self._tell(frames)
            self._note_ready()
        except ProtocolError as error:
            logger.error("the engine's socket: %s", error.message)
            self.transport.abort()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.lost(was_up=self._up)

    def _write(self) -> None:
        """As much as the socket takes; the rest when it takes more."""
        while self._unsent and not self._paused:
            self.transport.write(self._next())

    def _next(self) -> bytes | memoryview:
        """A part of a large piece, or small ones together."""
        piece = memoryview(self._unsent.popleft())
        if piece.nbytes > WRITE_BYTES:
            self._unsent.appendleft(piece[WRITE_BYTES:])
            return piece[:WRITE_BYTES]
        pieces, size = [piece], piece.nbytes
        while self._unsent and size + memoryview(self._unsent[0]).nbytes <= WRITE_BYTES:
            pieces.append(memoryview(self._unsent.popleft()))
            size += pieces[-1].nbytes
        return b"".join(pieces) if len(pieces) > 1 else piece

    def _note_ready(self) -> None:
        if self._reader.ready and not self._up:
            self._up = True
            self._link.up()

    def _tell(self, frames: Sequence[Buffer]) -> None:
        """Whatever becomes of one message, the next is heard."""
        try:
            self._link.received(frames)
        except Exception:
            logger.exception("a message from the engine could not be taken")
