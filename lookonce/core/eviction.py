"""Which encoder output is evicted next: GreedyDual-Size (Cao and Irani, 1997).

An entry's priority is the clock at its last use plus its cost per byte, and the clock moves up to
the priority of each entry that is evicted. With equal costs this is LRU; an output that takes long
to compute stays longer, but not for ever if it is not used.

    cost class       least recent ──────────▶ most recent
      1 ns per byte  [ k7 @ 3.1 ][ ········ ][ k2 @ 3.4 ]       key @ clock at its last use
      8 ns per byte  [ k1 @ 0.2 ]     ▲
                                      └ stale: evicted, or used again since

Costs are rounded to powers of two, so there are few classes. Within a class the first entry is
always the next, so nothing is sorted. An entry knows its class and position; a position that its
entry has left is stale, and is skipped when it becomes the first. So entries are added and removed
in O(1), and thousands of them in one pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf, log2

import msgspec

SPARE_POSITIONS = 64
"""Stale positions, beyond as many as there are entries, from which on a class is compacted."""


class EncoderCacheEntry(msgspec.Struct, gc=False):
    """An encoder output on the device: its size, its holders, and its position for eviction.

    Nearly every entry is held at most once, by one holder: `holder`. `holders` is for the rest.
    """

    key: bytes
    num_bytes: int
    cost_per_byte: float
    holder: int | None = None
    """The only holder, if it holds the entry once."""
    holders: dict[int, int] | None = None
    """Holder → how many times it holds the entry; None where `holder` is enough."""
    cost_class: float | None = None
    """The cost of its class in the eviction order; None where it has no position."""
    position: int = 0
    used: float = 0.0
    """The clock of the eviction order at its last use."""
    condemned: bool = False
    """The cache was cleared while the entry was held: it is dropped with its last holder."""

    @property
    def is_held(self) -> bool:
        return self.holder is not None or self.holders is not None

    def hold(self, holder: int) -> None:
        """Count one more hold."""
        if self.holders is None:
            if self.holder is None:
                self.holder = holder
                return
            self.holders, self.holder = {self.holder: 1}, None
        self.holders[holder] = self.holders.get(holder, 0) + 1

    def release(self, holder: int) -> bool:
        """Count one hold less. Returns whether it was the holder's last; `KeyError` without one."""
        if self.holders is None:
            if self.holder != holder:
                raise KeyError(holder)
            self.holder = None
            return True
        self.holders[holder] -= 1
        if self.holders[holder]:
            return False
        self.remove_holder(holder)
        return True

    def remove_holder(self, holder: int) -> None:
        """Remove all holds of one holder."""
        if self.holders is None:
            self.holder = None
        elif len(self.holders) > 1:
            del self.holders[holder]
        else:
            self.holders = None

    def all_holders(self) -> tuple[int, ...]:
        if self.holders is not None:
            return tuple(self.holders)
        return () if self.holder is None else (self.holder,)


