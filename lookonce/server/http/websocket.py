"""WebSocket connections: uvicorn's protocol over websockets' parser, with limits and deadlines.

What is limited here because neither does:

writing     While the client does not read, its pings are not answered, and its connection is closed
            once it has left an answer unread for `write_timeout`.
messages    One that is being received must arrive as fast as a request's body, and may come in
            `MAX_FRAGMENTS` frames.

The application is called with a scope of type "websocket"; it may answer with an HTTP response
instead of accepting (`websocket.http.response`).
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame

from lookonce.server.http.unread import ConnectionTable, UnreadProtocol

MAX_MESSAGE_BYTES = 24 * 1024 * 1024
"""Of one message: OpenAI's 15 MiB of sound for one event, in base64, and some JSON."""
MAX_FRAGMENTS = 4096
PING_TIMEOUT_SECONDS = 60.0
"""As `write_timeout`: a client that processes what it has read may be slow to answer a ping."""


class WebSocketProtocol(UnreadProtocol, WebSocketsSansIOProtocol):
    """A WebSocket in the table of `connections`, from its handshake to its end."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: ConnectionTable,
        address: str | None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.address = address
        self.phase: Literal["serving"] = "serving"
        self.num_requests = 1
        self._table = connections
        self._limits = connections.limits
        self._deadline = math.inf
        """Of the message that is being received."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._table.remove(self)

    def evictable(self) -> bool:
        return False

    def evict(self) -> bool:
        return False

    def check_deadline(self, now: float) -> None:
        if now - self.unread_since > self._limits.write_timeout:
            self._table.count_refused("write_timeout")
            self.transport.abort()
        elif now < self._deadline:
            return
        elif self.read_paused:
            self._deadline = now + 1.0  # we do not read: the client is not to blame
        else:
            self._fail(CloseCode.POLICY_VIOLATION, "the message came too slowly", "body_timeout")

    # --- what comes ---

    def data_received(self, data: bytes) -> None:
        if self.close_sent and self.close_timer is None:
            return  # it was failed; what still comes is dropped
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self.frames and not self.conn.reader.buffer:
            self._deadline = math.inf
            return
        latest = self._table.now + self._limits.body_timeout
        earned = self._deadline + len(data) / self._limits.min_body_rate
        self._deadline = min(earned, latest)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(
                CloseCode.MESSAGE_TOO_BIG,
                f"the message has more than {MAX_FRAGMENTS} frames",
                "too_many_frames",
            )
            return
        super().handle_cont(event)

    def handle_ping(self) -> None:
        """websockets' parser has prepared the answer: it is sent, or dropped where the client does
        not read."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def send_receive_event_to_app(self) -> None:
        """As uvicorn's, which logs a traceback for each text that is not UTF-8."""
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = []
        if self.close_sent:
            return
        if self.curr_msg_data_type == "text":
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self._fail(CloseCode.INVALID_DATA, "the text is not UTF-8", "invalid_utf8")
                return
            self.queue.put_nowait({"type": "websocket.receive", "text": text})
        else:
            self.queue.put_nowait({"type": "websocket.receive", "bytes": bytes(data)})
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def handle_parser_exception(self) -> None:
        self._table.count_refused("invalid_websocket")
        super().handle_parser_exception()

    def _fail(self, code: CloseCode, reason: str, counted: str) -> None:
        self._table.count_refused(counted)
        self._deadline = math.inf
        self.conn.fail(code, reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()

    # --- what is written ---

    async def send(self, message: Any) -> None:
        """As uvicorn's, which takes a handshake that was answered with a response for one that was
        not answered, and logs an error for each."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True
