"""Asks the engine before an item is made, so that only one API process of a server makes it.

    claimed ──▶ Claim ──▶ granted: make it ──▶ UpdateCache lists it for this sender, and the others
                  │                            that wait are told where it is
                  │                        └─▶ failed, cancelled, too large: Unclaim, the next one
                  │                            is granted
                  └─────▶ held: the item has been added; look it up

A claim is held only while its item is being made and sent, and whoever makes an item waits for no
other: there is no circle of waiting processes. A process that is stopped while it holds a claim
answers no heartbeat (`show_life`), and the engine grants its claims to those who wait. Without an
engine, or with one API process, everything is granted at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from lookonce.engine.client.sender_cache import SenderCache
from lookonce.errors import EngineDeadError
from lookonce.ipc.messages import Claim, ClientMessage, Hints, Unclaim, UpdateCache
from lookonce.types.media import ProcessedItem
from lookonce.types.ports import Publish

MAX_CLAIMS = 512
"""Claims of this process at a time; beyond it items are made unclaimed, as far as the media pool's
queue takes them."""
REPEAT_SECONDS = 2.0
"""How long to wait before a claim is repeated. An engine that lost touch with this process for a
while has forgotten its claims; it ignores a claim that it knows."""


class ItemClaims:
    """The claims of one API process; implements `types.ports.ClaimsItems`.

    `room` waits for bytes on the channel, `commit` sends a change of the cache, and `send` sends
    any other message if the engine is connected.
    """

    def __init__(
        self,
        sender: SenderCache,
        room: Callable[[int], AbstractAsyncContextManager[None]],
        commit: Callable[[UpdateCache], None],
        send: Callable[[ClientMessage], None],
    ) -> None:
        self._sender = sender
        self._room = room
        self._commit = commit
        self._send = send
        self._waiting: dict[int, asyncio.Future[bool]] = {}

    def __len__(self) -> int:
        """Claims that wait for the engine's word."""
        return len(self._waiting)

    @asynccontextmanager
    async def claimed(self, key: bytes) -> AsyncIterator[Publish | None]:
        """The block in which the item of `key` may be made, and the call that sends it to the
        engine; None: the engine holds the item, and the directory knows it now."""
        if not self._sender.claims_items or len(self._waiting) >= MAX_CLAIMS:
            yield _keep
            return
        claim = self._sender.claim(key)
        try:
            granted = await self._ask(claim)
            yield partial(self._publish, claim.number) if granted else None
        finally:
            self._end(self._sender.give_up(claim.number))

    def answered(self, message: Hints) -> None:
        """The engine's word on some claims. What is granted but not wanted any more is returned."""
        for number in message.held:
            self._sender.forget_claim(number)
            self._settle(number, granted=False)
        for number in message.granted:
            if not self._sender.has_claim(number):
                self._end(Unclaim(self._sender.epoch, number))
            self._settle(number, granted=True)

    def show_life(self) -> None:
        """Tell the engine, which has sent a heartbeat, that whoever holds a claim here is alive:
        the claims of a process that stays silent pass on to those who wait."""
        claim = self._sender.oldest_claim()
        if claim is not None:
            self._send(claim)

    def forget_all(self) -> None:
        """The engine that knew the claims is gone: whoever waits makes the item without one."""
        for number in list(self._waiting):
            self._settle(number, granted=True)

    async def _ask(self, claim: Claim) -> bool:
        """Whether it was granted."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[claim.number] = answer
        try:
            while not answer.done():
                self._send(claim)
                await asyncio.wait([answer], timeout=REPEAT_SECONDS)
            return answer.result()
        finally:
            self._waiting.pop(claim.number, None)

    async def _publish(self, number: int, item: ProcessedItem) -> None:
        """Send an item ahead of the requests that need it, if it can be listed."""
        if item.nbytes > self._sender.directory.capacity_bytes:
            return
        try:
            async with self._room(item.message_nbytes):
                if self._sender.has_claim(number):
                    message = self._sender.publish(number, item)
                    if isinstance(message, UpdateCache):
                        self._commit(message)
                    else:
                        self._end(message)
        except EngineDeadError:
            pass  # the item goes with its request, if there is an engine by then

    def _settle(self, number: int, *, granted: bool) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result(granted)

    def _end(self, message: Unclaim | None) -> None:
        if message is not None:
            self._send(message)


async def _keep(item: ProcessedItem) -> None:
    """The item goes with its request alone."""
