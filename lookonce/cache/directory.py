"""The directory of one API process: keys, sizes and expansions of its items in the engine's store.

It holds no arrays. Only the sender cache changes it, in the synchronous call that also enqueues the
message with the same changes for the store; the renderer looks up, pins and counts. Only the event
loop's thread uses it.

    entries   key → (bytes, Listing)   byte-bounded, least recently used first, pins
    hints     key → Hint               items other senders listed; worth adopting; count-bounded
    known     key → Expansion          outlives entries; count-bounded
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from lookonce.types.counts import Counts
from lookonce.types.media import Expansion
from lookonce.types.request import ProcessorOutcome

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Evicted(Generic[V]):
    key: bytes
    size: int
    value: V


class ByteLRU(Generic[V]):
    """A cache of (size in bytes, value) in least-recently-used order, with pins, in O(1).

        unpinned   [ least recent … most recent ]   evicted from the left
        pinned     { … }                            never evicted

        nbytes = sum of both <= capacity_bytes; pinned_bytes = sum of the pinned ones

    A pin belongs to a key, not to an entry: it may be taken before the entry exists, and `clear`
    keeps it. When its last pin is given back, an entry becomes the most recent one.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError("capacity_bytes must not be negative")
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self.pinned_bytes = 0
        self._unpinned: OrderedDict[bytes, tuple[int, V]] = OrderedDict()
        self._pinned: dict[bytes, tuple[int, V]] = {}
        self._pins: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._unpinned) + len(self._pinned)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pinned or key in self._unpinned

    def __iter__(self) -> Iterator[bytes]:
        """Unpinned keys, least recent first, then pinned ones."""
        yield from self._unpinned
        yield from self._pinned

    @property
    def num_pins(self) -> int:
        """Pins of all keys together. O(keys pinned)."""
        return sum(self._pins.values())

    def peek(self, key: bytes) -> V | None:
        """The value, leaving recency as it is."""
        entry = self._entry(key)
        return None if entry is None else entry[1]

    def size_of(self, key: bytes) -> int | None:
        entry = self._entry(key)
        return None if entry is None else entry[0]

    def get(self, key: bytes) -> V | None:
        """The value; its entry becomes the most recent."""
        if key in self._unpinned:
            self._unpinned.move_to_end(key)
        return self.peek(key)

    def pin(self, key: bytes) -> None:
        count = self._pins.get(key, 0)
        self._pins[key] = count + 1
        entry = self._unpinned.pop(key, None)
        if entry is not None:
            self._pinned[key] = entry
            self.pinned_bytes += entry[0]

    def unpin(self, key: bytes) -> None:
        """Give back one pin. Raises `ValueError` when there is none."""
        count = self._pins.get(key, 0)
        if count == 0:
            raise ValueError("unpin of a key that is not pinned")
        if count > 1:
            self._pins[key] = count - 1
            return
        del self._pins[key]
        entry = self._pinned.pop(key, None)
        if entry is not None:
            self.pinned_bytes -= entry[0]
            self._unpinned[key] = entry

    def try_insert(self, key: bytes, size: int, value: V) -> list[Evicted[V]] | None:
        """Insert as the most recent and say what was evicted for it, least recent first.

        None, and nothing changed, when it does not fit beside the pinned entries. Raises
        `ValueError` for a key that is present or a negative size.
        """
        if key in self or size < 0:
            raise ValueError("insert of a present key or a negative size")
        if self.pinned_bytes + size > self.capacity_bytes:
            return None
        evicted = []
        while self.nbytes + size > self.capacity_bytes:
            evicted.append(self._evict())
        self.nbytes += size
        if key in self._pins:
            self._pinned[key] = (size, value)
            self.pinned_bytes += size
        else:
            self._unpinned[key] = (size, value)
        return evicted

    def remove(self, key: bytes) -> V | None:
        """Take an entry out, pinned or not; its pins stay with the key."""
        entry = self._unpinned.pop(key, None)
        if entry is None:
            entry = self._pinned.pop(key, None)
            if entry is None:
                return None
            self.pinned_bytes -= entry[0]
        self.nbytes -= entry[0]
        return entry[1]

    def clear(self) -> None:
        """Drop every entry; pins stay."""
        self._unpinned.clear()
        self._pinned.clear()
        self.nbytes = self.pinned_bytes = 0

    def check_integrity(self) -> None:
        """Recount everything. Raises `AssertionError` naming the rule that is broken. O(n)."""
        unpinned = sum(size for size, _ in self._unpinned.values())
        pinned = sum(size for size, _ in self._pinned.values())
        rules = {
            "nbytes is the sum of all entries": self.nbytes == unpinned + pinned,
            "pinned_bytes is the sum of pinned entries": self.pinned_bytes == pinned,
            "entries fit the capacity": self.nbytes <= self.capacity_bytes,
            "an entry is pinned or unpinned": not self._pinned.keys() & self._unpinned.keys(),
            "pinned entries have pins": self._pinned.keys() <= self._pins.keys(),
            "unpinned entries have none": not self._unpinned.keys() & self._pins.keys(),
            "pins are positive": all(count > 0 for count in self._pins.values()),
        }
        for rule, holds in rules.items():
            if not holds:
                raise AssertionError(rule)

    def _entry(self, key: bytes) -> tuple[int, V] | None:
        return self._pinned.get(key) or self._unpinned.get(key)

    def _evict(self) -> Evicted[V]:
        key, (size, value) = self._unpinned.popitem(last=False)
        self.nbytes -= size
        return Evicted(key, size, value)


