"""What wraps every route: request ids, keys, draining, and failures turned into responses."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookonce.errors import LookOnceError
from lookonce.server.connection import ClientLeftError
from lookonce.server.page import is_page
from lookonce.server.responding import INTERNAL, error_response, json_response
from lookonce.server.services import Services

logger = logging.getLogger("lookonce.server")

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json"})
"""Answered without a key and while draining: they tell how the server is."""

HEADER_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CLIENT_LEFT_STATUS = 499


class RequestIds:
    """Takes `X-Request-Id` from the client, or makes one, and sends it back with the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        sent = request.headers.get("x-request-id", "")
        request.state.request_id = sent if HEADER_REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request.state.request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Failures:
    """A failure before the response has begun becomes OpenAI's error body; later ones are logged.

    Unlike Starlette's own handler it never raises again: one bad request disturbs no other.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientLeftError:
            logger.info("%s %s %d", scope["method"], scope["path"], CLIENT_LEFT_STATUS)
            if not started:
                await Response(status_code=CLIENT_LEFT_STATUS)(scope, receive, send)
        except LookOnceError as error:
            if not started:
                await error_response(error)(scope, receive, send)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await json_response(INTERNAL, 500)(scope, receive, send)


class Admission:
    """Counts what is served, refuses while draining, and finds out who asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or is_page(scope["path"]):
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        services: Services = request.app.state.services
        with services.drain.serving():
            request.state.principal = services.keys.principal(request)
            await self._app(scope, receive, send)
