"""The sender's half of the cache protocol, in the API process. It does no input and no output.

Each method that changes the directory returns the one message that makes the same change to the
engine's store. The caller awaits room on the channel first, then calls the method, encodes and
enqueues its message without awaiting in between: directory and store see the changes in one order.

    lookup … lookup      the renderer pins the items it relies on       (Directory)
    submit | cancel      pins are given back; only submit changes the directory
    asked, supply        count a ResendMedia, and answer it
    settle               count items that the engine turned out not to need
    update, inject       add items that were processed elsewhere
    claim … publish      make an item that no other sender makes now; or give_up
    clear | resync       empty the directory, for the engine or because a message was lost

While a message is put together the entries it needs are pinned, so no message drops an item it
refers to. An item that does not fit beside the pinned ones travels loose, for its request alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import Literal, Self

import msgspec

from lookonce.cache.directory import Directory
from lookonce.cache.identity import UuidBindings
from lookonce.errors import MediaNotCachedError, NotReadyError
from lookonce.ipc.messages import (
    NO_OPS,
    CacheOps,
    Claim,
    ClearCache,
    ExtendSession,
    Hello,
    Hints,
    KeyedItem,
    OpenSession,
    Submit,
    SupplyMedia,
    Unclaim,
    UpdateCache,
    Welcome,
)
from lookonce.types.counts import Counts
from lookonce.types.media import Array, ProcessedItem, UuidBinding
from lookonce.types.request import (
    ExtendOptions,
    GenerateRequest,
    RenderedItem,
    RenderedPrompt,
    SessionOptions,
)

STARTED_OVER = -1
"""`UpdateCache.cleared` of a sender that empties its share unasked."""


_NOT_HELD = "referenced media is not held any more; send it again with its bytes"


class SenderCache:
    """One API process's end of the cache protocol.

    `capacity_bytes` is the whole budget of the processor cache (0: off); this sender uses its
    part of it, which the engine's welcome tells.
    """

    def __init__(
        self,
        sender_id: str,
        *,
        capacity_bytes: int,
        uuids: UuidBindings | None = None,
        counts: Counts | None = None,
    ) -> None:
        counts = Counts() if counts is None else counts
        self.sender_id = sender_id
        self.epoch = 0
        """The engine's; 0 until the first welcome."""
        self.directory = Directory(capacity_bytes, counts=counts)
        self.uuids = uuids if uuids is not None else UuidBindings()
        self._resends = counts.count("mm_cache_resends_total")
        self._asks = counts.count("mm_cache_asks_total")
        self._capacity_bytes = capacity_bytes
        self._num_senders = 1
        self._seq = 0
        self._claims: dict[int, bytes] = {}
        """Number → key of open claims, granted or not."""
        self._num_claims = 0

    @property
    def resends(self) -> int:
        """Items the engine asked for although it should have held them: it restarted, was reset,
        or a hint was stale. They are not counted as queries or hits, nor shown in receipts."""
        return int(self._resends.value)

    @property
    def asks(self) -> int:
        """Items the engine asked for whose references were sent without them on purpose."""
        return int(self._asks.value)

    def hello(self) -> Hello:
        return Hello(self.sender_id, self.epoch)

    def welcome(self, message: Welcome) -> None:
        """Begin a new epoch with an empty directory; a repeated welcome changes nothing."""
        if message.epoch == self.epoch:
            return
        self.epoch = message.epoch
        self._claims.clear()
        self._num_senders = message.num_senders
        self.directory.restart(self._capacity_bytes // message.num_senders)

    def disconnect(self) -> None:
        """The engine is gone, and with it the claims that it knew."""
        self.epoch = 0
        self._claims.clear()

    def submit(self, request: GenerateRequest, rendered: RenderedPrompt) -> Submit:
        """Commit: list what fits, give back the prompt's pins, and return the message to send.

        Raises `NotReadyError` before the first welcome; the pins are given back all the same.
        """
        parts, change = self._refer(rendered)
        return Submit(
            epoch=self.epoch,
            seq=self._next_seq(),
            ops=change.ops(),
            request=request,
            loose=tuple(change.loose),
            recoverable=all(_worth(part) for part in parts.values()),
            bindings=self._fresh_bindings(),
        )

    def open_session(
        self, request: GenerateRequest, rendered: RenderedPrompt, options: SessionOptions
    ) -> OpenSession:
        """As `submit`, for a live session, whose items are in the prompt or listed for certain."""
        _, change = self._refer(rendered)
        return OpenSession(
            epoch=self.epoch,
            seq=self._next_seq(),
            ops=change.ops(),
            request=request,
            options=options,
            loose=tuple(change.loose),
            bindings=self._fresh_bindings(),
        )

    def extend_session(
        self,
        request_id: str,
        number: int,
        rendered: RenderedPrompt,
        options: ExtendOptions,
        *,
        loose: bool,
    ) -> ExtendSession:
        """As `open_session`; with `loose` the items are not listed."""
        if loose:
            items = {part.key: part.item for part in rendered.items if part.item is not None}
            ops, alone = NO_OPS, [KeyedItem(key, item) for key, item in items.items()]
            self._require_epoch()
        else:
            _, change = self._refer(rendered)
            ops, alone = change.ops(), change.loose
        return ExtendSession(
            epoch=self.epoch,
            seq=self._next_seq(),
            ops=ops,
            request_id=request_id,
            number=number,
            token_ids=Array("int32", rendered.ids.shape, rendered.ids.data),
            features=rendered.features,
            options=options,
            loose=tuple(alone),
            frames=rendered.frames,
        )

    def to_complete(self, rendered: RenderedPrompt) -> tuple[RenderedItem, ...]:
        """The parts of a session's prompt whose `recover` must run before it is sent: the engine
        does not ask for items of a session. Raises `MediaNotCachedError` without a source."""
        lacking = tuple(
            part
            for part in rendered.items
            if part.item is None and not self.directory.lists_for_certain(part.key)
        )
        if not all(part.recover for part in lacking):
            raise MediaNotCachedError(_NOT_HELD)
        return lacking

    def _refer(self, rendered: RenderedPrompt) -> tuple[dict[bytes, RenderedItem], _Change]:
        """List what fits of a prompt's items, and give its pins back."""
        parts = _unique(rendered.items)
        try:
            self._require_epoch()
            with _Change(self.directory, parts) as change:
                for key, part in parts.items():
                    change.refer(key, part.item)
        finally:
            self.cancel(rendered)
        return parts, change

    def cancel(self, rendered: RenderedPrompt) -> None:
        """Give back the pins of a prompt that is not sent. May be called again."""
        for part in rendered.items:
            if part.pinned:
                part.pinned = False
                self.directory.unpin(part.key)

    def settle(self, rendered: RenderedPrompt) -> None:
        """Count items that were sent as references alone and will not be asked for. May be called
        again."""
        for part in rendered.items:
            if part.uncounted:
                part.uncounted = False
                self.directory.count(part.outcome)

    def asked(self, rendered: RenderedPrompt, keys: Iterable[bytes]) -> None:
        """Count the items of a `ResendMedia`, before any of them is made again."""
        not_needed = {part.key for part in rendered.items if part.outcome == "not_needed"}
        for key in keys:
            if key in not_needed:  # whatever copies of it further on in the prompt count as
                self._asks.add()
            else:
                self._resends.add()

    def to_recover(
        self, rendered: RenderedPrompt, keys: Iterable[bytes]
    ) -> tuple[RenderedItem, ...]:
        """The parts whose `recover` must run before `supply`: those without their item that no
        other request has sent meanwhile.

        Raises `MediaNotCachedError` (422) when one of them has no source.
        """
        parts = _unique(rendered.items)
        wanted = [key for key in dict.fromkeys(keys) if not self.directory.lists_for_certain(key)]
        asked = [parts.get(key) for key in wanted]
        lacking = [part for part in asked if part is None or part.item is None]
        recoverable = tuple(part for part in lacking if part is not None and part.recover)
        if len(recoverable) < len(lacking):
            raise MediaNotCachedError(_NOT_HELD)
        return recoverable

    def supply(
        self,
        request_id: str,
        rendered: RenderedPrompt,
        keys: Iterable[bytes],
        recovered: Mapping[bytes, ProcessedItem],
    ) -> SupplyMedia:
        """Commit the answer to `ResendMedia(keys)`: recovered items, else those rendered.

        Raises `MediaNotCachedError`, with nothing changed, when an item is in neither and its key
        is not listed for certain.
        """
        asked = set(keys)
        lacking = [key for key in keys if not self.directory.lists_for_certain(key)]
        items = _gather(_unique(rendered.items), lacking, recovered)
        with _Change(self.directory, asked) as change:
            for key, item in items.items():
                change.supply(key, item)
        self._settle_asked(rendered, asked)
        return SupplyMedia(
            epoch=self.epoch,
            seq=self._next_seq(),
            ops=change.ops(),
            request_id=request_id,
            loose=tuple(change.loose),
        )

    def update(self, items: Iterable[KeyedItem]) -> UpdateCache:
        """Commit injected items. One that neither is in `ops.adds` nor was listed before does not
        fit beside the pins and is not stored. Raises `NotReadyError` before the first welcome.
        """
        self._require_epoch()
        given = {keyed.key: keyed.item for keyed in items}
        with _Change(self.directory, given) as change:
            for key, item in given.items():
                change.supply(key, item, injected=True)
        return self._update(change.ops())

    def clear(self, message: ClearCache) -> UpdateCache:
        """Commit a reset: everything listed here is forgotten on both sides, pins stay."""
        return self._start_over(message.number)

    def resync(self) -> UpdateCache:
        """Start over after a message of ours could not be sent although it was committed."""
        return self._start_over(STARTED_OVER)

    # --- claims -------------------------------------------------------------------------------

    @property
    def claims_items(self) -> bool:
        """Whether there are other senders, with which items are shared."""
        return self._num_senders > 1 and self.epoch > 0 and self.directory.capacity_bytes > 0

    @property
    def num_claims(self) -> int:
        return len(self._claims)

    def claim(self, key: bytes) -> Claim:
        """Begin to claim the item of `key`; until it is published, given up or forgotten."""
        self._num_claims += 1
        self._claims[self._num_claims] = key
        return Claim(self.epoch, self._num_claims, key)

    def oldest_claim(self) -> Claim | None:
        """The open claim that was made first."""
        for number, key in self._claims.items():
            return Claim(self.epoch, number, key)
        return None

    def has_claim(self, number: int) -> bool:
        return number in self._claims

    def forget_claim(self, number: int) -> None:
        """The engine has ended the claim."""
        self._claims.pop(number, None)

    def give_up(self, number: int) -> Unclaim | None:
        """End a claim of which the engine is told; None if it has ended."""
        if self._claims.pop(number, None) is None:
            return None
        return Unclaim(self.epoch, number)

    def publish(self, number: int, item: ProcessedItem) -> UpdateCache | Unclaim:
        """Commit an item that was made under an open claim, which ends: list it, so that the other
        senders have it, or only end the claim where it is listed or does not fit."""
        key = self._claims.pop(number)
        if self.directory.listing(key) is None:
            with _Change(self.directory, (key,)) as change:
                change.supply(key, item)
            if not change.loose:
                return self._update(change.ops())
        return Unclaim(self.epoch, number)

    def hint(self, message: Hints) -> None:
        """Take note of what other senders added."""
        for key in message.gone:
            self.directory.forget_hint(key)
        for hint in message.items:
            self.directory.hint(hint.key, hint.nbytes, hint.expansion)
        for binding in message.bindings:
            self.uuids.learn(binding)

    def _settle_asked(self, rendered: RenderedPrompt, keys: Container[bytes]) -> None:
        """Count the items that were asked for; one that need not be processed for that is a hit."""
        for part in rendered.items:
            if part.uncounted and part.key in keys:
                part.uncounted = False
                part.outcome = "hit" if part.outcome == "not_needed" else part.outcome
                self.directory.count(part.outcome)

    def _start_over(self, cleared: int) -> UpdateCache:
        self.directory.reset()
        return UpdateCache(
            epoch=self.epoch,
            seq=self._next_seq(),
            ops=NO_OPS,
            cleared=cleared,
            open_claims=tuple(self._claims),
        )

    def _update(self, ops: CacheOps) -> UpdateCache:
        return UpdateCache(epoch=self.epoch, seq=self._next_seq(), ops=ops)

    def _require_epoch(self) -> None:
        if self.epoch == 0:
            raise NotReadyError("the engine is still starting")

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _fresh_bindings(self) -> tuple[UuidBinding, ...]:
        fresh = self.uuids.take_fresh()
        return fresh if self._num_senders > 1 else ()


class _Change:
    """The changes of one message: made in the directory at once, collected for the store.

    All keys of the message are pinned while it is open, so that none evicts another.
    """

    def __init__(self, directory: Directory, keys: Iterable[bytes]) -> None:
        self.loose: list[KeyedItem] = []
        self._directory = directory
        self._keys = tuple(keys)
        self._drops: list[bytes] = []
        self._adds: list[KeyedItem] = []
        self._adopts: list[tuple[bytes, int]] = []

    def __enter__(self) -> Self:
        for key in self._keys:
            self._directory.pin(key)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for key in self._keys:
            self._directory.unpin(key)

    def refer(self, key: bytes, item: ProcessedItem | None) -> None:
        """Refer to `key`; where it is not listed it is adopted, added, or sent loose.

        Without an item the reference is sent alone: the engine asks for the item if it needs it.
        """
        if key in self._directory or self._adopt(key) or item is None:
            return
        self._add(key, item)

    def supply(self, key: bytes, item: ProcessedItem, *, injected: bool = False) -> None:
        """Send an item, added or loose, unless the engine holds it for certain."""
        listing = self._directory.listing(key)
        if listing is None:
            self._add(key, item, injected=injected)
        elif listing.adopted:
            self._directory.unlist(key)
            self._drops.append(key)
            self._add(key, item, injected=injected)

    def ops(self) -> CacheOps:
        return CacheOps(tuple(self._drops), tuple(self._adds), tuple(self._adopts))

    def _adopt(self, key: bytes) -> bool:
        hint = self._directory.hinted(key)
        if hint is None:
            return False
        evicted = self._directory.try_list(key, hint.nbytes, hint.expansion, adopted=True)
        if evicted is None:
            return False
        self._drops += evicted
        self._adopts.append((key, hint.nbytes))
        return True

    def _add(self, key: bytes, item: ProcessedItem, *, injected: bool = False) -> None:
        keyed = KeyedItem(key, item)
        evicted = self._directory.try_list(key, item.nbytes, item.expansion, injected=injected)
        if evicted is None:
            self._directory.learn(key, item.expansion)
            self.loose.append(keyed)
        else:
            self._drops += evicted
            self._adds.append(keyed)


def _unique(parts: Iterable[RenderedItem]) -> dict[bytes, RenderedItem]:
    """One part per key, in order; of copies, one that has its item, else one that can recover."""
    unique: dict[bytes, RenderedItem] = {}
    for part in parts:
        best = unique.get(part.key)
        if best is None or _worth(part) > _worth(best):
            unique[part.key] = part
    return unique


def _gather(
    parts: Mapping[bytes, RenderedItem],
    keys: Iterable[bytes],
    recovered: Mapping[bytes, ProcessedItem],
) -> dict[bytes, ProcessedItem]:
    items = {}
    for key in keys:
        item = recovered.get(key)
        if item is None and key in parts:
            item = parts[key].item
        if item is None:
            raise MediaNotCachedError(_NOT_HELD)
        items[key] = item
    return items


def _worth(part: RenderedItem) -> int:
    return 2 if part.item is not None else int(part.recover is not None)


InjectionStatus = Literal["stored", "already_held", "rejected"]
Keyed = tuple[bytes, ProcessedItem]
Update = Callable[[Iterable[KeyedItem]], Awaitable[UpdateCache]]
"""Adds items to directory and store (`EngineClient.inject`)."""


class InjectionOutcome(msgspec.Struct, frozen=True):
    """What became of one item."""

    status: InjectionStatus
    reason: str | None = None


STORED = InjectionOutcome("stored")
ALREADY_HELD = InjectionOutcome("already_held")
DISABLED = InjectionOutcome("rejected", "cache disabled")
NO_ROOM = InjectionOutcome("rejected", "the cache has no room beside the items in use")


async def inject(
    directory: Directory, update: Update, items: Sequence[Keyed]
) -> list[InjectionOutcome]:
    """Add items that were processed elsewhere to the cache; what became of each, in order.

    Each item is one query, and a hit where it is held already. With the cache off nothing is
    counted. Raises `UnavailableError`.
    """
    if not directory.capacity_bytes:
        return [DISABLED] * len(items)
    outcomes: list[InjectionOutcome | None] = []  # None: to be sent
    new: dict[bytes, ProcessedItem] = {}
    for key, item in items:
        outcomes.append(_outcome_before_sending(directory, key, item, new))
    if new:
        await update(KeyedItem(key, item) for key, item in new.items())
    stored = {key for key in new if key in directory}
    settled = [
        outcome or (STORED if key in stored else NO_ROOM)
        for outcome, (key, _) in zip(outcomes, items, strict=True)
    ]
    for outcome in settled:
        directory.count("hit" if outcome is ALREADY_HELD else "miss")
    return settled


def _outcome_before_sending(
    directory: Directory, key: bytes, item: ProcessedItem, new: dict[bytes, ProcessedItem]
) -> InjectionOutcome | None:
    """None for an item that is to be sent, which is added to `new`."""
    if key in new:
        return ALREADY_HELD
    if directory.lists_for_certain(key):
        directory.pin(key)
        directory.unpin(key)  # the item is the most recently used one now
        return ALREADY_HELD
    if item.nbytes > directory.capacity_bytes:
        return InjectionOutcome(
            "rejected",
            f"the item has {item.nbytes} bytes; the cache holds {directory.capacity_bytes}",
        )
    new[key] = item
    return None
