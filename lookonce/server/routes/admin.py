"""Routes for operators: health, readiness, version, models, metrics, aborting, emptying caches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce import __version__
from lookonce.config import Config
from lookonce.frontend.responses import ModelCard, ModelList
from lookonce.render.prompt.encoder import template_sources
from lookonce.server.audit import audit
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.body import receive
from lookonce.server.http.responses import json_response
from lookonce.server.services import Services
from lookonce.types.model import Comparison

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"
STARTED = int(time.time())


class Status(msgspec.Struct):
    status: str


class Readiness(msgspec.Struct):
    status: str
    engine_silent_seconds: float | msgspec.UnsetType = msgspec.UNSET
    """Since the engine process last said that it lives; left out where there is none."""


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
    silent = await services.engine.silent_seconds()
    told = Readiness(state, msgspec.UNSET if silent is None else round(silent, 1))
    return json_response(told, 200 if state == "ready" else 503)


async def show_version(request: Request) -> Response:
    return json_response(Version(__version__))


async def list_models(request: Request) -> Response:
    services: Services = request.app.state.services
    names = [services.config.model.served_name, *services.engine.adapters.names()]
    return json_response(ModelList(data=[_card(services, name) for name in names]))


async def show_model(request: Request) -> Response:
    services: Services = request.app.state.services
    name = services.require_model(request.path_params["model"])
    return json_response(_card(services, name))


def _card(services: Services, name: str) -> ModelCard:
    """Of the model, or of an adapter."""
    served = services.config.model.served_name
    return ModelCard(
        id=name,
        created=STARTED,
        root=name,
        parent=None if name == served else served,
        max_model_len=services.max_model_len(),
        modalities=services.renderer.modalities,
    )


async def metrics(request: Request) -> Response:
    """Metrics of all API processes and of the engine; those of a dead engine are left out."""
    services: Services = request.app.state.services
    engine = await services.engine_stats()
    local = await services.local_metrics()
    return Response(services.metrics.exposition(local, engine), media_type=METRICS_TYPE)


class Load(msgspec.Struct):
    server_load: int
    """Sequences that are computed or wait for it, of all API processes."""


async def load(request: Request) -> Response:
    services: Services = request.app.state.services
    engine = await services.engine_stats()
    counted = (engine.get(f"num_requests_{state}", 0) for state in ("running", "waiting"))
    return json_response(Load(int(sum(counted))))


async def server_info(request: Request) -> Response:
    """The version, the configuration without keys and passwords, and how far the model was found to
    differ from transformers. Needs an admin key."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    principal.require_admin()
    shown = public_config(services.config)
    return json_response(ServerInfo(__version__, shown, services.comparison()))


class ServerInfo(msgspec.Struct):
    version: str
    config: dict[str, Any]
    comparison: Comparison | None
    """None while the model loads, and for one with a family of its own."""


SECRET = frozenset({"api_keys", "username", "password", "limits", "secret"})
"""Fields of the configuration, at any depth, that no client is shown."""


def public_config(config: Config) -> dict[str, Any]:
    shown: dict[str, Any] = _without_secrets(msgspec.to_builtins(config))
    return shown


def _without_secrets(part: Any) -> Any:
    if isinstance(part, dict):
        return {k: _without_secrets(v) for k, v in part.items() if k not in SECRET}
    return [_without_secrets(each) for each in part] if isinstance(part, list | tuple) else part


async def tokenizer_info(request: Request) -> Response:
    """The model's `tokenizer_config.json`, with the chat template that is used. It is read once."""
    state = request.app.state
    info: bytes | None = getattr(state, "tokenizer_info", None)
    if info is None:
        info = state.tokenizer_info = await asyncio.to_thread(_tokenizer_info, state.services)
    return Response(info, media_type="application/json")


def _tokenizer_info(services: Services) -> bytes:
    folder = services.config.model.folder
    info = msgspec.json.decode(tokenizer_config(folder), type=dict[str, Any])
    sources = template_sources(
        folder, services.renderer.tokenizer, services.config.server.chat_template
    )
    info["chat_template"] = sources.get("default")
    return msgspec.json.encode(info)


def tokenizer_config(folder: str) -> bytes:
    """The file's contents; an empty object for a folder without it."""
    file = Path(folder) / "tokenizer_config.json"
    return file.read_bytes() if file.is_file() else b"{}"


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
