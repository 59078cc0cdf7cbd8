"""The little of the Redis protocol that blocks need, without copies and never past a deadline.

Requests are pipelined: all are sent, then all are answered. A connection whose exchange broke off
is closed, for nobody knows where its next answer begins.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Part: TypeAlias = bytes | bytearray | memoryview

MAX_VECTOR = 256
"""Buffers per `sendmsg`; systems allow 1,024."""
BUFFER_BYTES = 1 << 16
TERMINATOR = b"\r\n"


class RespError(Exception):
    """The server answered with an error; the connection is still good."""


class Connection:
    """One connection; used by one thread. Raises `OSError` (`TimeoutError` past the deadline)."""

    def __init__(self, address: str | tuple[str, int], deadline: float) -> None:
        remaining = _remaining(deadline)
        if isinstance(address, str):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(remaining)
            try:
                self._socket.connect(address)
            except BaseException:
                self._socket.close()
                raise
        else:
            self._socket = socket.create_connection(address, timeout=remaining)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(BUFFER_BYTES)
        self._start = self._end = 0

    def close(self) -> None:
        self._socket.close()

    def send(self, parts: Iterable[Part], deadline: float) -> None:
        """Send all parts, in order."""
        pending = [memoryview(part) for part in parts]
        pending.reverse()
        while pending:
            self._socket.settimeout(_remaining(deadline))
            sent = self._socket.sendmsg(pending[: -MAX_VECTOR - 1 : -1])
            while sent:
                part = pending[-1]
                if sent < part.nbytes:
                    pending[-1] = part[sent:]
                    break
                sent -= part.nbytes
                pending.pop()

    def read_integer(self, deadline: float) -> int:
        return int(self._reply(b":", deadline))

    def read_status(self, deadline: float) -> bytes:
        return self._reply(b"+", deadline)

    def read_bulk(self, into: Sequence[memoryview], deadline: float) -> int | None:
        """Read a value into the buffers, one after the other; its length, None where there is none.

        A value of another length than the buffers together is read and thrown away.
        """
        length = int(self._reply(b"$", deadline))
        if length < 0:
            return None
        if length == sum(part.nbytes for part in into):
            for part in into:
                self._read_into(part, deadline)
        else:
            self._skip(length, deadline)
        self._read_into(memoryview(bytearray(2)), deadline)
        return length

    def read_any(self, deadline: float) -> bytes | int | None:
        """An integer, a status or a value, whichever comes."""
        line = self._line(deadline)
        match line[:1], line[1:]:
            case b":", number:
                return int(number)
            case b"+", status:
                return status
            case b"$", b"-1":
                return None
            case b"$", length:
                value = memoryview(bytearray(int(length) + 2))
                self._read_into(value, deadline)
                return bytes(value[:-2])
            case _:
                raise RespError(line.decode(errors="replace"))

    def _reply(self, kind: bytes, deadline: float) -> bytes:
        line = self._line(deadline)
        if line[:1] == b"-":
            raise RespError(line[1:].decode(errors="replace"))
        if line[:1] != kind:
            raise ConnectionError("the server does not speak the Redis protocol")
        return line[1:]

    def _line(self, deadline: float) -> bytes:
        while True:
            end = self._buffer.find(TERMINATOR, self._start, self._end)
            if end >= 0:
                line = bytes(self._buffer[self._start : end])
                self._start = end + 2
                return line
            self._fill(deadline)

    def _fill(self, deadline: float) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            kept = self._end - self._start
            if kept == len(self._buffer):
                raise ConnectionError("the server sent an endless line")
            self._buffer[:kept] = self._buffer[self._start : self._end]
            self._start, self._end = 0, kept
        self._end += self._receive(memoryview(self._buffer)[self._end :], deadline)

    def _read_into(self, part: memoryview, deadline: float) -> None:
        """What is buffered first, the rest straight from the socket."""
        buffered = min(part.nbytes, self._end - self._start)
        part[:buffered] = self._buffer[self._start : self._start + buffered]
        self._start += buffered
        while buffered < part.nbytes:
            buffered += self._receive(part[buffered:], deadline)

    def _skip(self, length: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(length, 1 << 20)))
        while length:
            step = min(length, scratch.nbytes)
            self._read_into(scratch[:step], deadline)
            length -= step

    def _receive(self, part: memoryview, deadline: float) -> int:
        self._socket.settimeout(_remaining(deadline))
        count = self._socket.recv_into(part)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count


def command(*words: Part) -> list[Part]:
    """One command's parts; long words are passed on as they are."""
    parts: list[Part] = [b"*%d\r\n" % len(words)]
    for word in words:
        parts += (b"$%d\r\n" % memoryview(word).nbytes, word, TERMINATOR)
    return parts


def packed(*words: bytes) -> bytes:
    """One command of short words as one piece."""
    return b"".join(command(*words))


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the deadline has passed")
    return remaining
