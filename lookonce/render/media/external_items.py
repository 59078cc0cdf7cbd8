"""External items: media that a client placed in a prompt of token ids, or processed, by itself.

Each item comes as encoded media (whose digest is verified), as arrays (which are checked), or as a
name alone, to be found in the cache. Names are not trusted:

    64 hex digits, and media that has this digest        the MediaHash
    64 hex digits, arrays, a client trusted to inject    the MediaHash
    any other name with arrays                           external: no real item has such a hash
    a name alone                                         whichever of both this scope holds

Arrays come as bytes that may be hostile:

    base64 ─▶ msgpack {name: {dtype, shape, data}} ─▶ arrays ─▶ checked by the family ─▶ item

Nothing is allocated for what the bytes only claim: arrays are views of the received bytes, and one
whose shape and data disagree is refused. Two arrays cannot overlap: each has its own data.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pybase64

from lookonce.cache.identity import external_hash, item_key
from lookonce.cache.slab_pool import OwnSlabs
from lookonce.cache.slabs import LARGE
from lookonce.errors import BadRequestError, LookOnceError, MediaNotCachedError, RequestError
from lookonce.render.families.arrays import Arrays, check_finite, in_model_dtype, refuse_arrays
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.media.loader import OFF_LOOP_BYTES, MediaSource, for_part
from lookonce.render.media.resolver import MediaResolver
from lookonce.types.media import (
    ITEM_SIZE,
    Array,
    Expansion,
    MediaFeature,
    Modality,
    ProcessedItem,
    feature_at,
)
from lookonce.types.request import RenderedItem

REAL_HASH = re.compile(r"[0-9a-f]{64}")
MAX_NAME_LENGTH = 256
MAX_ARRAYS = 16
MAX_DIMENSIONS = 8
Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ExternalItem:
    """One item whose placeholder is in the prompt's token ids already."""

    modality: Modality
    name: str
    """A MediaHash in hex, or any name the client chose."""
    offset: int
    length: int
    param: str
    is_embed: tuple[tuple[int, int], ...] | None = None
    """`(start, end)`, relative to `offset`, of the positions that take encoder output."""
    kwargs_data: str | None = None
    media_data: str | None = None
    film_time: int | None = None
    """`MediaFeature.film_time`."""


class ExternalItemResolver:
    """External items → rendered items; uses the directory and the processing of `resolver`."""

    def __init__(
        self,
        family: ProcessorFamily,
        resolver: MediaResolver,
        own_slabs: OwnSlabs | None = None,
    ) -> None:
        """`own_slabs`: where arrays that came are put; None: they stay where they are."""
        self._own_slabs = own_slabs
        self._family = family
        self._directory = resolver.directory
        self._resolver = resolver

    async def resolve(
        self,
        media: Sequence[ExternalItem],
        scope: bytes,
        kwargs: Mapping[str, object],
        *,
        trusted: bool,
        tenant: str = "",
    ) -> list[RenderedItem]:
        """One rendered item per external item, in order; each is counted once. Encoded media are
        processed in the name of `tenant`.

        Raises a `RequestError` naming the part; then, as when cancelled, no pin is left.
        """
        encoded = [number for number, each in enumerate(media) if _is_encoded(each)]
        sources = [_source(media[number]) for number in encoded]
        loaded = (
            await self._resolver.resolve(sources, scope, kwargs, tenant=tenant) if sources else []
        )
        items = dict(zip(encoded, loaded, strict=True))
        made: list[RenderedItem] = []
        try:
            for number, each in enumerate(media):
                if number not in items:
                    items[number] = await self._named(each, scope, trusted=trusted)
                    made.append(items[number])
        except BaseException:
            self._resolver.release(items.values())
            raise
        for item in made:
            item.uncounted = item.outcome == "not_needed"
            if not item.uncounted:
                self._directory.count(item.outcome)
        return [items[number] for number in range(len(media))]

    async def _named(self, external: ExternalItem, scope: bytes, *, trusted: bool) -> RenderedItem:
        try:
            if external.kwargs_data is None:
                return self._from_name(external, scope)
            return await self._from_arrays(external, external.kwargs_data, scope, trusted=trusted)
        except RequestError as error:
            raise error if error.param else for_part(error, external.param) from None

    async def _from_arrays(
        self, external: ExternalItem, data: str, scope: bytes, *, trusted: bool
    ) -> RenderedItem:
        """The item of arrays that came; if an item of this name is held, that one is used."""
        digest = storage_digest(external.name, external.modality, trusted=trusted)
        held = self._find_held(external, scope)
        if held is not None:
            return held
        if len(data) > OFF_LOOP_BYTES:
            item = await asyncio.to_thread(self._item, external.modality, data)
        else:
            item = self._item(external.modality, data)
        if self._own_slabs is not None and item.nbytes >= LARGE:
            item = await asyncio.to_thread(self._own_slabs.place, item)
        fits = item.nbytes <= self._directory.capacity_bytes
        return RenderedItem(
            key=item_key(scope, digest),
            media_hash=digest,
            modality=external.modality,
            expansion=item.expansion,
            item=item,
            outcome="miss" if fits else "bypass",
        )

    def _item(self, modality: Modality, data: str) -> ProcessedItem:
        return item_from_arrays(self._family, modality, decode_kwargs(data))

    def _from_name(self, external: ExternalItem, scope: bytes) -> RenderedItem:
        held = self._find_held(external, scope)
        if held is not None:
            return held
        for digest in _digests(external):
            key = item_key(scope, digest)
            expansion = self._directory.known_expansion(key)
            if expansion is not None:
                return RenderedItem(
                    key, digest, external.modality, expansion, None, outcome="not_needed"
                )
        raise MediaNotCachedError("no item is held under this hash; send it with its data")

    def _find_held(self, external: ExternalItem, scope: bytes) -> RenderedItem | None:
        """The held item of this name; under the MediaHash first, whose content is verified."""
        held = (self._held(external, scope, digest) for digest in _digests(external))
        return next((item for item in held if item is not None), None)

    def _held(self, external: ExternalItem, scope: bytes, digest: bytes) -> RenderedItem | None:
        key = item_key(scope, digest)
        expansion = self._directory.lookup(key)
        if expansion is None:
            return None
        outcome = self._directory.held_as(key)
        return RenderedItem(
            key, digest, external.modality, expansion, None, outcome=outcome, pinned=True
        )


