"""Routes for operators: health, readiness, version, models, metrics, aborting, emptying caches."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce import __version__
from lookonce.errors import LookOnceError
from lookonce.frontend.responses import ModelCard, ModelList
from lookonce.server.audit import audit
from lookonce.server.http.body import receive
from lookonce.server.http.responses import json_response
from lookonce.server.services import Principal, Services

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"
STARTED = int(time.time())


class Status(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


async def health(request: Request) -> Response:
    """503 once the engine process is dead or stuck; a server that still loads is healthy."""
    services: Services = request.app.state.services
    state = services.engine.state
    return json_response(Status(state), 503 if state in ("dead", "stuck") else 200)


async def ready(request: Request) -> Response:
    """200 after the warm-up and until draining; 503 otherwise."""
    services: Services = request.app.state.services
    state: str = "draining" if services.drain.draining else services.engine.state
    if state == "ready" and services.warming:
        state = "warming"
    return json_response(Status(state), 200 if state == "ready" else 503)


async def show_version(request: Request) -> Response:
    return json_response(Version(__version__))


async def list_models(request: Request) -> Response:
    return json_response(ModelList(data=[_card(request.app.state.services)]))


async def show_model(request: Request) -> Response:
    services: Services = request.app.state.services
    services.require_model(request.path_params["model"])
    return json_response(_card(services))


def _card(services: Services) -> ModelCard:
    name = services.config.model.served_name
    return ModelCard(id=name, created=STARTED, root=name, max_model_len=services.max_model_len())


async def metrics(request: Request) -> Response:
    """Metrics of all API processes and of the engine; those of a dead engine are left out."""
    services: Services = request.app.state.services
    try:
        engine = await services.engine.stats()
    except LookOnceError:
        engine = {}
    local = await services.local_metrics()
    return Response(services.metrics.exposition(local, engine), media_type=METRICS_TYPE)


class AbortRequest(msgspec.Struct):
    request_ids: list[str]


class AbortResponse(msgspec.Struct):
    aborted: list[str]
    """The ids of this tenant's requests that were running."""


async def abort_requests(request: Request) -> Response:
    """Ends requests of the tenant who asks, in whatever API process they run."""
    principal: Principal = request.state.principal
    services: Services = request.app.state.services
    body = await receive(request, AbortRequest)
    aborted = await services.abort(principal.tenant, body.request_ids)
    audit("aborted", request.scope, requests=len(aborted))
    return json_response(AbortResponse(aborted))


TIERS = ("mm", "encoder", "prefix")
"""The caches that `POST /reset_TIER_cache` empties."""


def reset_route(tier: str) -> Callable[[Request], Awaitable[Response]]:
    """The handler that empties `tier`; running requests are not disturbed. Needs an admin key."""

    async def reset(request: Request) -> Response:
        services: Services = request.app.state.services
        principal: Principal = request.state.principal
        principal.require_admin()
        await services.engine.reset_cache(tier)
        audit("reset", request.scope, tier=tier)
        return Response(status_code=200)

    return reset
