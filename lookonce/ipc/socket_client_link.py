"""The API process's end of the link, on its event loop (`socket_engine_link` is the other end).

A message is written at once when the socket takes it. What it does not take is written in slices
when there is room, and long frames are read in slices too, so that the loop does other work
between them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from lookonce.errors import ProtocolError
from lookonce.ipc.channel import LinkEvents
from lookonce.ipc.framing import (
    DONTWAIT,
    SLICE_BYTES,
    FrameReader,
    Message,
    SendQueue,
    close_fds,
    greeting,
    message_pieces,
)
from lookonce.ipc.peer import peer_uid, require_same_user
from lookonce.types.media import Buffer

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.05


class SocketClientLink:
    """Connected to one engine after another; a message for one never reaches the next."""

    def __init__(
        self,
        path: str,
        sender: str,
        *,
        peer_uid: Callable[[socket.socket], int | None] = peer_uid,
    ) -> None:
        self._path = path
        self.sender = sender
        self._peer_uid = peer_uid
        self._connection: _Connection | None = None
        self._closed = False
        self._fds_expected = False
        self._refused = ""
        """Why the last connection was given up; logged once."""

    def open(self, events: LinkEvents) -> None:
        self._events = events
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def send(self, frames: Sequence[Buffer]) -> None:
        if self._connection is not None:
            self._connection.send(message_pieces(frames))

    def send_soon(self, frames: Sequence[Buffer]) -> None:
        if self._connection is not None:
            self._connection.send_soon(message_pieces(frames))

    def expect_fds(self, expected: bool) -> None:
        self._fds_expected = expected
        if self._connection is not None:
            self._connection.expect_fds(expected)

    def close(self) -> None:
        self._closed = True
        self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- called by the connection -------------------------------------------------------------

    def up(self) -> None:
        self._refused = ""
        self._events.link_up()

    def received(self, message: Message) -> None:
        """A message that raises is logged, and the next one is received."""
        try:
            self._events.link_frames(*message)
        except Exception:
            logger.exception("a message from the engine could not be taken")

    def lost(self, connection: _Connection, why: Exception) -> None:
        """The connection is closed: link down, and connect again."""
        if self._connection is not connection:
            return
        self._connection = None
        if isinstance(why, ProtocolError):
            self._refuse(why)
        if connection.up:
            self._events.link_down()
        if not self._closed:
            loop = asyncio.get_running_loop()
            self._connecting = loop.create_task(self._connect(RECONNECT_SECONDS))

    # --- inside -------------------------------------------------------------------------------

    async def _connect(self, delay: float = 0.0) -> None:
        """Try until an engine listens."""
        while True:
            await asyncio.sleep(delay)
            delay = RECONNECT_SECONDS
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.setblocking(False)
                link.connect(self._path)  # a unix socket connects at once or not at all
                require_same_user(self._peer_uid(link))
                self._connection = _Connection(self, link, expect_fds=self._fds_expected)
                return
            except OSError:
                link.close()
            except ProtocolError as error:
                link.close()
                self._refuse(error)

    def _refuse(self, error: ProtocolError) -> None:
        if error.message != self._refused:
            logger.error("the engine's socket: %s", error.message)
        self._refused = error.message


class _Connection:
    """One connection to an engine."""

    def __init__(self, owner: SocketClientLink, link: socket.socket, *, expect_fds: bool) -> None:
        """Raises `OSError` when the peer has gone already."""
        self.up = False
        """The engine's greeting has come."""
        self._owner = owner
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._soon: list[Buffer] = []
        """Pieces that are sent at the end of this turn of the loop."""
        self._unsent = SendQueue()
        self._writing = False
        """The loop calls `_write` when there is room."""
        self._closed = False
        self.expect_fds(expect_fds)
        link.send(greeting(owner.sender), DONTWAIT)
        self._loop.add_reader(link.fileno(), self._read)

    def expect_fds(self, expected: bool) -> None:
        reader = self._reader
        self._receive = reader.receive_with_fds if expected else reader.receive

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Write what the socket takes now; the loop writes the rest."""
        if self._soon:
            self._send_collected()
        self._send(pieces)

    def send_soon(self, pieces: Sequence[Buffer]) -> None:
        """As `send`, together with what else is sent in this turn of the loop."""
        if not self._soon:
            self._loop.call_soon(self._send_collected)
        self._soon += pieces

    def _send_collected(self) -> None:
        pieces, self._soon = self._soon, []
        if pieces and not self._closed:
            is_short = sum(map(len, pieces)) <= SLICE_BYTES
            self._send([b"".join(pieces)] if is_short else pieces)

    def _send(self, pieces: Sequence[Buffer]) -> None:
        if not self._writing and len(pieces) == 1 and len(pieces[0]) <= SLICE_BYTES:
            try:
                sent = self._link.send(pieces[0], DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._loop.call_soon(self._lose, error)
                return
            if sent == len(pieces[0]):
                return
            pieces = (memoryview(pieces[0])[sent:],)
        self._unsent.put(pieces)
        if not self._writing:
            self._write()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._link.fileno())
            self._loop.remove_writer(self._link.fileno())
            self._link.close()
            self._unsent.close()
            self._reader.close()

    def _read(self) -> None:
        try:
            messages = self._receive(self._link, SLICE_BYTES, DONTWAIT)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._lose(error)
            return
        if not self.up and self._reader.peer is not None:
            self.up = True
            self._owner.up()
        for message in messages:
            if self._closed:
                close_fds(message[1])
            else:
                self._owner.received(message)

    def _write(self) -> None:
        """Write one slice."""
        try:
            self._unsent.write(self._link)
        except BlockingIOError:
            pass
        except OSError as error:
            self._unsent.close()
            self._loop.call_soon(self._lose, error)
        if bool(self._unsent) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._link.fileno(), self._write)
            else:
                self._loop.remove_writer(self._link.fileno())

    def _lose(self, why: Exception) -> None:
        if not self._closed:
            self.close()
            self._owner.lost(self, why)
