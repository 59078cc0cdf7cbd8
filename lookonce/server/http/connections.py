"""The connections of one API process: how they are accepted, limited, timed, and refused.

uvicorn parses and serves HTTP. Three things are done here because it cannot do them:

accepting   The event loop's own server accepts whatever comes: no limit, none per address, and at
            the last descriptor it closes new connections and breaks whoever needs another.
            `Acceptor` stops before, so that those who are served go on. An accepted socket is a
            `SilentConnection` until its first byte: only then transport and parser are made.
limits      `HttpProtocol` bounds headers and gives header, body and idle time a deadline.
refusals    What is no request is answered in OpenAI's error shape, and not logged one by one.

WebSockets are opened at `WEBSOCKET_PATHS` alone: the connection is handed to a `WebSocketProtocol`,
which takes its place in `Connections`.

A connection's phases; each but SERVING ends at its deadline, which `Connections.sweep` looks at
once a second:

    SILENT ─▶ HANDSHAKE ─▶ HEADERS ─▶ BODY ─▶ SERVING ─▶ IDLE ─▶ HEADERS ...
                              └─────────┴─▶ REFUSED: the refusal was sent, the rest is read and
                                            dropped
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import errno
import fcntl
import heapq
import ipaddress
import logging
import math
import os
import resource
import select
import socket
import ssl
import sys
import termios
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from lookonce.config import ConnectionConfig
from lookonce.frontend.responses import ErrorBody, ErrorResponse
from lookonce.server.http.responses import RETRY_AFTER_SECONDS, encode, error_type
from lookonce.server.http.unread import UNREAD_SECONDS, UnreadAnswers, UnreadProtocol
from lookonce.server.http.websocket import WebSocketProtocol
from lookonce.types.counts import Counts
from lookonce.types.last_asked import LastAsked

logger = logging.getLogger("lookonce.server")
audit_logger = logging.getLogger("lookonce.audit")

Phase = Literal["silent", "handshake", "headers", "body", "serving", "idle", "refused"]
SWEEP_SECONDS = 1.0
LINGER_SECONDS = 2.0
"""How long the rest of a refused request is read: a close before would take the refusal with it."""
DISCARD_SECONDS = 10.0
"""How long the rest of a body is read that was answered before its end."""
DROPPED_BYTES_PER_SECOND = 50_000_000
"""Of all connections together, at most: what is read and dropped in a few hundredths of the event
loop's time."""
LEAST_DROP_BYTES = 16 * 1024
"""A read of less costs as much."""
FEW_CHUNKS = 1024
"""Of a body, in one read. Who sends more, of a byte each, takes milliseconds of the event loop with
each read, so the next one has to wait for a turn."""
CHUNK_COST_BYTES = 512
"""As many as could be dropped in ten times the microsecond that a chunk takes."""
MAX_PIPELINED = 24
"""Requests of one connection that may wait for the one being served."""
HEADER_SECONDS = 2.0
"""Who has sent no whole header of a first request by then is the first to give way."""
FEW_CONNECTIONS = 8
"""That one address may have before it gives way to those that have fewer: a browser opens six."""
MAX_VICTIMS = 64
LARGE_BODY_BYTES = 64 * 1024
"""Where more of a body has come, each read looks whether its client is still there."""
UNREAD_BODY_BYTES = 128 * 1024
"""Bytes of a body that may wait for the application, which is less than the event loop reads at a
time. What a body has beyond so many is read in turns: were the beginnings of all large bodies read
in one turn of the loop, everybody else would wait for all of them. To stop and go on costs as much
as to read 64 kB."""
READ_REST_SECONDS = 0.003
"""After reads of large bodies that cost `REST_AFTER_BYTES`, while other addresses ask: these take a
ninth of that, with what the kernel does for them. 70 MB a second are left."""
READ_COST_BYTES = 64 * 1024
"""A read costs as much as so many bytes of it, beside those that it has."""
REST_AFTER_BYTES = 64 * 1024 + READ_COST_BYTES
"""What a read of 64 kB costs. Smaller ones, as all of TLS, rest less often. Were it what the
largest read costs (256 kB), short requests would wait a third longer beside such bodies."""
SMALL_READ_BYTES = 16 * 1024
"""Who sent less since its last turn waits for the next one behind others who did."""
SMALL_READS_PER_TURN = 4
"""What as many small reads cost is less than what one large read and its rest take."""
WRITE_NOW = "lookonce.write_now"
"""ASGI extension: its `write` writes a chunk of a streamed answer at once, without a task."""
CHUNK_OVERHEAD = 32
"""Bytes that one chunk of a chunked body may take beside its data."""
WEBSOCKET_PATHS = (b"/v1/realtime",)
WEBSOCKET_VERSION = b"13"
WEBSOCKET_KEY_BYTES = 16


