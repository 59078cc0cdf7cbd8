"""External KV tiers on a virtual clock: real tables of slots and the real connector's decisions,
without bytes and threads.

A disk's and a Valkey's blocks are kept least recently used last, as those in host memory are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapreplace

from lookonce.kv.host import LEASE_SECONDS, SlotTable
from lookonce.kv.transfer import NUM_LOADERS, Acknowledged, Answered, Event, Loaded, Measured
from lookonce.simulate.prices import Prices, TierPrices
from lookonce.types.kv import KVLayout, TierSpec

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
    """A tier as `spec` says; a Valkey or LMCache without a size holds all that comes."""
    listed = {"host": prices.host, "disk": prices.disk}
    capacity = spec.capacity_bytes or 1 << 44
    num_slots = max(1, min(capacity // block_bytes, 1 << 24))
    table = SlotTable(num_slots, lease_seconds=LEASE_SECONDS, clock=clock)
    return SimulatedTier(spec.kind, table, listed.get(spec.kind, prices.valkey))


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
        self._clock = clock
        self._block_bytes = block_bytes
        self._free = [0.0] * NUM_LOADERS
        self._cancelled: set[int] = set()

    def submit_lookup(self, ticket: int, keys: Sequence[bytes]) -> float:
        seconds = sum(tier.prices.operation for tier in self._chain.tiers)

        def answer() -> None:
            self._cancelled.discard(ticket)  # the connector gives an unknown one's leases back
            self._tell(Answered(ticket, keys, self._chain.lease(keys)))

        self._after(seconds, answer)
        return float("inf")

    def submit_load(
        self,
        ticket: int,
        keys: Sequence[bytes],
        sources: Sequence[int],
        block_ids: Sequence[int],
        first: int = 0,
    ) -> None:
        costs: dict[int, int] = {}
        for source in sources[first:]:
            costs[source] = costs.get(source, 0) + 1
        taken = {
            source: self._chain.tiers[source].prices.operation
            + self._chain.tiers[source].prices.byte * count * self._block_bytes
            for source, count in costs.items()
        }

        def loaded() -> None:
            done = 0
            for key, source in zip(keys[first:], sources[first:], strict=True):
                if key not in self._chain.tiers[source].slots:
                    break
                done += 1
                for nearer in self._chain.tiers[:source]:
                    nearer.keep([key])
            for source, seconds in taken.items():
                self._tell(Measured(source, costs[source], seconds))
            if ticket not in self._cancelled:
                whole = done == len(keys) - first
                self._tell(Loaded(ticket, done, None if whole else "missing"))
            self._cancelled.discard(ticket)
            self._tell(Acknowledged(ticket))
            self._chain.release(keys, sources)

        self._after(sum(taken.values()), loaded)

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

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call when a worker has been free for so long."""
        now = self._clock()
        done = max(now, self._free[0]) + seconds
        heapreplace(self._free, done)
        self._at(done - now, call)
