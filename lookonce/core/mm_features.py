"""A request's multimodal features, sorted by offset, and which of them a window touches.

            offset          end
               ▼             ▼
    . . . . . [I I I I I I I] . . [I I I] . .      features never overlap, so offsets and ends
                    └──────── window ──┘           are both sorted: two bisections find the range

A window `[start, end)` touches a feature when they share a position. Every query costs O(log n)
plus the features touched, however many lie outside the window.

Many features at once, and the items for them, are checked as columns by compiled code
(`columns.c`); if no compiler was there at installation, by NumPy.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Set
from itertools import repeat
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.errors import BadRequestError
from lookonce.types.media import Expansion, MediaFeature, Modality, ProcessedItem
from lookonce.types.step import EmbedSlice

KEY_BYTES = 32
MAX_NUMBER = 2**62 - 1
"""The greatest offset and length: their sum is still a 64-bit integer."""
MAX_GRID = 2**31 - 1
"""The greatest number in a grid: positions and hashes are computed from it in 64 bits."""
SPARE_FEATURES = 16
"""Number of computed features that are always kept, so that forgetting is not tried every step."""
MANY = 16
"""Number of features from which on checking whole columns is cheaper than one by one."""

FeatureColumns: TypeAlias = "tuple[list[bytes], bytes, bytes, int, set[Modality]]"
"""Keys, offsets and ends (int64), the greatest length, and all modalities."""


class MultiModalFeatures:
    """The features of one prompt; appending one is O(1), and checks it.

    Raises `BadRequestError` for a feature with a wrong shape, and for two that overlap or are out
    of order (naming both).
    """

    __slots__ = (
        "_as_tuple",
        "_ends",
        "_features",
        "_forgotten",
        "_forgotten_end",
        "_keys",
        "_offsets",
        "all_plain",
        "longest",
        "modalities",
    )

    def __init__(self, features: Iterable[MediaFeature] = ()) -> None:
        self._features: list[MediaFeature] = []
        self._keys: list[bytes] = []
        self._offsets = array("q")
        self._ends = array("q")
        self._as_tuple: tuple[MediaFeature, ...] | None = None
        self._forgotten = 0
        """Number of leading features that are not stored any more."""
        self._forgotten_end = 0
        self.all_plain = True
        """Whether every position of every item takes a row: there is no `is_embed` mask."""
        self.longest = 0
        """Positions of the longest item, which is also the most rows that an item has."""
        self.modalities: set[Modality] = set()
        self.extend(tuple(features))

    def append(self, feature: MediaFeature) -> None:
        """Add a feature that begins at or after the end of the last one."""
        index = len(self)
        _check_shape(feature, index)
        if feature.offset < self.end:
            raise BadRequestError(_conflict(self._features[-1], feature, index), param="features")
        self._store(feature)

    def _store(self, feature: MediaFeature) -> None:
        self._features.append(feature)
        self._keys.append(feature.key)
        self._offsets.append(feature.offset)
        self._ends.append(feature.end)
        self._as_tuple = None
        self.all_plain &= feature.is_embed is None
        self.longest = max(self.longest, feature.length)
        self.modalities.add(feature.modality)

    def extend(self, features: tuple[MediaFeature, ...]) -> None:
        """Add features in order; as columns where there are many, all plain and correct.

        After an error the object must not be used: some features may have been added.
        """
        at_once = len(features) >= MANY and all(
            map(_is_possible, {feature.grid for feature in features})
        )
        if not at_once or not self._extend_at_once(features):
            for feature in features:
                self.append(feature)

    def _extend_at_once(self, features: tuple[MediaFeature, ...]) -> bool:
        """False, with nothing added, where the features must be checked one by one."""
        columns = plain_columns(features, self.end)
        if columns is None:
            return False
        keys, offsets, ends, longest, modalities = columns
        self._as_tuple = None if self._features else features
        self._features += features
        self._keys += keys
        self._offsets.frombytes(offsets)
        self._ends.frombytes(ends)
        self.longest = max(self.longest, longest)
        self.modalities |= modalities
        return True

    def __len__(self) -> int:
        """Their number, forgotten ones included: indices do not change."""
        return self._forgotten + len(self._features)

    def __getitem__(self, index: int) -> MediaFeature:
        return self._features[self._slot(index)]

    @property
    def keys(self) -> list[bytes]:
        """Each feature's key, in order. The caller must not change the list."""
        self._slot(0)
        return self._keys

    @property
    def end(self) -> int:
        """End of the last feature, 0 when there is none."""
        return self._ends[-1] if self._ends else 0

    def needed_until(self, keys: Set[bytes]) -> int:
        """Position from which on no item of those keys is needed; O(features)."""
        return next((f.end for f in reversed(self.as_tuple()) if f.key in keys), 0)

    def overlapping(self, start: int, end: int) -> range:
        """Indices of the features that share a position with `[start, end)`, in order."""
        if start >= end:
            return range(0)
        if start < self._forgotten_end:
            raise RuntimeError(f"the features before {self._forgotten_end} are forgotten")
        first = self._forgotten
        return range(
            first + bisect_right(self._ends, start), first + bisect_left(self._offsets, end)
        )

    def next_index(self, position: int) -> int:
        """Index of the first feature that ends after `position`; their number if none does."""
        return self._forgotten + bisect_right(self._ends, position)

    def window(self, indices: range) -> list[MediaFeature]:
        """The features of a range of indices."""
        return self._features[self._slots(indices)]

    def keys_of(self, indices: range) -> list[bytes]:
        """The keys of a range of indices."""
        return self._keys[self._slots(indices)]

    def rows(self, indices: range) -> list[int]:
        """Rows of encoder output of each feature of a range of indices."""
        if not self.all_plain:
            return [feature.num_embeds for feature in self.window(indices)]
        slots = self._slots(indices)
        ends = np.frombuffer(self._ends, dtype=np.int64)[slots]
        offsets = np.frombuffer(self._offsets, dtype=np.int64)[slots]
        rows: list[int] = (ends - offsets).tolist()
        return rows

    def forget_before(self, position: int) -> None:
        """Stop storing features that end at or before `position`; they must not be asked for again.

        Amortised O(1): they are deleted once they are as many as the others. The last one stays.
        """
        if len(self._ends) <= SPARE_FEATURES:
            return
        num_passed = bisect_right(self._ends, position, hi=len(self._ends) - 1)
        if num_passed < SPARE_FEATURES or 2 * num_passed < len(self._features):
            return
        self._forget(num_passed)

    def move_back(self, num_tokens: int, num_computed_features: int) -> None:
        """Make all offsets smaller by `num_tokens`: so many computed tokens have left the sequence.

        The first `num_computed_features` are not stored any more, but for the very last one.
        Offsets of items that are partly computed may become negative.
        """
        passed = min(num_computed_features - self._forgotten, len(self._ends) - 1)
        if passed > 0:
            self._forget(passed)
        self._forgotten_end -= num_tokens
        self._features = [
            msgspec.structs.replace(feature, offset=feature.offset - num_tokens)
            for feature in self._features
        ]
        self._offsets = array("q", (offset - num_tokens for offset in self._offsets))
        self._ends = array("q", (end - num_tokens for end in self._ends))
        self._as_tuple = None

    def _forget(self, num_passed: int) -> None:
        self._forgotten_end = self._ends[num_passed - 1]
        self._forgotten += num_passed
        del self._features[:num_passed], self._keys[:num_passed]
        del self._offsets[:num_passed], self._ends[:num_passed]
        self._as_tuple = None

    def found_in(self, items: dict[bytes, ProcessedItem]) -> list[ProcessedItem] | None:
        """The item of each feature, in order; None if one is missing."""
        found = [item for item in map(items.get, self.keys) if item is not None]
        return found if len(found) == len(self) else None

    def fitting(self, items: dict[bytes, ProcessedItem]) -> list[ProcessedItem] | None:
        """As `found_in`; also None unless each item is one run of as many rows as its feature."""
        if not self.all_plain:
            return None
        return one_run_items(self._keys, items, self._offsets, self._ends)

    def covered(self, length: int) -> NDArray[np.bool_]:
        """`[length]`: which positions take a row of a feature."""
        if not self.all_plain:
            return self._covered_one_by_one(length)
        steps = np.zeros(length + 1, dtype=np.int8)
        np.add.at(steps, np.frombuffer(self._offsets, dtype=np.int64), 1)
        np.add.at(steps, np.frombuffer(self._ends, dtype=np.int64), -1)
        return np.cumsum(steps[:-1], dtype=np.int8).astype(np.bool_)

    def _covered_one_by_one(self, length: int) -> NDArray[np.bool_]:
        covered = np.zeros(length, dtype=np.bool_)
        for feature in self._features:
            for first, last in _embed_ranges(feature):
                covered[feature.offset + first : feature.offset + last] = True
        return covered

    def embed_slices(self, start: int, end: int) -> tuple[EmbedSlice, ...]:
        """Encoder output rows that positions `[start, end)` take; `row` counts from `start`."""
        indices = self.overlapping(start, end)
        if self.all_plain:
            return self._plain_slices(indices, start, end)
        slices: list[EmbedSlice] = []
        for feature in self.window(indices):
            slices += feature_slices(feature, start, end)
        return tuple(slices)

    def _plain_slices(self, indices: range, start: int, end: int) -> tuple[EmbedSlice, ...]:
        """As `feature_slices` of each plain feature; the window can cut only the first and last."""
        if not indices:
            return ()
        slots = self._slots(indices)
        first, last = slots.start, slots.stop - 1
        keys, offsets, ends = self._keys, self._offsets, self._ends
        slices = [_plain_slice(keys[first], offsets[first], ends[first], start, end)]
        if last > first + 1:
            inner = slice(first + 1, last)
            at = np.frombuffer(offsets, dtype=np.int64)[inner] - start
            rows = self.rows(range(indices.start + 1, indices.stop - 1))
            slices += map(EmbedSlice, keys[inner], repeat(0), rows, at.tolist())
        if last > first:
            slices.append(_plain_slice(keys[last], offsets[last], ends[last], start, end))
        return tuple(slices)

    def _slot(self, index: int) -> int:
        if index < self._forgotten:
            raise RuntimeError(f"the first {self._forgotten} features are forgotten")
        return index - self._forgotten

    def _slots(self, indices: range) -> slice:
        first = self._slot(indices.start) if indices else 0
        return slice(first, first + len(indices))

    def as_tuple(self) -> tuple[MediaFeature, ...]:
        """All features; the tuple is built once and kept until the next append."""
        self._slot(0)
        if self._as_tuple is None:
            self._as_tuple = tuple(self._features)
        return self._as_tuple


