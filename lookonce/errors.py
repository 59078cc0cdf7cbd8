"""Every exception LookOnce raises on purpose, and the HTTP status each one becomes.

LookOnceError
├── RequestError            the caller's request is at fault; carries `param` and `code`
│   ├── BadRequestError         malformed or unsupported input
│   ├── UnauthorizedError       API key missing or unknown
│   ├── ForbiddenError          key lacks a right (admin, inject)
│   ├── MediaForbiddenError     media source is not allowed
│   ├── ModelNotFoundError      no model of that name is served
│   ├── NotFoundError           no stored response, conversation or item of this id
│   ├── ConflictError           a media uuid is bound to other bytes
│   ├── TooLargeError           body, media or prompt exceeds a limit
│   ├── UnsupportedMediaTypeError a body of a type that no route takes
│   ├── UnprocessableMediaError media bytes cannot be decoded or fetched
│   │   └── MediaNotCachedError     a reference with nothing behind it
│   ├── QueueFullError          too many requests are waiting
│   └── RateLimitedError        a tenant or key has used what it may; carries `retry_after`
├── UnavailableError        the server cannot serve now; the caller may retry
│   ├── NotReadyError           still starting or warming up
│   ├── DrainingError           shutting down
│   ├── EngineDeadError         the engine process ended or stopped answering
│   └── SessionEvictedError     a live session gave its KV to others: none was left, or it was idle
├── SessionFullError        a live session has filled its context
├── RequestFailedError      this request broke inside the engine; others go on
├── ConfigError             an option or a combination of options is wrong
├── ModelLoadError          the model folder cannot be served
├── DeviceLostError         the device, or a process that computes with it, is gone: the engine ends
└── ProtocolError           a peer process sent what the protocol does not allow
"""

from __future__ import annotations


class LookOnceError(Exception):
    """Base of all; `message` is safe to show to a client (no paths, no addresses)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(LookOnceError):
    """The request is at fault. `param` names the offending part, e.g. `messages[1].content[0]`."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class BadRequestError(RequestError):
    code = "bad_request"


class UnauthorizedError(RequestError):
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    code = "forbidden"


class MediaForbiddenError(RequestError):
    code = "media_not_allowed"


class ModelNotFoundError(RequestError):
    code = "model_not_found"


class NotFoundError(RequestError):
    code = "not_found"


class ConflictError(RequestError):
    code = "uuid_conflict"


class TooLargeError(RequestError):
    code = "too_large"


class UnsupportedMediaTypeError(RequestError):
    code = "unsupported_media_type"


class UnprocessableMediaError(RequestError):
    code = "unprocessable_media"


class MediaNotCachedError(UnprocessableMediaError):
    code = "media_not_cached"


class QueueFullError(RequestError):
    code = "queue_full"


class RateLimitedError(RequestError):
    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float = 1.0,
    ) -> None:
        """`retry_after`: seconds after which the same request may be let in."""
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after
        self.headers: dict[str, str] = {}
        """More headers of the answer: `x-ratelimit-*` of a request that was not admitted."""


class UnavailableError(LookOnceError):
    code = "unavailable"


class NotReadyError(UnavailableError):
    code = "not_ready"


class DrainingError(UnavailableError):
    code = "draining"


class EngineDeadError(UnavailableError):
    code = "engine_dead"


class SessionEvictedError(UnavailableError):
    code = "session_evicted"


class SessionFullError(LookOnceError):
    code = "session_full"


class RequestFailedError(LookOnceError):
    code = "request_failed"


class ConfigError(LookOnceError):
    pass


class ModelLoadError(LookOnceError):
    pass


class DeviceLostError(LookOnceError):
    pass


class ProtocolError(LookOnceError):
    pass


HTTP_STATUS: dict[type[LookOnceError], int] = {
    BadRequestError: 400,
    UnauthorizedError: 401,
    ForbiddenError: 403,
    MediaForbiddenError: 403,
    ModelNotFoundError: 404,
    NotFoundError: 404,
    ConflictError: 409,
    TooLargeError: 413,
    UnsupportedMediaTypeError: 415,
    UnprocessableMediaError: 422,
    QueueFullError: 429,
    RateLimitedError: 429,
    UnavailableError: 503,
}
"""Class → status; a class that is not listed uses its nearest listed base, else 500."""


def http_status(error: LookOnceError) -> int:
    """The status of the nearest class in `HTTP_STATUS`, or 500."""
    for cls in type(error).__mro__:
        if cls in HTTP_STATUS:
            return HTTP_STATUS[cls]
    return 500


def _classes(base: type[LookOnceError]) -> list[type[LookOnceError]]:
    found = [base]
    for sub in base.__subclasses__():
        found += _classes(sub)
    return found


WireError = tuple[str, str, str | None, str | None]
"""(class name, message, param, code): how an error travels between processes."""


def error_to_wire(error: LookOnceError) -> WireError:
    code = getattr(error, "code", None)
    return type(error).__name__, error.message, getattr(error, "param", None), code


def error_from_wire(
    kind: str, message: str, param: str | None = None, code: str | None = None
) -> LookOnceError:
    """The inverse of `error_to_wire`; an unknown kind becomes `RequestFailedError`."""
    for cls in _classes(LookOnceError):
        if cls.__name__ == kind:
            if issubclass(cls, RequestError):
                return cls(message, param=param, code=code)
            return cls(message)
    return RequestFailedError(message)
