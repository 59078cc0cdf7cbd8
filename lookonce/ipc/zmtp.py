"""ZMTP 3, what ZMQ sockets say to each other, as far as a DEALER and its ROUTER need it.

    greeting ── READY with the socket's identity ── messages, each of one frame or more

Bytes in, messages out, and the other way round; no input and no output. The specification is
https://rfc.zeromq.org/spec/23/ (mechanism NULL).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lookonce.errors import ProtocolError
from lookonce.types.media import Buffer

MORE, LONG, COMMAND = 1, 2, 4
"""Bits of a frame's first byte: another frame follows; the length has 8 bytes, not 1; no message
but a command."""

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING_SIZE = 64
GREETING = (_SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0")).ljust(_GREETING_SIZE, b"\0")
_READY, _ERROR = b"\x05READY", b"\x05ERROR"


def hello(identity: bytes) -> bytes:
    """All that a DEALER has to say first. It may say so before it has heard anything; for its first
    message it has to wait until its peer is ready too (libzmq refuses one that comes earlier)."""
    socket_type = _property(b"Socket-Type", b"DEALER")
    command = _READY + socket_type + _property(b"Identity", identity)
    return GREETING + _frame_head(COMMAND, len(command)) + command


def message(frames: Sequence[Buffer]) -> list[Buffer]:
    """What a message is on the wire. Bytes are heads and names, which are small: they are copied;
    other frames are sent from where they are."""
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
    """Splits what the peer sends, however it is cut, into messages."""

    def __init__(self) -> None:
        self.ready = False
        """The peer has said all that comes before messages."""
        self._rest = bytearray()
        """The beginning of what is not complete yet."""
        self._wanted = _GREETING_SIZE
        """Bytes `_rest` must have before there is something to be read."""
        self._greeted = False
        self._frames: list[Buffer] = []
        """Of the message whose last frame has not come."""

    def feed(self, data: bytes) -> Iterator[list[Buffer]]:
        """The messages that are complete: of each the first frame as bytes, others as views.

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
        """Where the body of the frame at `position` is; None while it is not complete."""
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
        """The greeting's length, once it is found to be good."""
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
