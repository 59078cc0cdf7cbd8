"""Clients that leave: work for a request ends the moment its connection does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed its connection; there is nobody to answer."""


class WhileConnected:
    """A block that is cancelled when the client leaves; it then ends with `ClientLeftError`.

    The request's body must have been read. The work stays in the task that enters the block: a
    stream has one task beside it that waits for its client, and none for its tokens.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = False
        self._left = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "there is work to cancel"
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.get_running_loop().create_task(_departure(self._receive))
        self._watcher.add_done_callback(self._end)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        self._watcher.cancel()
        if not self._left or self._task.uncancel() > self._cancelling:
            return  # somebody else cancels too, who is to be heard
        if kind is None or issubclass(kind, asyncio.CancelledError):
            raise ClientLeftError from None

    def _end(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled() or self._over:
            return
        watcher.exception()  # a broken connection is one that is gone
        self._left = True
        self._task.cancel()


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first.

    The request's body must have been read. Raises `ClientLeftError`.
    """
    with WhileConnected(receive):
        return await work


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
