"""`POST /inference/v1/media_cache`: puts items that a client processed into the processor cache.

`GET` answers what a client must know to name them with the public `media_hash`.
"""

from __future__ import annotations

from collections import Counter

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.frontend.media_injection import ItemOutcome, ReadArrays, inject_offered, offered_items
from lookonce.render.media.external_items import decode_kwargs
from lookonce.server.audit import audit
from lookonce.server.http.body import receive
from lookonce.server.http.responses import json_response
from lookonce.server.services import Principal, Services
from lookonce.types.media import Modality


class MediaCacheRequest(msgspec.Struct, kw_only=True):
    mm_hashes: dict[Modality, list[str]]
    kwargs_data: dict[Modality, list[str]]
    cache_salt: str | None = None
    model: str | None = None


class MediaCacheResponse(msgspec.Struct):
    items: dict[str, list[ItemOutcome]]
    """Modality → the outcome of each item, in order."""


class MediaCacheInfo(msgspec.Struct, kw_only=True):
    """Arguments for `lookonce.media_hash` that give this server's MediaHashes."""

    algorithm: str
    fingerprint: str
    """Hex digits."""
    dtype: str
    """The dtype of stored floating-point arrays; float32 is cast to it."""


async def inject_media(request: Request) -> Response:
    body = await receive(request, MediaCacheRequest)
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    services.require_model(body.model)
    services.require_ready()
    request.state.usage.take_media(sum(map(len, body.kwargs_data.values())))
    offered = offered_items(body.mm_hashes, body.kwargs_data, _reader)
    outcomes = await inject_offered(
        services,
        offered,
        tenant=principal.tenant,
        cache_salt=body.cache_salt,
        trusted=principal.inject,
    )
    told = Counter(outcome.status for listed in outcomes.values() for outcome in listed)
    audit("injected", request.scope, trusted=principal.inject, **told)
    return json_response(MediaCacheResponse(outcomes))


async def show_media_cache(request: Request) -> Response:
    services: Services = request.app.state.services
    config = services.config
    return json_response(
        MediaCacheInfo(
            algorithm=config.media.hash_algorithm,
            fingerprint=services.renderer.fingerprint.hex(),
            dtype=config.model.dtype,
        )
    )


def _reader(data: str) -> ReadArrays:
    return lambda: decode_kwargs(data)
