"""The engine process's half of the cache protocol. It does no input and no output.

Whatever a message asks for, its cache operations are applied first, in their fixed order (drop,
add, adopt), before and independently of judging the request: a rejected request leaves both sides
equal. Then the request takes all its references at once and keeps them until `release`.

Messages of another epoch, and of a sender that never said hello in this one, are discarded whole
(None); see `update` for how such a sender comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lookonce.cache.store import Store
from lookonce.cache.uuids import UuidBindings
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
    """What a request now holds, and which of its references the store could not answer."""

    items: dict[bytes, ProcessedItem]
    missing: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _Peer:
    """What waits to be told to one sender."""

    hints: dict[bytes, Hint] = field(default_factory=dict)
    bindings: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    """A request that holds items: whose it is, and its references that are still missing."""

    sender: str
    missing: tuple[bytes, ...] = ()


class ReceiverCache:
    """The engine's end of the cache protocol, for all senders. `epoch` is above 0."""

    def __init__(self, epoch: int) -> None:
        if epoch < 1:
            raise ValueError("an epoch is above 0")
        self.epoch = epoch
        self.store = Store()
        self._uuids = UuidBindings()
        self._peers: dict[str, _Peer] = {}
        self._requests: dict[str, _Open] = {}

    # --- senders ------------------------------------------------------------------------------

    def hello(self, sender: str, epoch: int = 0) -> bool:
        """A sender says hello, and which epoch its directory belongs to.

        Of this epoch: its share goes on as it is. Of another, or 0: its share starts empty, as its
        directory does with the welcome. False, and nothing is done, when it claims a share of this
        epoch that was closed by `goodbye`: it must come back by `ClearCache`, see `update`.
        """
        if epoch == self.epoch:
            return sender in self._peers
        self._peers.setdefault(sender, _Peer())
        self.store.open_share(sender)
        self.store.empty_share(sender)
        return True

    def goodbye(self, sender: str) -> tuple[str, ...]:
        """A sender is gone: its share is closed. Its open requests, to abort and `release`."""
        self._peers.pop(sender, None)
        self.store.close_share(sender)
        return tuple(id for id, request in self._requests.items() if request.sender == sender)

    def knows(self, sender: str) -> bool:
        return sender in self._peers

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
        self._requests[request_id] = _Open(sender)
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

        A sender this intake does not know comes back by emptying its share: send it `ClearCache`
        when one of its messages of this epoch was discarded.
        """
        if message.cleared and message.epoch == self.epoch:
            self.hello(sender)
        if not self._accepts(sender, message.epoch):
            return False
        self._apply(sender, message.ops)
        return True

    def release(self, request_id: str) -> None:
        """Let go of all a request holds. May be called again, and for requests never seen."""
        if self._requests.pop(request_id, None) is not None:
            self.store.release(request_id)

    def take_hints(self, sender: str) -> Hints | None:
        """What others added since the last call, less what has left the store; None if nothing.

        Nor is there anything for a sender that was taken for dead and has yet to start over.
        """
        peer = self._peers.get(sender)
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
        return epoch == self.epoch and sender in self._peers

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
        """Tell the others; tell the sender itself where another was first."""
        for name, digest in bindings:
            bound = self._uuids.claim(name, digest)
            for peer in self._others(sender) if bound == digest else [self._peers[sender]]:
                peer.bindings[name] = bound

    def _others(self, sender: str) -> list[_Peer]:
        return [peer for name, peer in self._peers.items() if name != sender]

    def check_integrity(self) -> None:
        """Recount everything. Raises `AssertionError` naming the rule that is broken. O(n)."""
        self.store.check_integrity()
        if self._requests.keys() != set(self.store.requests):
            raise AssertionError("every open request holds in the store")
        if self._peers.keys() != set(self.store.senders):
            raise AssertionError("every sender has one share")
