"""KV blocks in host memory: one slab of equal slots, each for one object (header and payload).

    free ──reserve──▶ reserved ──publish──▶ held ──(evicted by reserve, or removed)──▶ free
                          └──abandon──▶ free        a pinned one only when the last reader is done

The slab is touched page by page at start, so that no later write is a page fault. A pin belongs to
a reader that is copying: the slot cannot be reused. A lease keeps a block for some seconds:
eviction passes over it, removal does not.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from lookonce.errors import ConfigError
from lookonce.kv.objects import HEADER_BYTES, ObjectFormat
from lookonce.kv.tier import ReadOutcome


@dataclass(slots=True)
class SlotEntry:
    slot: int
    pins: int = 0
    removed: bool = False


class SlotTable:
    """Which block is in which slot, in least-recently-used order; no locks and no memory.

    `clock` gives monotonic seconds.
    """

    def __init__(self, num_slots: int, *, lease_seconds: float, clock: Callable[[], float]) -> None:
        if num_slots < 1:
            raise ValueError("a slab needs at least one slot")
        self.num_slots = num_slots
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._free = list(reversed(range(num_slots)))
        self._entries: OrderedDict[bytes, SlotEntry] = OrderedDict()
        self._leases: dict[bytes, tuple[int, float]] = {}
        self._reserved: set[int] = set()
        self._removed: set[int] = set()
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
        self._entries[key] = SlotEntry(slot)
        return True

    def abandon(self, slot: int) -> None:
        self._reserved.remove(slot)
        self._free.append(slot)

    def pin(self, key: bytes) -> SlotEntry | None:
        """Begin to read; counts as use."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            entry.pins += 1
        return entry

    def unpin(self, entry: SlotEntry) -> None:
        entry.pins -= 1
        if entry.removed and not entry.pins:
            self._removed.remove(entry.slot)
            self._free.append(entry.slot)

    def lease(self, key: bytes) -> bool:
        """Keep `key` for `lease_seconds`; False if it is not held. Counts as use."""
        if key not in self._entries:
            return False
        self._entries.move_to_end(key)
        count, _ = self._leases.get(key, (0, 0.0))
        self._leases[key] = (count + 1, self._clock() + self._lease_seconds)
        return True

    def release(self, key: bytes) -> None:
        """Give one lease back, if it has not ended by itself."""
        count, until = self._leases.pop(key, (0, 0.0))
        if count > 1:
            self._leases[key] = (count - 1, until)

    def remove(self, key: bytes, entry: SlotEntry) -> None:
        """Forget `key`, if it still is this very entry."""
        if self._entries.get(key) is entry:
            self._drop(key)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every slot is in exactly one place."""
        held = [entry.slot for entry in self._entries.values()]
        everywhere = [*self._free, *self._reserved, *held, *self._removed]
        if sorted(everywhere) != list(range(self.num_slots)):
            raise RuntimeError("a slot is lost or in two places")
        if any(entry.removed or entry.pins < 0 for entry in self._entries.values()):
            raise RuntimeError("a held entry is removed or has fewer than no pins")

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
            self._removed.add(entry.slot)
        else:
            self._free.append(entry.slot)


LEASE_SECONDS = 30.0
PAGE_BYTES = 4096
SLOT_ALIGNMENT = 64


class HostTier:
    """A `KVTier` in this process's memory. Raises `ConfigError` for a size that cannot be."""

    name = "host"

    def __init__(
        self,
        objects: ObjectFormat,
        capacity_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._slot_bytes = -(-objects.object_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        num_slots = capacity_bytes // self._slot_bytes
        if num_slots < 1:
            raise ConfigError(f"{objects.option} host: one block takes {self._slot_bytes} bytes")
        if capacity_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise ConfigError(f"{objects.option} host: this machine has less memory than that")
        self._slab = _prefaulted(num_slots * self._slot_bytes, objects.option)
        self._lock = threading.Lock()
        self._slots = SlotTable(num_slots, lease_seconds=LEASE_SECONDS, clock=clock)

    @property
    def held_bytes(self) -> int:
        return self._slots.num_held * self._slot_bytes

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [self._slots.lease(key) for key in keys]

    def release(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._slots.release(key)

    def read(self, keys: Sequence[bytes], into: memoryview) -> ReadOutcome:
        size = self._objects.payload_bytes
        target = np.frombuffer(into, dtype=np.uint8)
        for index, key in enumerate(keys):
            with self._lock:
                entry = self._slots.pin(key)
            if entry is None:
                return ReadOutcome(index, "missing")
            payload = target[index * size : (index + 1) * size]
            stored = self._object(entry.slot)
            header = stored[:HEADER_BYTES].tobytes()
            np.copyto(payload, stored[HEADER_BYTES:])  # lets other threads run
            intact = self._objects.intact(key, header, payload.data)
            with self._lock:
                if not intact:
                    self._slots.remove(key, entry)
                self._slots.unpin(entry)
            if not intact:
                return ReadOutcome(index, "corrupt")
        return ReadOutcome(len(keys))

    def write(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> int:
        return sum(
            self._write_one(key, payload) for key, payload in zip(keys, payloads, strict=True)
        )

    def _write_one(self, key: bytes, payload: memoryview) -> bool:
        with self._lock:
            slot = None if key in self._slots else self._slots.reserve()
        if slot is None:
            return False
        stored = self._object(slot)
        stored[:HEADER_BYTES] = np.frombuffer(self._objects.header(key, payload), dtype=np.uint8)
        np.copyto(stored[HEADER_BYTES:], np.frombuffer(payload, dtype=np.uint8))
        with self._lock:
            return self._slots.publish(key, slot)

    def close(self) -> None:
        """The memory goes with the process: a view of it may still be in use."""

    def check_integrity(self) -> None:
        with self._lock:
            self._slots.check_integrity()

    def _object(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        start = slot * self._slot_bytes
        return self._slab[start : start + self._objects.object_bytes]


def _prefaulted(num_bytes: int, option: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Anonymous memory with every page present. Raises `ConfigError` when there is not as much."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} host: {num_bytes} bytes cannot be had") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = np.frombuffer(memory, dtype=np.uint8)
    slab[::PAGE_BYTES] = 0
    return slab
