"""Which engines hold what: digest → engines.

A table of open addressing per 1/64 of all digests, so that no single growth takes long:

    keys   uint64[capacity]   the first 8 bytes of a digest; 0: the slot is free
    masks  uint64[capacity]   bit i: engine i of this table's 64 engines holds it

An entry takes 16 bytes of a table that is 0.3 to 0.6 full: at most 54 bytes. More than 64 engines
get tables of their own. Two digests that share 8 bytes make a price wrong, never an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

ENGINES_PER_TABLE = 64
NUM_PARTS = 64
MIN_CAPACITY = 16
MAX_FILL = 0.6
DEFAULT_MAX_ENTRIES = 10_000_000


def short(digest: bytes | int) -> int:
    """The number a digest is listed under; never 0. Peers' block hashes may be numbers."""
    if isinstance(digest, int):
        return (digest & 0xFFFF_FFFF_FFFF_FFFF) or 1
    return int.from_bytes(digest[:8], "little") or 1


class DigestIndex:
    """Digest → engines, which are small numbers. Not thread-safe.

    Beyond `max_entries` (of each 64 engines) any other entry is forgotten for a new one.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        self._max_part = max(1, max_entries // NUM_PARTS)
        self._tables: list[list[_Part]] = []
        self.num_forgotten = 0
        """Entries that gave way to new ones."""

    def add(self, engine: int, keys: Iterable[int]) -> None:
        parts, bit = self._parts(engine), 1 << engine % ENGINES_PER_TABLE
        for key in keys:
            self.num_forgotten += parts[key >> 58].add(key, bit, self._max_part)

    def remove(self, engine: int, keys: Iterable[int]) -> None:
        """Keys that the engine is not known to hold are left out."""
        parts, bit = self._parts(engine), 1 << engine % ENGINES_PER_TABLE
        for key in keys:
            parts[key >> 58].remove(key, bit)

    def drop(self, engine: int) -> None:
        """The engine holds nothing any more."""
        if engine // ENGINES_PER_TABLE < len(self._tables):
            for part in self._parts(engine):
                part.drop(1 << engine % ENGINES_PER_TABLE)

    def holders(self, key: int) -> int:
        """A bit for each engine that holds `key`."""
        found = 0
        for number, parts in enumerate(self._tables):
            found |= parts[key >> 58].mask(key) << number * ENGINES_PER_TABLE
        return found

    def holds(self, engine: int, key: int) -> bool:
        """Whether one engine holds `key`; quicker than `holders` where there are many."""
        table, bit = divmod(engine, ENGINES_PER_TABLE)
        return table < len(self._tables) and bool(
            self._tables[table][key >> 58].mask(key) >> bit & 1
        )

    def held(self, engine: int) -> set[int]:
        """All keys of one engine; slow."""
        if engine // ENGINES_PER_TABLE >= len(self._tables):
            return set()
        bit = 1 << engine % ENGINES_PER_TABLE
        return {key for part in self._parts(engine) for key in part.held(bit)}

    def __len__(self) -> int:
        return sum(part.used for parts in self._tables for part in parts)

    @property
    def num_bytes(self) -> int:
        return sum(16 * part.capacity for parts in self._tables for part in parts)

    def check_integrity(self) -> None:
        for parts in self._tables:
            for number, part in enumerate(parts):
                part.check_integrity(number)
                assert part.used <= self._max_part

    def _parts(self, engine: int) -> list[_Part]:
        table = engine // ENGINES_PER_TABLE
        while len(self._tables) <= table:
            self._tables.append([_Part() for _ in range(NUM_PARTS)])
        return self._tables[table]


class _Part:
    """One table: linear probing, backward-shift deletion (Knuth, TAOCP 3, 6.4, algorithm R)."""

    __slots__ = ("_cursor", "_keys", "_masks", "capacity", "used")

    def __init__(self, capacity: int = MIN_CAPACITY) -> None:
        self.capacity = capacity
        self.used = 0
        self._keys = array("Q", bytes(8 * capacity))
        self._masks = array("Q", bytes(8 * capacity))
        self._cursor = 0
        """Where the next entry to forget is looked for."""

    def add(self, key: int, bit: int, most: int) -> int:
        """Returns how many other entries were forgotten for it."""
        at = self._find(key)
        if self._keys[at]:
            self._masks[at] |= bit
            return 0
        forgotten = 0
        if self.used >= most:
            self._forget_one()
            forgotten, at = 1, self._find(key)
        elif self.used + 1 > MAX_FILL * self.capacity:
            self._rebuild(2 * self.capacity)
            at = self._find(key)
        self._keys[at], self._masks[at] = key, bit
        self.used += 1
        return forgotten

    def remove(self, key: int, bit: int) -> None:
        at = self._find(key)
        if self._keys[at]:
            self._masks[at] &= ~bit & 0xFFFF_FFFF_FFFF_FFFF
            if not self._masks[at]:
                self._free(at)

    def drop(self, bit: int) -> None:
        masks = np.frombuffer(self._masks, np.uint64) & np.uint64(~bit & 0xFFFF_FFFF_FFFF_FFFF)
        self._masks = array("Q", masks.tobytes())
        capacity, left = MIN_CAPACITY, int(np.count_nonzero(masks))
        while left + 1 > MAX_FILL * capacity:
            capacity *= 2
        self._rebuild(capacity)

    def mask(self, key: int) -> int:
        return self._masks[self._find(key)]

    def held(self, bit: int) -> list[int]:
        pairs = zip(self._keys, self._masks, strict=True)
        return [key for key, mask in pairs if mask & bit]

    def check_integrity(self, number: int) -> None:
        keys = [key for key in self._keys if key]
        assert len(keys) == len(set(keys)) == self.used <= MAX_FILL * self.capacity
        assert all(key >> 58 == number for key in keys)
        for at, (key, mask) in enumerate(zip(self._keys, self._masks, strict=True)):
            assert bool(key) == bool(mask)
            assert not key or self._find(key) == at

    def _find(self, key: int) -> int:
        """The slot of `key`, or the free one where it would be."""
        keys, last = self._keys, self.capacity - 1
        at = key & last
        while keys[at] and keys[at] != key:
            at = (at + 1) & last
        return at

    def _free(self, at: int) -> None:
        """Free a slot, and move what probing would not find behind it."""
        keys, masks, last = self._keys, self._masks, self.capacity - 1
        follower = at
        while True:
            follower = (follower + 1) & last
            key = keys[follower]
            if not key:
                break
            if (follower - key) & last >= (follower - at) & last:
                keys[at], masks[at] = key, masks[follower]
                at = follower
        keys[at] = masks[at] = 0
        self.used -= 1

    def _forget_one(self) -> None:
        last = self.capacity - 1
        while not self._keys[self._cursor & last]:
            self._cursor += 1
        self._free(self._cursor & last)
        self._cursor += 1

    def _rebuild(self, capacity: int) -> None:
        """Put all entries that someone holds into a table of `capacity` slots."""
        keys, masks = np.frombuffer(self._keys, np.uint64), np.frombuffer(self._masks, np.uint64)
        held = masks != 0
        keys, masks = keys[held], masks[held]
        homes = (keys & np.uint64(capacity - 1)).astype(np.int64)
        order = np.argsort(homes, kind="stable")
        keys, masks, homes = keys[order], masks[order], homes[order]
        steps = np.arange(len(homes))
        places = np.maximum.accumulate(homes - steps) + steps if len(homes) else homes
        fits = places < capacity
        new_keys, new_masks = np.zeros(capacity, np.uint64), np.zeros(capacity, np.uint64)
        new_keys[places[fits]], new_masks[places[fits]] = keys[fits], masks[fits]
        self.capacity, self.used, self._cursor = capacity, len(homes), 0
        self._keys, self._masks = (
            array("Q", new_keys.tobytes()),
            array("Q", new_masks.tobytes()),
        )
        for key, mask in zip(keys[~fits].tolist(), masks[~fits].tolist(), strict=True):
            at = self._find(key)  # what does not fit at the end goes on at the beginning
            self._keys[at], self._masks[at] = key, mask
