"""External tiers on a virtual clock: real tables of slots and the real connector's decisions,
without bytes and threads.

A disk's and a Valkey's blocks are kept least recently used last, as those in host memory are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace

from lookonce.kv.host import LEASE_SECONDS, SlotTable
from lookonce.kv.transfer import NUM_LOADERS, Acknowledged, Answered, Event, Loaded, Measured
from lookonce.simulate.prices import Prices, TierPrices
from lookonce.types.kv import KVLayout, LoadedOutput, OutputLayout, TierSpec
from lookonce.types.media import Array

MOST_SLOTS = 1 << 20
At = Callable[[float, Callable[[], None]], None]
"""Calls a function so many seconds from now."""


@dataclass(slots=True)
class SimulatedTier:
    """One tier: which blocks it holds, and what reaching it takes. Engines may share it."""

    name: str
    slots: SlotTable
    prices: TierPrices

    def stats(self, block_size: int) -> dict[str, float]:
        return {f"kv_tier_held_tokens:{self.name}": float(self.slots.num_held * block_size)}

    def keep(self, keys: Sequence[bytes]) -> None:
        """Store blocks that are not held yet, as far as there is room."""
        for key in keys:
            slot = None if key in self.slots else self.slots.reserve()
            if slot is not None:
                self.slots.publish(key, slot)


def open_tier(
    spec: TierSpec, block_bytes: int, prices: Prices, clock: Callable[[], float]
) -> SimulatedTier:
    """A tier as `spec` says; a Valkey or LMCache, which have no size, hold `MOST_SLOTS` blocks."""
    listed = {"host": prices.host, "disk": prices.disk}
    num_slots = MOST_SLOTS
    if spec.capacity_bytes:
        num_slots = max(1, spec.capacity_bytes // block_bytes)
    table = SlotTable(num_slots, lease_seconds=LEASE_SECONDS, clock=clock)
    return SimulatedTier(spec.kind, table, listed.get(spec.kind, prices.valkey))


SHARED = frozenset({"valkey", "lmcache"})
"""Kinds of tiers that all engines of a fleet share."""


def own_tiers(
    specs: Sequence[TierSpec], block_bytes: int, prices: Prices, clock: Callable[[], float]
) -> list[SimulatedTier]:
    """Those of `specs` that each engine has for itself."""
    own = [spec for spec in specs if spec.kind not in SHARED]
    return [open_tier(spec, block_bytes, prices, clock) for spec in own]


def shared_tiers(
    specs: Sequence[TierSpec], block_bytes: int, prices: Prices, clock: Callable[[], float]
) -> list[SimulatedTier]:
    """Those that a fleet's engines share; they are the farthest."""
    shared = [spec for spec in specs if spec.kind in SHARED]
    return [open_tier(spec, block_bytes, prices, clock) for spec in shared]


