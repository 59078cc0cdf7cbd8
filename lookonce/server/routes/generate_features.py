"""`features`: how bodies of `/inference/v1/generate` and rendered bodies name their media."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal, cast

import msgspec
import pybase64

from lookonce.errors import BadRequestError
from lookonce.render.media.external_items import ExternalItem, encode_kwargs
from lookonce.types.media import MODALITIES, MediaFeature, ProcessedItem
from lookonce.types.request import RenderedItem, RenderedPrompt

MediaForm = Literal["encoded", "reference", "tensors"]
"""How a rendered body carries its media: as it came, by its hash alone, or processed."""

Start = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Payloads = dict[str, list[str | None] | None]
"""Modality → base64 text per item; null where an item has none."""
ItemOf = Callable[[RenderedItem], Awaitable[ProcessedItem | None]]


class Placeholder(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where an item's tokens are. `is_embed` says which of them take encoder output: one boolean
    per token, or `[start, end]` pairs relative to `offset`; null: all of them."""

    offset: Start
    length: Count
    is_embed: list[bool | tuple[int, int]] | None = None


class Features(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Each field maps a modality to a list with one entry per item."""

    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[Placeholder]] = {}
    kwargs_data: Payloads | None = None
    media_data: Payloads | None = None


def given_media(features: Features | None) -> list[ExternalItem]:
    """The items one by one. Raises `BadRequestError` naming the list at fault."""
    if features is None:
        return []
    for field in ("mm_placeholders", "kwargs_data", "media_data"):
        for modality in getattr(features, field) or ():
            if modality not in features.mm_hashes:
                raise _bad(f"{field}.{modality}", "there are no mm_hashes of this modality")
    return [item for modality in features.mm_hashes for item in _items(features, modality)]


def _items(features: Features, modality: str) -> list[ExternalItem]:
    if modality not in MODALITIES:
        raise _bad(f"mm_hashes.{modality[:40]}", f"modalities are {', '.join(MODALITIES)}")
    names = features.mm_hashes[modality]
    placeholders = features.mm_placeholders.get(modality, [])
    kwargs = _payloads(features.kwargs_data, modality)
    media = _payloads(features.media_data, modality)
    lists = {"mm_placeholders": placeholders, "kwargs_data": kwargs, "media_data": media}
    for field, entries in lists.items():
        if entries is not None and len(entries) != len(names):
            raise _bad(f"{field}.{modality}", f"{len(entries)} entries for {len(names)} mm_hashes")
    return [
        ExternalItem(
            modality=modality,
            name=name,
            offset=place.offset,
            length=place.length,
            is_embed=_ranges(place, f"mm_placeholders.{modality}[{number}].is_embed"),
            kwargs_data=None if kwargs is None else kwargs[number],
            media_data=None if media is None else media[number],
            param=f"features.mm_hashes.{modality}[{number}]",
        )
        for number, (name, place) in enumerate(zip(names, placeholders, strict=True))
    ]


def _payloads(payloads: Payloads | None, modality: str) -> list[str | None] | None:
    return None if payloads is None else payloads.get(modality)


def _ranges(place: Placeholder, param: str) -> tuple[tuple[int, int], ...] | None:
    if place.is_embed is None:
        return None
    pairs = [entry for entry in place.is_embed if not isinstance(entry, bool)]
    if len(pairs) == len(place.is_embed):
        return tuple(pairs)
    if pairs or len(place.is_embed) != place.length:
        raise _bad(param, "one boolean per token, or [start, end] pairs")
    return _stretches(cast("list[bool]", place.is_embed))


def _stretches(mask: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """`(start, end)` of each stretch of True."""
    found: list[tuple[int, int]] = []
    for position, embeds in enumerate(mask):
        if embeds and found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        elif embeds:
            found.append((position, position + 1))
    return tuple(found)


async def features_of(
    rendered: RenderedPrompt, form: MediaForm, item_of: ItemOf
) -> Features | None:
    """The features of a rendered prompt; None for one without media.

    An item whose bytes never came (a uuid stood for them) goes by reference in any form.
    """
    if not rendered.items:
        return None
    features = Features(mm_hashes={}, mm_placeholders={})
    payloads: dict[str, list[str | None]] = {}
    for item, feature in zip(rendered.items, rendered.features, strict=True):
        features.mm_hashes.setdefault(item.modality, []).append(item.media_hash.hex())
        features.mm_placeholders.setdefault(item.modality, []).append(_placeholder(feature))
        payload = await _payload(item, form, item_of)
        payloads.setdefault(item.modality, []).append(payload)
    if form == "encoded":
        features.media_data = dict(payloads)
    elif form == "tensors":
        features.kwargs_data = dict(payloads)
    return features


async def _payload(item: RenderedItem, form: MediaForm, item_of: ItemOf) -> str | None:
    if form == "encoded" and item.encoded is not None:
        text: bytes = pybase64.b64encode(item.encoded)
        return text.decode("ascii")
    if form == "tensors":
        processed = await item_of(item)
        return None if processed is None else encode_kwargs(processed)
    return None


def _placeholder(feature: MediaFeature) -> Placeholder:
    stretches = None if feature.is_embed is None else list(feature.is_embed)
    return Placeholder(
        offset=feature.offset,
        length=feature.length,
        is_embed=cast("list[bool | tuple[int, int]] | None", stretches),
    )


def _bad(field: str, problem: str) -> BadRequestError:
    return BadRequestError(f"features.{field}: {problem}", param=f"features.{field}")
