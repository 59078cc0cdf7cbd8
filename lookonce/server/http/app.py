"""The application: its routes, and the one middleware around them."""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookonce.errors import LookOnceError
from lookonce.frontend.responses import ErrorBody, ErrorResponse
from lookonce.server.http.request_guard import Headers
from lookonce.server.http.responses import INTERNAL, ClientLeftError, error_response, json_response
from lookonce.server.routes import page
from lookonce.server.routes.admin import (
    TIERS,
    abort_requests,
    health,
    list_models,
    load,
    metrics,
    ready,
    reset_route,
    server_info,
    show_model,
    show_version,
    tokenizer_info,
)
from lookonce.server.routes.anthropic_messages import count_tokens, create_message
from lookonce.server.routes.chat import chat_completions
from lookonce.server.routes.completions import completions
from lookonce.server.routes.generate import generate
from lookonce.server.routes.invocations import invocations
from lookonce.server.routes.media_cache import inject_media, show_media_cache
from lookonce.server.routes.openapi import show_docs, show_openapi
from lookonce.server.routes.render import detokenize, render_chat, render_completion, tokenize
from lookonce.server.routes.responses_api.route import create_response
from lookonce.server.services import Drain, Services, header

logger = logging.getLogger("lookonce.server")

RENDER_ROUTES = [
    Route("/health", health),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/ready", ready),
    Route("/load", load),
    Route("/server_info", server_info),
    Route("/tokenizer_info", tokenizer_info),
    Route("/version", show_version),
    Route("/openapi.json", show_openapi),
    Route("/docs", show_docs),
    Route("/metrics", metrics),
    Route("/v1/models", list_models),
    Route("/v1/models/{model:path}", show_model),
    Route("/v1/chat/completions/render", render_chat, methods=["POST"]),
    Route("/v1/completions/render", render_completion, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
"""The routes that need no engine: those of `lookonce render`."""

ROUTES = [
    *RENDER_ROUTES,
    Route("/", page.show_page),
    Route(page.PREFIX + "{name}", page.show_page_file),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/invocations", invocations, methods=["POST"]),
    Route("/inference/v1/generate", generate, methods=["POST"]),
    Route("/inference/v1/abort_requests", abort_requests, methods=["POST"]),
    Route("/inference/v1/media_cache", inject_media, methods=["POST"]),
    Route("/inference/v1/media_cache", show_media_cache, methods=["GET"]),
    *[Route(f"/reset_{tier}_cache", reset_route(tier), methods=["POST"]) for tier in TIERS],
]

OPEN_PATHS = frozenset(
    {"/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json", "/docs"}
)
"""Paths that are answered without a key and while draining: they tell the server's state."""

HEADER_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CLIENT_LEFT_STATUS = 499
WARNING_HEADER = b"x-lookonce-warning"
"""Names the fields of the request that were ignored."""


def build_app(services: Services, routes: Sequence[Route] = ROUTES) -> Application:
    return Application(services, routes)


class Application(Starlette):
    """Starlette's router behind `RequestMiddleware`, which takes the place of Starlette's own."""

    def __init__(self, services: Services, routes: Sequence[Route]) -> None:
        super().__init__(routes=routes)
        self.state.services = services
        self._middleware = RequestMiddleware(services, routes, self.router)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._middleware(scope, receive, send)


class RequestMiddleware:
    """Request ids, names and origins, keys, draining, and failures turned into responses.

    One layer does all five: a layer each would cost every request, and every token of a stream,
    another call. A route of a fixed path is found in a dictionary; `router` finds all others, and
    answers requests that match no route.
    """

    def __init__(self, services: Services, routes: Sequence[Route], router: ASGIApp) -> None:
        self._services = services
        self._guard = services.guard
        self._root_path = services.config.server.root_path
        self._router = router
        self._endpoints: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {}
        for route in routes:
            if "{" not in route.path and inspect.iscoroutinefunction(route.endpoint):
                for method in route.methods or ():
                    self._endpoints.setdefault((method, route.path), route.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. It never raises: a failure before the response has begun becomes
        OpenAI's error body, a later one is logged."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        sender = _ResponseSender(scope, send, self._services.drain)
        try:
            await self._serve(scope, receive, sender)
        except ClientLeftError:
            logger.info("%s %s %d", scope["method"], scope["path"], CLIENT_LEFT_STATUS)
            await sender.send_instead(Response(status_code=CLIENT_LEFT_STATUS), receive)
        except LookOnceError as error:
            await sender.send_instead(error_response(error), receive)
        except HTTPException as error:
            await sender.send_instead(_no_such_route(scope, error), receive)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await sender.send_instead(json_response(INTERNAL, 500), receive)

    async def _serve(self, scope: Scope, receive: Receive, send: _ResponseSender) -> None:
        """Raises what the guard and the route raise, `DrainingError` and `UnauthorizedError`."""
        path = scope["path"]
        if self._root_path and path.startswith(self._root_path + "/"):
            scope["path"] = path = path.removeprefix(self._root_path)
        if cors := self._guard.admit(scope):
            send.headers = cors
            asked = self._guard.preflight(scope)
            if asked is not None:
                send.headers = [*cors, *asked]
                await Response(status_code=204)(scope, receive, send)
                return
        if path in OPEN_PATHS or path == "/" or path.startswith(page.PREFIX):
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


class _ResponseSender:
    """The `send` of one request, which adds the request's id to the response's headers.

    The id is the client's `X-Request-Id`, or a random one; it is kept in the request's state, where
    a route may still change it. While the server drains, the connection is closed after the
    response: the client then opens one to a process that goes on.
    """

    def __init__(self, scope: Scope, send: Send, drain: Drain) -> None:
        asked = header(scope, b"x-request-id")
        named = asked and HEADER_REQUEST_ID.fullmatch(asked)
        self._scope = scope
        self._state = scope.setdefault("state", {})
        self._state["request_id"] = asked if named else os.urandom(16).hex()
        self.headers: Headers = []
        """More headers that the response gets, whichever it is."""
        self._send = send
        self._drain = drain
        self._begun = False

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._begun = True
            request_id = (b"x-request-id", self._state["request_id"].encode("ascii"))
            message["headers"] = [*message.get("headers", ()), request_id, *self.headers]
            if (warning := self._state.get("warning")) is not None:
                message["headers"].append((WARNING_HEADER, warning.encode("ascii")))
            if self._drain.draining:
                message["headers"].append((b"connection", b"close"))
        return self._send(message)

    async def send_instead(self, response: Response, receive: Receive) -> None:
        """Send `response`, unless another has begun."""
        if not self._begun:
            await response(self._scope, receive, self)


def _no_such_route(scope: Scope, error: HTTPException) -> Response:
    """Starlette's 404 and 405 in the shape of all other errors."""
    wrong = "no such route" if error.status_code == 404 else error.detail
    message = f"{scope['method']} {scope['path']}: {wrong}"
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    body = ErrorBody(message, "invalid_request_error", None, code)
    return json_response(ErrorResponse(body), error.status_code, dict(error.headers or {}))
