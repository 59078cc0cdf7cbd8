"""Which unheld encoder output leaves next: least recently used, weighted by what it cost per byte.

Greedy dual: an entry's priority is the clock when it was used last plus its cost per byte, and the
clock moves up to the priority of each entry that leaves. With equal costs this is plain LRU; what
is dear to compute again stays longer, but not for ever if nobody uses it.

    lane, by cost class      least recent ──────────▶ most recent
      1 ns per byte          [ k7 @ 3.1 ][ ········ ][ k2 @ 3.4 ]       key @ clock when it was used
      8 ns per byte          [ k1 @ 0.2 ]     ▲
                                              └ gone, or used again: passed over

Within a lane of one cost the first is always the next: so nothing is ever sorted. An entry knows
its place; where it has another by now, or none, the old one is passed over when its turn comes. So
an entry is put in and taken out in O(1), and thousands by one pass over them. Costs are rounded to
powers of two, so there are few lanes: what costs about as much is told apart by its use alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf, log2

import msgspec

SPARE_PLACES = 64
"""Places that nobody has any more, beyond as many as there are entries, before a lane is tidied."""


class CostClass:
    """Places of the entries of one cost class, earliest use first."""

    __slots__ = ("cost", "entries", "first", "live")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        """Per byte, rounded."""
        self.entries: deque[EncoderCacheEntry] = deque()
        """Who had each place first."""
        self.first = 0
        """Number of the first place; they count on for ever."""
        self.live = 0
        """Places that their entry still has."""

    @property
    def end(self) -> int:
        """Number of the next place."""
        return self.first + len(self.entries)


class EvictionOrder:
    """Places of the entries that may leave."""

    __slots__ = ("_lanes", "clock")

    def __init__(self) -> None:
        self._lanes: dict[float, CostClass] = {}
        """Cost per byte, rounded to its class → lane."""
        self.clock = 0.0

    def __len__(self) -> int:
        return sum(lane.live for lane in self._lanes.values())

    @property
    def num_places(self) -> int:
        """Those that an entry has and those to be passed over."""
        return sum(len(lane.entries) for lane in self._lanes.values())

    def add(self, entry: EncoderCacheEntry) -> None:
        """Give an entry that was used now its place, instead of any it had."""
        self.remove(entry)
        lane = self.lane_of(entry)
        entry.lane, entry.place, entry.used = lane.cost, lane.end, self.clock
        lane.entries.append(entry)
        lane.live += 1

    def append(self, lane: CostClass, entries: Collection[EncoderCacheEntry]) -> None:
        """As one by one, for entries that have been told their new places already."""
        lane.entries.extend(entries)
        lane.live += len(entries)

    def remove(self, entry: EncoderCacheEntry) -> None:
        """Take away the place of an entry, if it has one."""
        if entry.lane is None:
            return
        lane = self._lanes[entry.lane]
        entry.lane = None
        lane.live -= 1
        if len(lane.entries) > 2 * lane.live + SPARE_PLACES:
            _tidy(lane)

    def take(self, num_bytes: int) -> list[EncoderCacheEntry]:
        """Remove the next entries until they free `num_bytes`, or until there are none left."""
        taken: list[EncoderCacheEntry] = []
        while num_bytes > 0:
            best = until = inf
            chosen: CostClass | None = None
            for lane in self._lanes.values():
                if lane.live:
                    priority = _pass_over(lane).used + lane.cost
                    if priority < best:
                        best, until, chosen = priority, best, lane
                    elif priority < until:
                        until = priority
            if chosen is None:
                break
            num_bytes -= self._take_from(chosen, until, num_bytes, taken)
        return taken

    def keys(self) -> set[bytes]:
        """Every entry that has a place."""
        return {entry.key for lane in self._lanes.values() for entry in _living(lane)}

    def lane_of(self, entry: EncoderCacheEntry) -> CostClass:
        """The lane of entries of that cost per byte."""
        cost = entry.cost_per_byte
        rounded = 2.0 ** round(log2(cost)) if cost > 0 else 0.0
        lane = self._lanes.get(rounded)
        if lane is None:
            lane = self._lanes[rounded] = CostClass(rounded)
        return lane

    def _take_from(
        self, lane: CostClass, until: float, num_bytes: int, taken: list[EncoderCacheEntry]
    ) -> int:
        """From one lane, while its next is the next of all; the bytes freed."""
        if until == inf and lane.live == len(lane.entries):
            return self._take_any_from(lane, num_bytes, taken)
        entries, cost, place, freed, before = lane.entries, lane.cost, lane.first, 0, len(taken)
        take_first, take_in = entries.popleft, taken.append
        while freed < num_bytes and entries:
            entry = entries[0]
            if entry.place == place and entry.lane == cost:
                if entry.used + cost > until:
                    break
                freed += entry.num_bytes
                entry.lane = None
                take_in(entry)
            take_first()
            place += 1
        lane.first = place
        lane.live -= len(taken) - before
        self.clock = max(self.clock, taken[-1].used + cost)
        return freed

    def _take_any_from(
        self, lane: CostClass, num_bytes: int, taken: list[EncoderCacheEntry]
    ) -> int:
        """As `_take_from` the only lane, where no place has to be passed over."""
        entries, freed, before = lane.entries, 0, len(taken)
        take_first, take_in = entries.popleft, taken.append
        while freed < num_bytes and entries:
            entry = take_first()
            entry.lane = None
            freed += entry.num_bytes
            take_in(entry)
        count = len(taken) - before
        lane.first += count
        lane.live -= count
        self.clock = max(self.clock, taken[-1].used + lane.cost)
        return freed


def _pass_over(lane: CostClass) -> EncoderCacheEntry:
    """The first entry that has its place: there is one."""
    entries = lane.entries
    while True:
        entry = entries[0]
        if entry.place == lane.first and entry.lane == lane.cost:
            return entry
        entries.popleft()
        lane.first += 1


def _living(lane: CostClass) -> list[EncoderCacheEntry]:
    return [
        entry
        for place, entry in enumerate(lane.entries, lane.first)
        if entry.place == place and entry.lane == lane.cost
    ]


def _tidy(lane: CostClass) -> None:
    """Drop the places that nobody has; as many have to be left before it happens again."""
    lane.entries = deque(_living(lane))
    for place, entry in enumerate(lane.entries, lane.first):
        entry.place = place


class EncoderCacheEntry(msgspec.Struct, gc=False):
    """An output that the device holds.

    Nearly always one holder holds it once: `holder`, without a dict. `holders` is for the rest.
    """

    key: bytes
    num_bytes: int
    cost_per_byte: float
    holder: int | None = None
    """Who alone holds it, once."""
    holders: dict[int, int] | None = None
    """Holder → how many times it holds this entry; None while `holder` is enough."""
    lane: float | None = None
    """In which lane of the eviction order its place is; None where it has none."""
    place: int = 0
    used: float = 0.0
    """The order's clock when it was used last."""
    condemned: bool = False
    """Cleared while held: leaves with its last holder."""

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
        """Count one hold less; whether the holder has none any more. `KeyError` if it had none."""
        if self.holders is None:
            if self.holder != holder:
                raise KeyError(holder)
            self.holder = None
            return True
        self.holders[holder] -= 1
        if self.holders[holder]:
            return False
        self.forget(holder)
        return True

    def forget(self, holder: int) -> None:
        """As if the holder had never held it."""
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