def place_external_items(
    token_ids: Sequence[int], media: Sequence[ExternalItem], items: Sequence[RenderedItem]
) -> tuple[MediaFeature, ...]:
    """The features, in the order of `media`, which must be sorted by offset.

    Raises `BadRequestError` for a placeholder that is not its item's expansion, or that overlaps
    another.
    """
    features = []
    end = 0
    for external, item in zip(media, items, strict=True):
        start = _start(external, item.expansion)
        if start < end:
            raise _misplaced(external, "it overlaps the placeholder before it")
        end = start + item.expansion.length
        if list(token_ids[start:end]) != item.expansion.token_ids():
            raise _misplaced(external, "the tokens there are not the item's placeholder")
        time = external.film_time
        if time is not None and external.modality != "video":
            raise _misplaced(external, "only an item of a film has a film_time")
        features.append(feature_at(item.key, external.modality, item.expansion, start, time))
    return tuple(features)


def placeholder_span(feature: MediaFeature, item: RenderedItem) -> tuple[int, int]:
    """Start and end of an item's expansion, which may begin before its first embed position."""
    start = feature.offset - item.expansion.embed_ranges()[0][0]
    return start, start + item.expansion.length


def storage_digest(name: str, modality: Modality, *, trusted: bool) -> bytes:
    """The MediaHash under which arrays are stored. Raises `BadRequestError` for a bad name."""
    real = real_digest(name)
    if trusted and real is not None:
        return real
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise BadRequestError(f"a hash is a text of 1 to {MAX_NAME_LENGTH} characters")
    return external_hash(name.encode("utf-8", "surrogatepass"), modality=modality)


def real_digest(name: str) -> bytes | None:
    return bytes.fromhex(name) if REAL_HASH.fullmatch(name) else None


def _digests(external: ExternalItem) -> list[bytes]:
    """The digests that the name may stand for in its scope, the MediaHash first."""
    name = external.name.encode("utf-8", "surrogatepass")
    of_arrays = external_hash(name, modality=external.modality)
    real = real_digest(external.name)
    return [of_arrays] if real is None else [real, of_arrays]


def _is_encoded(external: ExternalItem) -> bool:
    return external.kwargs_data is None and external.media_data is not None


def _source(external: ExternalItem) -> MediaSource:
    digest = real_digest(external.name)
    if digest is None:
        raise BadRequestError(
            f"{external.param}: encoded media is named by its MediaHash, 64 hex digits",
            param=external.param,
        )
    return MediaSource(
        external.modality, "inline", external.media_data or "", external.param, digest=digest
    )


