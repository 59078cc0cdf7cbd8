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

from lookonce.core.outputs import Entry

SPARE_PLACES = 64
"""Places that nobody has any more, beyond as many as there are entries, before a lane is tidied."""


class Lane:
    """Places of the entries of one cost class, earliest use first."""

    __slots__ = ("cost", "entries", "first", "live")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        """Per byte, rounded."""
        self.entries: deque[Entry] = deque()
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
        self._lanes: dict[float, Lane] = {}
        """Cost per byte, rounded to its class → lane."""
        self.clock = 0.0

    def __len__(self) -> int:
        return sum(lane.live for lane in self._lanes.values())

    @property
    def num_places(self) -> int:
        """Those that an entry has and those to be passed over."""
        return sum(len(lane.entries) for lane in self._lanes.values())

    def add(self, entry: Entry) -> None:
        """Give an entry that was used now its place, instead of any it had."""
        self.remove(entry)
        lane = self.lane_of(entry)
        entry.lane, entry.place, entry.used = lane.cost, lane.end, self.clock
        lane.entries.append(entry)
        lane.live += 1

    def append(self, lane: Lane, entries: Collection[Entry]) -> None:
        """As one by one, for entries that have been told their new places already."""
        lane.entries.extend(entries)
        lane.live += len(entries)

    def remove(self, entry: Entry) -> None:
        """Take away the place of an entry, if it has one."""
        if entry.lane is None:
            return
        lane = self._lanes[entry.lane]
        entry.lane = None
        lane.live -= 1
        if len(lane.entries) > 2 * lane.live + SPARE_PLACES:
            _tidy(lane)

    def take(self, num_bytes: int) -> list[Entry]:
        """Remove the next entries until they free `num_bytes`, or until there are none left."""
        taken: list[Entry] = []
        while num_bytes > 0:
            best = until = inf
            chosen: Lane | None = None
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

    def lane_of(self, entry: Entry) -> Lane:
        """The lane of entries of that cost per byte."""
        cost = entry.cost_per_byte
        rounded = 2.0 ** round(log2(cost)) if cost > 0 else 0.0
        lane = self._lanes.get(rounded)
        if lane is None:
            lane = self._lanes[rounded] = Lane(rounded)
        return lane

    def _take_from(self, lane: Lane, until: float, num_bytes: int, taken: list[Entry]) -> int:
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

    def _take_any_from(self, lane: Lane, num_bytes: int, taken: list[Entry]) -> int:
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


def _pass_over(lane: Lane) -> Entry:
    """The first entry that has its place: there is one."""
    entries = lane.entries
    while True:
        entry = entries[0]
        if entry.place == lane.first and entry.lane == lane.cost:
            return entry
        entries.popleft()
        lane.first += 1


def _living(lane: Lane) -> list[Entry]:
    return [
        entry
        for place, entry in enumerate(lane.entries, lane.first)
        if entry.place == place and entry.lane == lane.cost
    ]


def _tidy(lane: Lane) -> None:
    """Drop the places that nobody has; as many have to be left before it happens again."""
    lane.entries = deque(_living(lane))
    for place, entry in enumerate(lane.entries, lane.first):
        entry.place = place
