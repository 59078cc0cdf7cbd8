"""HTTP responses: JSON, errors in OpenAI's shape, server-sent events.

Also what ends them early: a client that leaves.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lookonce.errors import (
    LookOnceError,
    RateLimitedError,
    RequestError,
    UnavailableError,
    http_status,
)
from lookonce.frontend.responses import ErrorBody, ErrorResponse

logger = logging.getLogger("lookonce.server")
T = TypeVar("T")

encode = msgspec.json.Encoder().encode
"""Struct → JSON bytes."""


def json_response(
    body: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode(body), status, headers, media_type="application/json")


# --- errors -----------------------------------------------------------------------------------

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}
"""Status → OpenAI's error type; any other status is a `server_error` (see `error_type`)."""
RETRY_AFTER_SECONDS = "1"
INTERNAL = ErrorResponse(ErrorBody("the server failed to answer this request", "server_error"))


DescribeError = Callable[[Exception], msgspec.Struct]
"""Error → the body of its answer."""


def error_type(status: int) -> str:
    return ERROR_TYPES.get(status, "server_error")


ANTHROPIC_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status → Anthropic's error type; any other status is an `api_error`."""


class AnthropicErrorBody(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """Anthropic's error object: the body of an answer, and an event of a stream."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody


def error_response(error: LookOnceError, body: DescribeError | None = None) -> Response:
    """The status, headers and body for `error`; `body`: the body's shape, if not OpenAI's."""
    status = http_status(error)
    headers = {}
    if isinstance(error, UnavailableError) or status == 429:
        headers["Retry-After"] = RETRY_AFTER_SECONDS
    if isinstance(error, RateLimitedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
        headers["Retry-After-Ms"] = str(math.ceil(error.retry_after * 1000))
        headers |= error.headers
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response((body or error_body)(error), status, headers)


def error_body(error: Exception) -> ErrorResponse:
    """OpenAI's error object. An exception that is no `LookOnceError` is not shown to clients."""
    if not isinstance(error, LookOnceError):
        return INTERNAL
    status = http_status(error)
    return ErrorResponse(
        ErrorBody(
            message=error.message,
            type=error_type(status),
            param=error.param if isinstance(error, RequestError) else None,
            code=getattr(error, "code", None),
        )
    )


def anthropic_error(error: Exception) -> AnthropicError:
    """As `error_body`, in Anthropic's shape."""
    status = http_status(error) if isinstance(error, LookOnceError) else 500
    return anthropic_error_of(status, error_body(error).error.message)


def anthropic_error_of(status: int, message: str) -> AnthropicError:
    kind = ANTHROPIC_ERROR_TYPES.get(status, "api_error")
    return AnthropicError(error=AnthropicErrorBody(kind, message))


ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Their errors have Anthropic's shape, all others OpenAI's. Clients of these paths look for the
request's id in the header `request-id`, beside OpenAI's `x-request-id`."""


def error_shape(path: str) -> DescribeError:
    """Of answers to this path."""
    return anthropic_error if path in ANTHROPIC_PATHS else error_body


# --- server-sent events -----------------------------------------------------------------------

EVENT_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


class ChunkGroup(NamedTuple):
    """Chunks of an answer that exist at the same time and are sent in one write."""

    chunks: Sequence[msgspec.Struct]
    last: bool
    """No group follows."""


ChunkGroups = AsyncGenerator[ChunkGroup, None]


class EventEncoder(Protocol):
    """How a route encodes its server-sent events."""

    @property
    def end(self) -> bytes:
        """Bytes after the last event."""

    def event(self, body: msgspec.Struct) -> bytes: ...

    def failure(self, error: Exception) -> bytes:
        """The event for `error`, which ended the stream early."""


class UnnamedEventEncoder:
    """OpenAI's events of completions: without names, and `[DONE]` at the end."""

    end = b"data: [DONE]\n\n"

    def event(self, body: msgspec.Struct) -> bytes:
        return b"data: " + encode(body) + b"\n\n"

    def failure(self, error: Exception) -> bytes:
        return self.event(error_body(error))


UNNAMED_EVENTS = UnnamedEventEncoder()


class EventStream(Response):
    """Sends chunks as events when they come, and closes their source when the client leaves.

    The response begins with the first group, so a failure before it has its own status. A failure
    after it becomes the stream's last event.
    """

    def __init__(self, groups: ChunkGroups, encoder: EventEncoder = UNNAMED_EVENTS) -> None:
        # `Response.__init__` is not called: there is no body yet, and the headers are constant.
        self.background = None
        self._groups = groups
        self._encoder = encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._groups):
            with WhileConnected(receive):
                await self._send_all(scope, send)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        encoder, groups = self._encoder, self._groups
        group = await anext(groups)
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        try:
            while not group.last:
                body = b"".join(map(encoder.event, group.chunks))
                await send({"type": "http.response.body", "body": body, "more_body": True})
                group = await anext(groups)
            end = b"".join(map(encoder.event, group.chunks)) + encoder.end
        except Exception as error:
            scope.setdefault("state", {})["failure"] = type(error).__name__
            if isinstance(error, LookOnceError):
                extra = {"error": type(error).__name__, "code": getattr(error, "code", None)}
                logger.warning("a stream ended with an error", extra=extra)
            else:
                logger.exception("a stream broke")
            end = encoder.failure(error) + encoder.end
        await send({"type": "http.response.body", "body": end, "more_body": False})


# --- clients that leave -----------------------------------------------------------------------


class ClientLeftError(Exception):
    """The client closed its connection before its answer was complete."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first.

    The request's body must have been read. Raises `ClientLeftError`.
    """
    with WhileConnected(receive):
        return await work


class WhileConnected:
    """A block that is cancelled when the client leaves; it then ends with `ClientLeftError`.

    The request's body must have been read. The block's work stays in the task that enters it: one
    other task waits for the client to leave, and no task is made per token.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = False
        self._left = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "the block runs in a task"
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.get_running_loop().create_task(_departure(self._receive))
        self._watcher.add_done_callback(self._end)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        self._watcher.cancel()
        if not self._left or self._task.uncancel() > self._cancelling:
            return  # the task was also cancelled from outside: that cancellation goes on
        if kind is None or issubclass(kind, asyncio.CancelledError):
            raise ClientLeftError from None

    def _end(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled() or self._over:
            return
        watcher.exception()  # a connection that broke counts as closed
        self._left = True
        self._task.cancel()


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
