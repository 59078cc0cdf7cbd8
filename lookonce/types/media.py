"""Media items between processes: framework-free arrays, processed items, placeholders.

Nothing here imports torch. An `Array` names its dtype as text because NumPy has no bfloat16.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import msgspec

Modality = Literal["image", "audio", "video"]
"""An item of a film ("video") is one of its temporal patches: the frames that the encoder takes
together, which most models do with two."""
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")

ITEM_SIZE: dict[str, int] = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip
"""dtype name → bytes of one element; the only dtypes an `Array` may have."""

RAW_FORMATS = ("B", "b", "c")
"""What a buffer without a type says of its elements: bytes, of whatever dtype."""
NATIVE_FORMATS = {
    "float64": "d", "int64": "lq", "float32": "f", "int32": "il", "float16": "e", "int16": "h",
    "bool": "?",
}  # fmt: skip
"""dtype name → what a buffer of such elements in this machine's order says of them."""

OWN_ORDER = "@=<" if sys.byteorder == "little" else "@=>!"
"""What a format may begin with: ctypes names the order though it is the machine's own."""

Buffer: TypeAlias = bytes | bytearray | memoryview

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""dtypes of arrays that may lie in shared memory: what is computed with, never an index."""


class Slab(Protocol):
    """A piece of shared memory that holds arrays of one item (`cache.slabs`)."""

    @property
    def number(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Of the whole slab."""

    @property
    def is_leased(self) -> bool:
        """Whether the engine knows the slab by its number now."""

    def next_use(self) -> int:
        """The number of the next message that refers to the slab, from 1."""


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """Where an array lies: bytes `offset` and following of a slab."""

    slab: Slab
    offset: int


class Array:
    """An n-dimensional, C-contiguous, little-endian array: dtype name, shape and one flat buffer.

    `data` may be read-only and may be a view into a received message or a slab, which `place`
    names; nobody writes it. Raises `ValueError` when dtype, shape and the buffer's size do not
    agree, and when the buffer is neither of plain bytes nor of that dtype.
    """

    __slots__ = ("_place", "data", "dtype", "shape")

    def __init__(
        self, dtype: str, shape: tuple[int, ...], data: Buffer, place: SlabPlace | None = None
    ) -> None:
        size = ITEM_SIZE.get(dtype)
        if size is None:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(ITEM_SIZE)}")
        extent = size
        for n in shape:
            if n < 0:
                raise ValueError(f"shape {shape} has a negative dimension")
            size *= n
            extent *= n or 1
        if extent >= 1 << 63:  # an empty array may claim that; no library could index it
            raise ValueError("a shape has too large dimensions")
        view = memoryview(data)
        if not view.c_contiguous:
            raise ValueError("data is not contiguous")
        if view.nbytes != size:
            raise ValueError(
                f"{dtype} array of shape {shape} needs {size} bytes, got {view.nbytes}"
            )
        if view.format not in RAW_FORMATS and not _has_elements(view, dtype):
            raise ValueError(
                f"{dtype} array of shape {shape} got a buffer of elements {view.format!r}"
            )
        self.dtype = dtype
        self.shape = shape
        self.data = view.cast("B") if view.nbytes else memoryview(b"")
        self._place = place

    @property
    def place(self) -> SlabPlace | None:
        """Where the array lies in shared memory; None for private memory, and for a slab that the
        engine does not know any more (`data` stays readable)."""
        place = self._place
        return place if place is not None and place.slab.is_leased else None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Array)
            and (self.dtype, self.shape) == (other.dtype, other.shape)
            and self.data == other.data
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Array({self.dtype}, {self.shape})"


def _has_elements(view: memoryview, dtype: str) -> bool:
    """In the machine's own byte order: another order is part of the format, as in ">f"."""
    native = view.itemsize == ITEM_SIZE[dtype]
    return native and view.format.lstrip(OWN_ORDER) in NATIVE_FORMATS.get(dtype, "")


EVERY_TOKEN = -1
"""`Expansion.embed_token_id` of an item all of whose tokens take encoder rows."""


