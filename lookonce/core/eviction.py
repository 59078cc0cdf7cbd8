"""Which unheld encoder output leaves next: least recently used, weighted by what it cost per byte.

Greedy dual: an entry's priority is the clock when it was used last plus its cost per byte, and the
clock moves up to the priority of each entry that leaves. With equal costs this is plain LRU; what
is dear to compute again stays longer, but not for ever if nobody uses it.

    lane, by cost class      least recent ──────────▶ most recent
      1 ns per byte          [ k7 @ 3.1 ][ k2 @ 3.4 ]            key @ clock when it was used
      8 ns per byte          [ k1 @ 0.2 ]

Within a lane of one cost the first is always the next: so nothing is ever sorted, and an entry is
put in, taken out and found in O(1), many at once as fast as a dict can take them. Costs are rounded
to powers of two, so there are few lanes: what costs about as much is told apart by its use alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import inf, log2

import msgspec

Places = OrderedDict[bytes, float]
"""Key → the clock when it was used last, earliest first."""


class Entry(msgspec.Struct, gc=False):
    """One encoder output in the books of the encoder cache."""

    num_bytes: int
    cost_per_byte: float
    holders: dict[int, int]
    """Holder → how many times it holds this entry."""
    places: Places | None = None
    """Where its place in the order is; None where it has none."""
    condemned: bool = False
    """Cleared while held: leaves with its last holder."""


class EvictionOrder:
    """Places of the entries that may leave; `entries` are the cache's own, `take` removes them."""

    __slots__ = ("_clock", "_entries", "_lanes")

    def __init__(self, entries: dict[bytes, Entry]) -> None:
        self._entries = entries
        self._lanes: dict[float, Places] = {}
        """Cost per byte, rounded to its class → places."""
        self._clock = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def add(self, key: bytes, entry: Entry) -> None:
        """Give an entry that was used now its place, instead of any it had."""
        self.remove(key, entry)
        entry.places = places = self._lane(entry.cost_per_byte)
        places[key] = self._clock

    def add_many(self, entries: Mapping[bytes, Entry]) -> None:
        """As one by one, for entries without a place."""
        costs = {entry.cost_per_byte for entry in entries.values()}
        if len(costs) != 1:
            for key, entry in entries.items():
                self.add(key, entry)
            return
        places = self._lane(costs.pop())
        places.update(dict.fromkeys(entries, self._clock))
        for entry in entries.values():
            entry.places = places

    def remove(self, key: bytes, entry: Entry) -> None:
        """Take away the place of an entry, if it has one."""
        if entry.places is not None:
            del entry.places[key]
            entry.places = None

    def take(self, num_bytes: int) -> dict[bytes, int]:
        """Remove the next entries until they free `num_bytes`, or until there are none left.

        Their keys, in order, with the bytes of each.
        """
        taken: dict[bytes, int] = {}
        while num_bytes > 0:
            best = until = inf
            chosen: float | None = None
            for cost, places in self._lanes.items():
                if places:
                    priority = next(iter(places.values())) + cost
                    if priority < best:
                        best, until, chosen = priority, best, cost
                    elif priority < until:
                        until = priority
            if chosen is None:
                break
            num_bytes -= self._take_from(chosen, until, num_bytes, taken)
        return taken

    def _take_from(self, cost: float, until: float, num_bytes: int, taken: dict[bytes, int]) -> int:
        """From one lane, while its next is the next of all; the bytes freed."""
        places, used, freed = self._lanes[cost], 0.0, 0
        take_next, remove, alone = places.popitem, self._entries.pop, until == inf
        while freed < num_bytes and places:
            if not alone and next(iter(places.values())) + cost > until:
                break
            key, used = take_next(last=False)
            taken[key] = size = remove(key).num_bytes
            freed += size
        self._clock = max(self._clock, used + cost)
        return freed

    def keys(self) -> set[bytes]:
        """Every entry that has a place."""
        return {key for places in self._lanes.values() for key in places}

    def _lane(self, cost: float) -> Places:
        rounded = 2.0 ** round(log2(cost)) if cost > 0 else 0.0
        places = self._lanes.get(rounded)
        if places is None:
            places = self._lanes[rounded] = Places()
        return places
