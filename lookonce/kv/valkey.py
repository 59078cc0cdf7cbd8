"""Valkey or Redis, over TCP or a unix socket: blocks shared by servers, on this machine or others.

    lookonce:kv:<namespace><block hash>  →  header and payload

The server decides what it keeps (`maxmemory-policy allkeys-lru`); it promises nothing, so a lease
is only a look. Nothing is remembered here about what it holds: a server that came back empty
answers so. No command is ever repeated, and none waits past its deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lookonce.kv.objects import HEADER_BYTES, ObjectFormat
from lookonce.kv.resp import Connection, Part, RespError, command, packed
from lookonce.kv.tier import ReadOutcome, Reason, TierError
from lookonce.types.kv import TierSpec

PREFIX = b"lookonce:kv:"
TIMEOUT = 1.0
"""Seconds one call (at most a few MiB) may take, connecting included."""

T = TypeVar("T")


class ValkeyTier:
    """A `KVTier` on a server; unreachable ones cost a deadline, and then a breaker's patience."""

    name = "valkey"
    held_bytes = 0

    def __init__(self, objects: ObjectFormat, spec: TierSpec, *, timeout: float = TIMEOUT) -> None:
        self._objects = objects
        self._spec = spec
        self._timeout = timeout
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []

        def ask(connection: Connection, deadline: float) -> list[bool]:
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

        def fetch(connection: Connection, deadline: float) -> None:
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
        absent = [pair for pair, there in zip(zip(keys, payloads, strict=True), held, strict=True)
                  if not there]  # fmt: skip

        def put(connection: Connection, deadline: float) -> None:
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
        self, connection: Connection, index: int, key: bytes, into: memoryview, deadline: float
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

        def delete(connection: Connection, deadline: float) -> None:
            connection.send([packed(b"DEL", *map(self._name, keys))], deadline)
            connection.read_integer(deadline)

        self._exchange(delete)

    # --- connections --------------------------------------------------------------------------

    def _exchange(self, talk: Callable[[Connection, float], T]) -> T:
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

    def _connection(self, deadline: float) -> Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        spec = self._spec
        connection = Connection(spec.path or (spec.host or "", spec.port), deadline)
        try:
            self._greet(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: Connection, deadline: float) -> None:
        spec = self._spec
        if spec.password is not None:
            words = [b"AUTH", (spec.username or "default").encode(), spec.password.encode()]
            connection.send([packed(*words)], deadline)
            connection.read_status(deadline)
        if spec.database:
            connection.send([packed(b"SELECT", b"%d" % spec.database)], deadline)
            connection.read_status(deadline)

    def _put_back(self, connection: Connection) -> None:
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
