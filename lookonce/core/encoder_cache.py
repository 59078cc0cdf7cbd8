"""Which encoder outputs the device holds, for whom, and how many bytes they take.

    absent ──try_allocate──▶ unheld ──hold──▶ held by one or more holders
       ▲                       │  ▲                │
       └── evicted, cleared ───┘  └── last release ┘

Only unheld entries are evicted: the least recently used first, weighted by what they cost to
compute per byte (`EvictionOrder`). Evicted outputs are copied to the host tier, if there is one,
and restored from there.

Prefetched outputs are awaited: until a sequence holds them they are evicted only when nothing else
can be.

The cache is indexed both ways, holder → keys and key → holders; every change updates both.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Collection
from itertools import repeat
from math import inf, log2

import msgspec

from lookonce.core.host_outputs import NO_MOVES, HostOutputs, Moves
from lookonce.errors import TooLargeError

MANY = 16
"""Number of keys from which on releasing them in one pass is cheaper than one by one."""
SPARE_POSITIONS = 64
"""Stale positions, beyond as many as there are entries, from which on a class is compacted."""


class EncoderCache:
    """Accounts for encoder outputs; the runner keeps the tensors under the same keys.

    A holder is a sequence id. It may hold one key several times (the same picture twice in a
    prompt), and each hold needs its release. The runner must free the keys of `take_dropped`.
    """

    def __init__(self, capacity_bytes: int, row_bytes: int, host_capacity_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.row_bytes = row_bytes
        self.host = HostOutputs(host_capacity_bytes)
        self._entries: dict[bytes, EncoderCacheEntry] = {}
        self._held: dict[int, dict[bytes, EncoderCacheEntry]] = {}
        """Holder → keys it holds; the entry counts how often."""
        self._used_bytes = 0
        self._unheld_bytes = 0
        self._awaited: OrderedDict[bytes, None] = OrderedDict()
        """Unheld keys that were prefetched and not used yet, in that order."""
        self._awaited_bytes = 0
        self._order = EvictionOrder()
        """Unheld entries that are not awaited."""
        self._usual_cost = 0.0
        """Running mean of the recorded costs per byte; assumed for entries without one."""
        self._dropped: list[bytes] = []
        self._changed: set[bytes] | None = None
        """Keys that have come or gone since `take_changes`; None: nobody asks."""
        self._told: set[bytes] = set()
        """Keys that were held at the last `take_changes`."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def held_bytes(self) -> int:
        return self._used_bytes - self._unheld_bytes

    @property
    def num_holders(self) -> int:
        return len(self._held)

    @property
    def has_moves(self) -> bool:
        """Whether the runner must drop outputs, or copy them between device and host."""
        return bool(self._dropped) or (self.host.capacity_bytes > 0 and self.host.has_moves)

    def has_anywhere(self, key: bytes) -> bool:
        """Whether the output is on the device or on the host, and need not be encoded."""
        return key in self._entries or key in self.host.copies

    @property
    def eviction_queue_length(self) -> int:
        """Entries that may be evicted and are not awaited."""
        return len(self._order)

    @property
    def num_eviction_positions(self) -> int:
        """Positions of the eviction order in memory, stale ones included."""
        return self._order.num_positions

    @property
    def max_rows(self) -> int:
        """Rows of the largest output that fits into an empty cache."""
        return self.capacity_bytes // self.row_bytes if self.row_bytes else sys.maxsize

    def refuse_oversize(self, num_embeds: int, what: str) -> None:
        """Raise `TooLargeError`, with size and limit, when `what` does not fit an empty cache."""
        num_bytes = num_embeds * self.row_bytes
        if num_bytes > self.capacity_bytes:
            raise TooLargeError(
                f"{what} needs {num_bytes} bytes of encoder cache; the limit is "
                f"{self.capacity_bytes} bytes",
                param="features",
            )

    def try_allocate(
        self, key: bytes, num_embeds: int, holder: int | None = None
    ) -> tuple[bytes, ...] | None:
        """Make room for an absent key. Returns the unheld keys that had to be evicted for it.

        None, with nothing changed, when held entries leave too little room. With a holder the new
        entry is held once; without one it may be evicted.
        """
        entries = self._entries
        if key in entries:
            raise ValueError("the key is already in the encoder cache")
        num_bytes = num_embeds * self.row_bytes
        evicted: tuple[bytes, ...] = ()
        if self._used_bytes + num_bytes > self.capacity_bytes:
            if self._used_bytes - self._unheld_bytes + num_bytes > self.capacity_bytes:
                self.refuse_oversize(num_embeds, "an item")
                return None
            evicted = self._evict_until(self.capacity_bytes - num_bytes)
        self._used_bytes += num_bytes
        if holder is None:
            entry = entries[key] = EncoderCacheEntry(key, num_bytes, self._usual_cost)
            self._unheld_bytes += num_bytes
            self._order.add(entry)
        else:
            entry = entries[key] = EncoderCacheEntry(key, num_bytes, self._usual_cost, holder)
            self._held.setdefault(holder, {})[key] = entry
        return evicted

    def try_restore(self, key: bytes, num_embeds: int, holder: int) -> tuple[bytes, ...] | None:
        """As `try_allocate` for a key with a host copy, which the next step copies to the device.

        Outputs evicted for it never displace its host copy.
        """
        self.host.restore(key)
        evicted = self.try_allocate(key, num_embeds, holder)
        if evicted is None:
            self.host.cancel_restore(key)
        return evicted

    def try_allocate_many(self, keys: list[bytes], rows: list[int], holder: int) -> bool:
        """As `try_allocate` for each key, held by `holder`.

        False, with nothing changed, when a key is on the device or the host already, is named
        twice, or when all do not fit at once.
        """
        entries, row_bytes = self._entries, self.row_bytes
        total = sum(rows) * row_bytes
        if (
            self._used_bytes - self._unheld_bytes + total > self.capacity_bytes
            or not entries.keys().isdisjoint(keys)
            or (self.host.copies and not self.host.copies.keys().isdisjoint(keys))
        ):
            return False
        sizes = [num_rows * row_bytes for num_rows in rows]
        made = map(EncoderCacheEntry, keys, sizes, repeat(self._usual_cost), repeat(holder))
        new = dict(zip(keys, made, strict=True))
        if len(new) != len(keys):
            return False
        if self._used_bytes + total > self.capacity_bytes:
            self._evict_until(self.capacity_bytes - total)
        entries.update(new)
        held = self._held.get(holder)
        if held is None:
            self._held[holder] = new
        else:
            held.update(new)
        self._used_bytes += total
        return True

    def try_prefetch(self, key: bytes, num_embeds: int) -> bool:
        """Make room for an absent key that a later step needs: its entry is unheld and awaited.

        False, with nothing changed, when a held or awaited entry would have to be evicted, or when
        more than half of the cache would be awaited.
        """
        num_bytes = num_embeds * self.row_bytes
        kept = self._used_bytes - self._unheld_bytes + self._awaited_bytes
        awaited = self._awaited_bytes + num_bytes
        if kept + num_bytes > self.capacity_bytes or 2 * awaited > self.capacity_bytes:
            return False
        if self._used_bytes + num_bytes > self.capacity_bytes:
            self._evict_until(self.capacity_bytes - num_bytes)
        self._entries[key] = EncoderCacheEntry(key, num_bytes, self._usual_cost)
        self._used_bytes += num_bytes
        self._unheld_bytes += num_bytes
        self._awaited[key] = None
        self._awaited_bytes += num_bytes
        return True

    def stop_awaiting(self, key: bytes) -> None:
        """Make a prefetched entry evictable: its sequence does not need it any more."""
        if key in self._awaited:
            entry = self._entries[key]
            self._forget_awaited(entry)
            self._order.add(entry)

    def try_hold(self, holder: int, key: bytes) -> bool:
        """Hold an entry until `release`, as used now; False when the key is absent."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if not entry.is_held:
            self._unheld_bytes -= entry.num_bytes
            self._order.remove(entry)
            if key in self._awaited:
                self._forget_awaited(entry)
        entry.hold(holder)
        self._held.setdefault(holder, {})[key] = entry
        return True

    def release(self, holder: int, key: bytes) -> None:
        """Release one hold. Raises `KeyError` when the holder has none."""
        entry = self._entries[key]
        if entry.release(holder):
            self._forget_holder(holder, key)
            self._settle(entry)

    def release_many(self, holder: int, keys: list[bytes]) -> None:
        """As `release` for each key."""
        if len(keys) >= MANY:
            held = self._held[holder]
            for entry in self._release_alike(holder, [held[key] for key in keys]):
                self.release(holder, entry.key)
        else:
            for key in keys:
                self.release(holder, key)

    def release_all(self, holder: int) -> None:
        """Release all that a holder holds, however often; it may hold nothing."""
        held = self._held.get(holder)
        if held is None:
            return
        if len(held) >= MANY:
            self._release_alike(holder, held.values())
        for entry in self._held.pop(holder, {}).values():
            entry.remove_holder(holder)
            self._settle(entry)

    def _release_alike(
        self, holder: int, entries: Collection[EncoderCacheEntry]
    ) -> list[EncoderCacheEntry]:
        """Release in one pass the entries of one cost that this holder alone holds, once.

        Returns the other entries.
        """
        first = next(iter(entries))
        cost, cost_class, used = first.cost_per_byte, self._order.class_of(first), self._order.clock
        position, class_cost, num_bytes, rest = cost_class.end, cost_class.cost, 0, []
        for entry in entries:
            if entry.holder == holder and entry.cost_per_byte == cost and not entry.condemned:
                entry.holder = None
                entry.cost_class = class_cost
                entry.position = position
                entry.used = used
                position += 1
                num_bytes += entry.num_bytes
            else:
                rest.append(entry)
        released = entries if not rest else [entry for entry in entries if not entry.is_held]
        self._unheld_bytes += num_bytes
        self._order.append(cost_class, released)
        self._forget_held(holder, released)
        return rest

    def _forget_held(self, holder: int, entries: Collection[EncoderCacheEntry]) -> None:
        held = self._held[holder]
        if len(entries) == len(held):
            del self._held[holder]
        else:
            for entry in entries:
                del held[entry.key]

    def holders(self, key: bytes) -> tuple[int, ...]:
        entry = self._entries.get(key)
        return () if entry is None else entry.all_holders()

    def held_keys(self, holder: int) -> tuple[bytes, ...]:
        return tuple(self._held.get(holder, ()))

    def remove_failed(self, key: bytes) -> None:
        """Remove an output that could not be computed or restored, and all its holds.

        It is also named in `take_dropped`: a runner that failed half way may have kept it.
        """
        self.host.forget(key)
        entry = self._entries.get(key)
        if entry is None:
            return
        for holder in entry.all_holders():
            self._forget_holder(holder, key)
        if not entry.is_held:
            self._unheld_bytes -= entry.num_bytes
        self._drop(entry)

    def record_cost(self, key: bytes, seconds: float) -> None:
        """Record how long computing the output took: costly outputs stay longer once unheld."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.cost_per_byte = seconds / max(entry.num_bytes, 1)
            usual = self._usual_cost or entry.cost_per_byte
            self._usual_cost = 0.9 * usual + 0.1 * entry.cost_per_byte
            if entry.cost_class is not None:
                self._order.add(entry)

    def clear(self) -> None:
        """Drop unheld entries and host copies; held entries are dropped with their last holder."""
        self.host.clear()
        for entry in list(self._entries.values()):
            entry.condemned = True
            if not entry.is_held:
                self._unheld_bytes -= entry.num_bytes
                self._drop(entry)

    def take_moves(self) -> Moves:
        """What the runner must do with host memory."""
        return self.host.take_moves() if self.host.capacity_bytes else NO_MOVES

    def take_dropped(self) -> tuple[bytes, ...]:
        """Keys that were dropped or evicted since the last call, in order."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped

    def watch(self) -> None:
        """From now on `take_changes` says which outputs have come and gone."""
        self._changed = self.host.changed = set(self._entries) | set(self.host.copies)
        self._entries = WatchedEntries(self._entries, self._changed)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that are held, on the device or the host, and were not at the last call; and those
        of which the reverse is true."""
        if not self._changed:
            return [], []
        held = {key for key in self._changed if self.has_anywhere(key)}
        come = [key for key in held if key not in self._told]
        gone = [key for key in self._changed if key not in held and key in self._told]
        self._changed.clear()
        self._told.update(come)
        self._told.difference_update(gone)
        return come, gone

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where bytes, holders and the eviction order disagree."""
        entries = self._entries
        unheld = {key: entry for key, entry in entries.items() if not entry.is_held}
        if self._used_bytes != sum(e.num_bytes for e in entries.values()):
            raise RuntimeError("used bytes differ from the entries' sum")
        if self._unheld_bytes != sum(e.num_bytes for e in unheld.values()):
            raise RuntimeError("unheld bytes differ from the unheld entries' sum")
        if self._used_bytes > self.capacity_bytes:
            raise RuntimeError("the encoder cache is over its capacity")
        by_holder = {(h, key) for h, keys in self._held.items() for key in keys}
        if by_holder != {(h, key) for key, e in entries.items() for h in e.all_holders()}:
            raise RuntimeError("holders and held keys disagree")
        if any(not keys for keys in self._held.values()):
            raise RuntimeError("a holder of nothing is still listed")
        live = self._order.keys()
        if live | self._awaited.keys() != unheld.keys() or live & self._awaited.keys():
            raise RuntimeError("an unheld entry cannot be evicted")
        if self._awaited_bytes != sum(entries[key].num_bytes for key in self._awaited):
            raise RuntimeError("awaited bytes differ from the awaited entries' sum")
        self.host.check_integrity()

    def _forget_holder(self, holder: int, key: bytes) -> None:
        keys = self._held[holder]
        del keys[key]
        if not keys:
            del self._held[holder]

    def _settle(self, entry: EncoderCacheEntry) -> None:
        """After a release: an unheld entry becomes evictable, or is dropped if it was condemned."""
        if entry.is_held:
            return
        if entry.condemned:
            self._drop(entry)
        else:
            self._unheld_bytes += entry.num_bytes
            self._order.add(entry)

    def _evict_until(self, room: int) -> tuple[bytes, ...]:
        """Evict until at most `room` bytes are used.

        Entries that are not awaited go first, then those prefetched last, which are needed last.
        """
        left = self._order.take(self._used_bytes - room)
        freed = sum([entry.num_bytes for entry in left])
        while self._used_bytes - freed > room:
            entry = self._entries[next(reversed(self._awaited))]
            self._forget_awaited(entry)
            left.append(entry)
            freed += entry.num_bytes
        for entry in left:
            del self._entries[entry.key]
        if self.host.capacity_bytes:
            for entry in left:
                self.host.keep(entry.key, entry.num_bytes)
        self._unheld_bytes -= freed
        self._used_bytes -= freed
        evicted = tuple([entry.key for entry in left])
        self._dropped += evicted
        return evicted

    def _drop(self, entry: EncoderCacheEntry) -> None:
        del self._entries[entry.key]
        self._order.remove(entry)
        if entry.key in self._awaited:
            self._forget_awaited(entry)
        self._used_bytes -= entry.num_bytes
        self._dropped.append(entry.key)

    def _forget_awaited(self, entry: EncoderCacheEntry) -> None:
        del self._awaited[entry.key]
        self._awaited_bytes -= entry.num_bytes


class WatchedEntries(dict[bytes, "EncoderCacheEntry"]):
    """Entries that add to a set each key that comes or goes, by the operations that the cache uses:
    so that a cache that nobody watches does nothing for it."""

    def __init__(self, entries: dict[bytes, EncoderCacheEntry], changed: set[bytes]) -> None:
        super().__init__(entries)
        self._changed = changed

    def __setitem__(self, key: bytes, entry: EncoderCacheEntry) -> None:
        self._changed.add(key)
        super().__setitem__(key, entry)

    def __delitem__(self, key: bytes) -> None:
        self._changed.add(key)
        super().__delitem__(key)

    def update(self, new: dict[bytes, EncoderCacheEntry]) -> None:  # type: ignore[override]
        self._changed.update(new)
        super().update(new)


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
    """Which entry is evicted next: GreedyDual-Size (Cao and Irani, 1997).

    An entry's priority is the clock at its last use plus its cost per byte, and the clock moves up
    to the priority of each entry that is evicted. With equal costs this is LRU; an output that
    takes long to compute stays longer, but not for ever if it is not used.

        cost class       least recent ──────────▶ most recent
          1 ns per byte  [ k7 @ 3.1 ][ ········ ][ k2 @ 3.4 ]       key @ clock at its last use
          8 ns per byte  [ k1 @ 0.2 ]     ▲
                                          └ stale: evicted, or used again since

    Costs are rounded to powers of two, so there are few classes. Within a class the first entry is
    always the next, so nothing is sorted. An entry knows its class and position; a position that
    its entry has left is stale, and is skipped when it becomes the first. So entries are added and
    removed in O(1), and thousands of them in one pass.
    """

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
