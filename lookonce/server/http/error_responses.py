"""Errors and structs as HTTP responses: the one place where a failure gets its status and shape."""

from __future__ import annotations

import logging

import msgspec
from starlette.responses import Response

from lookonce.errors import LookOnceError, RequestError, UnavailableError, http_status
from lookonce.frontend.responses import ErrorBody, ErrorResponse

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