class UnplacedFeatures(MultiModalFeatures):
    """Features whose rows no position takes as its embedding, at offset 0, whole."""

    __slots__ = ()

    def extend(self, features: tuple[MediaFeature, ...]) -> None:
        for feature in features:
            self.append(feature)

    def embed_slices(self, start: int, end: int) -> tuple[EmbedSlice, ...]:
        """None."""
        return ()

    def covered(self, length: int) -> NDArray[np.bool_]:
        return np.zeros(length, dtype=np.bool_)


class EncoderInputs(UnplacedFeatures):
    """Inputs of an encoder-decoder request: all are at offset 0, none takes a decoder position.

    Cross-attention reads all rows at each position, so every chunk and every decode needs each
    input: their outputs are held from the first chunk, also after a cached prefix, until the
    sequence ends.
    """

    __slots__ = ()

    def append(self, feature: MediaFeature) -> None:
        """Add an input beside the others."""
        index = len(self)
        _check_shape(feature, index)
        if feature.offset != 0 or feature.is_embed is not None:
            raise BadRequestError(
                f"item {index} of an encoder-decoder request is at offset {feature.offset}"
                f"{'' if feature.is_embed is None else ' with is_embed ranges'}; all are at "
                "offset 0, whole",
                param="features",
            )
        self._store(feature)

    @property
    def end(self) -> int:
        """0: they take no positions."""
        return 0

    def needed_until(self, keys: Set[bytes]) -> int:
        """Beyond every position: each of them needs all inputs."""
        return sys.maxsize if keys else 0

    def overlapping(self, start: int, end: int) -> range:
        """Every input."""
        return range(len(self) if start < end else 0)

    def next_index(self, position: int) -> int:
        """0: an input is needed until the sequence ends."""
        return 0


