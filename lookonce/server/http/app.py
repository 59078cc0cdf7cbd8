"""The application: a list of routes and the door in front of them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lookonce.server.http.middleware import Door
from lookonce.server.routes.abort import abort_requests
from lookonce.server.routes.chat import chat_completions
from lookonce.server.routes.completions import completions
from lookonce.server.routes.generate import generate
from lookonce.server.routes.media_cache import inject_media, show_media_cache
from lookonce.server.routes.openapi import show_openapi
from lookonce.server.routes.page import show_asset, show_page
from lookonce.server.routes.render import render_chat, render_completion
from lookonce.server.routes.reset_cache import TIERS, reset_route
from lookonce.server.routes.responses_api.route import create_response
from lookonce.server.routes.status import (
    health,
    list_models,
    metrics,
    ready,
    show_model,
    show_version,
)
from lookonce.server.routes.tokenize import detokenize, tokenize
from lookonce.server.services import Services

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


class Application(Starlette):
    """Starlette's routes behind our own `Door`, which does what its middleware would."""

    def __init__(self, services: Services, routes: Sequence[Route]) -> None:
        super().__init__(routes=routes)
        self.state.services = services
        self._door = Door(services, routes, self.router)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._door(scope, receive, send)


def build_app(services: Services, routes: Sequence[Route] = ROUTES) -> Application:
    return Application(services, routes)
