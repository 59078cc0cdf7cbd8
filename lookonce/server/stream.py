"""Server-sent events, in OpenAI's manner."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lookonce.errors import LookOnceError
from lookonce.server.connection import while_connected
from lookonce.server.responding import encode, error_body

logger = logging.getLogger("lookonce.server")

Chunks = AsyncGenerator[Sequence[msgspec.Struct], None]
"""Chunks in groups: those of a group are there at the same time, and are written at once."""


class Wire(Protocol):
    """How a route writes its events."""

    @property
    def end(self) -> bytes:
        """After the last event."""

    def event(self, body: msgspec.Struct) -> bytes: ...

    def failure(self, error: Exception) -> bytes:
        """The event that says what ended the stream early."""


class PlainWire:
    """Events without names, and `[DONE]` at the end."""

    end = b"data: [DONE]\n\n"

    def event(self, body: msgspec.Struct) -> bytes:
        return b"data: " + encode(body) + b"\n\n"

    def failure(self, error: Exception) -> bytes:
        return self.event(error_body(error))


PLAIN = PlainWire()


async def stream_response(request: Request, chunks: Chunks, wire: Wire = PLAIN) -> Response:
    """A stream of `chunks`.

    Returns once the first group is there, so that whatever fails before it still gets its status;
    what fails later becomes an error event, the last one.
    """
    try:
        first = await while_connected(request.receive, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks, wire)


class EventStream(Response):
    """Sends events as they come and closes their source when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: Sequence[msgspec.Struct], rest: Chunks, wire: Wire) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        wire = self._wire
        await self._send(send, self._first)
        end = wire.end
        try:
            async for chunks in self._rest:
                await self._send(send, chunks)
        except LookOnceError as error:
            end = wire.failure(error) + wire.end
        except Exception as error:
            logger.exception("a stream broke")
            end = wire.failure(error) + wire.end
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send(self, send: Send, chunks: Sequence[msgspec.Struct]) -> None:
        body = b"".join(map(self._wire.event, chunks))
        await send({"type": "http.response.body", "body": body, "more_body": True})
