"""A live session as its caller sees it: extensions go out, token deltas come back.

    open ──▶ accepted ──▶ ended (closed by the caller; or engine gone, context full, evicted)

The client keeps a `PendingSession`, the caller an `EngineSession`. Dropping that closes the
session.

Credits: an extension of n tokens costs n, and may be sent while some are left. The engine gives
them back once the tokens are computed. They count only as long as the caller reads what the session
answers: with `MAX_UNREAD` deltas unread, `extend` waits although the engine would take more.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from lookonce.engine.client.delta_stream import PendingRequest
from lookonce.errors import (
    BadRequestError,
    LookOnceError,
    RequestFailedError,
    SessionFullError,
)
from lookonce.types.request import EXTEND, ExtendOptions, RenderedPrompt, SessionOptions, TokenDelta

MAX_UNREAD = 256
"""Deltas that wait for the caller beyond which credits that come back do not count yet."""
MAX_UNREAD_IN_ALL = 16_384
"""Deltas of endless answers that nobody reads, at which the session fails."""


class PendingSession(PendingRequest):
    """A live session in the client, from its opening to its last delta."""

    def __init__(self, request_id: str, rendered: RenderedPrompt, options: SessionOptions) -> None:
        super().__init__(request_id, rendered, num_samples=1)
        self.options = options
        self.credits = options.credits
        """Tokens that may be sent now; the last extension may have overdrawn them."""
        self.num_extensions = 0
        """Extensions that were sent."""
        self._held_back = 0
        """Credits that came while too much was unread."""
        self._credit_waiters: deque[asyncio.Future[None]] = deque()

    @property
    def num_unread(self) -> int:
        return len(self._deltas)

    def push(self, delta: TokenDelta) -> None:
        """Add a delta, unless it gives credits back and says nothing else."""
        said = delta.session
        if said is not None:
            self._held_back += said.credits
        if delta.token_ids or delta.finish_reason or (said and (said.ended or said.compacted)):
            if delta.finish_reason == "length":
                self.fail(SessionFullError("the session has filled the model's context"))
            elif self.num_unread >= MAX_UNREAD_IN_ALL:
                self.fail(RequestFailedError("the session's answers are not read"))
            else:
                super().push(delta)
        self._release_credits()

    def take(self) -> TokenDelta | None:
        delta = super().take()
        self._release_credits()
        return delta

    def fail(self, error: LookOnceError) -> None:
        super().fail(error)
        self._wake_senders()

    def spend(self, num_tokens: int) -> int:
        """Count one extension; its number."""
        self.credits -= num_tokens
        self.num_extensions += 1
        return self.num_extensions

    async def wait_credits(self) -> None:
        """Returns once there are credits; raises what ended the session."""
        while self.credits <= 0 and not self.closed:
            waiter = asyncio.get_running_loop().create_future()
            self._credit_waiters.append(waiter)
            await waiter
        self.require_open()

    def require_open(self) -> None:
        """Raises what ended the session."""
        if self.error is not None:
            raise self.error
        if self.closed:
            raise BadRequestError("the session is closed", param="session")

    @property
    def is_slowed(self) -> bool:
        """No credits are left: the session is sent to faster than it is computed or read."""
        return self.credits <= 0

    def _release_credits(self) -> None:
        if self._held_back and self.num_unread < MAX_UNREAD:
            self.credits += self._held_back
            self._held_back = 0
            if self.credits > 0:
                self._wake_senders()
        if self.closed:
            self._wake_senders()

    def _wake_senders(self) -> None:
        while self._credit_waiters:
            waiter = self._credit_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


class SessionLink(Protocol):
    """What an `EngineSession` needs of the client."""

    async def extend_session(
        self,
        session: PendingSession,
        rendered: RenderedPrompt,
        options: ExtendOptions,
        *,
        loose: bool,
    ) -> int: ...


class ClosedAtEnd(ABC):
    """An async context manager that is closed at the end of its block."""

    @abstractmethod
    def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class EngineSession(ClosedAtEnd):
    """One live session. Iterate for its deltas; `extend` from the same or another task.

    Both raise what ended the session: `EngineDeadError` when the engine has gone,
    `SessionFullError` at the end of the context, `SessionEvictedError`, or the error of an
    extension that was refused. Iteration ends after `close`. One task at a time may iterate.
    """

    def __init__(
        self,
        session: PendingSession,
        link: SessionLink,
        leave: Callable[[PendingSession], None],
    ) -> None:
        self._session = session
        self._link = link
        self._leave = leave
        self._left = False
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()

    @property
    def request_id(self) -> str:
        return self._session.request_id

    @property
    def credits(self) -> int:
        """Tokens that may be sent before `extend` waits."""
        return self._session.credits

    @property
    def is_slowed(self) -> bool:
        """The next `extend` waits: the session is sent to faster than it is computed or read."""
        return self._session.is_slowed

    @property
    def closed(self) -> bool:
        return self._left or self._session.closed

    async def extend(
        self,
        rendered: RenderedPrompt,
        options: ExtendOptions = EXTEND,
        *,
        loose: bool = False,
    ) -> int:
        """Append tokens and items, once there are credits; the number of the extension.

        With `loose` the items are used by this session alone and cached nowhere. The prompt's pins
        are given back in every case. Calls take effect in their order.
        """
        async with self._turn:
            if self._left:
                self._session.require_open()
            return await self._link.extend_session(
                self._session,
                rendered,
                options,
                loose=loose,
            )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        session = self._session
        while True:
            if self._left:
                raise StopAsyncIteration
            try:
                delta = session.take()
            except BaseException:
                self.close()
                raise
            if delta is not None:
                return delta
            await session.change()

    def close(self) -> None:
        """End the session; a task that iterates or waits for credits is woken."""
        if not self._left:
            self._left = True
            self._leave(self._session)

    def __del__(self) -> None:
        """The last reference may be dropped in any thread: the session is left on its loop."""
        if not self._left:
            self._left = True
            with suppress(RuntimeError):  # the loop is closed, and the client with it
                self._loop.call_soon_threadsafe(self._leave, self._session)
