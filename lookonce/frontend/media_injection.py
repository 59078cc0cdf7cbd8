"""Media items that somebody else processed enter the processor cache, over HTTP or from Python."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from lookonce.engine.client.sender_cache import InjectionOutcome, Keyed
from lookonce.errors import BadRequestError, LookOnceError
from lookonce.frontend.frontend import Frontend
from lookonce.render.media.external_items import arrays_of
from lookonce.types.media import MODALITIES, Array, Modality

logger = logging.getLogger("lookonce.server")

T = TypeVar("T")
ReadArrays = Callable[[], Mapping[str, Array]]


class ItemOutcome(msgspec.Struct, kw_only=True):
    hash: str
    status: str
    """`stored`, `already_held` or `rejected`."""
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Offered:
    """One item; `arrays` reads its arrays and may raise `BadRequestError`."""

    modality: Modality
    name: str
    arrays: ReadArrays


def offered_items(
    names: Mapping[Modality, Sequence[str]],
    given: Mapping[Modality, Sequence[T]],
    reader: Callable[[T], ReadArrays],
) -> list[Offered]:
    """The items one by one. Raises `BadRequestError` where names and items do not match, and for a
    name that is no text."""
    if names.keys() != given.keys():
        raise BadRequestError("hashes and items must be of the same modalities", param="mm_hashes")
    offered = []
    for modality, hashes in names.items():
        if modality not in MODALITIES:
            raise BadRequestError(
                f"mm_hashes: {str(modality)[:40]!r} is not one of {', '.join(MODALITIES)}",
                param="mm_hashes",
            )
        if isinstance(hashes, str) or not all(isinstance(name, str) for name in hashes):
            raise BadRequestError(
                f"mm_hashes.{modality}: a list of texts is needed", param=f"mm_hashes.{modality}"
            )
        if len(hashes) != len(given[modality]):
            raise BadRequestError(
                f"mm_hashes.{modality}: {len(hashes)} hashes for {len(given[modality])} items",
                param=f"mm_hashes.{modality}",
            )
        for name, value in zip(hashes, given[modality], strict=True):
            offered.append(Offered(modality, name, reader(value)))
    return offered


async def inject_offered(
    frontend: Frontend,
    offered: Sequence[Offered],
    *,
    tenant: str,
    cache_salt: str | None,
    trusted: bool,
) -> dict[str, list[ItemOutcome]]:
    """What became of each item, by modality. An invalid item is rejected alone, with a warning."""

    def validate(item: Offered) -> Keyed:
        return frontend.renderer.injected(
            item.modality,
            item.name,
            item.arrays(),
            tenant=tenant,
            cache_salt=cache_salt,
            trusted=trusted,
        )

    outcomes: dict[int, InjectionOutcome] = {}
    keyed: dict[int, Keyed] = {}
    for number, item in enumerate(offered):
        try:
            keyed[number] = await asyncio.to_thread(validate, item)
        except LookOnceError as error:
            outcomes[number] = InjectionOutcome("rejected", error.message)
    settled = await frontend.engine.inject_items(list(keyed.values()))
    outcomes |= zip(keyed, settled, strict=True)
    answer: dict[str, list[ItemOutcome]] = {}
    for number, item in enumerate(offered):
        answer.setdefault(item.modality, []).append(_outcome(item, outcomes[number]))
    return answer


def _outcome(item: Offered, outcome: InjectionOutcome) -> ItemOutcome:
    if outcome.status == "rejected":
        logger.warning("an injected item was rejected", extra={"modality": item.modality})
    return ItemOutcome(hash=item.name, status=outcome.status, reason=outcome.reason)


def arrays_reader(arrays: Mapping[str, Any]) -> ReadArrays:
    """For NumPy arrays or torch tensors."""
    return lambda: arrays_of(arrays)
