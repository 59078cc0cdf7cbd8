"""`POST /inference/v1/media_cache`: items that somebody else processed enter the processor cache.

`GET` answers what a frontend must know to name them by the public `media_hash`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.engine.injection import Injected, Keyed
from lookonce.errors import BadRequestError, LookOnceError
from lookonce.render.injection import arrays_of, decode_kwargs
from lookonce.server.auth import Principal
from lookonce.server.parsing import receive
from lookonce.server.responding import json_response
from lookonce.server.services import Services
from lookonce.types.media import MODALITIES, Array, Modality

logger = logging.getLogger("lookonce.server")

T = TypeVar("T")
ReadArrays = Callable[[], Mapping[str, Array]]


class MediaCacheRequest(msgspec.Struct, kw_only=True):
    mm_hashes: dict[Modality, list[str]]
    kwargs_data: dict[Modality, list[str]]
    cache_salt: str | None = None
    model: str | None = None


class ItemOutcome(msgspec.Struct, kw_only=True):
    hash: str
    status: str
    """`stored`, `already_held` or `rejected`."""
    reason: str | None = None


class MediaCacheResponse(msgspec.Struct):
    items: dict[str, list[ItemOutcome]]
    """Modality → one entry per item, in order."""


class MediaCacheInfo(msgspec.Struct, kw_only=True):
    """Arguments for `lookonce.media_hash` that give this server's MediaHashes."""

    algorithm: str
    fingerprint: str
    """Hex digits."""
    dtype: str
    """What floating arrays are stored in; float32 is cast to it."""


@dataclass(frozen=True, slots=True)
class Offered:
    """One item: how to read its arrays may raise `BadRequestError`."""

    modality: Modality
    name: str
    arrays: ReadArrays


async def inject_media(request: Request) -> Response:
    body = await receive(request, MediaCacheRequest)
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    services.require_model(body.model)
    services.require_ready()
    offered = offered_items(body.mm_hashes, body.kwargs_data, _reader)
    outcomes = await inject_offered(
        services,
        offered,
        tenant=principal.tenant,
        cache_salt=body.cache_salt,
        trusted=principal.inject,
    )
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


def offered_items(
    names: Mapping[Modality, Sequence[str]],
    given: Mapping[Modality, Sequence[T]],
    reader: Callable[[T], ReadArrays],
) -> list[Offered]:
    """The items one by one. Raises `BadRequestError` where names and items do not match."""
    if names.keys() != given.keys():
        raise BadRequestError("hashes and items must be of the same modalities", param="mm_hashes")
    offered = []
    for modality, hashes in names.items():
        if modality not in MODALITIES or len(hashes) != len(given[modality]):
            raise BadRequestError(
                f"mm_hashes.{modality}: {len(hashes)} hashes for {len(given[modality])} items",
                param=f"mm_hashes.{modality}",
            )
        for name, value in zip(hashes, given[modality], strict=True):
            offered.append(Offered(modality, name, reader(value)))
    return offered


async def inject_offered(
    services: Services,
    offered: Sequence[Offered],
    *,
    tenant: str,
    cache_salt: str | None,
    trusted: bool,
) -> dict[str, list[ItemOutcome]]:
    """What became of each item. One that is no good is rejected alone, with one warning."""

    def judge(item: Offered) -> Keyed:
        return services.renderer.injected(
            item.modality,
            item.name,
            item.arrays(),
            tenant=tenant,
            cache_salt=cache_salt,
            trusted=trusted,
        )

    outcomes: dict[int, Injected] = {}
    keyed: dict[int, Keyed] = {}
    for number, item in enumerate(offered):
        try:
            keyed[number] = await asyncio.to_thread(judge, item)
        except LookOnceError as error:
            outcomes[number] = Injected("rejected", error.message)
    settled = await services.engine.inject_items(list(keyed.values()))
    outcomes |= zip(keyed, settled, strict=True)
    answer: dict[str, list[ItemOutcome]] = {}
    for number, item in enumerate(offered):
        answer.setdefault(item.modality, []).append(_outcome(item, outcomes[number]))
    return answer


def _outcome(item: Offered, outcome: Injected) -> ItemOutcome:
    if outcome.status == "rejected":
        logger.warning("%s item %.16r rejected: %s", item.modality, item.name, outcome.reason)
    return ItemOutcome(hash=item.name, status=outcome.status, reason=outcome.reason)


def arrays_reader(arrays: Mapping[str, Any]) -> ReadArrays:
    """Of NumPy arrays or torch tensors."""
    return lambda: arrays_of(arrays)


def _reader(data: str) -> ReadArrays:
    return lambda: decode_kwargs(data)
