"""What the engine lacks is made again from its source and supplied; the caller never knows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container
from contextlib import AbstractAsyncContextManager

from lookonce.engine.client.generation import PendingRequest
from lookonce.engine.client.sender_cache import SenderCache
from lookonce.errors import LookOnceError, RequestFailedError
from lookonce.ipc.messages import SupplyMedia
from lookonce.types.media import ProcessedItem
from lookonce.types.request import RenderedItem

logger = logging.getLogger(__name__)


class Resender:
    """Answers `ResendMedia`, each in a task of its own.

    `room` waits for bytes on the channel, `commit` sends at once, and `give_up` ends a request
    whose items cannot be made again.
    """

    def __init__(
        self,
        sender: SenderCache,
        room: Callable[[int], AbstractAsyncContextManager[None]],
        commit: Callable[[SupplyMedia], None],
        give_up: Callable[[PendingRequest, LookOnceError], None],
    ) -> None:
        self._sender = sender
        self._room = room
        self._commit = commit
        self._give_up = give_up
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: PendingRequest, keys: tuple[bytes, ...]) -> None:
        task = asyncio.get_running_loop().create_task(self._resend(request, keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _resend(self, request: PendingRequest, keys: tuple[bytes, ...]) -> None:
        """Make what the engine lacks again from its source, and supply it."""
        try:
            recovered: dict[bytes, ProcessedItem] = {}
            while not await self._try_supply(request, keys, recovered):
                pass  # a reset took what was listed: it too must be made again
        except LookOnceError as error:
            self._give_up(request, error)
        except Exception:
            logger.exception("request %s: media could not be made again", request.request_id)
            self._give_up(request, RequestFailedError("media could not be processed again"))

    async def _try_supply(
        self,
        request: PendingRequest,
        keys: tuple[bytes, ...],
        recovered: dict[bytes, ProcessedItem],
    ) -> bool:
        """Add to `recovered` what must be made again, then supply; False if that takes more."""

        def lacking() -> tuple[RenderedItem, ...]:
            rest = [key for key in keys if key not in recovered]
            return self._sender.to_recover(request.rendered, rest)

        if request.complete:
            return True
        parts = lacking()
        made = await asyncio.gather(*(part.recover() for part in parts if part.recover))
        recovered.update((part.key, item) for part, item in zip(parts, made, strict=True))
        async with self._room(sum(item.nbytes for item in recovered.values())):
            if request.closed:
                return True
            if lacking():
                return False
            self._commit(self._sender.supply(request.request_id, request.rendered, keys, recovered))
            _let_go(request, recovered)
            return True


def _let_go(request: PendingRequest, sent: Container[bytes]) -> None:
    """What was made again is the engine's now; it could be made once more."""
    for part in request.rendered.items:
        if part.recover is not None and part.key in sent:
            part.item = None
