"""Which block sits in which slot of the host slab: LRU, pins of readers, leases of lookups.

    free ──reserve──▶ reserved ──publish──▶ held ──(evicted by reserve, or removed)──▶ free
                          └──abandon──▶ free        a pinned one only when the last reader is done

A pin is a reader copying right now: the slot cannot be reused. A lease is a promise with an end:
eviction passes over it, removal does not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    slot: int
    pins: int = 0
    removed: bool = False


class SlotTable:
    """Bookkeeping only, without locks and without memory. `clock` gives monotonic seconds."""

    def __init__(self, num_slots: int, *, lease_seconds: float, clock: Callable[[], float]) -> None:
        if num_slots < 1:
            raise ValueError("a slab needs at least one slot")
        self.num_slots = num_slots
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._free = list(reversed(range(num_slots)))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._leases: dict[bytes, tuple[int, float]] = {}
        self._reserved: set[int] = set()
        self._dying: set[int] = set()
        """Slots of removed entries that a reader still pins."""

    @property
    def num_held(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def reserve(self) -> int | None:
        """A slot to write to, evicting if needed; None while all are pinned or leased."""
        if not self._free and not self._evict():
            return None
        slot = self._free.pop()
        self._reserved.add(slot)
        return slot

    def publish(self, key: bytes, slot: int) -> bool:
        """The slot now holds `key`; False, and the slot is free again, if another one does."""
        self._reserved.remove(slot)
        if key in self._entries:
            self._free.append(slot)
            return False
        self._entries[key] = Entry(slot)
        return True

    def abandon(self, slot: int) -> None:
        self._reserved.remove(slot)
        self._free.append(slot)

    def pin(self, key: bytes) -> Entry | None:
        """Begin to read; counts as use."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            entry.pins += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if entry.removed and not entry.pins:
            self._dying.remove(entry.slot)
            self._free.append(entry.slot)

    def lease(self, key: bytes) -> bool:
        """Promise to keep `key` for a while; False if it is not held. Counts as use."""
        if key not in self._entries:
            return False
        self._entries.move_to_end(key)
        count, _ = self._leases.get(key, (0, 0.0))
        self._leases[key] = (count + 1, self._clock() + self._lease_seconds)
        return True

    def release(self, key: bytes) -> None:
        """Give one lease back; one that has ended already is none."""
        count, until = self._leases.pop(key, (0, 0.0))
        if count > 1:
            self._leases[key] = (count - 1, until)

    def remove(self, key: bytes, entry: Entry) -> None:
        """Forget `key`, if it still is this very entry."""
        if self._entries.get(key) is entry:
            self._drop(key)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every slot is in exactly one place."""
        held = [entry.slot for entry in self._entries.values()]
        everywhere = [*self._free, *self._reserved, *held, *self._dying]
        if sorted(everywhere) != list(range(self.num_slots)):
            raise RuntimeError("a slot is lost or in two places")
        if any(entry.removed or entry.pins < 0 for entry in self._entries.values()):
            raise RuntimeError("a held entry is removed or pinned less than never")

    def _evict(self) -> bool:
        now = self._clock()
        for key, entry in self._entries.items():
            if not entry.pins and not self._leased(key, now):
                self._drop(key)
                return True
        return False

    def _leased(self, key: bytes, now: float) -> bool:
        lease = self._leases.get(key)
        if lease is None:
            return False
        if lease[1] > now:
            return True
        del self._leases[key]
        return False

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._leases.pop(key, None)
        entry.removed = True
        if entry.pins:
            self._dying.add(entry.slot)
        else:
            self._free.append(entry.slot)