class FrameInputs(UnplacedFeatures):
    """The one clip of a request whose model adds a row of sound to each token.

    It begins at position 0 and goes on beyond the prompt: its rows are for the tokens that are
    generated, too. So its output is held from the first chunk until the sequence has come to its
    end. The runner adds the rows.
    """

    __slots__ = ()

    def append(self, feature: MediaFeature) -> None:
        """Add the clip, if there is none."""
        index = len(self)
        _check_shape(feature, index)
        if index or feature.offset != 0 or feature.is_embed is not None:
            raise BadRequestError(
                f"item {index} is at offset {feature.offset}"
                f"{'' if feature.is_embed is None else ' with is_embed ranges'}; this model takes "
                "one clip, at offset 0, whole",
                param="features",
            )
        self._store(feature)


def feature_slices(feature: MediaFeature, start: int, end: int) -> list[EmbedSlice]:
    """The rows of one feature's output that positions `[start, end)` take."""
    slices: list[EmbedSlice] = []
    rows_before = 0
    for first, last in _embed_ranges(feature):
        low, high = max(feature.offset + first, start), min(feature.offset + last, end)
        if low < high:
            row = rows_before + low - feature.offset - first
            slices.append(EmbedSlice(feature.key, row, row + high - low, low - start))
        elif feature.offset + first >= end:
            break
        rows_before += last - first
    return slices


def next_embed(feature: MediaFeature, start: int) -> int | None:
    """The first position from `start` on that takes a row of the feature; None if none does."""
    if feature.is_embed is None:
        return max(feature.offset, start) if feature.end > start else None
    for first, last in _embed_ranges(feature):
        if feature.offset + last > start:
            return max(feature.offset + first, start)
    return None


