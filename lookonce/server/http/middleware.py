"""What wraps every route: request ids, keys, draining, and failures turned into responses.

It is one layer, not one per concern: each would cost every request, and every token of a stream,
another call.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookonce.errors import LookOnceError
from lookonce.frontend.responses import ErrorBody, ErrorResponse
from lookonce.server.http.auth import header
from lookonce.server.http.connection import ClientLeftError
from lookonce.server.http.error_responses import INTERNAL, error_response, json_response
from lookonce.server.routes.page import is_page
from lookonce.server.services import Drain, Services

logger = logging.getLogger("lookonce.server")

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json"})
"""Answered without a key and while draining: they tell how the server is."""

HEADER_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CLIENT_LEFT_STATUS = 499

Endpoint = Callable[[Request], Awaitable[Response]]


class Door:
    """Every request comes in here, and every answer goes out.

    A route of one fixed path is found by it; `router` finds all others, and says what is wrong
    with a request for none.
    """

    def __init__(self, services: Services, routes: Sequence[Route], router: ASGIApp) -> None:
        self._services = services
        self._router = router
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        for route in routes:
            if "{" not in route.path and inspect.iscoroutinefunction(route.endpoint):
                for method in route.methods or ():
                    self._endpoints.setdefault((method, route.path), route.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A failure before the response has begun becomes OpenAI's error body; later ones are
        logged. It never raises again: one bad request disturbs no other."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        answer = _Answer(scope, send, self._services.drain)
        try:
            await self._serve(scope, receive, answer)
        except ClientLeftError:
            logger.info("%s %s %d", scope["method"], scope["path"], CLIENT_LEFT_STATUS)
            await answer.instead(Response(status_code=CLIENT_LEFT_STATUS), receive)
        except LookOnceError as error:
            await answer.instead(error_response(error), receive)
        except HTTPException as error:
            await answer.instead(_no_such_route(scope, error), receive)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await answer.instead(json_response(INTERNAL, 500), receive)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts what is served, refuses while draining, and finds out who asks."""
        path = scope["path"]
        if path in OPEN_PATHS or is_page(path):
            await self._router(scope, receive, send)
            return
        with self._services.drain.serving():
            scope["state"]["principal"] = self._services.keys.principal(scope)
            endpoint = self._endpoints.get((scope["method"], path))
            if endpoint is None or scope.get("root_path"):
                await self._router(scope, receive, send)
                return
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)


class _Answer:
    """The `send` of one request, which sends its id back with the response.

    The id is the client's `X-Request-Id`, or one made here; it is kept in the request's state,
    where a route may still change it. While draining the connection closes after the response: its
    client opens another, which reaches a process that stays, instead of sending into the closing.
    """

    def __init__(self, scope: Scope, send: Send, drain: Drain) -> None:
        sent = header(scope, b"x-request-id")
        made = sent if sent and HEADER_REQUEST_ID.fullmatch(sent) else os.urandom(16).hex()
        self._scope = scope
        self._state = scope.setdefault("state", {})
        self._state["request_id"] = made
        self._send = send
        self._drain = drain
        self._begun = False

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._begun = True
            named = (b"x-request-id", self._state["request_id"].encode("ascii"))
            message["headers"] = [*message.get("headers", ()), named]
            if self._drain.draining:
                message["headers"].append((b"connection", b"close"))
        return self._send(message)

    async def instead(self, response: Response, receive: Receive) -> None:
        """Send `response`, unless another has begun."""
        if not self._begun:
            await response(self._scope, receive, self)


def _no_such_route(scope: Scope, error: HTTPException) -> Response:
    """Starlette's own 404 and 405, in the shape every other error has."""
    wrong = "no such route" if error.status_code == 404 else error.detail
    message = f"{scope['method']} {scope['path']}: {wrong}"
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    body = ErrorBody(message, "invalid_request_error", None, code)
    return json_response(ErrorResponse(body), error.status_code, dict(error.headers or {}))
