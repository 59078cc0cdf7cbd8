"""Tiers and pages for tests: in memory, with faults on demand."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from lookonce.kv.objects import ObjectFormat
from lookonce.kv.tier import ReadOutcome, Reason, TierError
from lookonce.types.kv import KVLayout

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


def eventually(condition: object, seconds: float = 5.0) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


@dataclass
class FaultyTier:
    """A tier in a dict that does as it is told: fails, hangs, forgets, lies about nothing."""

    name: str = "faulty"
    blocks: dict[bytes, bytes] = field(default_factory=dict)
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
        return sum(map(len, self.blocks.values()))

    @property
    def num_leases(self) -> int:
        return sum(self.leased.values())

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter()
        with self.lock:
            held = [k in self.blocks for k in keys]
            for k, there in zip(keys, held, strict=True):
                if there:
                    self.leased[k] = self.leased.get(k, 0) + 1
        return held

    def release(self, keys: Sequence[bytes]) -> None:
        with self.lock:
            for k in keys:
                self.leased[k] -= 1
                assert self.leased[k] >= 0, "a lease is given back once"

    def read(self, keys: Sequence[bytes], into: memoryview) -> ReadOutcome:
        try:
            self._enter()
        except TierError as error:
            return ReadOutcome(0, error.reason)
        size = into.nbytes // len(keys)
        for index, k in enumerate(keys):
            if self.fail_reads_after is not None and self.reads >= self.fail_reads_after:
                return ReadOutcome(index, self.read_reason)
            found = self.blocks.get(k)
            if found is None:
                return ReadOutcome(index, "missing")
            self.reads += 1
            into[index * size : (index + 1) * size] = found
        return ReadOutcome(len(keys))

    def write(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> int:
        self._enter()
        new = 0
        for k, p in zip(keys, payloads, strict=True):
            new += k not in self.blocks
            self.blocks[k] = bytes(p)
        return new

    def close(self) -> None:
        pass

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