class EvictionOrder:
    """The entries that may be evicted."""

    __slots__ = ("_classes", "clock")

    def __init__(self) -> None:
        self._classes: dict[float, CostClass] = {}
        """Cost per byte, rounded → class."""
        self.clock = 0.0

    def __len__(self) -> int:
        return sum(cost_class.num_entries for cost_class in self._classes.values())

    @property
    def num_positions(self) -> int:
        """Positions in memory, stale ones included."""
        return sum(len(cost_class.entries) for cost_class in self._classes.values())

    def add(self, entry: EncoderCacheEntry) -> None:
        """Put an entry last in its class, as used now; leaves any position it had."""
        self.remove(entry)
        cost_class = self.class_of(entry)
        entry.cost_class, entry.position, entry.used = cost_class.cost, cost_class.end, self.clock
        cost_class.entries.append(entry)
        cost_class.num_entries += 1

    def append(self, cost_class: CostClass, entries: Collection[EncoderCacheEntry]) -> None:
        """As `add` for each, for entries whose class, position and use the caller has set."""
        cost_class.entries.extend(entries)
        cost_class.num_entries += len(entries)

    def remove(self, entry: EncoderCacheEntry) -> None:
        """Take an entry out, if it is in."""
        if entry.cost_class is None:
            return
        cost_class = self._classes[entry.cost_class]
        entry.cost_class = None
        cost_class.num_entries -= 1
        if len(cost_class.entries) > 2 * cost_class.num_entries + SPARE_POSITIONS:
            cost_class.compact()

    def take(self, num_bytes: int) -> list[EncoderCacheEntry]:
        """Remove and return the next entries until they free `num_bytes`, or none are left."""
        taken: list[EncoderCacheEntry] = []
        while num_bytes > 0:
            best = until = inf
            chosen: CostClass | None = None
            for cost_class in self._classes.values():
                if cost_class.num_entries:
                    priority = cost_class.skip_stale().used + cost_class.cost
                    if priority < best:
                        best, until, chosen = priority, best, cost_class
                    elif priority < until:
                        until = priority
            if chosen is None:
                break
            num_bytes -= self._take_from(chosen, until, num_bytes, taken)
        return taken

    def keys(self) -> set[bytes]:
        """Keys of all entries."""
        classes = self._classes.values()
        return {entry.key for cost_class in classes for entry in cost_class.current_entries()}

    def class_of(self, entry: EncoderCacheEntry) -> CostClass:
        """The class of the entry's cost per byte."""
        cost = entry.cost_per_byte
        rounded = 2.0 ** round(log2(cost)) if cost > 0 else 0.0
        cost_class = self._classes.get(rounded)
        if cost_class is None:
            cost_class = self._classes[rounded] = CostClass(rounded)
        return cost_class

    def _take_from(
        self, source: CostClass, until: float, num_bytes: int, taken: list[EncoderCacheEntry]
    ) -> int:
        """Move entries of one class to `taken` while their priority is at most `until`.

        Stops once they free `num_bytes`. Returns the bytes freed.
        """
        if until == inf and source.num_entries == len(source.entries):
            return self._take_any_from(source, num_bytes, taken)
        entries, cost, position, freed = source.entries, source.cost, source.first, 0
        before = len(taken)
        take_first, take_in = entries.popleft, taken.append
        while freed < num_bytes and entries:
            entry = entries[0]
            if entry.position == position and entry.cost_class == cost:
                if entry.used + cost > until:
                    break
                freed += entry.num_bytes
                entry.cost_class = None
                take_in(entry)
            take_first()
            position += 1
        source.first = position
        source.num_entries -= len(taken) - before
        self.clock = max(self.clock, taken[-1].used + cost)
        return freed

    def _take_any_from(
        self, source: CostClass, num_bytes: int, taken: list[EncoderCacheEntry]
    ) -> int:
        """As `_take_from` the only class with entries, where no position is stale."""
        entries, freed, before = source.entries, 0, len(taken)
        take_first, take_in = entries.popleft, taken.append
        while freed < num_bytes and entries:
            entry = take_first()
            entry.cost_class = None
            freed += entry.num_bytes
            take_in(entry)
        count = len(taken) - before
        source.first += count
        source.num_entries -= count
        self.clock = max(self.clock, taken[-1].used + source.cost)
        return freed


class CostClass:
    """Entries of about the same cost per byte, the least recently used first."""

    __slots__ = ("cost", "entries", "first", "num_entries")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        """Per byte, rounded."""
        self.entries: deque[EncoderCacheEntry] = deque()
        """The entry that was put in each position, stale ones included."""
        self.first = 0
        """Number of the first position; numbers are not used again."""
        self.num_entries = 0
        """Positions that are not stale."""

    @property
    def end(self) -> int:
        """Number of the next position."""
        return self.first + len(self.entries)

    def skip_stale(self) -> EncoderCacheEntry:
        """The first entry, after dropping the stale positions before it; there must be one."""
        while True:
            entry = self.entries[0]
            if entry.position == self.first and entry.cost_class == self.cost:
                return entry
            self.entries.popleft()
            self.first += 1

    def current_entries(self) -> list[EncoderCacheEntry]:
        """The entries whose position is not stale."""
        return [
            entry
            for position, entry in enumerate(self.entries, self.first)
            if entry.position == position and entry.cost_class == self.cost
        ]

    def compact(self) -> None:
        """Drop all stale positions."""
        self.entries = deque(self.current_entries())
        for position, entry in enumerate(self.entries, self.first):
            entry.position = position