class SimulatedChain:
    """The tiers of one engine, nearest first."""

    def __init__(self, tiers: Sequence[SimulatedTier]) -> None:
        self.tiers = tuple(tiers)

    def lease(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """The tier of each leading block, leased there; nearest first."""
        sources = []
        for key in keys:
            for number, tier in enumerate(self.tiers):
                if tier.slots.lease(key):
                    sources.append(number)
                    break
            else:
                break
        return tuple(sources)

    def release(self, keys: Sequence[bytes], sources: Sequence[int]) -> None:
        for key, source in zip(keys, sources, strict=False):
            self.tiers[source].slots.release(key)

    def seconds(self, sources: Sequence[int], num_bytes: int) -> float:
        """What reading so many bytes from each of `sources` takes."""
        counts = Counter(sources)
        prices = {source: self.tiers[source].prices for source in counts}
        return sum(
            prices[source].operation + prices[source].byte * count * num_bytes
            for source, count in counts.items()
        )

    def keep_nearer(self, keys: Sequence[bytes], sources: Sequence[int]) -> None:
        """Keep what a farther tier gave in the nearer ones."""
        for key, source in zip(keys, sources, strict=True):
            for nearer in self.tiers[:source]:
                nearer.keep([key])


class SimulatedOutputs:
    """Implements `types.ports.ExternalEncoderCache` on a virtual clock: outputs are held in pieces
    of one size, as real tiers hold them, and loaded where all of an output's pieces are held."""

    def __init__(
        self,
        chain: SimulatedChain,
        layout: OutputLayout,
        *,
        at: At,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.wake = wake
        self.num_loaded = 0
        self._chain = chain
        self._layout = layout
        self._at = at
        self._workers = _Workers(at, clock)
        self._reports: list[LoadedOutput] = []

    def submit_load(self, outputs: Sequence[tuple[bytes, int]]) -> None:
        for key, num_rows in outputs:
            sources = self._chain.lease(self._pieces(key, num_rows))
            seconds = sum(tier.prices.operation for tier in self._chain.tiers)
            whole = len(sources) == self._layout.num_pieces(num_rows)
            if whole:
                seconds += self._chain.seconds(sources, self._layout.piece_bytes)
            self._workers.after(seconds, partial(self._report, key, num_rows, sources, whole))

    def _report(self, key: bytes, num_rows: int, sources: tuple[int, ...], whole: bool) -> None:
        pieces = self._pieces(key, num_rows)
        self._chain.release(pieces, sources)
        if whole:
            self.num_loaded += 1
            self._chain.keep_nearer(pieces, sources)
            output = Array("uint8", (num_rows,), bytes(num_rows))
            tier = self._chain.tiers[max(sources)].name
            self._reports.append(LoadedOutput(key, output, tier))
        else:
            self._reports.append(LoadedOutput(key))
        self.wake()

    def store(self, outputs: Sequence[tuple[bytes, int]]) -> None:
        for key, num_rows in outputs:
            for tier in self._chain.tiers:
                tier.keep(self._pieces(key, num_rows))

    def poll(self) -> Sequence[LoadedOutput]:
        taken, self._reports = self._reports, []
        return taken

    def stats(self) -> dict[str, float]:
        return {"encoder_tier_loads_total": float(self.num_loaded)}

    def close(self) -> None:
        """Nothing to end."""

    def _pieces(self, key: bytes, num_rows: int) -> list[bytes]:
        return [key + bytes([n & 255, n >> 8]) for n in range(self._layout.num_pieces(num_rows))]


class _Workers:
    """As many as `NUM_LOADERS`, each busy with one thing at a time."""

    def __init__(self, at: At, clock: Callable[[], float]) -> None:
        self._at, self._clock = at, clock
        self._free = [0.0] * NUM_LOADERS

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call when a worker has worked for so long."""
        now = self._clock()
        done = max(now, self._free[0]) + seconds
        heapreplace(self._free, done)
        self._at(done - now, call)


class SimulatedPages:
    """Has a layout and no pages."""

    def __init__(self, block_size: int, block_bytes: int) -> None:
        heads = max(1, block_bytes // (2 * block_size))
        self.layout = KVLayout(1, block_size, heads, 1, "uint8")


class SimulatedTransfers:
    """What `kv.transfer.Transfers` does with threads, on a virtual clock: lookups and loads by
    `NUM_LOADERS` workers, stores at once."""

    def __init__(
        self,
        chain: SimulatedChain,
        pages: SimulatedPages,
        tell: Callable[[Event], None],
        *,
        at: At,
        clock: Callable[[], float],
        block_bytes: int,
    ) -> None:
        self._chain = chain
        self._tell = tell
        self._at = at
        self._block_bytes = block_bytes
        self._workers = _Workers(at, clock)
        self._cancelled: set[int] = set()

    def submit_lookup(self, ticket: int, keys: Sequence[bytes]) -> float:
        seconds = sum(tier.prices.operation for tier in self._chain.tiers)

        def answer() -> None:
            self._cancelled.discard(ticket)  # the connector gives an unknown one's leases back
            self._tell(Answered(ticket, keys, self._chain.lease(keys)))

        self._workers.after(seconds, answer)
        return float("inf")

    def submit_load(
        self,
        ticket: int,
        keys: Sequence[bytes],
        sources: Sequence[int],
        block_ids: Sequence[int],
        first: int = 0,
    ) -> None:
        counts = Counter(sources[first:])
        taken = {
            source: self._chain.seconds([source] * count, self._block_bytes)
            for source, count in counts.items()
        }

        def loaded() -> None:
            done = 0
            for key, source in zip(keys[first:], sources[first:], strict=True):
                if key not in self._chain.tiers[source].slots:
                    break
                done += 1
            until = first + done
            self._chain.keep_nearer(keys[first:until], sources[first:until])
            for source, seconds in taken.items():
                self._tell(Measured(source, counts[source], seconds))
            if ticket not in self._cancelled:
                self._tell(Loaded(ticket, done, None if until == len(keys) else "missing"))
            self._cancelled.discard(ticket)
            self._tell(Acknowledged(ticket))
            self._chain.release(keys, sources)

        self._workers.after(sum(taken.values()), loaded)

    def submit_store(self, ticket: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> bool:
        for tier in self._chain.tiers:
            tier.keep(keys)
        self._at(0.0, lambda: self._tell(Acknowledged(ticket)))
        return True

    def release(self, keys: Sequence[bytes], sources: Sequence[int]) -> None:
        self._chain.release(keys, sources)

    def cancel(self, ticket: int) -> None:
        self._cancelled.add(ticket)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to end."""
