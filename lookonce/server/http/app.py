"""The application: its routes, and the one middleware around them."""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from lookonce.errors import LookOnceError, ModelNotFoundError
from lookonce.frontend.responses import ErrorBody, ErrorResponse
from lookonce.server.audit import audit_refusal, route_of
from lookonce.server.http.forwarded import ForwardedClients
from lookonce.server.http.headers import header
from lookonce.server.http.request_guard import Headers
from lookonce.server.http.responses import (
    ANTHROPIC_PATHS,
    ClientLeftError,
    error_body,
    error_response,
    error_shape,
    json_response,
)
from lookonce.server.rate_limits import NO_LIMITS
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
from lookonce.server.routes.anthropic_messages import (
    count_tokens,
    create_message,
)
from lookonce.server.routes.audio import transcriptions, translations
from lookonce.server.routes.chat import chat_completions
from lookonce.server.routes.completions import completions
from lookonce.server.routes.conversations import (
    add_conversation_items,
    create_conversation,
    delete_conversation,
    delete_conversation_item,
    list_conversation_items,
    show_conversation,
    show_conversation_item,
    update_conversation,
)
from lookonce.server.routes.debug import show_savings, show_state, take_profile
from lookonce.server.routes.generate import generate
from lookonce.server.routes.invocations import invocations
from lookonce.server.routes.lora import load_lora_adapter, unload_lora_adapter
from lookonce.server.routes.media_cache import inject_media, show_media_cache
from lookonce.server.routes.openapi import show_docs, show_openapi
from lookonce.server.routes.pooling import embeddings, pool, rerank, score
from lookonce.server.routes.realtime.route import realtime
from lookonce.server.routes.render import detokenize, render_chat, render_completion, tokenize
from lookonce.server.routes.responses_api.route import count_input_tokens, create_response
from lookonce.server.routes.responses_api.stored import (
    delete_response,
    show_input_items,
    show_response,
)
from lookonce.server.routes.serving_base import REQUEST_ID
from lookonce.server.services import Drain, Services
from lookonce.types.held_bytes import HeldBytes, current_held_bytes
from lookonce.types.logs import current_request_id

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

CONVERSATION = "/v1/conversations/{conversation_id}"

ROUTES = [
    *RENDER_ROUTES,
    Route("/", page.show_page),
    Route(page.PREFIX + "{name}", page.show_page_file),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{response_id}", show_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/input_items", show_input_items, methods=["GET"]),
    Route("/v1/conversations", create_conversation, methods=["POST"]),
    Route(CONVERSATION, show_conversation, methods=["GET"]),
    Route(CONVERSATION, update_conversation, methods=["POST"]),
    Route(CONVERSATION, delete_conversation, methods=["DELETE"]),
    Route(CONVERSATION + "/items", list_conversation_items, methods=["GET"]),
    Route(CONVERSATION + "/items", add_conversation_items, methods=["POST"]),
    Route(CONVERSATION + "/items/{item_id}", show_conversation_item, methods=["GET"]),
    Route(CONVERSATION + "/items/{item_id}", delete_conversation_item, methods=["DELETE"]),
    Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
    Route("/v1/audio/translations", translations, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/pooling", pool, methods=["POST"]),
    Route("/v1/score", score, methods=["POST"]),
    Route("/score", score, methods=["POST"]),
    Route("/v1/rerank", rerank, methods=["POST"]),
    Route("/v2/rerank", rerank, methods=["POST"]),
    Route("/rerank", rerank, methods=["POST"]),
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/invocations", invocations, methods=["POST"]),
    Route("/inference/v1/generate", generate, methods=["POST"]),
    Route("/inference/v1/abort_requests", abort_requests, methods=["POST"]),
    Route("/inference/v1/media_cache", inject_media, methods=["POST"]),
    Route("/inference/v1/media_cache", show_media_cache, methods=["GET"]),
    Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
    Route("/debug/state", show_state, methods=["GET"]),
    Route("/savings", show_savings, methods=["GET"]),
    Route("/debug/profile", take_profile, methods=["POST"]),
    *[Route(f"/reset_{tier}_cache", reset_route(tier), methods=["POST"]) for tier in TIERS],
]

WEBSOCKETS = [WebSocketRoute("/v1/realtime", realtime)]

OPEN_PATHS = frozenset(
    {"/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json", "/docs"}
)
"""Paths that are answered without a key and while draining: they tell the server's state."""

UNLIMITED_PATHS = frozenset(
    {"/inference/v1/abort_requests", *(f"/reset_{tier}_cache" for tier in TIERS)}
)
"""Paths of requests that count for no limit: they free what others hold."""

