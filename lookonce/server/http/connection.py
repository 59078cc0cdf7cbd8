"""Clients that leave: work for a request ends the moment its connection does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, TypeVar, cast

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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


_HEAD = b"HTTP/1.1 "


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, on a `HeadHolder`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        holder = HeadHolder(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, holder))


class HeadHolder:
    """A transport that keeps the head of an answer back until its body follows.

    uvicorn writes them one after the other; sending is the dearest thing done for a short answer,
    and each write wakes the client. A head that nothing follows at once goes out by itself.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(_HEAD):
            self._held = data
            asyncio.get_running_loop().call_soon(self._let_go)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._let_go()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """All else is the transport's own."""
        return getattr(self._transport, name)

    def _let_go(self) -> None:
        if self._held and not self._transport.is_closing():
            self._transport.write(self._held)
        self._held = b""
