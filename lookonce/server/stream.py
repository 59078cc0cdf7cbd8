"""Server-sent events, in OpenAI's manner."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lookonce.errors import LookOnceError
from lookonce.server.connection import while_connected
from lookonce.server.responding import encode, error_body

logger = logging.getLogger("lookonce.server")

Chunks = AsyncGenerator[msgspec.Struct, None]

DONE = b"data: [DONE]\n\n"


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


async def stream_response(request: Request, chunks: Chunks) -> Response:
    """A stream of `chunks`.

    Returns once the first chunk is there, so that whatever fails before it still gets its status;
    what fails later becomes an error event, the last one before `[DONE]`.
    """
    try:
        first = await while_connected(request.receive, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks)


class EventStream(Response):
    """Sends events as they come and closes their source when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: msgspec.Struct, rest: Chunks) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await _send_body(send, event(self._first))
        try:
            async for chunk in self._rest:
                await _send_body(send, event(chunk))
        except LookOnceError as error:
            await _send_body(send, event(error_body(error)))
        except Exception as error:
            logger.exception("a stream broke")
            await _send_body(send, event(error_body(error)))
        await _send_body(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
