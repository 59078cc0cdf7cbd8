"""How many bytes a sender may have under way: the channel's only back pressure."""

from __future__ import annotations

import asyncio
from collections import deque


class FlowControl:
    """A byte budget that is waited for first come, first served.

    An amount above the whole capacity is granted once nothing else is under way, so it passes
    alone instead of never. Used from one event loop only.

    Invariant: waiters exist only while the first of them does not fit.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Bytes under way or reserved."""
        return self._used

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def acquire(self, nbytes: int) -> None:
        """Wait until `nbytes` fit, then take them. Raises what `fail` was given."""
        if not self._waiters and self._fits(nbytes):
            self._used += nbytes
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, granted)
        self._waiters.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise

    def take(self, nbytes: int) -> None:
        """Count bytes that go out whether they fit or not (small control messages do)."""
        self._used += nbytes

    def release(self, nbytes: int) -> None:
        self._used -= nbytes
        self._grant()

    def fail(self, error: Exception) -> None:
        """The channel is gone: whoever waits gets `error`. What is held may still be released."""
        waiters, self._waiters = self._waiters, deque()
        for _, granted in waiters:
            if not granted.done():
                granted.set_exception(error)

    def _fits(self, nbytes: int) -> bool:
        return self._used == 0 or self._used + nbytes <= self._capacity

    def _grant(self) -> None:
        while self._waiters and self._fits(self._waiters[0][0]):
            nbytes, granted = self._waiters.popleft()
            if not granted.done():
                self._used += nbytes
                granted.set_result(None)

    def _withdraw(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        """A waiter was cancelled: perhaps after its grant, which then goes to the next."""
        nbytes, granted = entry
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self.release(nbytes)
        elif entry in self._waiters:
            self._waiters.remove(entry)
            self._grant()

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the invariant above is broken."""
        assert self._used >= 0, f"{self._used} bytes under way"
        if self._waiters:
            nbytes, granted = self._waiters[0]
            leaving = granted.done()  # cancelled: its task has not run since
            assert leaving or not self._fits(nbytes), "a waiter that fits still waits"
