"""Speaks HTTP/1.1 to one engine's own server: requests go out as they came, answers are handed on
as the bytes that come.

A connection is used for one request at a time, and again for the next one. Those that wait for
one are limited over all engines together, and give way where this process has no descriptors left.
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import cast

import httptools

from lookonce.errors import UnavailableError

Headers = list[tuple[bytes, bytes]]
EngineAnswerParts = tuple[int, Headers, bytes]
"""Status, headers and body."""

RETRIED_STATUSES = frozenset({502, 503})
"""An engine that answers so has not begun: another one may serve the request."""
ENGINE_LOST = "the engine was lost"
CONNECT_SECONDS = 5.0
MAX_IDLE = 256
"""Connections to all engines that are kept for later requests."""
NO_DESCRIPTOR = "the front-end can open no more connections to engines now"
OWN_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Failures to connect that say nothing of the engine."""
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT})
"""Failures to connect to an engine whose machine, or the way there, may be gone."""
CLOSING_TURNS = 3
"""Of the event loop, after which the descriptor of a connection that was aborted is free."""
MAX_UNREAD = 1 << 20
"""Bytes of an answer that may wait for the client; the engine's connection is not read beyond."""
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


class EngineLostError(Exception):
    """The engine's server cannot be reached, or ended its connection in the middle."""


class EngineUnreachableError(EngineLostError):
    """Nothing answered an attempt to connect. Connections that there are would not tell of it."""


class NoDescriptorError(UnavailableError):
    """This process can open no connection now; the engine may be well. An answer of 503."""


class IdleConnections:
    """Connections to all engines of a fleet that wait for their next request."""

    def __init__(self, most: int = MAX_IDLE) -> None:
        self._most = most
        self._connections: OrderedDict[_Connection, None] = OrderedDict()
        """The one that has waited longest first."""

    def __len__(self) -> int:
        return len(self._connections)

    def keep(self, connection: _Connection) -> None:
        self._connections[connection] = connection.client.idle[connection] = None
        if len(self._connections) > self._most:
            next(iter(self._connections)).abort()

    def forget(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)
        connection.client.idle.pop(connection, None)

    def close(self) -> bool:
        """Close all; whether there were any."""
        closed = list(self._connections)
        for connection in closed:
            connection.abort()
        return bool(closed)


class EngineAnswer:
    """The head of an answer, and its body as it comes."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    async def chunks(
        self, take: Callable[[bytes], bool] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Raises `EngineLostError`. What has gathered meanwhile comes as one.

        While nothing else is to be had, `take` gets what comes, in the callback that receives it;
        what it refuses (False) comes as a chunk. So a token wakes no task.
        """
        while (chunk := await self._connection.read(take)) is not None:
            yield chunk

    async def body(self, most: float = math.inf) -> bytes:
        """Of a body that has more than `most` bytes what has come until then. Raises
        `EngineLostError`."""
        parts: list[bytes] = []
        size = 0
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                parts.append(chunk)
                size += len(chunk)
                if size > most:
                    break
        return b"".join(parts)

    def abort(self, _: object = None) -> None:
        """End the connection, and with it the request at the engine."""
        self._connection.abort()

    def close(self) -> None:
        """The connection is used again if the answer was read to its end."""
        self._connection.release()