def _start(external: ExternalItem, expansion: Expansion) -> int:
    """Position where the item's expansion begins. Raises `BadRequestError`.

    The client's placeholder covers either the embed positions or the whole expansion.
    """
    embeds = list(expansion.embed_ranges())
    lead = embeds[0][0]
    if external.is_embed is None:
        if external.length == expansion.length:
            return external.offset
        ranges: Ranges = [(external.offset, external.offset + external.length)]
    else:
        ranges = [(external.offset + a, external.offset + b) for a, b in external.is_embed]
    start = ranges[0][0] - lead if ranges else -1
    if start < 0 or ranges != [(start + a, start + b) for a, b in embeds]:
        raise _misplaced(
            external,
            f"its item takes {expansion.num_embeds} embed positions, in {len(embeds)} stretches; "
            f"the placeholder names others (length {external.length})",
        )
    return start


def _misplaced(external: ExternalItem, problem: str) -> BadRequestError:
    return BadRequestError(f"{external.param}: {problem}", param=external.param)


class WireArray(msgspec.Struct, forbid_unknown_fields=True):
    """One array: `data` is its elements in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, WireArray])


def item_from_arrays(family: ProcessorFamily, modality: Modality, arrays: Arrays) -> ProcessedItem:
    """The item of arrays that this model's processor could have made. Raises `BadRequestError`."""
    if modality not in family.modalities:
        raise refuse_arrays(f"this model takes no {modality}")
    cast = in_model_dtype(arrays, family.dtype)
    try:
        expansion = family.expansion_of_arrays(modality, cast)
    except LookOnceError as error:
        raise refuse_arrays(error.message) from None
    check_finite(cast)  # after the cast: what was finite before may be too large for its dtype
    return ProcessedItem(modality, cast, expansion)


def encode_kwargs(item: ProcessedItem) -> str:
    """The item's arrays in the form of `kwargs_data`."""
    wire = {
        name: WireArray(a.dtype, a.shape, memoryview(a.data)) for name, a in item.arrays.items()
    }
    text: bytes = pybase64.b64encode(_encoder.encode(wire))
    return text.decode("ascii")


def decode_kwargs(text: str) -> dict[str, Array]:
    """The arrays in `kwargs_data`, views of its bytes. Raises `BadRequestError`."""
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError:
        raise refuse_arrays("kwargs_data is not valid base64") from None
    try:
        wire = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise refuse_arrays(
            "kwargs_data must be msgpack of {name: {dtype, shape, data}}, and nothing after it"
        ) from None
    if len(wire) > MAX_ARRAYS:
        raise refuse_arrays(f"an item has at most {MAX_ARRAYS} arrays")
    return {name: _wire_array(name, array) for name, array in wire.items()}


def arrays_of(kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """Copies of NumPy arrays or torch tensors as `Array`s.

    Raises `BadRequestError` for anything else, and for dtypes that no item has.
    """
    if not isinstance(kwargs, Mapping):
        raise refuse_arrays("an item must be a mapping of names to arrays")
    return {str(name): _copied_array(str(name), value) for name, value in kwargs.items()}


def _wire_array(name: str, wire: WireArray) -> Array:
    shown = repr(name[:40])
    if wire.dtype not in ITEM_SIZE:
        raise refuse_arrays(f"{shown} has a dtype that is not one of {', '.join(ITEM_SIZE)}")
    if len(wire.shape) > MAX_DIMENSIONS:
        raise refuse_arrays(f"{shown} has more than {MAX_DIMENSIONS} dimensions")
    try:
        return Array(wire.dtype, wire.shape, wire.data)
    except ValueError:
        raise refuse_arrays(
            f"{shown}: its shape and the {wire.data.nbytes} bytes of its data disagree"
        ) from None


def _copied_array(name: str, value: Any) -> Array:
    shown = repr(name[:40])
    if hasattr(value, "detach"):  # a torch tensor: NumPy has no bfloat16, so its bits are taken
        return _copied_tensor(shown, value.detach().cpu().contiguous())
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.name not in ITEM_SIZE:
        raise refuse_arrays(f"{shown} must be a NumPy array or a torch tensor of numbers")
    little = np.array(value, dtype=value.dtype.newbyteorder("<"), order="C", copy=True)
    return Array(value.dtype.name, little.shape, little.tobytes())


def _copied_tensor(shown: str, tensor: Any) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZE:
        raise refuse_arrays(f"{shown} has dtype {dtype}, which no item has")
    flat = tensor.reshape(-1)
    if dtype == "bfloat16":
        flat = flat.view(_int16_of(tensor))
    return Array(dtype, tuple(tensor.shape), flat.numpy().tobytes())


def _int16_of(tensor: Any) -> Any:
    """torch.int16, without importing torch."""
    return tensor.new_empty(0).short().dtype
