"""Errors and structs as HTTP responses: the one place where a failure gets its status and shape."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lookonce.errors import LookOnceError, RequestError, UnavailableError, http_status
from lookonce.frontend.responses import ErrorBody, ErrorResponse
from lookonce.server.http.connection import WhileConnected

logger = logging.getLogger("lookonce.server")


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""Status → OpenAI's error type; any other status is a `server_error`."""


RETRY_AFTER_SECONDS = "1"


INTERNAL = ErrorResponse(ErrorBody("the server failed to answer this request", "server_error"))


_encoder = msgspec.json.Encoder()


def encode(body: msgspec.Struct) -> bytes:
    return _encoder.encode(body)


def json_response(
    body: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode(body), status, headers, media_type="application/json")


def error_body(error: Exception) -> ErrorResponse:
    """What a client may know of `error`; anything but our own errors stays in the log."""
    if not isinstance(error, LookOnceError):
        return INTERNAL
    status = http_status(error)
    return ErrorResponse(
        ErrorBody(
            message=error.message,
            type=ERROR_TYPES.get(status, "server_error"),
            param=error.param if isinstance(error, RequestError) else None,
            code=getattr(error, "code", None),
        )
    )


def error_response(error: LookOnceError) -> Response:
    status = http_status(error)
    headers = {}
    if isinstance(error, UnavailableError) or status == 429:
        headers["Retry-After"] = RETRY_AFTER_SECONDS
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), status, headers)


class Group(NamedTuple):
    """Chunks that are there at the same time, and are written at once."""

    chunks: Sequence[msgspec.Struct]
    last: bool
    """Nothing follows but the stream's end."""


Groups = AsyncGenerator[Group, None]


HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


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


class EventStream(Response):
    """Sends events as they come and closes their source when the client leaves.

    It begins with the first group, so that whatever fails before it still gets its status; what
    fails later becomes an error event, the last one.
    """

    def __init__(self, groups: Groups, wire: Wire = PLAIN) -> None:
        # Not Response's own: there is no body yet, and the headers are always the same.
        self.background = None
        self._groups = groups
        self._wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._groups):
            with WhileConnected(receive):
                await self._send_all(send)

    async def _send_all(self, send: Send) -> None:
        wire, groups = self._wire, self._groups
        group = await anext(groups)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            while not group.last:
                body = b"".join(map(wire.event, group.chunks))
                await send({"type": "http.response.body", "body": body, "more_body": True})
                group = await anext(groups)
            end = b"".join(map(wire.event, group.chunks)) + wire.end
        except LookOnceError as error:
            end = wire.failure(error) + wire.end
        except Exception as error:
            logger.exception("a stream broke")
            end = wire.failure(error) + wire.end
        await send({"type": "http.response.body", "body": end, "more_body": False})
