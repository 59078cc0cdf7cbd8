"""One request as its caller sees it: an async iterator of token deltas.

The client keeps a `PendingRequest`, the caller a `DeltaStream`. Only the caller refers to the
stream: dropping it aborts the request, as does leaving or cancelling it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Self

from lookonce.errors import LookOnceError, error_from_wire
from lookonce.types.request import FinishReason, RenderedPrompt, TokenDelta


class PendingRequest:
    """A request from its submission to its last delta.

    new ──▶ submitted ──▶ accepted ──▶ closed (every sample finished, failed, or abandoned)
    """

    def __init__(self, request_id: str, rendered: RenderedPrompt, num_samples: int) -> None:
        self.request_id = request_id
        self.rendered = rendered
        self.submitted = False
        self.accepted = False
        self.complete = False
        """The engine holds all items of the request, and asks for none any more."""
        self.error: LookOnceError | None = None
        self._unfinished = set(range(num_samples))
        self._deltas: deque[TokenDelta] = deque()
        self._change: asyncio.Future[None] | None = None
        self._acceptance_awaited = False

    @property
    def closed(self) -> bool:
        """No more deltas will come; some may still have to be read."""
        return self.error is not None or not self._unfinished

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def accept(self, *, complete: bool) -> None:
        """Drop the items' arrays that can be made again, and, if `complete`, their sources too."""
        self.accepted = True
        self.complete = complete
        for part in self.rendered.items:
            if complete:
                part.item = part.recover = part.encoded = None
                if part.given_back is not None:
                    part.given_back()
                    part.given_back = None
            elif part.recover is not None:
                part.item = None
        if self._acceptance_awaited:
            self._wake()

    def push(self, delta: TokenDelta) -> None:
        """Add a delta; one of a sample that has ended already is dropped."""
        if delta.index not in self._unfinished or self.error is not None:
            return
        if delta.error is not None:
            self.fail(error_from_wire(*delta.error))
            return
        self.accepted = True
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
        self._deltas.append(delta)
        self._wake()

    def finish(self, reason: FinishReason) -> None:
        """End every unfinished sample with `reason`, as if the engine had."""
        for index in sorted(self._unfinished):
            self.push(TokenDelta(self.request_id, index, [], finish_reason=reason))

    def forget_sample(self, index: int) -> None:
        """Take no more deltas of this sample."""
        self._unfinished.discard(index)
        self._wake()

    def fail(self, error: LookOnceError) -> None:
        if not self.closed:
            self.error = error
            self._wake()

    async def wait_accepted(self) -> None:
        """Returns once the engine has accepted the request; raises what the request failed with."""
        self._acceptance_awaited = True
        while not self.accepted and not self.closed:
            await self.change()
        self._acceptance_awaited = False
        if self.error is not None:
            raise self.error

    def take(self) -> TokenDelta | None:
        """The next delta, None while there is none.

        Raises `StopAsyncIteration` after the last, or what the request failed with.
        """
        if self._deltas:
            return self._deltas.popleft()
        if self.error is not None:
            raise self.error
        if not self._unfinished:
            raise StopAsyncIteration
        return None

    def change(self) -> asyncio.Future[None]:
        """A future for the next delta, acceptance or failure; one task may wait for it."""
        self._change = asyncio.get_running_loop().create_future()
        return self._change

    def _wake(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)


class DeltaStream:
    """The token deltas of one request, as they come.

        deltas = await client.generate(...)      returns once the engine has accepted
        async for delta in deltas: ...           (or iterate at once, without the await)

    Raises what the request failed with. One task at a time may wait on it. The request is aborted
    when the stream is closed or dropped, when `async with` is left, and when a task that waits on
    it is cancelled.
    """

    def __init__(
        self,
        request: PendingRequest,
        submit: Callable[[PendingRequest], Awaitable[None]],
        leave: Callable[[PendingRequest], None],
    ) -> None:
        self._request = request
        self._submit = submit
        self._leave = leave
        self._left = False

    def __await__(self) -> Generator[object, None, Self]:
        return self._accepted().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._left:
            raise StopAsyncIteration
        request = self._request
        try:
            if not request.submitted:
                await self._submit(request)
            while (delta := request.take()) is None:
                await request.change()
            return delta
        except BaseException:
            self._close()
            raise

    async def aclose(self) -> None:
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    async def _accepted(self) -> Self:
        if self._request.accepted:
            return self
        try:
            if not self._request.submitted:
                await self._submit(self._request)
            await self._request.wait_accepted()
        except BaseException:
            self._close()
            raise
        return self

    def _close(self) -> None:
        if not self._left:
            self._left = True
            self._leave(self._request)
