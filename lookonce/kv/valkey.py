"""Valkey or Redis, over TCP or a unix socket: blocks shared by servers, on this machine or others.

    lookonce:kv:<namespace><block hash>  →  header and payload

The server decides what it keeps (`maxmemory-policy allkeys-lru`); it promises nothing, so a lease
is only a look. Nothing is remembered here about what it holds: a server that came back empty
answers so. No command is ever repeated, and none waits past its deadline.

The client is our own, for the part of the Redis protocol (RESP) that blocks need: values go from
pages to the socket and back without a copy. valkey-py 6.2, which joins and splits every value,
takes 5 times as long to read values of 1 MiB and 2.2 times to write them; it would bring TLS,
cluster and Sentinel.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

from lookonce.kv.objects import HEADER_BYTES, ObjectFormat
from lookonce.kv.tier import ReadOutcome, Reason, TierError
from lookonce.types.kv import TierSpec

Part: TypeAlias = bytes | bytearray | memoryview
MAX_VECTOR = 256
"""Buffers per `sendmsg`; systems allow 1,024."""
BUFFER_BYTES = 1 << 16
TERMINATOR = b"\r\n"


class RespError(Exception):
    """The server answered with an error; the connection is still good."""


class RespConnection:
    """One connection, used by one thread. Raises `OSError` (`TimeoutError` past the deadline).

    Requests are pipelined: all are sent, then all are answered. A connection whose exchange broke
    off must be closed: nobody can tell where its next answer begins.
    """

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


PREFIX = b"lookonce:kv:"
TIMEOUT = 1.0
"""Seconds one call (at most a few MiB) may take, connecting included."""
T = TypeVar("T")


class ValkeyTier:
    """A `KVTier` on a server. Every call takes at most `timeout` seconds, connecting included."""

    name = "valkey"
    held_bytes = 0

    def __init__(self, objects: ObjectFormat, spec: TierSpec, *, timeout: float = TIMEOUT) -> None:
        self._objects = objects
        self._spec = spec
        self._timeout = timeout
        self._idle: list[RespConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []

        def ask(connection: RespConnection, deadline: float) -> list[bool]:
            asked = b"".join(packed(b"EXISTS", self._name(key)) for key in keys)
            connection.send([asked], deadline)
            return [connection.read_integer(deadline) == 1 for _ in keys]

        return self._exchange(ask)

    def release(self, keys: Sequence[bytes]) -> None:
        """There is nothing to give back."""

    def read(self, keys: Sequence[bytes], into: memoryview) -> ReadOutcome:
        """All are asked for at once, and received straight into `into`."""
        good = 0
        bad: list[bytes] = []
        first_reason: Reason | None = None

        def fetch(connection: RespConnection, deadline: float) -> None:
            nonlocal good, first_reason
            asked = b"".join(packed(b"GET", self._name(key)) for key in keys)
            connection.send([asked], deadline)
            for index, key in enumerate(keys):
                reason = self._receive(connection, index, key, into, deadline)
                if reason == "corrupt":
                    bad.append(key)
                if reason is not None:
                    first_reason = first_reason or reason
                elif first_reason is None:
                    good += 1

        try:
            self._exchange(fetch)
            self._delete(bad)
        except TierError as error:
            return ReadOutcome(good, first_reason or error.reason)
        return ReadOutcome(good, first_reason)

    def write(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> int:
        """Only what the server lacks is sent."""
        held = self.lease(keys)
        pairs = zip(keys, payloads, held, strict=True)
        absent = [(key, payload) for key, payload, there in pairs if not there]

        def put(connection: RespConnection, deadline: float) -> None:
            parts: list[Part] = []
            for key, payload in absent:
                parts += self._set(key, payload)
            connection.send(parts, deadline)
            for _ in absent:
                connection.read_status(deadline)

        if absent:
            self._exchange(put)
        return len(absent)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # --- objects ------------------------------------------------------------------------------

    def _name(self, key: bytes) -> bytes:
        return PREFIX + self._objects.namespace + key

    def _set(self, key: bytes, payload: memoryview) -> list[Part]:
        """Header and payload are one value, sent as two parts."""
        head = b"*3\r\n$3\r\nSET\r\n" + b"".join(command(self._name(key))[1:])
        size = b"$%d\r\n" % self._objects.object_bytes
        return [head + size + self._objects.header(key, payload), payload, b"\r\n"]

    def _receive(
        self, connection: RespConnection, index: int, key: bytes, into: memoryview, deadline: float
    ) -> Reason | None:
        size = self._objects.payload_bytes
        header = bytearray(HEADER_BYTES)
        payload = into[index * size : (index + 1) * size]
        length = connection.read_bulk([memoryview(header), payload], deadline)
        if length is None:
            return "missing"
        whole = length == self._objects.object_bytes
        return None if whole and self._objects.intact(key, header, payload) else "corrupt"

    def _delete(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return

        def delete(connection: RespConnection, deadline: float) -> None:
            connection.send([packed(b"DEL", *map(self._name, keys))], deadline)
            connection.read_integer(deadline)

        self._exchange(delete)

    # --- connections --------------------------------------------------------------------------

    def _exchange(self, talk: Callable[[RespConnection, float], T]) -> T:
        """Run `talk` on a connection. Raises `TierError`; a broken connection is not used again."""
        deadline = time.monotonic() + self._timeout
        try:
            connection = self._connection(deadline)
            try:
                answer = talk(connection, deadline)
            except BaseException:
                connection.close()
                raise
        except TimeoutError as error:
            raise TierError("timeout", str(error)) from error
        except OSError as error:
            self._drop_idle()  # connections to a server that is gone
            raise TierError("connection", str(error)) from error
        except (RespError, ValueError) as error:
            raise TierError("io", str(error)) from error
        self._put_back(connection)
        return answer

    def _connection(self, deadline: float) -> RespConnection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        spec = self._spec
        connection = RespConnection(spec.path or (spec.host or "", spec.port), deadline)
        try:
            self._greet(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: RespConnection, deadline: float) -> None:
        spec = self._spec
        if spec.password is not None:
            words = [b"AUTH", (spec.username or "default").encode(), spec.password.encode()]
            connection.send([packed(*words)], deadline)
            connection.read_status(deadline)
        if spec.database:
            connection.send([packed(b"SELECT", b"%d" % spec.database)], deadline)
            connection.read_status(deadline)

    def _put_back(self, connection: RespConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