KNOWN_EXPANSIONS = 65_536
"""Expansions remembered beyond their entries (~200 bytes each, and 120 for each run)."""
RUNS_OF_AN_EXPANSION = 8
"""Runs that a remembered expansion may have on average: tiles and rows with tokens between them
have dozens, and what one item takes must not be up to who sends it."""
MAX_HINTS = 4_096
_HITS: frozenset[ProcessorOutcome] = frozenset({"hit", "injected", "shared", "not_needed"})


@dataclass(slots=True)
class Listing:
    expansion: Expansion
    adopted: bool
    """Listed because of a hint: the store may not hold it any more."""
    injected: bool = False
    """A client processed it, not this server."""


@dataclass(frozen=True, slots=True)
class HintedItem:
    nbytes: int
    expansion: Expansion


class Directory:
    """What the engine holds for this sender. Implements `types.ports.ItemDirectory`.

    `capacity_bytes` 0 turns the cache off: nothing is listed, hinted or counted.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        max_known: int = KNOWN_EXPANSIONS,
        max_hints: int = MAX_HINTS,
        counts: Counts | None = None,
    ) -> None:
        counts = Counts() if counts is None else counts
        self._queries = counts.count("mm_cache_queries_total")
        self._hits = counts.count("mm_cache_hits_total")
        self._evictions = counts.count("mm_cache_evictions_total")
        self._listed_bytes = counts.count("mm_cache_bytes", gauge=True)
        self._entries: ByteLRU[Listing] = ByteLRU(capacity_bytes)
        self._hints: _Bounded[HintedItem] = _Bounded(max_hints)
        self._known: _Bounded[Expansion] = _Bounded(
            max_known, RUNS_OF_AN_EXPANSION * max_known, lambda known: len(known.runs)
        )

    # --- what the renderer uses ---------------------------------------------------------------

    def lookup(self, key: bytes) -> Expansion | None:
        """The expansion of an item that need not be processed, and one pin on its key; or None."""
        expansion = self.peek(key)
        if expansion is None:
            return None
        self._entries.pin(key)
        return expansion

    def unpin(self, key: bytes) -> None:
        """Give back the pin of one answered lookup. Raises `ValueError` when there is none."""
        self._entries.unpin(key)

    def peek(self, key: bytes) -> Expansion | None:
        """What `lookup` would answer, without a pin and without changing recency."""
        listing = self._entries.peek(key)
        if listing is not None:
            return listing.expansion
        hint = self._hints.get(key)
        return None if hint is None else hint.expansion

    def held_as(self, key: bytes) -> ProcessorOutcome:
        """Which hit a `lookup` was: "hit" (processed here), "injected", "shared" (by a sender)."""
        listing = self._entries.peek(key)
        if listing is None:
            return "shared"
        if listing.injected:
            return "injected"
        return "shared" if listing.adopted else "hit"

    def known_expansion(self, key: bytes) -> Expansion | None:
        """The expansion, if it is still remembered, whether or not the item is listed."""
        return self.peek(key) or self._known.get(key)

    def learn(self, key: bytes, expansion: Expansion) -> None:
        """Remember an expansion, e.g. of an item that was processed but not (yet) listed."""
        self._known.put(key, expansion)

    def count(self, outcome: ProcessorOutcome) -> None:
        """Count one media part, once, when its rendering resolves; off with the cache.

        `hit`, `injected`, `shared` and `not_needed` (a reference that the engine never asked the
        item of) caused no processing and are hits; `miss` and `bypass` are queries only.
        """
        if self.capacity_bytes:
            self._queries.add()
            self._hits.add(outcome in _HITS)

    # --- what the sender uses -----------------------------------------------------------------

    def pin(self, key: bytes) -> None:
        self._entries.pin(key)

    def try_list(
        self,
        key: bytes,
        nbytes: int,
        expansion: Expansion,
        *,
        adopted: bool = False,
        injected: bool = False,
    ) -> list[bytes] | None:
        """List an item; the keys evicted for it, or None if it does not fit beside the pins."""
        evicted = self._entries.try_insert(key, nbytes, Listing(expansion, adopted, injected))
        if evicted is None:
            return None
        self._hints.pop(key)
        for entry in evicted:
            self.learn(entry.key, entry.value.expansion)
        self._evictions.add(len(evicted))
        self._listed_bytes.set(self.nbytes)
        return [entry.key for entry in evicted]

    def unlist(self, key: bytes) -> None:
        listing = self._entries.remove(key)
        if listing is not None:
            self.learn(key, listing.expansion)
            self._listed_bytes.set(self.nbytes)

    def lists_for_certain(self, key: bytes) -> bool:
        """Whether the store holds the item once it has read all messages sent so far."""
        listing = self._entries.peek(key)
        return listing is not None and not listing.adopted

    def listing(self, key: bytes) -> Listing | None:
        return self._entries.peek(key)

    def hint(self, key: bytes, nbytes: int, expansion: Expansion) -> None:
        """Remember an item of another sender, if it would fit this directory."""
        if nbytes <= self.capacity_bytes and key not in self._entries:
            self._hints.put(key, HintedItem(nbytes, expansion))

    def forget_hint(self, key: bytes) -> None:
        """No other sender lists the item any more."""
        self._hints.pop(key)

    def hinted(self, key: bytes) -> HintedItem | None:
        return self._hints.get(key)

    def restart(self, capacity_bytes: int) -> None:
        """Empty the directory for a new engine; expansions are kept."""
        for key, listing in self.listings().items():
            self.learn(key, listing.expansion)
        self._entries.clear()
        self._entries.capacity_bytes = capacity_bytes
        self._hints.clear()
        self._listed_bytes.set(0)

    def reset(self) -> None:
        """Forget everything but pins and counters."""
        self._entries.clear()
        self._hints.clear()
        self._known.clear()
        self._listed_bytes.set(0)

    # --- what metrics and tests read ----------------------------------------------------------

    @property
    def queries(self) -> int:
        """Media parts whose rendering resolved."""
        return int(self._queries.value)

    @property
    def hits(self) -> int:
        """Those that caused no processing."""
        return int(self._hits.value)

    @property
    def evictions(self) -> int:
        """Entries that made room for others (not those a reset or a restart took)."""
        return int(self._evictions.value)

    @property
    def capacity_bytes(self) -> int:
        return self._entries.capacity_bytes

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes

    @property
    def num_pins(self) -> int:
        return self._entries.num_pins

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def listings(self) -> dict[bytes, Listing]:
        """Every entry, unpinned ones least recent first. O(n)."""
        return {key: entry for key in self._entries if (entry := self._entries.peek(key))}

    def sizes(self) -> dict[bytes, int]:
        """key → bytes of every entry: what the store must list for this sender. O(n)."""
        return {key: self._entries.size_of(key) or 0 for key in self._entries}

    def check_integrity(self) -> None:
        self._entries.check_integrity()


class _Bounded(Generic[V]):
    """A map of at most `capacity` keys that forgets those put longest ago; and of values whose
    weights are `max_weight` together at most."""

    def __init__(
        self,
        capacity: int,
        max_weight: int | None = None,
        weigh: Callable[[V], int] = lambda _: 1,
    ) -> None:
        self._capacity = capacity
        self._max_weight = capacity if max_weight is None else max_weight
        self._weigh = weigh
        self._weight = 0
        self._values: OrderedDict[bytes, V] = OrderedDict()

    def get(self, key: bytes) -> V | None:
        return self._values.get(key)

    def put(self, key: bytes, value: V) -> None:
        self.pop(key)
        self._values[key] = value
        self._weight += self._weigh(value)
        while len(self._values) > self._capacity or self._weight > self._max_weight:
            _, forgotten = self._values.popitem(last=False)
            self._weight -= self._weigh(forgotten)

    def pop(self, key: bytes) -> V | None:
        value = self._values.pop(key, None)
        if value is not None:
            self._weight -= self._weigh(value)
        return value

    def clear(self) -> None:
        self._values.clear()
        self._weight = 0
