"""Tiers and pages for tests: in memory or real ones behind, with faults on demand."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lookonce.kv.disk import DiskTier
from lookonce.kv.host import HostTier
from lookonce.kv.objects import ObjectFormat
from lookonce.kv.tier import KVTier, ReadOutcome, Reason, TierError
from lookonce.kv.valkey import ValkeyTier
from lookonce.types.kv import KVLayout, TierSpec
from tests.support.kv_servers import ValkeyServer

LAYOUT = KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
NAMESPACE = bytes(range(32))
OBJECTS = ObjectFormat(NAMESPACE, LAYOUT)
SIZE = LAYOUT.block_bytes


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def payload(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(SIZE))


def read(tier: object, keys: Sequence[bytes]) -> tuple[ReadOutcome, list[bytes]]:
    """The outcome, and the payloads it vouches for."""
    into = memoryview(bytearray(SIZE * len(keys)))
    outcome = tier.read(keys, into)  # type: ignore[attr-defined]
    return outcome, [bytes(into[i * SIZE : (i + 1) * SIZE]) for i in range(outcome.num_blocks)]


def eventually(condition: object, seconds: float = 60.0) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


class DictTier:
    """The simplest tier there can be."""

    name = "dict"

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    @property
    def held_bytes(self) -> int:
        return sum(map(len, self.blocks.values()))

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        return [k in self.blocks for k in keys]

    def release(self, keys: Sequence[bytes]) -> None:
        pass

    def read(self, keys: Sequence[bytes], into: memoryview) -> ReadOutcome:
        size = into.nbytes // len(keys)
        for index, k in enumerate(keys):
            found = self.blocks.get(k)
            if found is None:
                return ReadOutcome(index, "missing")
            into[index * size : (index + 1) * size] = found
        return ReadOutcome(len(keys))

    def write(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> int:
        new = sum(k not in self.blocks for k in keys)
        self.blocks.update((k, bytes(p)) for k, p in zip(keys, payloads, strict=True))
        return new

    def close(self) -> None:
        pass


def evict(tier: KVTier, k: bytes) -> None:
    """What the tier, or somebody beside it, does when room is needed."""
    match tier:
        case DictTier():
            tier.blocks.pop(k, None)
        case HostTier():
            with tier._lock:
                entry = tier._slots._entries.get(k)
                if entry is not None:
                    tier._slots.remove(k, entry)
        case DiskTier():
            tier._delete(tier._path(k))
        case ValkeyTier():
            tier._delete([k])


@dataclass
class FaultyTier:
    """A tier before another one that does as it is told: fails, hangs, forgets; never lies."""

    name: str = "faulty"
    inner: KVTier = field(default_factory=DictTier)
    """A dict, or a real tier."""
    stored: dict[bytes, None] = field(default_factory=dict)
    """What it was given and has not forgotten, in order."""
    fault: Reason | None = None
    """Every call fails with this."""
    fail_reads_after: int | None = None
    """Reads go wrong from this many blocks on, with `read_reason`."""
    read_reason: Reason = "missing"
    hang: threading.Event | None = None
    """Every call waits for it first."""
    leased: dict[bytes, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: int = 0
    reads: int = 0

    @property
    def held_bytes(self) -> int:
        return self.inner.held_bytes

    @property
    def num_leases(self) -> int:
        return sum(self.leased.values())

    def forget(self, first: int = 0) -> None:
        """Everything but the `first` blocks it was given is evicted."""
        for k in list(self.stored)[first:]:
            evict(self.inner, k)
            self.stored.pop(k)

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter()
        held = self.inner.lease(keys)
        with self.lock:
            for k, there in zip(keys, held, strict=True):
                if there:
                    self.leased[k] = self.leased.get(k, 0) + 1
        return held

    def release(self, keys: Sequence[bytes]) -> None:
        self.inner.release(keys)
        with self.lock:
            for k in keys:
                self.leased[k] -= 1
                assert self.leased[k] >= 0, "a lease is given back once"

    def read(self, keys: Sequence[bytes], into: memoryview) -> ReadOutcome:
        try:
            self._enter()
        except TierError as error:
            return ReadOutcome(0, error.reason)
        good = len(keys)
        if self.fail_reads_after is not None:
            good = max(0, min(good, self.fail_reads_after - self.reads))
        size = into.nbytes // len(keys)
        outcome = ReadOutcome(0)
        if good:
            outcome = self.inner.read(keys[:good], into[: good * size])
        self.reads += outcome.num_blocks
        if outcome.reason is None and good < len(keys):
            return ReadOutcome(good, self.read_reason)
        return outcome

    def write(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> int:
        self._enter()
        new = self.inner.write(keys, payloads)
        self.stored.update(dict.fromkeys(keys))
        return new

    def close(self) -> None:
        """The test closes what it opened."""

    def _enter(self) -> None:
        self.calls += 1
        if self.hang is not None:
            self.hang.wait(10.0)
        if self.fault is not None:
            raise TierError(self.fault)


class FakePages:
    """Pages as a dict of bytes; a write to a block somebody else owns is caught."""

    def __init__(self, layout: KVLayout = LAYOUT) -> None:
        self.layout = layout
        self.blocks: dict[int, bytes] = {}

    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        size = self.layout.block_bytes
        for index, block in enumerate(block_ids):
            out[index * size : (index + 1) * size] = self.blocks[block]

    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
        size = self.layout.block_bytes
        for index, block in enumerate(block_ids):
            self.blocks[block] = bytes(data[index * size : (index + 1) * size])


class StoredObjects:
    """A tier of a kind, host, disk or valkey, whose objects change where they are stored."""

    def __init__(
        self, kind: str, objects: ObjectFormat, folder: Path, valkey: ValkeyServer
    ) -> None:
        self._objects = objects
        self._folder = folder
        self._valkey = valkey
        self.tier: DiskTier | HostTier | ValkeyTier
        match kind:
            case "disk":
                self.tier = DiskTier(objects, str(folder), 1 << 20)
            case "host":
                self.tier = HostTier(objects, 1 << 16)
            case _:
                self.tier = ValkeyTier(objects, TierSpec("valkey", path=valkey.socket))

    def flip(self, chance: random.Random, key: bytes | None = None) -> None:
        """Flip a bit of the object of that key, or of any."""
        if isinstance(self.tier, DiskTier):
            held = sorted(self._folder.glob("*/??/*.kv"))
            path = chance.choice(held) if key is None else Path(self.tier._path(key))
            stored = bytearray(path.read_bytes())
            stored[chance.randrange(len(stored))] ^= 1 << chance.randrange(8)
            path.write_bytes(stored)
        elif isinstance(self.tier, HostTier):
            entries = self.tier._slots._entries
            entry = entries[chance.choice(list(entries)) if key is None else key]
            at = chance.randrange(self._objects.object_bytes)
            self.tier._object(entry.slot)[at] ^= 4
        else:
            prefix = b"lookonce:kv:" + self._objects.namespace
            name = chance.choice(self._valkey.names()) if key is None else prefix + key
            value = self._valkey.call(b"GET", name)
            assert isinstance(value, bytes)
            at = chance.randrange(len(value))
            self._valkey.call(b"SETRANGE", name, b"%d" % at, bytes([value[at] ^ 8]))
