"""Messages on a unix stream socket: lists of frames, and descriptors with the few that need them.

Both pairs of processes use this: API process ↔ engine process, media pool ↔ media worker.

    once      "LookOnce" | version u16 | length of the name u16 | the sender's name
    message   bytes of the first frame u64 | number of other frames u32 | number of descriptors u16
              | MARK u16 | bytes of each other frame u64 ... | first frame | other frames ...

All numbers are little-endian. Descriptors travel with the first byte of their message (SCM_RIGHTS).

    frames ─▶ message_pieces ─▶ SendQueue ─▶ sendmsg ...... recv_into ─▶ FrameReader ─▶ frames
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from lookonce.errors import ProtocolError
from lookonce.types.media import Buffer

Message = tuple[list[Buffer], Sequence[int]]
"""The frames of a received message, and its descriptors, which the receiver has to close."""

SLICE_BYTES = 256 * 1024
"""Bytes that an event loop reads or writes at once: copying them takes less than 0.1 ms."""
SCRATCH_BYTES = 32 * 1024
OWN_BUFFER_BYTES = 16 * 1024
"""A longer frame is received into a buffer of its own."""
JOIN_BYTES = 4096
"""Shorter frames are copied into one piece with their neighbours, so that it is one write."""
MAX_PIECES = 64
"""Pieces that one `sendmsg` takes; the system's limit is 1024."""
MAX_FDS = 253
"""Descriptors of one message: Linux's own limit (SCM_MAX_FD)."""
MAX_FRAMES = 1 << 14
"""Frames of one message beside the first. Each costs its receiver some microseconds, however short
it is, and the engine's input thread serves nobody else meanwhile."""
MAX_FRAME_BYTES = 1 << 40

DONTWAIT = int(socket.MSG_DONTWAIT)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_FDS_SPACE = socket.CMSG_SPACE(MAX_FDS * 4)

MAGIC, VERSION = b"LookOnce", 1
MARK = 0x4F4C
"""At the end of every header: a reader that has lost its place does not take data for lengths."""
GREETING = struct.Struct("<8sHH")
HEADER = struct.Struct("<QIHH")
_ONE_FRAME = [0, 0, MARK]


def greeting(name: str = "") -> bytes:
    """The first bytes on a connection, from both ends. `name`: latin-1, at most 65535 bytes."""
    encoded = name.encode("latin-1")
    return GREETING.pack(MAGIC, VERSION, len(encoded)) + encoded


def message_pieces(frames: Sequence[Buffer], num_fds: int = 0) -> list[Buffer]:
    """The bytes of a message. Short frames are copied; long ones are sent from where they are."""
    first = frames[0]
    if len(frames) == 1 and isinstance(first, bytes):
        return [HEADER.pack(len(first), 0, num_fds, MARK) + first]
    views = [memoryview(frame) for frame in frames]
    sizes = [view.nbytes for view in views]
    head = HEADER.pack(sizes[0], len(sizes) - 1, num_fds, MARK)
    joined = [head, struct.pack(f"<{len(sizes) - 1}Q", *sizes[1:])]
    pieces: list[Buffer] = []
    for view, size in zip(views, sizes, strict=True):
        if size < JOIN_BYTES:
            joined.append(view.tobytes())
            continue
        pieces += (b"".join(joined), view.cast("B"))
        joined = []
    pieces.append(b"".join(joined))
    return [piece for piece in pieces if piece]  # an empty one would never be written


