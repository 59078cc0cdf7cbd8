"""Columns of many media features, and their items, checked in one pass each.

Both answer None where anything is out of the ordinary, with nothing said of what: whoever asked
goes through everything one by one then, and finds out. Compiled if there was a compiler at
installation; in Python a column is a pass of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from lookonce.types.media import Expansion, MediaFeature, Modality, ProcessedItem

KEY_BYTES = 32
MAX_NUMBER = 2**62 - 1
"""The greatest offset and length, far beyond any prompt: their sum is a 64-bit integer still."""

Plain: TypeAlias = "tuple[list[bytes], bytes, bytes, int, set[Modality]]"
"""Keys, offsets and ends (int64), the greatest length, and the modalities there are."""


def plain_columns_in_python(features: tuple[MediaFeature, ...], start: int) -> Plain | None:
    """Of features that take a row at each of their positions, in order from `start` on.

    None unless all are like that; `features` are at least one.
    """
    keys = [feature.key for feature in features]
    rows = [feature.length for feature in features]
    places = [feature.offset for feature in features]
    if min(places) < 0 or max(max(places), max(rows)) > MAX_NUMBER or min(rows) < 1:
        return None  # before NumPy is given what no 64 bits hold
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

    None unless each is there, and expands to one run of as many rows as its feature has positions.
    """
    if len(items) == len(keys) and list(items) == keys:
        found = list(items.values())  # they came in order, as most do
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


plain_columns: Callable[[tuple[MediaFeature, ...], int], Plain | None]
one_run_items: Callable[
    [list[bytes], dict[bytes, ProcessedItem], array[int], array[int]],
    list[ProcessedItem] | None,
]
try:
    from lookonce.core import _columns

    _columns.bind(MediaFeature, ProcessedItem, Expansion)
    plain_columns, one_run_items = _columns.plain_columns, _columns.one_run_items
except (ImportError, TypeError):  # no compiler where it was installed, or other classes
    plain_columns, one_run_items = plain_columns_in_python, one_run_items_in_python