class Expansion(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one media item's placeholder becomes in the prompt, run-length encoded (~200 bytes).

    `runs` are `(token_id, count)` in order. Every position whose token is `embed_token_id`
    takes one row of the item's encoder output; with `EVERY_TOKEN` all do. `grid` is `(t, h, w)` in
    merged patches for families with multi-axis rope, else None: positions must be computable
    without the item.
    """

    runs: tuple[tuple[int, int], ...]
    embed_token_id: int
    grid: tuple[int, int, int] | None = None

    @property
    def length(self) -> int:
        """Prompt tokens the placeholder becomes."""
        return sum(count for _, count in self.runs)

    @property
    def num_embeds(self) -> int:
        """Rows of encoder output the item has."""
        return sum(count for token, count in self.runs if self.is_embed(token))

    def is_embed(self, token: int) -> bool:
        """Whether positions of this token take rows."""
        return self.embed_token_id in (token, EVERY_TOKEN)

    def token_ids(self) -> list[int]:
        ids: list[int] = []
        for token, count in self.runs:
            ids += [token] * count
        return ids

    def embed_ranges(self) -> tuple[tuple[int, int], ...]:
        """`(start, end)` of each stretch of embed positions, relative to the expansion's start."""
        ranges: list[tuple[int, int]] = []
        at = 0
        for token, count in self.runs:
            if not self.is_embed(token):
                pass
            elif ranges and ranges[-1][1] == at:
                ranges[-1] = (ranges[-1][0], at + count)
            else:
                ranges.append((at, at + count))
            at += count
        return tuple(ranges)


class ProcessedItem(msgspec.Struct, frozen=True, array_like=True):
    """One media item after the processor: named arrays plus its expansion."""

    modality: Modality
    arrays: dict[str, Array]
    expansion: Expansion

    @property
    def nbytes(self) -> int:
        """What every cache accounts for this item, bytes: its slabs as a whole, its other arrays,
        and a flat overhead."""
        slabs: dict[int, int] = {}
        for array in self.arrays.values():
            if (place := array.place) is not None:
                slabs[place.slab.number] = place.slab.nbytes
        return ITEM_OVERHEAD + self.message_nbytes + sum(slabs.values())

    @property
    def message_nbytes(self) -> int:
        """Bytes of the arrays that travel in messages: those that do not lie in slabs."""
        return sum(array.nbytes for array in self.arrays.values() if array.place is None)


class UuidBinding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a client's name for an item stands for (`cache.identity.UuidBindings`)."""

    name: bytes
    """Digest of scope and uuid."""
    digest: bytes
    """MediaHash, or another 32 bytes that describe a film."""
    tenant: str
    """Whose scope it is."""


class MediaExample(msgspec.Struct, frozen=True):
    """A prompt with media, once as a renderer makes it and once as transformers' processor does.

    Both have the same token ids. A model is compared with transformers on such prompts.
    """

    token_ids: tuple[int, ...]
    items: tuple[tuple[int, ProcessedItem], ...]
    """`(position where its expansion begins, item)` in order."""
    arrays: dict[str, Array]
    """What transformers' processor makes of the whole prompt beside token ids."""


ITEM_OVERHEAD = 512
"""Bytes charged per item beside its arrays (names, expansion, bookkeeping)."""


class MediaFeature(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one media item sits in a prompt.

    `offset` is the position of its first embed token and `offset + length` ends after its last;
    between them `is_embed` gives the `(start, end)` stretches, relative to `offset`, that take
    encoder output (None: all of them). `key` is the full 32-byte scoped key.
    """

    key: bytes
    modality: Modality
    offset: int
    length: int
    num_embeds: int
    is_embed: tuple[tuple[int, int], ...] | None = None
    grid: tuple[int, int, int] | None = None
    film_time: int | None = None
    """With multi-axis rope and films whose items share one base: how far this item lies after the
    film's beginning on the temporal axis. An item that begins where another one of a film ends goes
    on with that film. None: the item stands alone."""

    @property
    def end(self) -> int:
        return self.offset + self.length


def feature_at(
    key: bytes,
    modality: Modality,
    expansion: Expansion,
    start: int,
    film_time: int | None = None,
) -> MediaFeature:
    """The feature of an item whose expansion begins at prompt position `start`.

    Raises `ValueError` for an expansion without any embed token.
    """
    ranges = expansion.embed_ranges()
    if not ranges:
        raise ValueError("an expansion needs at least one embed token")
    first, last = ranges[0][0], ranges[-1][1]
    relative = tuple((a - first, b - first) for a, b in ranges)
    return MediaFeature(
        key=key,
        modality=modality,
        offset=start + first,
        length=last - first,
        num_embeds=expansion.num_embeds,
        is_embed=None if len(relative) == 1 else relative,
        grid=expansion.grid,
        film_time=film_time,
    )
