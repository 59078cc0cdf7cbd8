"""One flight per key: concurrent callers of the same work share one execution.

A key is in flight from the first caller until the work ends; nothing is kept afterwards, so a
failure is never cached. Cancelling a caller leaves the others flying; when the last one leaves,
work that has not started is cancelled. Work that has started is finished by default, since its
result is about to be useful (it lands in a cache), or cancelled too with `abandon=True`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    """One execution and how many callers wait for it."""

    def __init__(self) -> None:
        self.waiters = 0
        self.started = False
        self.task: asyncio.Task[V] | None = None

    async def work(self, start: Callable[[], Awaitable[V]]) -> V:
        self.started = True
        return await start()


class Flights(Generic[K, V]):
    """Flights in the air, by key. Belongs to one event loop."""

    def __init__(self, *, abandon: bool = False) -> None:
        self._flights: dict[K, _Flight[V]] = {}
        self._abandon = abandon

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    async def run(self, key: K, start: Callable[[], Awaitable[V]]) -> V:
        """The result of `start()`, or of the flight of the same key already in the air.

        `start` is called at most once per flight; its exception reaches every waiter.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._take_off(key, start)
        task = flight.task
        assert task is not None
        flight.waiters += 1
        try:
            return await asyncio.shield(task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not task.done():
                self._last_left(key, flight, task)

    def _take_off(self, key: K, start: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight: _Flight[V] = _Flight()
        flight.task = asyncio.create_task(flight.work(start))
        self._flights[key] = flight
        flight.task.add_done_callback(lambda task: self._land(key, flight, task))
        return flight

    def _last_left(self, key: K, flight: _Flight[V], task: asyncio.Task[V]) -> None:
        if flight.started and not self._abandon:
            return
        # A later caller must not board a flight that is being cancelled.
        if self._flights.get(key) is flight:
            del self._flights[key]
        task.cancel()

    def _land(self, key: K, flight: _Flight[V], task: asyncio.Task[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # marks it as seen: without waiters nobody else will
