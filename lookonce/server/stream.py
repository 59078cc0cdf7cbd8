"""Server-sent events, in OpenAI's manner."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

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

DONE = b"data: [DONE]\n\n"


def events(bodies: Sequence[msgspec.Struct]) -> bytes:
    return b"".join([b"data: " + encode(body) + b"\n\n" for body in bodies])


async def stream_response(request: Request, chunks: Chunks) -> Response:
    """A stream of `chunks`.

    Returns once the first group is there, so that whatever fails before it still gets its status;
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

    def __init__(self, first: Sequence[msgspec.Struct], rest: Chunks) -> None:
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
        await _send_body(send, events(self._first))
        end = DONE
        try:
            async for chunks in self._rest:
                await _send_body(send, events(chunks))
        except LookOnceError as error:
            end = events([error_body(error)]) + DONE
        except Exception as error:
            logger.exception("a stream broke")
            end = events([error_body(error)]) + DONE
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
