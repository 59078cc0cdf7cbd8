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
from dataclasses import dataclass
from typing import Generic, TypeVar

from lookonce.cache.lru import ByteLRU
from lookonce.types.media import Expansion
from lookonce.types.request import ProcessorOutcome

KNOWN_EXPANSIONS = 65_536
"""Expansions remembered beyond their entries (~200 bytes each)."""
MAX_HINTS = 4_096

_HITS: frozenset[ProcessorOutcome] = frozenset({"hit", "injected", "shared", "not_needed"})

V = TypeVar("V")


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
    ) -> None:
        self.queries = 0
        """Media parts whose rendering resolved."""
        self.hits = 0
        """Those that caused no processing."""
        self.evictions = 0
        """Entries that made room for others (not those a reset or a restart took)."""
        self._entries: ByteLRU[Listing] = ByteLRU(capacity_bytes)
        self._hints: _Bounded[HintedItem] = _Bounded(max_hints)
        self._known: _Bounded[Expansion] = _Bounded(max_known)

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
            self.queries += 1
            self.hits += outcome in _HITS

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
        self.evictions += len(evicted)
        return [entry.key for entry in evicted]

    def unlist(self, key: bytes) -> None:
        listing = self._entries.remove(key)
        if listing is not None:
            self.learn(key, listing.expansion)

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

    def hinted(self, key: bytes) -> HintedItem | None:
        return self._hints.get(key)

    def restart(self, capacity_bytes: int) -> None:
        """Empty the directory for a new engine; expansions are kept."""
        for key, listing in self.listings().items():
            self.learn(key, listing.expansion)
        self._entries.clear()
        self._entries.capacity_bytes = capacity_bytes
        self._hints.clear()

    def reset(self) -> None:
        """Forget everything but pins and counters."""
        self._entries.clear()
        self._hints.clear()
        self._known.clear()

    # --- what metrics and tests read ----------------------------------------------------------

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
    """A map of at most `capacity` keys that forgets the one put longest ago."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[bytes, V] = OrderedDict()

    def get(self, key: bytes) -> V | None:
        return self._values.get(key)

    def put(self, key: bytes, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._capacity:
            self._values.popitem(last=False)

    def pop(self, key: bytes) -> V | None:
        return self._values.pop(key, None)

    def clear(self) -> None:
        self._values.clear()
