"""Which unheld encoder output leaves next: least recently used, weighted by what it cost per byte.

Greedy dual: the priority of an entry is the clock plus its cost per byte, when it was used last;
the clock moves up to the priority of each entry that leaves. With equal costs this is plain LRU;
what is dear to compute again stays longer, but not for ever if nobody uses it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

_SLACK = 64


class Entry(msgspec.Struct, gc=False):
    """One encoder output in the books of the encoder cache."""

    num_bytes: int
    cost_per_byte: float
    holders: dict[int, int]
    """Holder → how many times it holds this entry."""
    tick: int = 0
    """Names the entry's live place in the order; 0 where it has none."""
    condemned: bool = False
    """Cleared while held: leaves with its last holder."""


class EvictionOrder:
    """A heap of places. Setting an entry's tick to 0 takes its place away; nothing is searched.

    `entries` are the cache's own: what is taken to leave is removed from them.
    """

    __slots__ = ("_clock", "_entries", "_heap", "_tick")

    def __init__(self, entries: dict[bytes, Entry]) -> None:
        self._entries = entries
        self._heap: list[tuple[float, int, bytes]] = []
        """(priority, tick, key); outdated where the tick is not the entry's."""
        self._tick = 0
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: bytes, entry: Entry) -> None:
        """Give an entry that was used now its place, instead of any it had."""
        self._tick += 1
        entry.tick = self._tick
        heapq.heappush(self._heap, (self._clock + entry.cost_per_byte, entry.tick, key))
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._clean()

    def add_many(self, entries: Iterable[tuple[bytes, Entry]]) -> None:
        """As one by one, but the order is put right once."""
        heap, clock, tick = self._heap, self._clock, self._tick
        for key, entry in entries:
            tick += 1
            entry.tick = tick
            heap.append((clock + entry.cost_per_byte, tick, key))
        self._tick = tick
        self._clean()

    def sort(self) -> None:
        """Before much is taken: a sorted list is a heap too, and quicker to take from."""
        self._heap.sort()

    def take(self, num_bytes: int) -> list[tuple[bytes, Entry]]:
        """Remove the next entries until they free `num_bytes`, or until there are none left."""
        taken: list[tuple[bytes, Entry]] = []
        heap, entries = self._heap, self._entries
        while num_bytes > 0 and heap:
            priority, tick, key = heapq.heappop(heap)
            entry = entries.get(key)
            if entry is None or entry.tick != tick:
                continue
            self._clock = priority
            del entries[key]
            taken.append((key, entry))
            num_bytes -= entry.num_bytes
        return taken

    def live_keys(self) -> set[bytes]:
        return {place[2] for place in self._heap if self._is_live(place)}

    def _clean(self) -> None:
        """Leave outdated places out and put the rest in order."""
        self._heap = [place for place in self._heap if self._is_live(place)]
        heapq.heapify(self._heap)

    def _is_live(self, place: tuple[float, int, bytes]) -> bool:
        entry = self._entries.get(place[2])
        return entry is not None and entry.tick == place[1]
