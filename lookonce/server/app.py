"""The application: a list of routes and the middleware around them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lookonce.server.abort import abort_requests
from lookonce.server.caches import TIERS, reset_route
from lookonce.server.chat import chat_completions
from lookonce.server.completions import completions
from lookonce.server.generate import generate
from lookonce.server.media_cache import inject_media, show_media_cache
from lookonce.server.middleware import Admission, Failures, RequestIds
from lookonce.server.observe import health, list_models, metrics, ready, show_model, show_version
from lookonce.server.openapi import show_openapi
from lookonce.server.page import show_asset, show_page
from lookonce.server.render import render_chat, render_completion
from lookonce.server.respond.route import create_response
from lookonce.server.responding import json_response
from lookonce.server.responses import ErrorBody, ErrorResponse
from lookonce.server.services import Services
from lookonce.server.tokenize import detokenize, tokenize

RENDER_ROUTES = [
    Route("/health", health),
    Route("/ready", ready),
    Route("/version", show_version),
    Route("/openapi.json", show_openapi),
    Route("/metrics", metrics),
    Route("/v1/models", list_models),
    Route("/v1/models/{model:path}", show_model),
    Route("/v1/chat/completions/render", render_chat, methods=["POST"]),
    Route("/v1/completions/render", render_completion, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
"""What needs no engine: all that `lookonce render` serves."""

ROUTES = [
    *RENDER_ROUTES,
    Route("/", show_page),
    Route("/page/{name}", show_asset),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/inference/v1/generate", generate, methods=["POST"]),
    Route("/inference/v1/abort_requests", abort_requests, methods=["POST"]),
    Route("/inference/v1/media_cache", inject_media, methods=["POST"]),
    Route("/inference/v1/media_cache", show_media_cache, methods=["GET"]),
    *[Route(f"/reset_{tier}_cache", reset_route(tier), methods=["POST"]) for tier in TIERS],
]


def build_app(services: Services, routes: Sequence[Route] = ROUTES) -> Starlette:
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestIds), Middleware(Failures), Middleware(Admission)],
        exception_handlers={HTTPException: _no_such_route},
    )
    app.state.services = services
    return app


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in the shape every other error has."""
    assert isinstance(error, HTTPException)
    wrong = "no such route" if error.status_code == 404 else error.detail
    message = f"{request.method} {request.url.path}: {wrong}"
    body = ErrorBody(message, "invalid_request_error", None, "not_found")
    return json_response(ErrorResponse(body), error.status_code, dict(error.headers or {}))
