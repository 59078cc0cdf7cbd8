"""The API process's end of the ZMQ link: a DEALER on the event loop itself.

libzmq's DEALER would run in a thread beside the loop, with two wake-ups and a queue between them
for every message. Here the loop reads and writes the unix socket itself, in ZMTP 3, the protocol
between ZMQ sockets, as far as a DEALER and its ROUTER need it:

    greeting ── READY with the socket's identity ── messages, each of one frame or more

`hello`, `message` and `Reader` do no input and no output. The specification is
https://rfc.zeromq.org/spec/23/ (mechanism NULL).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from lookonce.errors import ProtocolError
from lookonce.ipc.channel import LinkEvents
from lookonce.types.media import Buffer

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.05
WRITE_BYTES = 128 * 1024
"""Bytes written at most at once: asyncio's own transport copies what the socket does not take, and
the loop has other work."""


class ZmqClientLink:
    """Connected to one engine after another; a message for one never reaches the next."""

    def __init__(self, address: str, sender: str) -> None:
        """`address`: `ipc://PATH`."""
        self._path = address.removeprefix("ipc://")
        self._identity = sender.encode("latin-1")
        self._connection: _DealerConnection | None = None
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

    # --- called by the connection -------------------------------------------------------------

    def made(self, connection: _DealerConnection) -> None:
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
        """Try until an engine listens."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(delay)
            try:
                await loop.create_unix_connection(lambda: _DealerConnection(self), self._path)
            except OSError:
                delay = RECONNECT_SECONDS
            else:
                return


class _DealerConnection(asyncio.Protocol):
    """One connection."""

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
        """Write as much as the socket takes; `resume_writing` writes the rest."""
        while self._unsent and not self._paused:
            self.transport.write(self._next())

    def _next(self) -> bytes | memoryview:
        """The next bytes to write: part of a large piece, or several small pieces joined."""
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
        """A message that raises is logged, and the next one is received."""
        try:
            self._link.received(frames)
        except Exception:
            logger.exception("a message from the engine could not be taken")


# --- ZMTP 3 -----------------------------------------------------------------------------------

MORE, LONG, COMMAND = 1, 2, 4
"""Bits of a frame's first byte: another frame of the message follows; the length has 8 bytes, not
1; the frame is a command, not part of a message."""
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING_SIZE = 64
GREETING = (_SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0")).ljust(_GREETING_SIZE, b"\0")
_READY, _ERROR = b"\x05READY", b"\x05ERROR"


def hello(identity: bytes) -> bytes:
    """Greeting and READY of a DEALER. It may send both at once; for its first message it must wait
    until its peer is ready too (libzmq refuses one that comes earlier)."""
    socket_type = _property(b"Socket-Type", b"DEALER")
    command = _READY + socket_type + _property(b"Identity", identity)
    return GREETING + _frame_head(COMMAND, len(command)) + command


def message(frames: Sequence[Buffer]) -> list[Buffer]:
    """The bytes of a message on the wire. Frames of type `bytes` are heads and names, which are
    small: they are copied. Other frames are not."""
    if len(frames) == 1 and isinstance(frames[0], bytes):
        return [_frame_head(0, len(frames[0])) + frames[0]]
    pieces: list[Buffer] = []
    for number, frame in enumerate(frames, start=1):
        flags = MORE if number < len(frames) else 0
        if isinstance(frame, bytes):
            pieces.append(_frame_head(flags, len(frame)) + frame)
        else:
            view = memoryview(frame).cast("B")
            pieces += (_frame_head(flags, len(view)), view)
    return pieces


class Reader:
    """Splits the bytes that the peer sends, in pieces of any size, into messages."""

    def __init__(self) -> None:
        self.ready = False
        """The peer's READY has come."""
        self._rest = bytearray()
        """The beginning of a frame that is not complete yet."""
        self._wanted = _GREETING_SIZE
        """Bytes `_rest` must have before a frame can be read."""
        self._greeted = False
        self._frames: list[Buffer] = []
        """The frames of a message whose last frame has not come."""

    def feed(self, data: bytes) -> Iterator[list[Buffer]]:
        """The complete messages: of each the first frame as bytes, the others as views.

        Raises `ProtocolError` for anything but ZMTP 3.
        """
        if self._rest or not self._greeted:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data = bytes(self._rest)
            self._rest.clear()
        position = 0 if self._greeted else self._greet(data)
        while (span := self._span(data, position)) is not None:
            start, end = span
            flags, position = data[position], end
            if flags & COMMAND:
                self._command(data[start:end])
                continue
            self._frames.append(memoryview(data)[start:end] if self._frames else data[start:end])
            if not flags & MORE:
                frames, self._frames = self._frames, []
                yield frames
        self._rest += memoryview(data)[position:]

    def _span(self, data: bytes, position: int) -> tuple[int, int] | None:
        """Start and end of the body of the frame at `position`; None while it is not complete."""
        left = len(data) - position
        head = 9 if left and data[position] & LONG else 2
        self._wanted = head
        if left < head:
            return None
        start = position + head
        size = int.from_bytes(data[position + 1 : start], "big")
        self._wanted = head + size
        return (start, start + size) if left >= self._wanted else None

    def _greet(self, data: bytes) -> int:
        """Check the greeting; its length. Raises `ProtocolError`."""
        if data[0] != 0xFF or data[9] != 0x7F or data[10] < 3 or data[12:17] != b"NULL\0":
            raise ProtocolError("the peer does not speak ZMTP 3 without authentication")
        self._greeted = True
        return _GREETING_SIZE

    def _command(self, body: bytes) -> None:
        if body.startswith(_ERROR):
            raise ProtocolError(f"the peer refuses the connection: {body[7:]!r}")
        self.ready = self.ready or body.startswith(_READY)


def _frame_head(flags: int, size: int) -> bytes:
    if size < 256:
        return bytes((flags, size))
    return bytes((flags | LONG,)) + size.to_bytes(8, "big")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