def _plain_slice(key: bytes, offset: int, last: int, start: int, end: int) -> EmbedSlice:
    """The rows that positions `[start, end)` take of a plain feature at `[offset, last)`."""
    low, high = max(offset, start), min(last, end)
    return EmbedSlice(key, low - offset, high - offset, low - start)


def _embed_ranges(feature: MediaFeature) -> tuple[tuple[int, int], ...]:
    return ((0, feature.length),) if feature.is_embed is None else feature.is_embed


def _check_shape(feature: MediaFeature, index: int) -> None:
    if len(feature.key) != KEY_BYTES:
        raise BadRequestError(
            f"item {index} has a key of {len(feature.key)} bytes; keys have {KEY_BYTES}",
            param="features",
        )
    if not (0 <= feature.offset <= MAX_NUMBER and 1 <= feature.length <= MAX_NUMBER):
        raise BadRequestError(
            f"item {index} has offset {feature.offset} and length {feature.length}; "
            f"offsets are not negative, lengths at least 1, and neither is above {MAX_NUMBER}",
            param="features",
        )
    if not _is_possible(feature.grid):
        raise BadRequestError(
            f"item {index} has the grid {feature.grid}; its numbers are from 0 to {MAX_GRID}",
            param="features",
        )
    rows, at = 0, 0
    for first, last in _embed_ranges(feature):
        if not at <= first < last <= feature.length:
            raise BadRequestError(
                f"item {index}: is_embed range ({first}, {last}) is not in order within its "
                f"length {feature.length}",
                param="features",
            )
        rows, at = rows + last - first, last
    if rows != feature.num_embeds:
        raise BadRequestError(
            f"item {index} takes {rows} embed positions but has {feature.num_embeds} rows",
            param="features",
        )


def _is_possible(grid: tuple[int, int, int] | None) -> bool:
    return grid is None or (min(grid) >= 0 and max(grid) <= MAX_GRID)


def _conflict(before: MediaFeature, after: MediaFeature, index: int) -> str:
    problem = "overlap" if after.end > before.offset else "are out of order"
    return (
        f"items {index - 1} and {index} {problem}: positions [{before.offset}, {before.end}) "
        f"and [{after.offset}, {after.end})"
    )


def plain_columns_in_python(
    features: tuple[MediaFeature, ...], start: int
) -> FeatureColumns | None:
    """The columns of at least one feature, in order from `start` on.

    None unless all are plain (they take a row at each position), correct and in order.
    """
    keys = [feature.key for feature in features]
    rows = [feature.length for feature in features]
    places = [feature.offset for feature in features]
    if min(places) < 0 or max(max(places), max(rows)) > MAX_NUMBER or min(rows) < 1:
        return None  # NumPy raises for what 64 bits do not hold
    offsets = np.array(places, dtype=np.int64)
    lengths = np.array(rows, dtype=np.int64)
    ends = offsets + lengths
    if (
        offsets[0] < start
        or bool((offsets[1:] < ends[:-1]).any())
        or [feature.num_embeds for feature in features] != rows
        or set(map(len, keys)) != {KEY_BYTES}
        or {feature.is_embed for feature in features} != {None}
    ):
        return None
    modalities = {feature.modality for feature in features}
    return keys, offsets.tobytes(), ends.tobytes(), int(lengths.max()), modalities


def one_run_items_in_python(
    keys: list[bytes],
    items: dict[bytes, ProcessedItem],
    offsets: array[int],
    ends: array[int],
) -> list[ProcessedItem] | None:
    """The item of each key, in order.

    None unless each is in `items` and is one run of as many rows as its feature has positions.
    """
    if len(items) == len(keys) and list(items) == keys:
        found = list(items.values())  # in order, as most clients send them
    else:
        found = [item for item in map(items.get, keys) if item is not None]
    expansions = [item.expansion for item in found]
    try:
        runs = [run for (run,) in [expansion.runs for expansion in expansions]]
    except ValueError:
        return None
    rows = (np.frombuffer(ends, np.int64) - np.frombuffer(offsets, np.int64)).tolist()
    embeds = [expansion.embed_token_id for expansion in expansions]
    fit = [count for _, count in runs] == rows and [token for token, _ in runs] == embeds
    return found if fit else None


plain_columns: Callable[[tuple[MediaFeature, ...], int], FeatureColumns | None]
one_run_items: Callable[
    [list[bytes], dict[bytes, ProcessedItem], array[int], array[int]],
    list[ProcessedItem] | None,
]
try:
    from lookonce.core import _columns

    _columns.bind(MediaFeature, ProcessedItem, Expansion)
    plain_columns, one_run_items = _columns.plain_columns, _columns.one_run_items
except (ImportError, TypeError):  # not compiled, or compiled for other classes
    plain_columns, one_run_items = plain_columns_in_python, one_run_items_in_python
