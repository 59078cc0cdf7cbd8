"""HTTP connections: work ends when its client leaves, and an answer begins with one write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, TypeVar, cast

from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

T = TypeVar("T")
_HEAD = b"HTTP/1.1 "


class ClientLeftError(Exception):
    """The client closed its connection before its answer was complete."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first.

    The request's body must have been read. Raises `ClientLeftError`.
    """
    with WhileConnected(receive):
        return await work


class WhileConnected:
    """A block that is cancelled when the client leaves; it then ends with `ClientLeftError`.

    The request's body must have been read. The block's work stays in the task that enters it: one
    other task waits for the client to leave, and no task is made per token.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = False
        self._left = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "the block runs in a task"
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
            return  # the task was also cancelled from outside: that cancellation goes on
        if kind is None or issubclass(kind, asyncio.CancelledError):
            raise ClientLeftError from None

    def _end(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled() or self._over:
            return
        watcher.exception()  # a connection that broke counts as closed
        self._left = True
        self._task.cancel()


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol on a `HeadBufferingTransport`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        buffering = HeadBufferingTransport(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, buffering))


class HeadBufferingTransport:
    """A transport that writes the head of an answer together with the body that follows.

    uvicorn writes head and body one after the other. For a short answer the write is the largest
    cost, and each write wakes the client. A head without a body at the end of the event loop's turn
    is written alone.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_HEAD):
            self._head = data
            asyncio.get_running_loop().call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's own."""
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""


def header(scope: Scope, name: bytes) -> str:
    """The first header of this name, which is in lower case; empty where there is none."""
    for each, value in scope["headers"]:
        if each == name:
            text: str = value.decode("latin-1")
            return text
    return ""
