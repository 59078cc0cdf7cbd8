"""The receiver's half of the cache protocol, in the engine process. It does no input and no output.

The cache operations of a message are applied first, in their fixed order (drop, add, adopt), also
where its request is rejected then: directory and store stay equal. Then the request takes all its
references at once and keeps them until `release`.

A message of another epoch, or of a sender that never said hello in this one, is discarded whole
(None); `update` says how such a sender comes back.

Claims let one sender at a time make an item:

    key → [ holder │ waiting … ]    in the order they came; the holder has been granted the claim

A queue ends when its item is added: all who wait are told. When the holder gives up, goes or is
silent for long, the next one is granted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lookonce.cache.identity import UuidBindings
from lookonce.cache.store import Store
from lookonce.errors import BadRequestError
from lookonce.ipc.messages import (
    CacheOps,
    Claim,
    ExtendSession,
    Hint,
    Hints,
    KeyedItem,
    OpenSession,
    Submit,
    SupplyMedia,
    Unclaim,
    UpdateCache,
)
from lookonce.types.media import ProcessedItem, UuidBinding

MAX_PENDING_HINTS = 1_024
"""Hints kept for a sender between two takes; the oldest go first."""
MAX_CLAIMS = 1_024
"""Claims of one sender that are remembered; more are granted and forgotten."""


@dataclass(frozen=True, slots=True)
class Held:
    """The items a request holds now, and the keys that the store has no item for."""

    items: dict[bytes, ProcessedItem]
    missing: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _Sender:
    """What one sender has yet to be told, and its open claims: number → key."""

    hints: dict[bytes, Hint] = field(default_factory=dict)
    bindings: dict[bytes, UuidBinding] = field(default_factory=dict)
    """By name."""
    granted: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    claims: dict[int, bytes] = field(default_factory=dict)
    gone: dict[bytes, None] = field(default_factory=dict)

    def hint(self, key: bytes, item: ProcessedItem) -> None:
        self.gone.pop(key, None)
        self.hints[key] = Hint(key, item.nbytes, item.expansion)
        if len(self.hints) > MAX_PENDING_HINTS:
            del self.hints[next(iter(self.hints))]

    def withdraw(self, key: bytes) -> None:
        """The item has left the store. The sender may know of it by an earlier hint."""
        self.hints.pop(key, None)
        self.gone[key] = None
        if len(self.gone) > MAX_PENDING_HINTS:
            del self.gone[next(iter(self.gone))]


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
        self._senders: dict[str, _Sender] = {}
        self._claims: dict[bytes, deque[tuple[str, int]]] = {}
        """Key → (sender, number) of its claims; the first one is granted."""
        self._requests: dict[str, _OpenRequest] = {}

    # --- senders ------------------------------------------------------------------------------

    def hello(self, sender: str, epoch: int = 0) -> bool:
        """A sender says hello; `epoch` is the one its directory belongs to.

        For this epoch its share stays as it is. For another, or 0, its share starts empty, as its
        directory does with the welcome. Returns False, and does nothing, where the share was closed
        by `goodbye`: the sender must come back by `ClearCache` (`update`).
        """
        if epoch == self.epoch:
            return self.knows(sender)
        self._end_claims(sender)
        self._open(sender)
        return True

    def goodbye(self, sender: str) -> tuple[str, ...]:
        """A sender is gone: close its share. Returns its open requests, to abort and `release`."""
        self._end_claims(sender)
        self._senders.pop(sender, None)
        self.store.close_share(sender)
        return tuple(id for id, request in self._requests.items() if request.sender == sender)

    def knows(self, sender: str) -> bool:
        return sender in self._senders

    # --- messages -----------------------------------------------------------------------------

    def submit(self, sender: str, message: Submit | OpenSession) -> Held | None:
        """Apply the operations, then hold the request's references; None when discarded.

        A live session holds nothing here: whoever computes its items refers to them.
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
        held = self._hold(request_id, wanted, message.loose)
        if isinstance(message, OpenSession):
            self._let_go(request_id)
        return held

    def extend(self, sender: str, message: ExtendSession) -> Held | None:
        """Apply the operations, then find the items of the extension. None when discarded; nothing
        is found (`Held({})`) for a session that was released meanwhile.
        """
        if not self._accepts(sender, message.epoch):
            return None
        self._apply(sender, message.ops)
        session = self._requests.get(message.request_id)
        if session is None or session.sender != sender:
            return Held({})
        wanted = tuple(dict.fromkeys(feature.key for feature in message.features))
        held = self._hold(message.request_id, wanted, message.loose)
        self._let_go(message.request_id)
        return held

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
            self._open(sender)
            for number in self._senders[sender].claims.keys() - set(message.open_claims):
                self._end_claim(sender, number)
        if not self._accepts(sender, message.epoch):
            return False
        self._apply(sender, message.ops)
        return True

    def release(self, request_id: str) -> None:
        """Release all items of a request. May be called again, and for unknown requests."""
        if self._requests.pop(request_id, None) is not None:
            self.store.release(request_id)

    def claim(self, sender: str, message: Claim) -> bool:
        """Grant a claim, queue it, or answer that the item is held; False: discarded."""
        if not self._accepts(sender, message.epoch):
            return False
        claimant, number, key = self._senders[sender], message.number, message.key
        if number in claimant.claims:  # repeated
            if self._claims[key][0] == (sender, number):
                claimant.granted.append(number)
            return True
        item = self.store.get_listed(key)
        if item is not None:
            claimant.hint(key, item)
            claimant.held.append(number)
        elif len(claimant.claims) >= MAX_CLAIMS:
            claimant.granted.append(number)
        else:
            claimant.claims[number] = key
            queue = self._claims.setdefault(key, deque())
            queue.append((sender, number))
            if len(queue) == 1:
                claimant.granted.append(number)
        return True

    def pass_claims_on(self, sender: str) -> bool:
        """A sender has been silent: end those of its granted claims for which others wait, who are
        granted them. Whether there were any. The sender may repeat a claim, and waits then, too."""
        known = self._senders.get(sender)
        waited_for = [
            number
            for number, key in (known.claims.items() if known else ())
            if self._claims[key][0] == (sender, number)
            and any(name != sender for name, _ in self._claims[key])
        ]
        for number in waited_for:
            self._end_claim(sender, number)
        return bool(waited_for)

    def unclaim(self, sender: str, message: Unclaim) -> None:
        """End a claim; one that is not open any more is no mistake."""
        if self._accepts(sender, message.epoch):
            self._end_claim(sender, message.number)

    def take_hints(self, sender: str) -> Hints | None:
        """What other senders added since the last call and the store still has, and answers to
        claims; None if there is nothing to tell.

        Always None for a sender that was taken for dead and has not started over yet.
        """
        peer = self._senders.get(sender)
        if peer is None:
            return None
        all_news = (peer.hints, peer.bindings, peer.granted, peer.held, peer.gone)
        if not any(all_news):
            return None
        items = tuple(hint for hint in peer.hints.values() if hint.key in self.store)
        told = Hints(
            items,
            tuple(peer.bindings.values()),
            tuple(peer.granted),
            tuple(peer.held),
            tuple(peer.gone),
        )
        for news in all_news:
            news.clear()
        return told if told != Hints() else None

    def claims(self) -> dict[tuple[str, int], int]:
        """(sender, number) of every open claim → its place in its queue, 0 for the granted one."""
        return {
            claim: place for queue in self._claims.values() for place, claim in enumerate(queue)
        }

    def counters(self) -> dict[str, float]:
        store = self.store
        return {
            "mm_store_bytes": float(store.nbytes),
            "mm_store_listed_bytes": float(sum(map(store.share_nbytes, store.senders))),
            "mm_store_requests": float(len(store.requests)),
        }

    # --- inside -------------------------------------------------------------------------------

    def _accepts(self, sender: str, epoch: int) -> bool:
        return epoch == self.epoch and sender in self._senders

    def _open(self, sender: str) -> None:
        """Let the sender have an empty share. One that is new is told of what others have."""
        if sender not in self._senders:
            self._senders[sender] = newcomer = _Sender()
            newcomer.bindings.update((each.name, each) for each in self._uuids.bindings())
            for key, item in self.store.listed():
                newcomer.hint(key, item)
        self.store.open_share(sender)
        self.store.empty_share(sender)

    def _apply(self, sender: str, ops: CacheOps) -> None:
        for key in ops.drops:
            self.store.drop(sender, key)
            if self.store.get_listed(key) is None:
                self._withdraw(sender, key)
        for keyed in ops.adds:
            if self.store.add(sender, keyed.key, keyed.item):
                self._announce(sender, keyed)
            self._answer_claims(keyed)
        for key, nbytes in ops.adopts:
            self.store.adopt(sender, key, nbytes)

    def _hold(self, request_id: str, wanted: tuple[bytes, ...], loose: Iterable[KeyedItem]) -> Held:
        for keyed in loose:
            self.store.hold_loose(request_id, keyed.key, keyed.item)
        items = self.store.hold(request_id, wanted)
        missing = tuple(key for key in wanted if key not in items)
        self._requests[request_id].missing = missing
        return Held(items, missing)

    def _let_go(self, request_id: str) -> None:
        """Hold nothing for an open request any more."""
        self.store.release(request_id)
        self.store.open_request(request_id)
        self._requests[request_id].missing = ()

    def _withdraw(self, sender: str, key: bytes) -> None:
        for peer in self._others(sender):
            peer.withdraw(key)

    def _announce(self, sender: str, keyed: KeyedItem) -> None:
        for peer in self._others(sender):
            peer.hint(keyed.key, keyed.item)

    def _announce_bindings(self, sender: str, bindings: Iterable[UuidBinding]) -> None:
        """For the other senders; for this one where another sender has bound the name before."""
        for asked in bindings:
            bound = self._uuids.claim(asked)
            for peer in self._others(sender) if bound == asked else [self._senders[sender]]:
                peer.bindings[bound.name] = bound

    def _answer_claims(self, keyed: KeyedItem) -> None:
        """The item was added: its claims end. All but the granted one wait for an answer."""
        for place, (name, number) in enumerate(self._claims.pop(keyed.key, ())):
            claimant = self._senders[name]
            del claimant.claims[number]
            if place > 0:
                claimant.hint(keyed.key, keyed.item)
                claimant.held.append(number)

    def _end_claim(self, sender: str, number: int) -> None:
        """End one claim; if it was the granted one, the next is granted."""
        key = self._senders[sender].claims.pop(number, None)
        if key is None:
            return
        queue = self._claims[key]
        was_granted = queue[0] == (sender, number)
        queue.remove((sender, number))
        if not queue:
            del self._claims[key]
        elif was_granted:
            name, following = queue[0]
            self._senders[name].granted.append(following)

    def _end_claims(self, sender: str) -> None:
        known = self._senders.get(sender)
        for number in list(known.claims) if known else ():
            self._end_claim(sender, number)

    def _others(self, sender: str) -> list[_Sender]:
        return [peer for name, peer in self._senders.items() if name != sender]

    def check_integrity(self) -> None:
        """Recount everything. Raises `AssertionError` naming the rule that is broken. O(n)."""
        self.store.check_integrity()
        if self._requests.keys() != set(self.store.requests):
            raise AssertionError("every open request holds in the store")
        if self._senders.keys() != set(self.store.senders):
            raise AssertionError("every sender has one share")
        claims = {
            (name, n): key for name, s in self._senders.items() for n, key in s.claims.items()
        }
        queued = {claim: key for key, queue in self._claims.items() for claim in queue}
        if claims != queued or not all(self._claims.values()):
            raise AssertionError("every open claim is in one queue")
