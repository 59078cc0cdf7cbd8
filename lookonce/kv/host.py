"""Host memory: one slab of equal slots, touched page by page at start, so that no later write is
a page fault. A slot holds one object, header and payload, as every other tier does."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from lookonce.errors import ConfigError
from lookonce.kv.objects import HEADER_BYTES, ObjectFormat
from lookonce.kv.slots import SlotTable
from lookonce.kv.tier import ReadOutcome

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
            raise ConfigError(f"--kv-tier host: one block takes {self._slot_bytes} bytes")
        if capacity_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise ConfigError("--kv-tier host: this machine has less memory than that")
        self._slab = _prefaulted(num_slots * self._slot_bytes)
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


def _prefaulted(num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Anonymous memory with every page present. Raises `ConfigError` when there is not as much."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--kv-tier host: {num_bytes} bytes cannot be had") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = np.frombuffer(memory, dtype=np.uint8)
    slab[::PAGE_BYTES] = 0
    return slab