class EngineClient:
    """The connections to one engine's server. `address`: `HOST:PORT` or `unix:PATH`."""

    def __init__(self, address: str, connections: IdleConnections) -> None:
        self.address = address
        self.connections = connections
        self.idle: dict[_Connection, None] = {}
        """Those of `connections` that are this engine's, the one used last at the end."""
        self.busy: set[_Connection] = set()
        """Those whose answer has not ended."""
        local = address.startswith("unix:")
        self._host = b"localhost" if local else address.encode()

    async def request(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
    ) -> EngineAnswer:
        """The answer, once its head has come; its `close` must be called.

        `headers` are sent but for those about the connection. Raises `EngineLostError`, and
        `NoDescriptorError` where this process can open no connection.
        """
        head = self._head(method, target, headers, len(body))
        while True:
            connection, used = await self._connection()
            self.busy.add(connection)
            try:
                await connection.send(head, body, bodiless=method == "HEAD")
            except EngineLostError:
                connection.abort()
                if used and not connection.received and not connection.given_up:
                    continue  # it was closed while it was idle
                raise
            except BaseException:
                connection.abort()
                raise
            return EngineAnswer(connection)

    async def ask(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
    ) -> EngineAnswerParts:
        """As `request`, but the whole answer."""
        answer = await self.request(method, target, headers, body)
        try:
            return answer.status, answer.headers, await answer.body()
        finally:
            answer.close()

    def close(self) -> None:
        """Close what waits for a next request."""
        for connection in list(self.idle):
            connection.abort()

    def abort(self) -> int:
        """End all connections: requests that have no whole answer raise `EngineLostError`. How many
        such requests there were."""
        self.close()
        lost = list(self.busy)
        for connection in lost:
            connection.given_up = True
            connection.abort()
        return len(lost)

    def _head(
        self, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], length: int
    ) -> bytes:
        lines = [f"{method} {target} HTTP/1.1\r\nhost: ".encode("ascii"), self._host, b"\r\n"]
        for name, value in headers:
            if name not in HOP_BY_HOP and name not in (b"host", b"content-length", b"expect"):
                lines += (name, b": ", value, b"\r\n")
        if length or method in ("POST", "PUT", "PATCH"):
            lines.append(b"content-length: %d\r\n" % length)
        lines.append(b"\r\n")
        return b"".join(lines)

    async def _connection(self) -> tuple[_Connection, bool]:
        """A connection, and whether it was used before."""
        while self.idle:
            connection = next(reversed(self.idle))
            self.connections.forget(connection)
            if connection.usable:
                return connection, True
        while True:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    return await self._connect(), False
            except (OSError, TimeoutError) as error:
                if isinstance(error, TimeoutError) or error.errno in UNREACHABLE:
                    raise EngineUnreachableError(f"{self.address} cannot be reached") from error
                if error.errno not in OWN_LACKS:
                    raise EngineLostError(f"{self.address} cannot be reached") from error
                if not self.connections.close():
                    raise NoDescriptorError(NO_DESCRIPTOR) from error
                for _ in range(CLOSING_TURNS):
                    await asyncio.sleep(0)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self.address.startswith("unix:"):
            path = self.address.removeprefix("unix:")
            _, made = await loop.create_unix_connection(lambda: _Connection(self), path)
        else:
            host, _, port = self.address.rpartition(":")
            _, made = await loop.create_connection(
                lambda: _Connection(self), host.strip("[]"), int(port)
            )
        return made


class _Connection(asyncio.Protocol):
    """One connection; also the parser's callbacks."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: list[bytes] = []
        self._unread = 0
        self._take: Callable[[bytes], bool] | None = None
        """Of the reader that waits."""
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self.status = 0
        self.headers: Headers = []
        self.received = False
        """Any byte of the answer."""
        self._head_came = False
        self._complete = True
        self._stays = False
        """The engine does not close it after this answer."""
        self._bodiless = False
        self._lost = False
        self.given_up = False
        """It was ended because the engine is silent."""

    @property
    def usable(self) -> bool:
        return not self._lost and self._complete

    async def send(self, head: bytes, body: bytes, *, bodiless: bool = False) -> None:
        """Send a request and wait for the head of its answer. Raises `EngineLostError`.

        `bodiless`: the answer ends with its head, whatever length it tells. The parser does not
        know that, so the connection is not used again."""
        assert self._transport is not None
        self.status, self.headers, self.received = 0, [], False
        self._head_came = self._complete = self._stays = False
        self._bodiless = bodiless
        self._chunks, self._unread = [], 0
        if len(body) <= 1 << 16:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        await self._writable.wait()
        while not self._head_came:
            await self._wait()

    async def read(self, take: Callable[[bytes], bool] | None = None) -> bytes | None:
        """What of the body has come and was not taken; None at its end."""
        while not self._chunks:
            if self._complete:
                return None
            self._take = take
            try:
                await self._wait()
            finally:
                self._take = None
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks, self._unread = [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        if self.usable and self._stays and not self._bodiless:
            self._parser = httptools.HttpResponseParser(self)
            self.client.busy.discard(self)
            self.client.connections.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._lost = True
        self.client.busy.discard(self)
        self.client.connections.forget(self)
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._lost:
            raise EngineLostError(f"{self.client.address} ended its connection")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- asyncio's callbacks ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.client.busy.discard(self)
        self.client.connections.forget(self)
        self._writable.set()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self.abort()  # nothing was asked
            return
        self.received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()
        if self._take is not None and self._chunks and self._taken():
            if not self._complete:
                return
        elif self._unread > MAX_UNREAD and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _taken(self) -> bool:
        """Whether the reader that waits took all that has come."""
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        if self._take is None or not self._take(data):
            self._take = None  # what follows comes after this
            return False
        self._chunks, self._unread = [], 0
        return True

    # --- the parser's callbacks ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._head_came = True
            self._complete = self._bodiless
        else:
            self.headers = []

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        if self._head_came:
            self._complete = True
            self._stays = self._parser.should_keep_alive()  # the parser knows it no longer later