class RefusedRequestError(Exception):
    """What was sent is refused before it is a request for the application."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def refusal(status: int, code: str, message: str) -> bytes:
    """The whole HTTP response, after which the connection is closed."""
    body = encode(ErrorResponse(ErrorBody(message, error_type(status), None, code)))
    retry = f"retry-after: {RETRY_AFTER_SECONDS}\r\n" if status in (429, 503) else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}"
        "connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


class TurnFlow(FlowControl):
    """As uvicorn's, but that nobody goes on to read before the connection's turn."""

    def __init__(self, transport: asyncio.Transport, wait: Callable[[], bool]) -> None:
        """`wait` is asked when somebody wants to go on: whether `resume_now` will be called
        later."""
        super().__init__(transport)
        self._wait = wait
        self.waits_for_turn = False

    def resume_reading(self) -> None:
        if not self.read_paused or self.waits_for_turn:
            return
        self.waits_for_turn = self._wait()
        if not self.waits_for_turn:
            self.resume_now()

    def resume_now(self) -> None:
        super().resume_reading()

    def end(self) -> None:
        """The connection has ended: nothing is read, and nobody asked."""
        self._wait = _waits_for_ever


def _waits_for_ever() -> bool:
    """Of a connection that has ended."""
    return True


class HttpProtocol(UnreadProtocol, HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits, deadlines and refusals, on a `HeadBufferingTransport`.

    `_overhead` counts the bytes of the message that is being received which are not its body: its
    header, the framing of chunks, and trailers. Nothing may make it larger than one header.
    """

    _table: Connections

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.address = address
        self.phase: Phase = "handshake"
        self.num_requests = 0
        self._table = connections if connections is not None else Connections(ConnectionConfig())
        self._limits = self._table.limits
        self._deadline = self._table.now + self._limits.header_timeout
        self._overhead = self._num_body_bytes = 0
        self._num_chunks = self.num_read = 0
        """Of the read that is parsed: chunks, and bytes."""
        self._handshake: asyncio.Task[Any] | None = None
        self._aborted = False
        self._served: Any = None
        """The cycle of the request that is served; `cycle` is that of the last one that came."""

    # --- the connection ---

    def accept(self, handshake: asyncio.Task[Any], deadline: float) -> None:
        """`handshake` is the task that makes a connection of an accepted socket. It, and the first
        header unless there is TLS, may take until `deadline`."""
        self._handshake = handshake
        self._deadline = deadline

    def note_accepted(self) -> None:
        """The task has ended."""
        self._handshake = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        buffering = HeadBufferingTransport(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, buffering))
        self.flow: TurnFlow = TurnFlow(self.transport, self._wait_to_read)
        self.phase = "headers"
        if transport.get_extra_info("ssl_object") is not None:
            self._deadline = self._table.now + self._limits.header_timeout
            self.transport.set_write_buffer_limits(HIGH_WATER_LIMIT)  # uvloop's is 512 KiB for TLS

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's, which tells the application only of the last request that came."""
        super().connection_lost(exc)
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected = True
            served.message_event.set()
        for cycle in (self.cycle, served, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:
                cycle.body = bytearray()  # it lives while it is served, and nobody reads more
        self._table.remove(self)
        self._let_go()

    def _let_go(self) -> None:
        """Of all that refers to this connection, so that it is freed at once. Thousands that are
        refused each second would else wait for a garbage collection, and leave memory in pieces.
        uvicorn's types know no connection that has ended."""
        self.cycle = self.scope = self.parser = self._served = None  # type: ignore[assignment]
        self.pipeline.clear()
        if self.flow is not None:
            self.flow.end()

    def shorten_idle(self, seconds: float) -> None:
        """It ends so soon, if it waits for its first or next request."""
        if self.phase == "idle" or (self.phase == "headers" and not self._overhead):
            self._deadline = min(self._deadline, self._table.now + seconds)

    @property
    def header_began(self) -> float:
        """When it began to wait for the header or the handshake that it waits for."""
        return self._deadline - self._limits.header_timeout

    @property
    def has_received(self) -> bool:
        """Anything of the header that it waits for."""
        return self._overhead > 0

    def evictable(self) -> bool:
        """It is not closed already, and no whole request of it is being served or its client does
        not read the answer."""
        serving = self.phase == "serving" or (self.phase == "body" and self.pipeline)
        unread = self._table.now - self.unread_since >= UNREAD_SECONDS
        return not self._aborted and (not serving or unread)

    def evict(self) -> bool:
        """The event loop tells of its end in its next turn."""
        if not self.evictable():
            return False
        self._abort()
        return True

    def _abort(self) -> None:
        self._aborted = True
        self._deadline = self.unread_since = math.inf
        if self.phase != "handshake":
            self.transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()

    def _enter(self, phase: Phase, seconds: float) -> None:
        self.phase = phase
        self._deadline = self._table.now + seconds

    def _serving(self) -> bool:
        """A request was received of which the answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    # --- what comes ---

    def data_received(self, data: bytes) -> None:
        if self.phase == "idle":
            self._enter("headers", self._limits.header_timeout)
        elif self.phase == "refused":
            self._read_in_turn(len(data))
            return
        self._num_chunks, self.num_read = 0, len(data)
        self._overhead += len(data)
        self._table.num_received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
                return
            # any other offer is not taken: the request is served as it is
        except httptools.HttpParserError as error:
            self._refuse(_reason(error))
            return
        if self._overhead > self._limits.max_header_bytes:
            self._refuse(self._header_too_large())
        elif self._is_given_up():
            self._abort()
        elif self.phase == "body" and self.cycle.response_complete:
            self._read_in_turn(len(data) + self._num_chunks * CHUNK_COST_BYTES)
        elif self._num_chunks > FEW_CHUNKS:
            self._read_in_turn(self._num_chunks * CHUNK_COST_BYTES)

    def _read_in_turn(self, num_dropped: int = 0) -> None:
        """So many bytes were dropped, or as much work done: no more is read before `Connections`
        says so."""
        if not self.transport.is_closing():
            self.flow.pause_reading()
            self.flow.waits_for_turn = True
            self._table.wait_to_drop(self, num_dropped)

    def _wait_to_read(self) -> bool:
        """The application asks for more. Whether that is read in turn: of a body that is large."""
        if (
            self.phase != "body"
            or self._num_body_bytes <= UNREAD_BODY_BYTES
            or self.cycle.response_complete
        ):
            return False
        self._table.wait_to_read(self)
        return True

    def read_once(self) -> None:
        """Its turn has come. Where the application has enough to read, it goes on itself."""
        self.flow.waits_for_turn = False
        if self._is_given_up():
            self._abort()
        elif not self.transport.is_closing() and not self._has_enough():
            self.flow.resume_now()

    def _is_given_up(self) -> bool:
        """Whether a large body is being received whose client has left, and of which not all has
        come: it never will, so that what did is not read."""
        transport = self.transport
        if (
            self.phase != "body"
            or self._num_body_bytes <= LARGE_BODY_BYTES
            or self.cycle.response_complete
            or transport.is_closing()
            or transport.get_extra_info("ssl_object") is not None  # some may be there, decrypted
        ):
            return False
        declared = next((v for name, v in self.headers if name == b"content-length"), None)
        if declared is None:
            return False
        unread = self._unread_of_left()
        return unread is not None and self._num_body_bytes + unread < int(declared)

    def _unread_of_left(self) -> int | None:
        """Bytes that can still be read of a client that has closed its side; None where it has not,
        or the system does not tell."""
        connection = self.transport.get_extra_info("socket")
        if connection is None or not hasattr(select, "POLLRDHUP"):
            return None
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLRDHUP)
        if not poll.poll(0):
            return None
        unread = fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4))
        return int.from_bytes(unread, sys.byteorder)

    def _has_enough(self) -> bool:
        cycle = self.cycle
        return (
            cycle is not None
            and not cycle.response_complete
            and len(cycle.body) > UNREAD_BODY_BYTES
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's, with a limit, for trailers too. Raises `RefusedRequestError`."""
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise RefusedRequestError(
                400, "invalid_http", "Transfer-Encoding: a body may come in chunks, and not encoded"
            )
        self.headers.append((name, value))
        if len(self.headers) > self._limits.max_headers:
            raise RefusedRequestError(
                431,
                "headers_too_large",
                f"the request has more than {self._limits.max_headers} header fields, which is "
                "the limit",
            )

    def on_headers_complete(self) -> None:
        """Raises `RefusedRequestError`, which ends the parsing."""
        limits = self._limits
        if self._overhead > limits.max_header_bytes:
            self._check_header_size()
        upgrade = self.parser.should_upgrade()
        if upgrade and self._get_upgrade() == b"websocket":
            self._check_websocket()
            super().on_headers_complete()
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise RefusedRequestError(
                429,
                "too_many_requests",
                f"{MAX_PIPELINED} requests wait on this connection already",
            )
        self.num_requests += 1
        super().on_headers_complete()
        write = partial(self._write_now, weakref.ref(self.cycle))
        self.scope["extensions"] = {WRITE_NOW: {"write": write}}
        if upgrade:
            self.cycle.keep_alive = False  # the parser takes what follows for another protocol
        self.phase = "body"
        self._num_body_bytes = 0
        self._deadline = self._table.now + limits.body_timeout

    def _check_websocket(self) -> None:
        """Raises `RefusedRequestError` for a WebSocket at another path or with a bad handshake."""
        path = httptools.parse_url(self.url).path
        if self.ws_protocol_class is None or path not in self._table.websocket_paths:
            raise RefusedRequestError(
                400, "websocket_not_supported", "there are WebSockets at /v1/realtime alone"
            )
        wrong = self._wrong_in_handshake()
        if wrong is not None:
            raise RefusedRequestError(400, "invalid_websocket", wrong)

    def _wrong_in_handshake(self) -> str | None:
        sent: dict[bytes, list[bytes]] = {}
        for name, value in self.headers:
            sent.setdefault(name, []).append(value)
        if self.parser.get_method() != b"GET" or self.parser.get_http_version() != "1.1":
            return "a WebSocket begins with a GET of HTTP/1.1"
        if self._serving() or self.pipeline:
            return "a WebSocket begins when the requests before it have been answered"
        if b"content-length" in sent or b"transfer-encoding" in sent:
            return "the request that begins a WebSocket has no body"
        if sent.get(b"sec-websocket-version") != [WEBSOCKET_VERSION]:
            return "Sec-WebSocket-Version is not 13"
        keys = sent.get(b"sec-websocket-key", [])
        if len(keys) != 1 or not _is_websocket_key(keys[0]):
            return "Sec-WebSocket-Key is not base64 of 16 bytes"
        return None

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to a `WebSocketProtocol`, which reads the request once more."""
        self.connections.discard(self)
        protocol = WebSocketProtocol(
            self.config,
            self.server_state,
            self.app_state,
            connections=self._table,
            address=self.address,
        )
        self._table.replace(self, protocol)
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers]
        self._enter("serving", math.inf)
        protocol.connection_made(self.transport)
        protocol.data_received(b"\r\n".join([*lines, b"", b""]))
        self.transport.set_protocol(protocol)
        self._let_go()

    def _check_header_size(self) -> None:
        """The header may have come together with its body."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            raise self._header_too_large()

    def _header_too_large(self) -> RefusedRequestError:
        return RefusedRequestError(
            431,
            "headers_too_large",
            f"the request's header has more than {self._limits.max_header_bytes} bytes, which is "
            "the limit",
        )

    def on_chunk_header(self) -> None:
        self._overhead = max(0, self._overhead - CHUNK_OVERHEAD)
        self._num_chunks += 1

    def on_body(self, body: bytes) -> None:
        """As uvicorn's, which stops reading at an eighth of `UNREAD_BODY_BYTES`."""
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            self._num_body_bytes += len(body)
            if self._num_body_bytes > UNREAD_BODY_BYTES:
                self.flow.pause_reading()
            cycle.message_event.set()
        overhead = self._overhead - len(body)
        self._overhead = overhead if overhead > 0 else 0
        if not cycle.response_complete:
            earned = self._deadline + len(body) / self._limits.min_body_rate
            latest = self._table.now + self._limits.body_timeout
            self._deadline = earned if earned < latest else latest

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._overhead = 0
        if self.phase == "headers":
            return  # a WebSocket begins
        if self.cycle.response_complete:
            self._enter("idle", self._table.keep_alive)
        else:
            self.phase = "serving"
            self._deadline = math.inf
            if self._num_body_bytes <= UNREAD_BODY_BYTES:
                self._table.note_asked(self.address)

    def on_response_complete(self) -> None:
        """As uvicorn's, whose timer for idle connections `Connections.sweep` replaces."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._table.leave_turns(self)
        self.flow.waits_for_turn = False
        if self.phase == "body" and not self.pipeline:
            self._deadline = self._table.now + DISCARD_SECONDS
            self._read_in_turn()
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self.phase == "serving":
            self._enter("idle", self._table.keep_alive)

    def _write_now(self, of: weakref.ref[Any], chunk: bytes) -> bool:
        """Write a chunk of the answer of a cycle, which is being streamed. False: it has to be sent
        as ASGI says, since the client does not read, has gone, or has got no head."""
        cycle = of()
        if (
            cycle is None
            or not cycle.chunked_encoding
            or cycle.response_complete
            or cycle.disconnected
            or self.flow.write_paused
        ):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    # --- refusals and deadlines ---

    def _refuse(self, refused: RefusedRequestError) -> None:
        """Answer and close. Only close where another request is being served, or this one was
        answered."""
        if self.transport.is_closing():
            return
        self._table.count_refused(refused.code)
        self.headers, self.url = [], b""  # nothing is kept while the rest is read and dropped
        if self._serving():
            own = self.phase == "body" and not self.cycle.response_started and not self.pipeline
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if not own:
                self.transport.close()
                return
        self.transport.write(refusal(refused.status, refused.code, refused.message))
        if not self.transport.can_write_eof():  # TLS: its own closing does that
            self.transport.close()
            return
        self.transport.write_eof()
        self._enter("refused", LINGER_SECONDS)
        self._read_in_turn()

    def check_deadline(self, now: float) -> None:
        if now - self.unread_since > self._limits.write_timeout:
            self._time_out("write")
        elif self.pipeline and self.flow.read_paused and self._unread_of_left() is not None:
            self._abort()  # nothing is read, so that nothing else tells of its end
        elif now < self._deadline:
            return
        elif self.phase == "body" and self.flow.read_paused and not self.cycle.response_complete:
            self._deadline = now + 1.0  # we do not read: the client is not to blame
        else:
            self._time_out(self.phase)

    def _time_out(self, what: str) -> None:
        limits = self._limits
        if what == "headers" and self._overhead:
            message = f"the request's header did not come within {limits.header_timeout:g} s"
            self._refuse(RefusedRequestError(408, "header_timeout", message))
        elif what == "body" and self._serving():
            message = (
                f"the request's body came too slowly: {limits.min_body_rate} bytes a second are "
                f"expected, and no pause of {limits.body_timeout:g} s"
            )
            self._refuse(RefusedRequestError(408, "body_timeout", message))
        else:
            if what not in ("idle", "refused", "handshake"):  # those are counted elsewhere
                reason = "no_request" if what == "headers" else f"{what}_timeout"
                self._table.count_refused(reason)
            self._abort()


def _reason(error: httptools.HttpParserError) -> RefusedRequestError:
    cause = error.__context__
    if isinstance(cause, RefusedRequestError):
        return cause
    detail = "" if isinstance(error, httptools.HttpParserCallbackError) else f": {error}"
    return RefusedRequestError(
        400, "invalid_http", f"what was sent is not a valid HTTP/1.1 request{detail}"[:300]
    )


def _is_websocket_key(value: bytes) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == WEBSOCKET_KEY_BYTES
    except binascii.Error:
        return False


# --- all connections ----------------------------------------------------------------------------


class Eviction(IntEnum):
    """What connections are doing, in the order in which they are closed where there is no room."""

    NO_REQUEST = 0
    """It has never sent a whole header, and has had `HEADER_SECONDS` to do so."""
    IDLE = 1
    """It has sent a request before, or has just come."""
    HEADER = 2
    BODY = 3
    """It is sending a request's header, or body."""
    SERVED = 4
    """It leaves its answer unread."""


class Connection(Protocol):
    """What `Connections` must know of one, be it HTTP or a WebSocket."""

    @property
    def address(self) -> str | None: ...

    @property
    def phase(self) -> Phase: ...

    @property
    def num_requests(self) -> int: ...

    def evictable(self) -> bool:
        """Whether it may be closed to make room now."""
        ...

    def evict(self) -> bool:
        """Close it if it is `evictable`; whether it was."""
        ...

    def check_deadline(self, now: float) -> None: ...


Waiting = TypeVar("Waiting", bound=Connection)


class AddressTurns(Generic[Waiting]):
    """Connections that wait, in turns by address; those of one address in the order of coming."""

    def __init__(self) -> None:
        self._waiting: dict[str | None, dict[Waiting, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, connection: Waiting) -> None:
        self._waiting.setdefault(connection.address, {})[connection] = None

    def discard(self, connection: Waiting) -> None:
        waiting = self._waiting.get(connection.address, {})
        if connection in waiting:
            del waiting[connection]
            if not waiting:
                del self._waiting[connection.address]

    def take(self) -> Waiting | None:
        """The next one, which waits no longer; its address comes last from now on."""
        if not self._waiting:
            return None
        address = next(iter(self._waiting))
        waiting = self._waiting.pop(address)
        connection = next(iter(waiting))
        del waiting[connection]
        if waiting:
            self._waiting[address] = waiting
        return connection


class Connections:
    """The open connections, by address, and what was refused.

    What is dropped is read in turns by address, `DROPPED_BYTES_PER_SECOND` in all: who sends
    without end what is refused would else have more of the event loop than those who are served.
    So is what large bodies have beyond `UNREAD_BODY_BYTES`, one read in each turn of the event
    loop: whoever asks something small waits in each of its turns for no more than one. While other
    addresses ask, the loop rests between such reads, by what they cost (`READ_REST_SECONDS`): a
    small request takes many turns. Those that send little at a time have turns of their own, beside
    the others': a body that comes fast would else wait for thousands that send a byte now and then.
    Bodies of very many chunks are read as what is dropped is: each chunk costs as much as many
    bytes.
    """

    def __init__(
        self, limits: ConnectionConfig, counts: Counts | None = None, root_path: str = ""
    ) -> None:
        """`counts` gets what is counted for metrics; `root_path` is what a proxy may put before
        every path. Call this on the event loop."""
        self.limits = limits
        beneath = (root_path.encode() + path for path in WEBSOCKET_PATHS)
        self.websocket_paths = {*WEBSOCKET_PATHS, *beneath}
        self.most = limits.max_connections
        self.keep_alive = limits.keep_alive_timeout
        """Seconds that a connection may wait for its next request."""
        self.now = asyncio.get_running_loop().time() + SWEEP_SECONDS
        """A second or less ahead of the clock: it is set at each sweep, so that no request has to
        ask for the time, and no deadline comes early."""
        self.total = 0
        self.num_received = 0
        """Bytes."""
        self.num_ended = 0
        self.on_room: Callable[[], None] = lambda: None
        """Called when a connection has ended."""
        self._by_address: dict[str | None, dict[Connection, None]] = {}
        self._dropping: AddressTurns[HttpProtocol] = AddressTurns()
        self._reading: AddressTurns[HttpProtocol] = AddressTurns()
        self._reading_small: AddressTurns[HttpProtocol] = AddressTurns()
        """Those that wait to read what is dropped; the next part of a large body; and that of one
        of which little had come the last time."""
        self._drop_turn: asyncio.TimerHandle | None = None
        self._read_turn: asyncio.Handle | None = None
        self._last_asked: LastAsked[str | None] = LastAsked()
        """Addresses that sent a whole request that is not large."""
        self._num_dropped = 0
        """Bytes, since the last turn."""
        self._read_cost = 0
        """Of large bodies, since the last rest: their bytes, and `READ_COST_BYTES` of each read."""
        self.unread = UnreadAnswers(limits.max_unread_bytes, lambda: self.now)
        self._victims: deque[tuple[Eviction, Connection]] = deque()
        """That are closed next where there is no room, unless they do something else by then."""
        counts = Counts() if counts is None else counts
        self._refused = counts.by_label("http_refused_total")
        self._evicted = counts.count("http_connections_evicted_total")
        self._open = counts.count("http_connections", gauge=True)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and connections ended so far."""
        return self.num_received, self.num_ended

    def full(self, address: str | None) -> bool:
        """Whether this address has as many as one may have; unix sockets have no address."""
        held = len(self._by_address.get(address, ()))
        return address is not None and held >= self.limits.max_per_address

    def add(self, connection: Connection) -> None:
        self._by_address.setdefault(connection.address, {})[connection] = None
        self.total += 1
        self._open.set(self.total)

    def wait_to_drop(self, connection: HttpProtocol, num_dropped: int) -> None:
        """Call its `read_once` once its turn has come, unless it is removed before. It has just
        dropped so many bytes."""
        if num_dropped:
            self._num_dropped += max(num_dropped, LEAST_DROP_BYTES)
        self._dropping.add(connection)
        if self._drop_turn is None:
            self._start_drop_turn()

    def _start_drop_turn(self) -> None:
        """The next one comes when what was dropped since the last one has had its time."""
        seconds, self._num_dropped = self._num_dropped / DROPPED_BYTES_PER_SECOND, 0
        loop = asyncio.get_running_loop()
        self._drop_turn = loop.call_later(seconds, self._give_drop_turn)

    def _give_drop_turn(self) -> None:
        self._drop_turn = None
        connection = self._dropping.take()
        if self._dropping:
            self._start_drop_turn()
        if connection is not None:
            connection.read_once()

    def note_asked(self, address: str | None) -> None:
        """A request that is not large has come."""
        self._last_asked.note(address, self.now)

    def _others_ask(self, address: str | None) -> bool:
        return self._last_asked.others(address, self.now)

    def wait_to_read(self, connection: HttpProtocol) -> None:
        """Call its `read_once` once its turn has come, unless it is removed before."""
        self._read_cost += READ_COST_BYTES + connection.num_read
        small = connection.num_read < SMALL_READ_BYTES
        (self._reading_small if small else self._reading).add(connection)
        if self._read_turn is None:
            self._read_turn = asyncio.get_running_loop().call_soon(self._give_read_turn)

    def _give_read_turn(self) -> None:
        self._read_turn = None
        taken = [self._reading.take()]
        taken += [self._reading_small.take() for _ in range(SMALL_READS_PER_TURN)]
        reading = [each for each in taken if each is not None]
        if not reading:
            return
        loop = asyncio.get_running_loop()
        rests = self._read_cost >= REST_AFTER_BYTES
        if rests:
            self._read_cost = 0
        if rests and any(self._others_ask(each.address) for each in reading):
            # who comes meanwhile rests too
            self._read_turn = loop.call_later(READ_REST_SECONDS, self._give_read_turn)
        elif self._reading or self._reading_small:
            self._read_turn = loop.call_soon(self._give_read_turn)
        for each in reading:
            each.read_once()

    def leave_turns(self, connection: HttpProtocol) -> None:
        for turns in (self._dropping, self._reading, self._reading_small):
            turns.discard(connection)

    def remove(self, connection: Connection) -> None:
        held = self._by_address.get(connection.address, {})
        if connection in held:
            del held[connection]
            self.total -= 1
            self.num_ended += 1
            self._open.set(self.total)
            if not held:
                del self._by_address[connection.address]
            if isinstance(connection, HttpProtocol):
                self.leave_turns(connection)
            self.unread.release(connection)
            self.on_room()

    def replace(self, old: Connection, new: Connection) -> None:
        """`new` is the same connection with another protocol."""
        held = self._by_address.get(old.address, {})
        if old in held:
            del held[old]
            held[new] = None
        self.unread.release(old)

    def evict_one(self) -> bool:
        """Close the connection that has least to show for its place.

        Those come first that have never sent a request, then those of addresses that have more than
        `FEW_CONNECTIONS`, then all others: an address with a few that it uses does not lose one
        while silent ones of many addresses are there, or many of one. Of those of the first two
        kinds, one of the address that has most is closed; of the others, and of one address, what
        each is doing decides, in the order of `Eviction`, and then its age.
        """
        while True:
            if not self._victims:
                self._victims = self._next_victims()
            if not self._victims:
                return False
            doing, victim = self._victims.popleft()
            is_open = victim in self._by_address.get(victim.address, ())
            if is_open and self._eviction(victim) == doing and victim.evict():
                self._evicted.add()
                return True

    def _next_victims(self) -> deque[tuple[Eviction, Connection]]:
        """The next `MAX_VICTIMS` to close, all of one kind; looking at thousands of connections for
        each one that is closed would take milliseconds each time."""
        found: list[tuple[int, int, int, int, Eviction, Connection]] = []
        for held in self._by_address.values():
            ranked = [(self._eviction(each), each) for each in held if each.evictable()]
            ranked.sort(key=lambda pair: pair[0])
            for number, (doing, each) in enumerate(ranked):
                left = len(held) - number  # those before it are closed by then
                if doing == Eviction.NO_REQUEST:
                    order = 0, -left, 0
                elif left > FEW_CONNECTIONS:
                    order = 1, -left, 0
                else:
                    order = 2, int(doing), -left
                found.append((*order, len(found), doing, each))
        first = heapq.nsmallest(MAX_VICTIMS, found)
        return deque((each[4], each[5]) for each in first if each[0] == first[0][0])

    def _eviction(self, connection: Connection) -> Eviction:
        if not isinstance(connection, HttpProtocol | SilentConnection):
            return Eviction.SERVED
        match connection.phase:
            case "serving":
                return Eviction.SERVED
            case "body":
                return Eviction.BODY
            case "idle":
                return Eviction.IDLE
            case "refused":
                return Eviction.NO_REQUEST
        if self.now - connection.header_began < HEADER_SECONDS:
            return Eviction.HEADER if connection.has_received else Eviction.IDLE
        return Eviction.IDLE if connection.num_requests else Eviction.NO_REQUEST

    def sweep(self, now: float) -> None:
        """End what has passed its deadline, once a second.

        After a pause no deadline counts: this process was busy, and what came is not read yet.
        """
        late = now - self.now > SWEEP_SECONDS
        self.now = now + SWEEP_SECONDS
        self._victims.clear()
        connections = self._all()
        for connection in connections:
            if not late:
                connection.check_deadline(now)
        self.unread.count(connections)
        self.on_room()  # a connection may be closed for a new one now that could not be before

    def drain(self, seconds: float) -> None:
        """Connections that wait for a request end after so many seconds, now and from now on."""
        self.keep_alive = min(self.keep_alive, seconds)
        for connection in self._all():
            if isinstance(connection, HttpProtocol | SilentConnection):
                connection.shorten_idle(seconds)

    async def wait_none(self) -> None:
        """Until no connection is open. No other `on_room` is called any more."""
        ended = asyncio.Event()
        self.on_room = ended.set
        while self.total:
            ended.clear()
            await ended.wait()

    def close_handshakes(self) -> None:
        self._close_all("handshake")

    def close_silent(self) -> None:
        self._close_all("silent")

    def _close_all(self, phase: Phase) -> None:
        for connection in self._all():
            if connection.phase == phase:
                connection.evict()

    def count_refused(self, reason: str) -> None:
        self._refused[reason] += 1
        audit_logger.info("refused", extra={"event": "refused", "reason": reason})

    def _all(self) -> Iterable[Connection]:
        return [each for held in self._by_address.values() for each in held]


# --- accepting ----------------------------------------------------------------------------------

SPARE_DESCRIPTORS = 64
"""Descriptors kept for those who are served: fetches, workers, files."""
MAX_DESCRIPTORS = 65_536
ACCEPTS_PER_TURN = 6
"""Connections that one short turn of the event loop accepts: whoever is served waits for each of
them."""
ACCEPTS_PER_SECOND = 3000
"""That a long turn may catch up with. Beside a thousand streams a turn takes tens of milliseconds:
at six a turn, who connects behind a thousand others would wait for seconds."""
REST_SECONDS = 0.001
"""Where more wait, the next ones are accepted so much later: some thousand a second. A client that
connects without end would else be accepted as fast as the machine can, at everybody's cost."""
OPENED_PER_TURN = 2
"""Connections with a first byte that get transport and parser in one short turn of the event loop:
that takes a quarter of a millisecond each, several times what accepting takes."""
OPENED_PER_SECOND = 500
"""That a long turn may catch up with: an eighth of its time."""
FAILED_HANDSHAKE_SECONDS = 2.0
"""For so long an address whose handshake failed takes turns with those without such handshakes."""
LONGEST_TURN_SECONDS = 0.05
"""No more than a turn of this length may catch up with is done in one that takes longer."""
MAX_EVICTIONS = 16
SHORTAGE_SECONDS = 0.5
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
TOO_MANY = refusal(429, "too_many_connections", "this address has too many open connections")


class TurnAllowance:
    """How many times something may be done in one turn of the event loop: a few times, or as often
    as at a rate since the turn before, where that turn was long."""

    def __init__(
        self, least: int, per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._least = least
        self._per_second = per_second
        self._clock = clock
        self._last: float | None = None

    def take(self) -> int:
        """What this turn may do."""
        last, self._last = self._last, self._clock()
        if last is None:
            return self._least
        elapsed = min(self._last - last, LONGEST_TURN_SECONDS)
        return max(self._least, int(elapsed * self._per_second))

    def reset(self) -> None:
        """Nothing is left to do: the time until the next turn is none that others had to wait."""
        self._last = None


class SilentConnection:
    """An accepted socket of which nothing was received yet.

    It has no transport and no parser: whoever only connects, and leaves again, costs those who are
    served no more than that. Its client's first byte, or its end, is told once.
    """

    def __init__(
        self,
        accepted: socket.socket,
        address: str | None,
        connections: Connections,
        *,
        on_first_byte: Callable[[SilentConnection], None],
        tls: bool,
    ) -> None:
        """`tls`: a client that sends nothing has failed its handshake, and is counted so."""
        self.address = address
        self.phase: Phase = "silent"
        self.num_requests = 0
        self.socket = accepted
        self.deadline = connections.now + connections.limits.header_timeout
        self._connections = connections
        self._on_first_byte = on_first_byte
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        """That watches the socket."""

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call this once it is in the table."""
        if not self._look():
            self._loop = loop
            loop.add_reader(self.socket.fileno(), self._look)

    def _look(self) -> bool:
        """Tell the first byte, or the end, where it has come; whether it has."""
        try:
            has_byte = bool(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        except OSError:
            has_byte = False
        if has_byte:
            self._stop_listening()
            self._on_first_byte(self)
        else:
            if self._tls:
                self._connections.count_refused("handshake")
            self.close()
        return True

    def _stop_listening(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.socket.fileno())
            self._loop = None

    def close(self) -> None:
        self._stop_listening()
        self.socket.close()
        self._connections.remove(self)

    def shorten_idle(self, seconds: float) -> None:
        """It ends so soon, if nothing comes."""
        self.deadline = min(self.deadline, self._connections.now + seconds)

    @property
    def header_began(self) -> float:
        """When it was accepted."""
        return self.deadline - self._connections.limits.header_timeout

    has_received = False

    def evictable(self) -> bool:
        return self.socket.fileno() >= 0

    def evict(self) -> bool:
        if not self.evictable():
            return False
        self.close()
        return True

    def check_deadline(self, now: float) -> None:
        if now >= self.deadline:
            self._connections.count_refused("handshake" if self._tls else "no_request")
            self.close()


class Acceptor:
    """Accepts connections of a listening socket while there is room; takes the place of asyncio's
    server in `uvicorn.Server.servers`.

    Without room it closes a connection that waits for a request, or else leaves new ones in the
    kernel's queue until one ends. Where as many came as were closed, it closes twice as many the
    next time: one at a time would keep thousands of new ones waiting for seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        protocol: Callable[[str | None], HttpProtocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        """`protocol` makes the protocol of a connection from an address."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._connections = connections
        self._protocol = protocol
        self._tls = tls
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opening: AddressTurns[SilentConnection] = AddressTurns()
        self._opening_beside: AddressTurns[SilentConnection] = AddressTurns()
        """Those of which the first byte has come, of addresses that had nothing `_unfinished` then,
        and of others."""
        self._unfinished: Counter[str | None] = Counter()
        """Of each address: handshakes that go on, or failed less than `FAILED_HANDSHAKE_SECONDS`
        ago. Without TLS they take one turn of the event loop."""
        self._open_turn: asyncio.Handle | None = None
        self._accepts = TurnAllowance(ACCEPTS_PER_TURN, ACCEPTS_PER_SECOND)
        self._opens = TurnAllowance(OPENED_PER_TURN, OPENED_PER_SECOND)
        self._accepting = False
        self._rest: asyncio.TimerHandle | None = None
        self._closed = False
        self._evictions = 1
        """How many connections are closed when there is no room."""
        connections.on_room = self.resume
        listener.setblocking(False)
        _keep_alive(listener)

    def resume(self) -> None:
        """Look for new connections, if it does not, and does not rest."""
        if not self._accepting and self._rest is None and not self._closed:
            self._accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept_some)

    def pause(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())

    def close(self) -> None:
        self.pause()
        self._closed = True
        self._connections.close_handshakes()

    async def wait_closed(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept_some(self) -> None:
        """Called when at least one connection waits to be accepted."""
        for number in range(self._accepts.take()):
            if self._connections.total >= self._connections.most:
                if number == 0:  # the end of a connection resumes, or the next sweep
                    self.pause()
                    self._evict()
                return
            try:
                accepted, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                self._evictions = 1
                self._accepts.reset()
                return
            except OSError as error:
                if error.errno not in SHORTAGES:
                    raise
                logger.warning("no connection can be accepted: %s", error.strerror)
                self._rest_for(SHORTAGE_SECONDS)  # the end of a connection does not resume
                self._connections.evict_one()
                return
            self._connect(accepted, _client_address(peer))
        self._rest_for(REST_SECONDS)

    def _rest_for(self, seconds: float) -> None:
        self.pause()
        self._rest = self._loop.call_later(seconds, self._end_rest)

    def _end_rest(self) -> None:
        self._rest = None
        self.resume()

    def _evict(self) -> None:
        """Close as many as wait for their clients, up to `_evictions`."""
        for _ in range(self._evictions):
            if not self._connections.evict_one():
                return
        self._evictions = min(2 * self._evictions, MAX_EVICTIONS)

    def _connect(self, accepted: socket.socket, address: str | None) -> None:
        accepted.setblocking(False)
        if self._connections.full(address):
            self._connections.count_refused("too_many_connections")
            _turn_away(accepted, None if self._tls else TOO_MANY)
            return
        silent = SilentConnection(
            accepted,
            address,
            self._connections,
            on_first_byte=self._open_in_turn,
            tls=self._tls is not None,
        )
        self._connections.add(silent)
        silent.listen(self._loop)

    def _open_in_turn(self, silent: SilentConnection) -> None:
        is_beside = silent.address in self._unfinished
        (self._opening_beside if is_beside else self._opening).add(silent)
        if self._open_turn is None:
            self._open_turn = self._loop.call_soon(self._open_some)

    def _open_some(self) -> None:
        """Open some of both kinds, one of each in turn. A TLS handshake costs a millisecond or two:
        without the two kinds, who comes would wait for all addresses that begin handshakes and end
        none."""
        self._open_turn = None
        turns = self._opening, self._opening_beside
        for number in range(self._opens.take()):
            silent = turns[number % 2].take() or turns[1 - number % 2].take()
            if silent is None:
                break
            self._open(silent)
        if any(turns):
            self._open_turn = self._loop.call_soon(self._open_some)
        else:
            self._opens.reset()

    def _open(self, silent: SilentConnection) -> None:
        """Make a connection of it, unless it was closed while it waited."""
        accepted = silent.socket
        if accepted.fileno() < 0:
            return
        self._unfinished[silent.address] += 1
        protocol = self._protocol(silent.address)
        self._connections.replace(silent, protocol)
        timeout = self._connections.limits.header_timeout if self._tls else None
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        )
        protocol.accept(task, silent.deadline)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._accepted(done, accepted, protocol))

    def _accepted(
        self, done: asyncio.Task[Any], accepted: socket.socket, protocol: HttpProtocol
    ) -> None:
        """A client that left, is no TLS client, or took too long is forgotten.

        The event loop closes the transport of a task that was cancelled or failed, but does not say
        so to a protocol that it had connected in the same turn.
        """
        self._tasks.discard(done)
        protocol.note_accepted()
        failed = done.cancelled() or done.exception() is not None
        if failed:
            self._connections.count_refused("handshake")
            self._loop.call_later(FAILED_HANDSHAKE_SECONDS, self._note_finished, protocol.address)
        else:
            self._note_finished(protocol.address)
        if protocol.phase == "handshake":
            accepted.close()
            self._connections.remove(protocol)
        elif failed:
            protocol.connection_lost(None)

    def _note_finished(self, address: str | None) -> None:
        self._unfinished[address] -= 1
        if not self._unfinished[address]:
            del self._unfinished[address]


def _client_address(peer: object) -> str | None:
    """By which connections are counted: of IPv6 the network of 64 bits, which one client has."""
    if not isinstance(peer, tuple):
        return None  # a unix socket
    text = str(peer[0])
    if ":" not in text:
        return text
    address = ipaddress.IPv6Address(text.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def allowed_connections(limits: ConnectionConfig, descriptors: int = 1) -> int:
    """As many as asked for, or as there may be descriptors beside those in use and to spare, where
    each connection takes `descriptors`.

    Raises the process's own limit of descriptors as far as it may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MAX_DESCRIPTORS) if hard != resource.RLIM_INFINITY else MAX_DESCRIPTORS
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    used = sum(1 for _ in Path("/proc/self/fd").iterdir()) if Path("/proc/self/fd").exists() else 64
    possible = max(1, (soft - used - SPARE_DESCRIPTORS) // descriptors)
    if possible < limits.max_connections:
        logger.warning(
            "at most %d connections instead of %d: this process may open %d descriptors",
            possible,
            limits.max_connections,
            soft,
        )
    return min(limits.max_connections, possible)


def grow_descriptor_table(num_descriptors: int) -> None:
    """Make the system's table of this process's descriptors so large, as far as it may be.

    Linux doubles it when it is full, within the `accept` of the 64th or 128th descriptor, and waits
    there for all cores to have left the old one (`synchronize_rcu`, 10 to 20 ms): the event loop
    would stand still for everybody.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        num_descriptors = min(num_descriptors, soft)
    with contextlib.suppress(OSError), open(os.devnull, "rb") as file:
        os.close(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, num_descriptors - 1))


def _keep_alive(listener: socket.socket) -> None:
    """Accepted sockets inherit these: a client that vanished is noticed within two minutes."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _turn_away(accepted: socket.socket, answer: bytes | None) -> None:
    """Close a socket; `answer` goes out first if it can at once."""
    with accepted:
        try:
            if answer is not None:
                accepted.send(answer)
                accepted.shutdown(socket.SHUT_WR)
                accepted.recv(1 << 16)  # unread bytes would make the close a reset
        except OSError:
            pass


# --- writing ------------------------------------------------------------------------------------

_HEAD = b"HTTP/1.1 "
JOINED_BYTES = 16 * 1024
"""A longer body is written behind its head without a copy of it: several answers may share it."""


class HeadBufferingTransport:
    """A transport that writes the head of an answer together with the body that follows.

    uvicorn writes head and body one after the other. For a short answer the write is the largest
    cost, and each write wakes the client. A head without a body at the end of the event loop's turn
    is written alone.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """What is written to a client that has left is dropped; uvloop raises `RuntimeError`."""
        if self._transport.is_closing():
            self._head = b""
            return
        if self._head:
            head, self._head = self._head, b""
            if len(data) > JOINED_BYTES:
                self._transport.writelines([head, data])
                return
            data = head + data
        elif data.startswith(_HEAD):
            self._head = data
            asyncio.get_running_loop().call_soon(self._flush)
            return
        self._transport.write(data)

    def write_eof(self) -> None:
        self._flush()
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's own."""
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""