class SendQueue:
    """What a socket has not taken yet, in order. It owns duplicates of the descriptors."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        """Descriptors stand with the first piece of their message."""

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def put(self, pieces: Iterable[Buffer], fds: Sequence[int] = ()) -> None:
        """Raises `OSError` when a descriptor cannot be duplicated; then nothing is added."""
        own = _duplicates(fds) if fds else ()
        for piece in pieces:
            self._pieces.append((memoryview(piece), own))
            own = ()

    def write(self, link: socket.socket, limit: int = SLICE_BYTES, flags: int = DONTWAIT) -> None:
        """One `sendmsg` of at most `limit` bytes. Raises `BlockingIOError` when there is no room.

        Raises `ConnectionError` when the peer is gone.
        """
        batch: list[memoryview] = []
        fds: tuple[int, ...] = ()
        size = 0
        for piece, own in self._pieces:
            if size >= limit or len(batch) == MAX_PIECES or (own and batch):
                break
            batch.append(piece[: limit - size])
            size += batch[-1].nbytes
            fds = fds or own
        sent = link.sendmsg(batch, _ancillary(fds), flags)
        self._drop(sent)

    def close(self) -> None:
        """Forget everything that was not sent."""
        pieces, self._pieces = self._pieces, deque()
        for _, fds in pieces:
            close_fds(fds)

    def _drop(self, sent: int) -> None:
        while sent:
            piece, fds = self._pieces.popleft()
            close_fds(fds)  # they went with the first byte
            if piece.nbytes > sent:
                self._pieces.appendleft((piece[sent:], ()))
            sent -= min(sent, piece.nbytes)


class FrameReader:
    """Splits the bytes that a peer sends, in pieces of any size, into messages.

    Bytes are received into `buffer` and announced with `feed`. Frames of up to 16 KiB are copied
    out of a buffer for all; each longer one is received in place. Received frames are read-only.

        scratch   | taken | bytes of messages that are not complete | free |
                          start                                     end
    """

    def __init__(self, max_message_bytes: int = MAX_FRAME_BYTES) -> None:
        """A message whose frames have more than `max_message_bytes` together is malformed."""
        self._max_message_bytes = max_message_bytes
        self.peer: str | None = None
        """The name in the peer's greeting; None until it has come."""
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0
        self._frames: list[Buffer] | None = None
        """The complete frames of the message that is being received; None between messages."""
        self._sizes: Sequence[int] = ()
        """Bytes of the frames of that message."""
        self._table: tuple[int, int] | None = None
        """(bytes of the first frame, number of others) until the others' sizes have come."""
        self._own: memoryview | None = None
        """The buffer of a long frame that is being received."""
        self._filled = 0
        self._fds: list[int] = []
        """Descriptors that have come and no message has declared yet."""
        self._fds_lost = False
        """This process could not open all descriptors that have come."""
        self._message_fds: Sequence[int] = ()

    def buffer(self, limit: int = SLICE_BYTES) -> memoryview:
        """Where to receive the next bytes; never empty."""
        if self._own is not None:
            return self._own[self._filled : self._filled + limit]
        return self._view[self._end :] if self._end else self._view

    @property
    def in_place(self) -> bool:
        """A long frame is being received, and `buffer` takes nothing beyond it."""
        return self._own is not None

    def feed(self, count: int) -> list[Message]:
        """The messages that `count` more bytes in `buffer` complete.

        Raises `ConnectionResetError` when `count` is 0 (the peer has closed its end),
        `ProtocolError` for malformed bytes and `OSError` when there is no memory for a frame.
        After an error `close` is all that may be called.
        """
        if count == 0:
            raise ConnectionResetError("the peer has closed the connection")
        if self._own is None:
            self._end = end = self._end + count
            if self._frames is None and self.peer is not None and end >= HEADER.size:
                size, *rest = HEADER.unpack_from(self._scratch)
                if size + HEADER.size == end and rest == _ONE_FRAME and not self._fds:
                    self._end = 0  # one small message, as a step's tokens are
                    return [([self._view[HEADER.size : end].tobytes()], ())]
        else:
            self._filled += count
            if self._filled == self._own.nbytes:
                own, self._own = self._own, None
                self._take(own.toreadonly())
        messages: list[Message] = []
        try:
            if self._own is None:
                self._parse(messages)
            if self._fds and (self._frames is not None or self._end == 0):
                raise ProtocolError("descriptors came that no message declares")
        except BaseException:
            for _, fds in messages:
                close_fds(fds)
            raise
        return messages

    def receive(
        self, link: socket.socket, limit: int = SLICE_BYTES, flags: int = 0
    ) -> list[Message]:
        """Receive once, and `feed`. Descriptors that come are lost: see `receive_with_fds`."""
        return self.feed(link.recv_into(self.buffer(limit), 0, flags))

    def receive_with_fds(
        self, link: socket.socket, limit: int = SLICE_BYTES, flags: int = 0
    ) -> list[Message]:
        """Receive once, and `feed`. Descriptors cost a call some microseconds more.

        A message whose descriptors this process could not open, because it has too many, comes
        without any.
        """
        count, ancillary, came, _ = link.recvmsg_into(
            [self.buffer(limit)], _FDS_SPACE, flags | _CLOEXEC
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds += fds
        if len(self._fds) > MAX_FDS:
            raise ProtocolError(f"{len(self._fds)} descriptors came")
        if came & socket.MSG_CTRUNC:
            self._fds_lost = True
        return self.feed(count)

    def close(self) -> None:
        """Close the descriptors that nobody has got."""
        close_fds(self._fds)
        close_fds(self._message_fds)
        self._fds, self._message_fds = [], ()

    # --- inside -------------------------------------------------------------------------------

    def _parse(self, messages: list[Message]) -> None:
        if self.peer is None and not self._greet():
            return
        while True:
            if self._frames is None:
                left = self._end - self._start - HEADER.size
                if left < 0:
                    break
                header = HEADER.unpack_from(self._scratch, self._start)
                self._start += HEADER.size
                size, others, num_fds, mark = header
                if others == num_fds == 0 and mark == MARK and size <= left:  # as most messages
                    messages.append(([self._copied(size)], ()))
                    continue
                self._begin(*header)
            elif self._table is not None or len(self._frames) < len(self._sizes):
                if not self._next_block():
                    break
            else:
                messages.append((self._frames, self._message_fds))
                self._frames, self._message_fds = None, ()
        self._compact()

    def _greet(self) -> bool:
        """Whether the greeting is complete."""
        head = bytes(self._view[: min(self._end, GREETING.size)])
        if head[: len(MAGIC)] != MAGIC[: len(head)]:
            raise ProtocolError("the peer is no process of LookOnce")
        if len(head) < GREETING.size:
            return False
        _, version, length = GREETING.unpack(head)
        if version != VERSION:
            raise ProtocolError(f"the peer speaks version {version} of the link, not {VERSION}")
        if length > SCRATCH_BYTES - GREETING.size:
            raise ProtocolError(f"a name of {length} bytes")
        if self._end < GREETING.size + length:
            return False
        self._start = GREETING.size
        self.peer = self._copied(length).decode("latin-1")
        return True

    def _begin(self, size: int, others: int, num_fds: int, mark: int) -> None:
        """The header of a message has come."""
        if mark != MARK:
            raise ProtocolError("a header without its mark")
        if size > self._max_message_bytes or others > MAX_FRAMES:
            raise ProtocolError(f"a message of {others} frames beside one of {size} bytes")
        if num_fds and self._fds_lost:
            close_fds(self._fds)
            self._fds, self._fds_lost, num_fds = [], False, 0
        if num_fds > len(self._fds):
            raise ProtocolError(f"{num_fds} descriptors declared, {len(self._fds)} have come")
        # Descriptors may have come together with the end of what was sent before their message.
        self._message_fds, self._fds = tuple(self._fds[:num_fds]), self._fds[num_fds:]
        self._frames = []
        if others:
            self._table = (size, others)
        else:
            self._sizes = (size,)

    def _next_block(self) -> bool:
        """Take the next frame, or the table of sizes; False while it is not complete."""
        assert self._frames is not None
        size = self._sizes[len(self._frames)] if self._table is None else 8 * self._table[1]
        left = self._end - self._start
        if size <= left:
            self._take(self._copied(size))
            return True
        if size > OWN_BUFFER_BYTES:
            self._own = _new_buffer(size)
            self._own[:left] = self._view[self._start : self._end]
            self._filled = left
            self._start = self._end
        return False

    def _take(self, block: Buffer) -> None:
        assert self._frames is not None
        if self._table is None:
            self._frames.append(block)
            return
        first, others = self._table
        self._sizes = (first, *struct.unpack(f"<{others}Q", block))
        self._table = None
        if max(self._sizes) > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {max(self._sizes)} bytes")
        if sum(self._sizes) > self._max_message_bytes:
            raise ProtocolError(f"a message of {sum(self._sizes)} bytes")

    def _copied(self, size: int) -> bytes:
        start = self._start
        self._start = start + size
        return self._view[start : start + size].tobytes()

    def _compact(self) -> None:
        """Move what is left to the front, so that a header or a short frame always fits."""
        left = self._end - self._start
        if left:
            self._view[:left] = self._view[self._start : self._end]
        self._start, self._end = 0, left


class MessageSocket:
    """One end of a connection that blocks, used by one thread at a time."""

    def __init__(
        self,
        link: socket.socket,
        *,
        takes_fds: bool = False,
        max_message_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`takes_fds`: the peer may send descriptors; elsewhere a message that declares some is
        malformed, and so is one of more than `max_message_bytes`."""
        self._link = link
        self._receive_once = FrameReader.receive_with_fds if takes_fds else FrameReader.receive
        self._reader = FrameReader(max_message_bytes)
        self._unsent = SendQueue()
        self._unsent.put([greeting()])
        self._received: deque[Message] = deque()
        link.setblocking(True)

    def settimeout(self, seconds: float) -> None:
        """How long one call of the system may wait: while bytes come there is no limit."""
        # The kernel's own time limit leaves the socket blocking, so that one call receives a frame.
        fraction, whole = math.modf(seconds)
        timeval = struct.pack("@ll", int(whole), int(fraction * 1e6))
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, frames: Sequence[Buffer], fds: Sequence[int] = (), *, wait: bool = True) -> None:
        """Returns when the system has taken everything; `fds` stay the caller's. Without `wait`
        what it does not take at once goes with the next message.

        Raises `ConnectionError` or `TimeoutError`; then the connection is of no use any more.
        """
        self._unsent.put(message_pieces(frames, len(fds)), fds)
        try:
            while self._unsent:
                self._unsent.write(self._link, MAX_FRAME_BYTES, 0 if wait else DONTWAIT)
        except BlockingIOError:
            if wait:
                raise TimeoutError("the peer does not read") from None

    def wait(self, seconds: float) -> bool:
        """Whether anything comes, or the peer leaves, within so many seconds."""
        return bool(self._received or select.select([self._link], [], [], seconds)[0])

    def receive(self) -> Message:
        """The next message; the caller closes its descriptors.

        Raises `ConnectionError`, `ProtocolError`, `TimeoutError`, or another `OSError` when there
        is no memory for it; then the connection is of no use any more.
        """
        try:
            while not self._received:
                flags = socket.MSG_WAITALL if self._reader.in_place else 0
                self._received += self._receive_once(
                    self._reader, self._link, MAX_FRAME_BYTES, flags
                )
        except BlockingIOError:
            raise TimeoutError("the peer is silent") from None
        return self._received.popleft()

    def close(self) -> None:
        self._link.close()
        self._unsent.close()
        self._reader.close()
        for _, fds in self._received:
            close_fds(fds)
        self._received.clear()


def close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _ancillary(fds: Sequence[int]) -> list[tuple[int, int, array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []


def _duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    """Raises `OSError`, with nothing left open."""
    own: list[int] = []
    try:
        own.extend(map(os.dup, fds))
    except BaseException:
        close_fds(own)
        raise
    return tuple(own)


def _new_buffer(size: int) -> memoryview:
    """Memory that is not touched before it is written, unlike a `bytearray`'s."""
    try:
        return np.empty(size, np.uint8).data
    except MemoryError:
        raise OSError(errno.ENOMEM, f"no memory for a frame of {size} bytes") from None
