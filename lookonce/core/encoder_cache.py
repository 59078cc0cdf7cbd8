"""Which encoder outputs the device holds, for whom, and how many bytes they take.

    absent ──try_allocate──▶ unheld ──hold──▶ held by one or more holders
       ▲                       │  ▲                │
       └── evicted, cleared ───┘  └── last release ┘

Only unheld entries leave. The next to leave is the least recently used, weighted by what it cost
to compute per byte (see `eviction`).

What leaves for room goes to the host tier, if there is one, and is restored from there. Outputs
that were prefetched are awaited: until somebody holds them they leave only when nothing else can.

The index runs both ways, holder → keys and key → holders, and every change updates both.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection
from itertools import repeat

import msgspec

from lookonce.core.eviction import EncoderCacheEntry, EvictionOrder
from lookonce.core.host_outputs import HostOutputs
from lookonce.errors import TooLargeError

MANY = 16
"""Keys released at once from which on one pass is cheaper than settling one after the other."""


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """Room made for one output, and the keys that had to leave for it."""

    key: bytes
    num_bytes: int
    evicted: tuple[bytes, ...] = ()


class EncoderCache:
    """Accounts for encoder outputs; the runner keeps the tensors under the same keys.

    A holder is a sequence id. One holder may hold one key several times (the same picture twice
    in a prompt); each hold needs its release. `take_dropped` names the keys that left since it
    was last asked: the runner must free those.
    """

    def __init__(self, capacity_bytes: int, row_bytes: int, host_capacity_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.row_bytes = row_bytes
        self.host = HostOutputs(host_capacity_bytes)
        self._entries: dict[bytes, EncoderCacheEntry] = {}
        self._held: dict[int, dict[bytes, EncoderCacheEntry]] = {}
        """Holder → keys it holds; each entry counts how often."""
        self._used_bytes = 0
        self._unheld_bytes = 0
        self._awaited: OrderedDict[bytes, None] = OrderedDict()
        """Unheld entries that somebody will need soon, in the order they were prefetched."""
        self._awaited_bytes = 0
        self._order = EvictionOrder()
        """Unheld entries that nobody awaits."""
        self._usual_cost = 0.0
        """Running mean of the recorded costs per byte; stands in where none was recorded."""
        self._dropped: list[bytes] = []

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
        """Whether the runner has to be told of anything that left or moves."""
        return bool(self._dropped) or self.host.has_moves

    def has_anywhere(self, key: bytes) -> bool:
        """Whether the output need not be encoded: it is on the device or on the host."""
        return key in self._entries or key in self.host.copies

    @property
    def eviction_queue_length(self) -> int:
        """Entries that may leave and that nobody awaits."""
        return len(self._order)

    @property
    def num_places(self) -> int:
        """Places of the eviction order in memory, those that nobody has any more too."""
        return self._order.num_places

    @property
    def max_rows(self) -> int:
        """Rows of the largest output that fits at all."""
        return self.capacity_bytes // self.row_bytes if self.row_bytes else sys.maxsize

    def refuse_oversize(self, num_embeds: int, what: str) -> None:
        """Raise `TooLargeError` when `what` could never fit, with its size and the limit."""
        num_bytes = num_embeds * self.row_bytes
        if num_bytes > self.capacity_bytes:
            raise TooLargeError(
                f"{what} needs {num_bytes} bytes of encoder cache; the limit is "
                f"{self.capacity_bytes} bytes",
                param="features",
            )

    def try_allocate(
        self, key: bytes, num_embeds: int, holder: int | None = None
    ) -> Allocation | None:
        """Make room for an absent key, evicting unheld entries only as far as needed.

        None, with nothing changed, when what is held leaves too little room. With a holder the
        new entry is held once from the start; without one it is evictable.
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
        return Allocation(key, num_bytes, evicted)

    def try_restore(self, key: bytes, num_embeds: int, holder: int) -> Allocation | None:
        """As `try_allocate` for a key with a host copy, which goes to the device in the next step.

        What leaves the device for it never pushes its own copy out.
        """
        self.host.restore(key)
        allocation = self.try_allocate(key, num_embeds, holder)
        if allocation is None:
            self.host.cancel_restore(key)
        return allocation

    def try_allocate_many(self, keys: list[bytes], rows: list[int], holder: int) -> bool:
        """As `try_allocate` for each key, held by `holder`; False, with nothing changed, when one
        is known already, on the device or the host, named twice, or when all do not fit at once.
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
        """Make room for an absent key that nobody needs yet: the entry is unheld and awaited.

        False, with nothing changed, when something held or awaited would have to leave, or when
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
        """Whoever prefetched the key does not need it any more."""
        if key in self._awaited:
            entry = self._entries[key]
            self._forget_awaited(entry)
            self._order.add(entry)

    def try_hold(self, holder: int, key: bytes) -> bool:
        """Keep an entry until `release`, as used now; False when the key is absent."""
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
        """Give one hold back. Raises `KeyError` when the holder has none."""
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
        """Give back everything a holder has, however often it holds it; nothing if nothing."""
        held = self._held.get(holder)
        if held is None:
            return
        if len(held) >= MANY:
            self._release_alike(holder, held.values())
        for entry in self._held.pop(holder, {}).values():
            entry.forget(holder)
            self._settle(entry)

    def _release_alike(
        self, holder: int, entries: Collection[EncoderCacheEntry]
    ) -> list[EncoderCacheEntry]:
        """Release in one pass all that cost the same and are held once by nobody else; the rest."""
        first = next(iter(entries))
        cost, lane, used = first.cost_per_byte, self._order.lane_of(first), self._order.clock
        place, lane_cost, num_bytes, rest = lane.end, lane.cost, 0, []
        for entry in entries:
            if entry.holder == holder and entry.cost_per_byte == cost and not entry.condemned:
                entry.holder = None
                entry.lane = lane_cost
                entry.place = place
                entry.used = used
                place += 1
                num_bytes += entry.num_bytes
            else:
                rest.append(entry)
        released = entries if not rest else [entry for entry in entries if not entry.is_held]
        self._unheld_bytes += num_bytes
        self._order.append(lane, released)
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
        """Forget an output that could not be computed or restored, whoever holds it.

        It counts as dropped: a runner that broke half way may have kept it.
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
        """What computing the output took; decides how long it stays once unheld."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.cost_per_byte = seconds / max(entry.num_bytes, 1)
            usual = self._usual_cost or entry.cost_per_byte
            self._usual_cost = 0.9 * usual + 0.1 * entry.cost_per_byte
            if entry.lane is not None:
                self._order.add(entry)

    def clear(self) -> None:
        """Drop everything unheld, host copies too; what is held leaves with its last holder."""
        self.host.clear()
        for entry in list(self._entries.values()):
            entry.condemned = True
            if not entry.is_held:
                self._unheld_bytes -= entry.num_bytes
                self._drop(entry)

    def take_dropped(self) -> tuple[bytes, ...]:
        """Keys that left since the last call, in order."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped

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
        """After a holder left: the entry becomes evictable, or goes if it was condemned."""
        if entry.is_held:
            return
        if entry.condemned:
            self._drop(entry)
        else:
            self._unheld_bytes += entry.num_bytes
            self._order.add(entry)

    def _evict_until(self, room: int) -> tuple[bytes, ...]:
        """What nobody awaits leaves first; then what was prefetched last, for the latest need."""
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
