"""The store: processed items in the engine process, who lists them and which requests hold them.

    item ──┬── listed by senders   (each sender's share equals its directory)
           └── held by requests    (until the request is released, whatever senders drop)

An item leaves the store when no sender lists it and no request holds it. A sender may list a key
whose item the store does not hold any more (it adopted a stale hint): the share counts it all the
same, and the item comes with the resend. The store never evicts: the directories decide. Only the
engine's input thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lookonce.types.media import ProcessedItem


@dataclass(slots=True)
class Share:
    """What one sender lists: key → bytes, and their sum."""

    sizes: dict[bytes, int] = field(default_factory=dict)
    nbytes: int = 0


@dataclass(slots=True)
class _Entry:
    item: ProcessedItem | None
    listers: int = 0
    holders: int = 0


class Store:
    """key → item, with one share per sender and one set of held items per request."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of all items in memory, listed or held, each counted once."""
        self.mismatches = 0
        """Operations that contradicted a share (a drop of what it does not list): always 0."""
        self._entries: dict[bytes, _Entry] = {}
        self._shares: dict[str, Share] = {}
        self._held: dict[str, dict[bytes, ProcessedItem]] = {}
        self.on_change: Callable[[bytes, bool], None] | None = None
        """Called with each key whose item comes (True) or goes."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def get(self, key: bytes) -> ProcessedItem | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.item

    def get_listed(self, key: bytes) -> ProcessedItem | None:
        """The item, if some sender lists it: so it fits a share, and is not held for one request
        alone."""
        entry = self._entries.get(key)
        return entry.item if entry is not None and entry.listers else None

    def listed(self) -> Iterator[tuple[bytes, ProcessedItem]]:
        """Every item in memory that some sender lists, those that came first first."""
        for key, entry in self._entries.items():
            if entry.item is not None and entry.listers:
                yield key, entry.item

    # --- shares -------------------------------------------------------------------------------

    @property
    def senders(self) -> tuple[str, ...]:
        return tuple(self._shares)

    def open_share(self, sender: str) -> None:
        self._shares.setdefault(sender, Share())

    def close_share(self, sender: str) -> None:
        self.empty_share(sender)
        self._shares.pop(sender, None)

    def empty_share(self, sender: str) -> None:
        share = self._shares.get(sender)
        for key in list(share.sizes) if share else ():
            self.drop(sender, key)

    def share(self, sender: str) -> Mapping[bytes, int]:
        """key → bytes of what the sender lists."""
        return MappingProxyType(self._shares[sender].sizes)

    def share_nbytes(self, sender: str) -> int:
        return self._shares[sender].nbytes

    def add(self, sender: str, key: bytes, item: ProcessedItem) -> bool:
        """List an item that came with a message; True if the store did not hold it before.

        The first copy stays: requests may hold it.
        """
        entry = self._list(sender, key, item.nbytes)
        return self._fill(key, entry, item)

    def adopt(self, sender: str, key: bytes, nbytes: int) -> None:
        """List a key that another sender added, whether or not its item is still there."""
        self._list(sender, key, nbytes)

    def drop(self, sender: str, key: bytes) -> None:
        share = self._shares[sender]
        size = share.sizes.pop(key, None)
        if size is None:
            self.mismatches += 1
            return
        share.nbytes -= size
        entry = self._entries[key]
        entry.listers -= 1
        self._leave_if_unused(key, entry)

    # --- requests -----------------------------------------------------------------------------

    @property
    def requests(self) -> tuple[str, ...]:
        return tuple(self._held)

    def open_request(self, request_id: str) -> None:
        """Begin to hold for a request. Raises `ValueError` when it already began."""
        if request_id in self._held:
            raise ValueError(f"request {request_id} is open")
        self._held[request_id] = {}

    def hold(self, request_id: str, keys: Iterable[bytes]) -> dict[bytes, ProcessedItem]:
        """Hold those of `keys` that have items for an open request, and return these items."""
        held = self._held[request_id]
        found = {}
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.item is None:
                continue
            found[key] = entry.item
            if key not in held:
                held[key] = entry.item
                entry.holders += 1
        return found

    def hold_loose(self, request_id: str, key: bytes, item: ProcessedItem) -> None:
        """Hold an item for a request without listing it for a sender."""
        self._fill(key, self._entries.setdefault(key, _Entry(None)), item)
        self.hold(request_id, (key,))

    def release(self, request_id: str) -> None:
        """Release everything that a request holds. May be called again."""
        for key in self._held.pop(request_id, {}):
            entry = self._entries[key]
            entry.holders -= 1
            self._leave_if_unused(key, entry)

    # --- inside -------------------------------------------------------------------------------

    def _list(self, sender: str, key: bytes, nbytes: int) -> _Entry:
        share = self._shares[sender]
        entry = self._entries.setdefault(key, _Entry(None))
        before = share.sizes.get(key)
        if before is None:
            entry.listers += 1
        share.sizes[key] = nbytes
        share.nbytes += nbytes - (before or 0)
        return entry

    def _fill(self, key: bytes, entry: _Entry, item: ProcessedItem) -> bool:
        if entry.item is not None:
            return False
        entry.item = item
        self.nbytes += item.nbytes
        if self.on_change is not None:
            self.on_change(key, True)
        return True

    def _leave_if_unused(self, key: bytes, entry: _Entry) -> None:
        if entry.listers or entry.holders:
            return
        del self._entries[key]
        if entry.item is not None:
            self.nbytes -= entry.item.nbytes
            if self.on_change is not None:
                self.on_change(key, False)

    def check_integrity(self) -> None:
        """Recount everything. Raises `AssertionError` naming the rule that is broken. O(n)."""
        listers: dict[bytes, int] = {}
        holders: dict[bytes, int] = {}
        for share in self._shares.values():
            for key in share.sizes:
                listers[key] = listers.get(key, 0) + 1
        for held in self._held.values():
            for key in held:
                holders[key] = holders.get(key, 0) + 1
        entries = self._entries.items()
        items = [entry.item for entry in self._entries.values() if entry.item is not None]
        rules = {
            "listers counted": all(e.listers == listers.get(k, 0) for k, e in entries),
            "holders counted": all(e.holders == holders.get(k, 0) for k, e in entries),
            "listed and held keys have entries": listers.keys() | holders.keys()
            == self._entries.keys(),
            "held entries have items": all(e.item is not None for _, e in entries if e.holders),
            "shares sum up": all(s.nbytes == sum(s.sizes.values()) for s in self._shares.values()),
            "nbytes is the sum of items": self.nbytes == sum(item.nbytes for item in items),
        }
        for rule, holds in rules.items():
            if not holds:
                raise AssertionError(rule)
