"""The tiers of one engine, nearest first, each behind a circuit breaker and with its figures.

closed ──failures in a row──▶ open ──cooldown──▶ half open ──success──▶ closed
                               ▲                     │
                               └──── failure: cooldown doubled
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal

from lookonce.kv.disk import DiskTier
from lookonce.kv.host import HostTier
from lookonce.kv.lmcache import LMCacheTier
from lookonce.kv.objects import ObjectFormat
from lookonce.kv.tier import FAULTS, KVTier, ReadOutcome, Reason, TierError
from lookonce.kv.valkey import ValkeyTier
from lookonce.types.kv import TierKind, TierSpec

BreakerState = Literal["closed", "half_open", "open"]
FAILURES_TO_OPEN = 3
FIRST_COOLDOWN = 1.0
LONGEST_COOLDOWN = 30.0


class CircuitBreaker:
    """Says whether a tier may be asked. Thread-safe.

    A timeout opens it at once: one request has waited for the whole of it already.
    """

    def __init__(
        self, clock: Callable[[], float], *, first_cooldown: float = FIRST_COOLDOWN
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._first_cooldown = self._cooldown = first_cooldown
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if self._opened_at is None:
                return "closed"
            cooled = self._clock() - self._opened_at >= self._cooldown
            return "half_open" if cooled or self._probing else "open"

    def try_enter(self) -> bool:
        """Whether the tier may be asked now; each True is followed by `succeed` or `fail`."""
        with self._lock:
            if self._opened_at is None:
                return True
            if self._probing or self._clock() - self._opened_at < self._cooldown:
                return False
            self._probing = True
            return True

    def succeed(self) -> None:
        with self._lock:
            self._opened_at = None
            self._probing = False
            self._failures = 0
            self._cooldown = self._first_cooldown

    def fail(self, *, timed_out: bool = False) -> None:
        with self._lock:
            self._failures += 1
            if self._probing:
                self._probing = False
                self._cooldown = min(2 * self._cooldown, LONGEST_COOLDOWN)
            elif self._opened_at is not None or not (
                timed_out or self._failures >= FAILURES_TO_OPEN
            ):
                return
            self._opened_at = self._clock()


logger = logging.getLogger(__name__)
BREAKER_VALUES = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


class GuardedTier:
    """A tier that never raises, and is not asked while its circuit breaker is open. Thread-safe.

    Counts objects: KV blocks, or pieces of encoder outputs. Of pieces of states (`states`) only
    bytes and seconds are counted; states are counted whole (`count_states`).
    """

    def __init__(
        self, tier: KVTier, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._tier = tier
        self._breaker = CircuitBreaker(clock)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._load_seconds = self._store_seconds = 0.0
        self._failures: Counter[Reason] = Counter()

    def lease(self, keys: Sequence[bytes], *, states: bool = False) -> list[bool] | None:
        """Which are held; None when the tier cannot say."""
        if not self._breaker.try_enter():
            return None
        try:
            held = self._tier.lease(keys)
        except TierError as error:
            self._fail(error.reason)
            return None
        self._breaker.succeed()
        if not states:
            self._count(lookups=len(keys), hits=sum(held))
        return held

    def release(self, keys: Sequence[bytes]) -> None:
        self._tier.release(keys)

    def read(
        self, keys: Sequence[bytes], into: memoryview, *, states: bool = False
    ) -> tuple[ReadOutcome, float]:
        """The outcome, and the seconds it took."""
        if not self._breaker.try_enter():
            return ReadOutcome(0, "connection"), 0.0
        started = time.monotonic()
        outcome = self._tier.read(keys, into)
        seconds = time.monotonic() - started
        if outcome.reason is not None:
            self._fail(outcome.reason)
        if outcome.reason not in FAULTS:
            self._breaker.succeed()
        nbytes = outcome.num_blocks * (into.nbytes // len(keys))
        loaded = 0 if states else outcome.num_blocks
        self._count(load_seconds=seconds, loaded=loaded, loaded_bytes=nbytes)
        return outcome, seconds

    def write(
        self, keys: Sequence[bytes], payloads: Sequence[memoryview], *, states: bool = False
    ) -> int | None:
        """How many were new; None where the tier could not take them."""
        if not self._breaker.try_enter():
            return None
        started = time.monotonic()
        try:
            stored = self._tier.write(keys, payloads)
        except TierError as error:
            self._fail(error.reason)
            return None
        self._breaker.succeed()
        nbytes = stored * payloads[0].nbytes
        seconds = time.monotonic() - started
        self._count(store_seconds=seconds, stored=0 if states else stored, stored_bytes=nbytes)
        return stored

    def count_dropped(self, num_blocks: int) -> None:
        """Blocks, pieces of outputs, or whole states that the tier could not take."""
        self._count(dropped=num_blocks)

    def count_states(self, *, loaded: int = 0, stored: int = 0) -> None:
        self._count(states_loaded=loaded, states_stored=stored)

    def close(self) -> None:
        self._tier.close()

    def stats(self, block_size: int) -> dict[str, float]:
        """Metric name and label → value, of a KV tier: in tokens, `block_size` to a block."""
        with self._lock:
            counts = self._counts.copy()
        figures = {
            "lookups_total": counts["lookups"] * block_size,
            "hits_total": counts["hits"] * block_size,
            "loaded_tokens_total": counts["loaded"] * block_size,
            "stored_tokens_total": counts["stored"] * block_size,
        }
        return self._figures("kv_tier", figures)

    def state_stats(self) -> dict[str, float]:
        """What is counted beside, of a model that keeps states."""
        with self._lock:
            counts = self._counts.copy()
        return {
            f"kv_tier_{done}_states_total:{self.name}": float(counts[f"states_{done}"])
            for done in ("loaded", "stored")
        }

    def output_stats(self) -> dict[str, float]:
        """The same of a tier of encoder outputs: in pieces."""
        with self._lock:
            counts = self._counts.copy()
        return self._figures(
            "encoder_tier", {"lookups_total": counts["lookups"], "hits_total": counts["hits"]}
        )

    def _figures(self, prefix: str, figures: dict[str, int]) -> dict[str, float]:
        """`figures`, and those that every tier has."""
        with self._lock:
            counts, failures = self._counts.copy(), self._failures.copy()
        common = {
            "loaded_bytes_total": counts["loaded_bytes"],
            "load_seconds_total": self._load_seconds,
            "stored_bytes_total": counts["stored_bytes"],
            "store_seconds_total": self._store_seconds,
            "dropped_stores_total": counts["dropped"],
            "held_bytes": self._tier.held_bytes,
            "breaker_state": BREAKER_VALUES[self._breaker.state],
        }
        stats = {
            f"{prefix}_{name}:{self.name}": float(value)
            for name, value in (figures | common).items()
        }
        for reason, count in failures.items():
            stats[f"{prefix}_failures_total:{self.name},{reason}"] = float(count)
        return stats

    def _fail(self, reason: Reason) -> None:
        with self._lock:
            self._failures[reason] += 1
        if reason in FAULTS:
            before = self._breaker.state
            self._breaker.fail(timed_out=reason == "timeout")
            if before == "closed" and self._breaker.state == "open":
                logger.warning("tier %s failed (%s): left alone for a while", self.name, reason)

    def _count(
        self, *, load_seconds: float = 0.0, store_seconds: float = 0.0, **counts: int
    ) -> None:
        with self._lock:
            self._counts.update(counts)
            self._load_seconds += load_seconds
            self._store_seconds += store_seconds


class TierChain:
    """Tiers nearest first. Called by worker threads only: a tier may take its time."""

    def __init__(
        self, tiers: Sequence[KVTier], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        names = _distinct([tier.name for tier in tiers])
        self.tiers = tuple(
            GuardedTier(tier, name, clock=clock) for tier, name in zip(tiers, names, strict=True)
        )

    def lease(self, keys: Sequence[bytes]) -> tuple[int, ...] | None:
        """The tier that holds each of the leading blocks, leased there; nearest first.

        None when nothing was found and some tier could not say.
        """
        sources, unsure = self.locate(keys)
        prefix: list[int] = []
        for source in sources:
            if source is None:
                break
            prefix.append(source)
        rest = [(key, s) for key, s in zip(keys, sources, strict=True) if s is not None]
        self.release([k for k, _ in rest[len(prefix) :]], [s for _, s in rest[len(prefix) :]])
        return None if unsure and not prefix else tuple(prefix)

    def locate(
        self, keys: Sequence[bytes], *, states: bool = False
    ) -> tuple[list[int | None], bool]:
        """The tier that holds each object, leased there, nearest first; None: no tier says so.
        And whether some tier could not say. `states`: the objects are pieces of states."""
        sources: list[int | None] = [None] * len(keys)
        unsure = False
        for number, tier in enumerate(self.tiers):
            absent = [index for index, source in enumerate(sources) if source is None]
            if not absent:
                break
            held = tier.lease([keys[index] for index in absent], states=states)
            unsure |= held is None
            for index, found in zip(absent, held or (), strict=False):
                if found:
                    sources[index] = number
        return sources, unsure

    def release(self, keys: Sequence[bytes], sources: Sequence[int]) -> None:
        """Give back the leases `lease` took."""
        pairs = sorted(zip(sources, keys, strict=True))
        for source, group in groupby(pairs, key=lambda pair: pair[0]):
            self.tiers[source].release([key for _, key in group])

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def _distinct(names: Sequence[str]) -> list[str]:
    """Two tiers of one kind are told apart by number: disk, disk-2."""
    seen: Counter[str] = Counter()
    distinct = []
    for name in names:
        seen[name] += 1
        distinct.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return distinct


def open_chain(specs: Sequence[TierSpec], objects: ObjectFormat) -> TierChain:
    """Open every tier, nearest first. Raises `ConfigError` for one this machine cannot have.

    A server that does not answer is no error: it may come later.
    """
    return TierChain([_OPENERS[spec.kind](objects, spec) for spec in specs])


def _host(objects: ObjectFormat, spec: TierSpec) -> KVTier:
    return HostTier(objects, spec.capacity_bytes)


def _disk(objects: ObjectFormat, spec: TierSpec) -> KVTier:
    return DiskTier(objects, spec.path or "", spec.capacity_bytes)


def _valkey(objects: ObjectFormat, spec: TierSpec) -> KVTier:
    return ValkeyTier(objects, spec)


def _lmcache(objects: ObjectFormat, spec: TierSpec) -> KVTier:
    return LMCacheTier(objects, f"{spec.host}:{spec.port}")


_OPENERS: dict[TierKind, Callable[[ObjectFormat, TierSpec], KVTier]] = {
    "host": _host,
    "disk": _disk,
    "valkey": _valkey,
    "lmcache": _lmcache,
}
