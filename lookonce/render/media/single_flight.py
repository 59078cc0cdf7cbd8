"""One flight per key: concurrent callers of the same work share one execution.

A key is in flight from its first caller until the last one has the result, so that nobody slips in
between; nothing is kept afterwards. A failure takes its key off at once: it is never cached. A
caller who is cancelled leaves the others flying. When the last one has left, the work is cancelled:
nobody would take its result. What that means is the work's business; a pool gives back a place in
its queue, and finishes in peace what has begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    """One execution and how many callers wait for it."""

    __slots__ = ("num_waiting", "task")

    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.num_waiting = 0


class SingleFlight(Generic[K, V]):
    """SingleFlight in the air, by key. Belongs to one event loop."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    async def run(self, key: K, start: Callable[[], Awaitable[V]]) -> V:
        """The result of `start()`, or of the flight of the same key already in the air.

        `start` is called once per flight; its result or exception reaches every caller.
        """
        flight = self._flights.get(key) or self._take_off(key, start)
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0:
                # Off the board first: a later caller must not join a flight that is ending.
                self._forget(key, flight)
                flight.task.cancel()

    def _take_off(self, key: K, start: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = _Flight(asyncio.create_task(_call(start)))
        self._flights[key] = flight
        flight.task.add_done_callback(lambda task: self._land(key, flight, task))
        return flight

    def _land(self, key: K, flight: _Flight[V], task: asyncio.Task[V]) -> None:
        # `exception` also marks it as seen: asyncio would complain if every caller had left.
        if task.cancelled() or task.exception() is not None:
            self._forget(key, flight)

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


async def _call(start: Callable[[], Awaitable[V]]) -> V:
    return await start()
