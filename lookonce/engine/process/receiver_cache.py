"""The receiver's half of the cache protocol, in the engine process. It does no input and no output.

The cache operations of a message are applied first, in their fixed order (drop, add, adopt), also
where its request is rejected then: directory and store stay equal. Then the request takes all its
references at once and keeps them until `release`.

A message of another epoch, or of a sender that never said hello in this one, is discarded whole
(None); `update` says how such a sender comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lookonce.cache.identity import UuidBindings
from lookonce.cache.store import Store
from lookonce.errors import BadRequestError
from lookonce.ipc.messages import (
    CacheOps,
    Hint,
    Hints,
    KeyedItem,
    Submit,
    SupplyMedia,
    UpdateCache,
)
from lookonce.types.media import ProcessedItem

MAX_PENDING_HINTS = 1_024
"""Hints kept for a sender between two takes; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Held:
    """The items a request holds now, and the keys that the store has no item for."""

    items: dict[bytes, ProcessedItem]
    missing: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _SenderNews:
    """Hints and uuid bindings that one sender has yet to be told."""

    hints: dict[bytes, Hint] = field(default_factory=dict)
    bindings: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _OpenRequest:
    """A request that holds items; `missing` are the keys of those it still lacks."""

    sender: str
    missing: tuple[bytes, ...] = ()


class ReceiverCache:
    """The receiver's end of the cache protocol, for all senders. `epoch` is above 0."""

    def __init__(self, epoch: int) -> None:
        if epoch < 1:
            raise ValueError("an epoch is above 0")
        self.epoch = epoch
        self.store = Store()
        self._uuids = UuidBindings()
        self._news: dict[str, _SenderNews] = {}
        self._requests: dict[str, _OpenRequest] = {}

    # --- senders ------------------------------------------------------------------------------

    def hello(self, sender: str, epoch: int = 0) -> bool:
        """A sender says hello; `epoch` is the one its directory belongs to.

        For this epoch its share stays as it is. For another, or 0, its share starts empty, as its
        directory does with the welcome. Returns False, and does nothing, where the share was closed
        by `goodbye`: the sender must come back by `ClearCache` (`update`).
        """
        if epoch == self.epoch:
            return sender in self._news
        self._news.setdefault(sender, _SenderNews())
        self.store.open_share(sender)
        self.store.empty_share(sender)
        return True

    def goodbye(self, sender: str) -> tuple[str, ...]:
        """A sender is gone: close its share. Returns its open requests, to abort and `release`."""
        self._news.pop(sender, None)
        self.store.close_share(sender)
        return tuple(id for id, request in self._requests.items() if request.sender == sender)

    def knows(self, sender: str) -> bool:
        return sender in self._news

    # --- messages -----------------------------------------------------------------------------

    def submit(self, sender: str, message: Submit) -> Held | None:
        """Apply the operations, then hold the request's references; None when discarded.

        Raises `BadRequestError`, operations applied, when a request of that id is open.
        """
        if not self._accepts(sender, message.epoch):
            return None
        self._apply(sender, message.ops)
        self._announce_bindings(sender, message.bindings)
        request_id = message.request.request_id
        if request_id in self._requests:
            raise BadRequestError("a request of this request_id is running", param="request_id")
        self._requests[request_id] = _OpenRequest(sender)
        self.store.open_request(request_id)
        wanted = tuple(dict.fromkeys(feature.key for feature in message.request.features))
        return self._hold(request_id, wanted, message.loose)

    def supply(self, sender: str, message: SupplyMedia) -> Held | None:
        """Apply the operations, then hold what was missing. None when discarded; nothing is held
        (`Held({})`) for a request that was released meanwhile.
        """
        if not self._accepts(sender, message.epoch):
            return None
        self._apply(sender, message.ops)
        request = self._requests.get(message.request_id)
        if request is None or request.sender != sender:
            return Held({})
        return self._hold(message.request_id, request.missing, message.loose)

    def update(self, sender: str, message: UpdateCache) -> bool:
        """Empty the share if the message says so, then apply its operations; False: discarded.

        An unknown sender comes back by emptying its share: send it `ClearCache` when one of its
        messages of this epoch was discarded.
        """
        if message.cleared and message.epoch == self.epoch:
            self.hello(sender)
        if not self._accepts(sender, message.epoch):
            return False
        self._apply(sender, message.ops)
        return True

    def release(self, request_id: str) -> None:
        """Release all items of a request. May be called again, and for unknown requests."""
        if self._requests.pop(request_id, None) is not None:
            self.store.release(request_id)

    def take_hints(self, sender: str) -> Hints | None:
        """What other senders added since the last call and the store still has; None if nothing.

        Always None for a sender that was taken for dead and has not started over yet.
        """
        peer = self._news.get(sender)
        if peer is None:
            return None
        items = tuple(hint for hint in peer.hints.values() if hint.key in self.store)
        bindings = tuple(peer.bindings.items())
        peer.hints.clear()
        peer.bindings.clear()
        return Hints(items, bindings) if items or bindings else None

    def counters(self) -> dict[str, float]:
        store = self.store
        return {
            "mm_store_bytes": float(store.nbytes),
            "mm_store_listed_bytes": float(sum(map(store.share_nbytes, store.senders))),
            "mm_store_requests": float(len(store.requests)),
        }

    # --- inside -------------------------------------------------------------------------------

    def _accepts(self, sender: str, epoch: int) -> bool:
        return epoch == self.epoch and sender in self._news

    def _apply(self, sender: str, ops: CacheOps) -> None:
        for key in ops.drops:
            self.store.drop(sender, key)
        for keyed in ops.adds:
            if self.store.add(sender, keyed.key, keyed.item):
                self._announce(sender, keyed)
        for key, nbytes in ops.adopts:
            self.store.adopt(sender, key, nbytes)

    def _hold(self, request_id: str, wanted: tuple[bytes, ...], loose: Iterable[KeyedItem]) -> Held:
        for keyed in loose:
            self.store.hold_loose(request_id, keyed.key, keyed.item)
        items = self.store.hold(request_id, wanted)
        missing = tuple(key for key in wanted if key not in items)
        self._requests[request_id].missing = missing
        return Held(items, missing)

    def _announce(self, sender: str, keyed: KeyedItem) -> None:
        for peer in self._others(sender):
            peer.hints[keyed.key] = Hint(keyed.key, keyed.item.nbytes, keyed.item.expansion)
            if len(peer.hints) > MAX_PENDING_HINTS:
                del peer.hints[next(iter(peer.hints))]

    def _announce_bindings(self, sender: str, bindings: Iterable[tuple[bytes, bytes]]) -> None:
        """For the other senders; for this one where another sender has bound the name before."""
        for name, digest in bindings:
            bound = self._uuids.claim(name, digest)
            for peer in self._others(sender) if bound == digest else [self._news[sender]]:
                peer.bindings[name] = bound

    def _others(self, sender: str) -> list[_SenderNews]:
        return [peer for name, peer in self._news.items() if name != sender]

    def check_integrity(self) -> None:
        """Recount everything. Raises `AssertionError` naming the rule that is broken. O(n)."""
        self.store.check_integrity()
        if self._requests.keys() != set(self.store.requests):
            raise AssertionError("every open request holds in the store")
        if self._news.keys() != set(self.store.senders):
            raise AssertionError("every sender has one share")
