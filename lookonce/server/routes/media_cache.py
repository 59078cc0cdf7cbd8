"""`POST /inference/v1/media_cache`: puts items that a client processed into the processor cache.

`GET` answers what a client must know to name them with the public `media_hash`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import NotReadyError
from lookonce.frontend.media_injection import ItemOutcome, ReadArrays, inject_offered, offered_items
from lookonce.render.media.external_items import decode_kwargs
from lookonce.server.audit import audit
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.body import receive
from lookonce.server.http.responses import json_response
from lookonce.server.services import Services
from lookonce.types.lora import LoRAIdentity
from lookonce.types.media import Modality
from lookonce.types.model import RenderingFacts


class MediaCacheRequest(msgspec.Struct, kw_only=True):
    mm_hashes: dict[Modality, list[str]]
    kwargs_data: dict[Modality, list[str]]
    cache_salt: str | None = None
    model: str | None = None


class MediaCacheResponse(msgspec.Struct):
    items: dict[str, list[ItemOutcome]]
    """Modality → the outcome of each item, in order."""


class AdapterDigests(msgspec.Struct):
    """What caches depend on of a LoRA adapter, in hex digits."""

    digest: str
    """Of its contents: keys and values depend on it."""
    encoder_digest: str
    """Of what of it changes encoder outputs; empty: nothing does."""

    @classmethod
    def of(cls, identity: LoRAIdentity) -> AdapterDigests:
        return cls(identity.digest.hex(), identity.encoder_digest.hex())


class MediaCacheInfo(msgspec.Struct, kw_only=True):
    """Arguments for `lookonce.media_hash` that give this server's MediaHashes, and what else caches
    depend on."""

    algorithm: str
    fingerprint: str
    """Hex digits."""
    files_digest: str
    """Of the files of tokenizer and processor, and of the chat template; hex digits. Who renders
    for this server with other files would make other tokens of a prompt."""
    dtype: str
    """The dtype of stored floating-point arrays; float32 is cast to it."""
    adapters: dict[str, AdapterDigests]
    """LoRA adapters by the names that requests ask for."""
    media_adapters: dict[str, AdapterDigests]
    """Those that the model has for prompts with media, by modality; of several that a prompt has,
    it gets the first."""
    model: RenderingFacts | None
    """Null as long as it is loading, and where it answers no prompts of token ids."""


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
    config, known = services.config, services.engine.adapters
    own: tuple[tuple[Modality, LoRAIdentity], ...] = ()
    facts: RenderingFacts | None = None
    with suppress(NotReadyError):
        own = services.engine.model.media_adapters
        facts = RenderingFacts.of(services.engine.model)
    return json_response(
        MediaCacheInfo(
            algorithm=config.media.hash_algorithm,
            fingerprint=services.renderer.fingerprint.hex(),
            files_digest=services.renderer.files_digest,
            dtype=config.model.dtype,
            adapters={info.name: AdapterDigests.of(info.identity) for info in known.listed()},
            media_adapters={modality: AdapterDigests.of(each) for modality, each in own},
            model=facts,
        )
    )


def _reader(data: str) -> ReadArrays:
    return lambda: decode_kwargs(data)