STORED_PATHS = ("/v1/responses/", "/v1/conversations/")
"""How the paths of stored responses begin: any request of them counts, not POST alone."""

KEPT_BACK = "kept_back"
"""In a request's state: whoever called the application does not hand its refusal on."""
CLIENT_LEFT_STATUS = 499
INTERNAL_ERROR = 1011
"""Code that a WebSocket is closed with when serving it broke."""
WARNING_HEADER = b"x-lookonce-warning"
"""Names the fields of the request that were ignored."""


def build_app(
    services: Services, routes: Sequence[Route] = ROUTES, websockets: Sequence[WebSocketRoute] = ()
) -> Application:
    return Application(services, routes, websockets)


class Application(Starlette):
    """Starlette's router behind `RequestMiddleware`, which takes the place of Starlette's own."""

    def __init__(
        self, services: Services, routes: Sequence[Route], websockets: Sequence[WebSocketRoute]
    ) -> None:
        all_routes: list[BaseRoute] = [*routes, *websockets]
        super().__init__(routes=all_routes)
        self.state.services = services
        paths = [*(route.path for route in routes), *(route.path for route in websockets)]
        self.paths = frozenset(path for path in paths if "{" not in path)
        """Paths that the log may name."""
        self._middleware = RequestMiddleware(services, routes, self.router, websockets)
        config = services.config.server
        self._forwarded = ForwardedClients(
            config.forwarded_allow_ips, behind_frontends=config.behind_frontends
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if scope["type"] != "lifespan":
            self._forwarded.resolve(scope)
        await self._middleware(scope, receive, send)


CLIENT_LEFT = "client_left"
BROKEN = "broken"
"""What answers are counted as that fail after they have begun, beside their status."""


class RequestMiddleware:
    """Request ids, names and origins, keys, limits, draining, traces, and failures turned into
    responses.

    One layer does them all: a layer each would cost every request, and every token of a stream,
    another call. A route of a fixed path is found in a dictionary; `router` finds all others, and
    answers requests that match no route.
    """

    def __init__(
        self,
        services: Services,
        routes: Sequence[Route],
        router: ASGIApp,
        websockets: Sequence[WebSocketRoute] = (),
    ) -> None:
        self._services = services
        self._responses = services.metrics.counts.by_label("http_responses_total")
        for status in ("200", "500", "503", BROKEN):  # seen by Prometheus before the first one
            self._responses[status] += 0
        self._guard = services.guard
        self._root_path = services.config.server.root_path
        self._router = router
        self._endpoints: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {}
        self._websockets = {route.path: route.endpoint for route in websockets}
        for route in routes:
            if "{" not in route.path and inspect.iscoroutinefunction(route.endpoint):
                for method in route.methods or ():
                    self._endpoints.setdefault((method, route.path), route.endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. It never raises: a failure before the response has begun becomes an
        error body, a later one is logged."""
        if scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        sender = _ResponseSender(scope, send, self._services.drain, self._responses)
        current_request_id.set(scope["state"]["request_id"])
        tracer, failure = self._services.tracer, None
        if tracer is not None and scope["path"] not in OPEN_PATHS:
            scope["state"]["trace"] = tracer.begin(scope)
        try:
            await self._serve(scope, receive, sender)
        except ClientLeftError:
            failure = CLIENT_LEFT
            logger.info("the client left", extra=_what(scope, CLIENT_LEFT_STATUS))
            await sender.send_instead(Response(status_code=CLIENT_LEFT_STATUS), receive)
        except LookOnceError as error:
            failure = type(error).__name__
            try:
                answer = error_response(error, error_shape(scope["path"]))
                await sender.send_instead(answer, receive)
            finally:  # also where the client never takes it
                if not scope["state"].get(KEPT_BACK):
                    audit_refusal(scope, error)
        except HTTPException as error:
            await sender.send_instead(_no_such_route(scope, error), receive)
        except Exception as error:
            failure = "internal"
            logger.exception("a request failed", extra=_what(scope, 500))
            body = error_shape(scope["path"])(error)
            await sender.send_instead(json_response(body, 500), receive)
        failure = failure or scope["state"].get("failure")
        if failure is not None and failure != CLIENT_LEFT and sender.status == 200:
            self._responses[BROKEN] += 1
        if tracer is not None and (trace := scope["state"].get("trace")) is not None:
            tracer.end(trace, scope, sender.status or CLIENT_LEFT_STATUS, failure)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("served", extra=_what(scope, sender.status))

    async def _serve(self, scope: Scope, receive: Receive, send: _ResponseSender) -> None:
        """Raises what the guard and the route raise, `DrainingError` and `UnauthorizedError`."""
        path = self._routed_path(scope)
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
            state = scope["state"]
            state["principal"] = principal = self._services.keys.principal(scope)
            limited = scope["method"] == "POST" or path.startswith(STORED_PATHS)
            limited = limited and path not in UNLIMITED_PATHS
            with (
                self._services.admit(principal) if limited else NO_LIMITS as usage,
                HeldBytes(self._services.held_bytes, principal.tenant) as held,
            ):
                state["usage"] = usage
                current_held_bytes.set(held)
                endpoint = self._endpoints.get((scope["method"], path))
                if endpoint is None or scope.get("root_path"):
                    await self._router(scope, receive, send)
                    return
                response = await endpoint(Request(scope, receive, send))
                await response(scope, receive, send)

    def _routed_path(self, scope: Scope) -> str:
        """The path without what a proxy puts before it, which is also taken out of `scope`."""
        if self._root_path and scope["path"].startswith(self._root_path + "/"):
            scope["path"] = scope["path"].removeprefix(self._root_path)
        path: str = scope["path"]
        return path

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket, or answer its handshake with an error as any other request's."""
        websocket = WebSocket(scope, receive, send)
        _name_request(scope)
        current_request_id.set(scope["state"]["request_id"])
        try:
            endpoint = self._websockets.get(self._routed_path(scope))
            self._guard.admit(scope)
            if endpoint is None:
                raise ModelNotFoundError(f"{scope['path'][:200]}: no such route", code="not_found")
            with self._services.drain.serving():
                scope["state"]["principal"] = self._services.keys.principal(scope)
                await endpoint(websocket)
        except LookOnceError as error:
            audit_refusal(scope, error)
            await _refuse_websocket(websocket, error_response(error))
        except Exception as error:
            logger.exception("a WebSocket failed", extra=_what(scope, 500))
            await _refuse_websocket(websocket, json_response(error_body(error), 500))


async def _refuse_websocket(websocket: WebSocket, response: Response) -> None:
    """Answer the handshake; one that was accepted is closed."""
    try:
        if websocket.application_state == WebSocketState.CONNECTING:
            await websocket.send_denial_response(response)
        else:
            await websocket.close(INTERNAL_ERROR)
    except (WebSocketDisconnect, RuntimeError, OSError):
        pass  # the client is gone


def _name_request(scope: Scope) -> None:
    """Its id is the client's `X-Request-Id`, or a random one."""
    asked = header(scope, b"x-request-id")
    named = asked and REQUEST_ID.fullmatch(asked)
    scope.setdefault("state", {})["request_id"] = asked if named else os.urandom(16).hex()


def _what(scope: Scope, status: int) -> dict[str, object]:
    """What a log line says of a request; its id is added to every line."""
    principal = scope["state"].get("principal")
    tenant = None if principal is None else principal.tenant
    return {"route": route_of(scope), "status": status, "tenant": tenant}


class _ResponseSender:
    """The `send` of one request, which adds the request's id to the response's headers.

    The id is the client's `X-Request-Id`, or a random one; it is kept in the request's state, where
    a route may still change it. While the server drains, the connection is closed after the
    response: the client then opens one to a process that goes on.
    """

    def __init__(self, scope: Scope, send: Send, drain: Drain, responses: Counter[str]) -> None:
        """`responses` counts those that begin, by status; probes and `/metrics` are left out."""
        _name_request(scope)
        self._responses = responses
        self._scope = scope
        self._state = scope["state"]
        self.headers: Headers = []
        """More headers that the response gets, whichever it is."""
        self._send = send
        self._drain = drain
        self._begun = False
        self.status = 0
        """Of the response, once it has begun."""

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._begun = True
            self.status = message["status"]
            if self._scope["path"] not in OPEN_PATHS:
                self._responses[str(self.status)] += 1
            request_id = (b"x-request-id", self._state["request_id"].encode("ascii"))
            message["headers"] = [*message.get("headers", ()), request_id, *self.headers]
            if self._scope["path"] in ANTHROPIC_PATHS:
                message["headers"].append((b"request-id", request_id[1]))
            if (usage := self._state.get("usage")) is not None:
                message["headers"] += usage.headers()
            if (warning := self._state.get("warning")) is not None:
                message["headers"].append((WARNING_HEADER, warning.encode("ascii")))
            if (trace := self._state.get("trace")) is not None:
                message["headers"].append((b"traceresponse", trace.response_header))
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
