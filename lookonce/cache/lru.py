"""A byte-bounded cache in least-recently-used order, with pins. Every operation is O(1).

    unpinned   [ least recent … most recent ]   evicted from the left
    pinned     { … }                            never evicted

    nbytes = sum of both; nbytes <= capacity_bytes; pinned_bytes = sum of the second

A pin belongs to a key, not to an entry: it may be taken before the entry exists and outlives
`clear`, so whoever took a pin always gives back exactly that one. When its last pin goes, an entry
becomes the most recent one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Evicted(Generic[V]):
    key: bytes
    size: int
    value: V


class ByteLRU(Generic[V]):
    """key → (size in bytes, value), at most `capacity_bytes` in all."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError("capacity_bytes must not be negative")
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self.pinned_bytes = 0
        self._unpinned: OrderedDict[bytes, tuple[int, V]] = OrderedDict()
        self._pinned: dict[bytes, tuple[int, V]] = {}
        self._pins: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._unpinned) + len(self._pinned)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pinned or key in self._unpinned

    def __iter__(self) -> Iterator[bytes]:
        """Unpinned keys, least recent first, then pinned ones."""
        yield from self._unpinned
        yield from self._pinned

    @property
    def num_pins(self) -> int:
        """Pins of all keys together. O(keys pinned)."""
        return sum(self._pins.values())

    def peek(self, key: bytes) -> V | None:
        """The value, leaving recency as it is."""
        entry = self._entry(key)
        return None if entry is None else entry[1]

    def size_of(self, key: bytes) -> int | None:
        entry = self._entry(key)
        return None if entry is None else entry[0]

    def get(self, key: bytes) -> V | None:
        """The value; its entry becomes the most recent."""
        if key in self._unpinned:
            self._unpinned.move_to_end(key)
        return self.peek(key)

    def pin(self, key: bytes) -> None:
        count = self._pins.get(key, 0)
        self._pins[key] = count + 1
        entry = self._unpinned.pop(key, None)
        if entry is not None:
            self._pinned[key] = entry
            self.pinned_bytes += entry[0]

    def unpin(self, key: bytes) -> None:
        """Give back one pin. Raises `ValueError` when there is none."""
        count = self._pins.get(key, 0)
        if count == 0:
            raise ValueError("unpin of a key that is not pinned")
        if count > 1:
            self._pins[key] = count - 1
            return
        del self._pins[key]
        entry = self._pinned.pop(key, None)
        if entry is not None:
            self.pinned_bytes -= entry[0]
            self._unpinned[key] = entry

    def try_insert(self, key: bytes, size: int, value: V) -> list[Evicted[V]] | None:
        """Insert as the most recent and say what was evicted for it, least recent first.

        None, and nothing changed, when it does not fit beside the pinned entries. Raises
        `ValueError` for a key that is present or a negative size.
        """
        if key in self or size < 0:
            raise ValueError("insert of a present key or a negative size")
        if self.pinned_bytes + size > self.capacity_bytes:
            return None
        evicted = []
        while self.nbytes + size > self.capacity_bytes:
            evicted.append(self._evict())
        self.nbytes += size
        if key in self._pins:
            self._pinned[key] = (size, value)
            self.pinned_bytes += size
        else:
            self._unpinned[key] = (size, value)
        return evicted

    def remove(self, key: bytes) -> V | None:
        """Take an entry out, pinned or not; its pins stay with the key."""
        entry = self._unpinned.pop(key, None)
        if entry is None:
            entry = self._pinned.pop(key, None)
            if entry is None:
                return None
            self.pinned_bytes -= entry[0]
        self.nbytes -= entry[0]
        return entry[1]

    def clear(self) -> None:
        """Drop every entry; pins stay."""
        self._unpinned.clear()
        self._pinned.clear()
        self.nbytes = self.pinned_bytes = 0

    def check_integrity(self) -> None:
        """Recount everything. Raises `AssertionError` naming the rule that is broken. O(n)."""
        unpinned = sum(size for size, _ in self._unpinned.values())
        pinned = sum(size for size, _ in self._pinned.values())
        rules = {
            "nbytes is the sum of all entries": self.nbytes == unpinned + pinned,
            "pinned_bytes is the sum of pinned entries": self.pinned_bytes == pinned,
            "entries fit the capacity": self.nbytes <= self.capacity_bytes,
            "an entry is pinned or unpinned": not self._pinned.keys() & self._unpinned.keys(),
            "pinned entries have pins": self._pinned.keys() <= self._pins.keys(),
            "unpinned entries have none": not self._unpinned.keys() & self._pins.keys(),
            "pins are positive": all(count > 0 for count in self._pins.values()),
        }
        for rule, holds in rules.items():
            if not holds:
                raise AssertionError(rule)

    def _entry(self, key: bytes) -> tuple[int, V] | None:
        return self._pinned.get(key) or self._unpinned.get(key)

    def _evict(self) -> Evicted[V]:
        key, (size, value) = self._unpinned.popitem(last=False)
        self.nbytes -= size
        return Evicted(key, size, value)
