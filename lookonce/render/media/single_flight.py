"""Single flight: concurrent callers of the same work share one execution.

A key is in flight from its first call until the last caller has the result; nothing is kept
afterwards. A failure ends the flight at once, so that it is not repeated to later callers. A
cancelled caller does not disturb the others; when the last caller is cancelled, so is the work.
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
    """The running executions by key. Belongs to one event loop."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    async def run(self, key: K, start: Callable[[], Awaitable[V]]) -> V:
        """The result of `start()`, or of the running flight of the same key.

        `start` is called once per flight; every caller gets its result or exception.
        """
        flight = self._flights.get(key) or self._start(key, start)
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0:
                # Forgotten first: a later caller must not join a flight that is being cancelled.
                self._forget(key, flight)
                flight.task.cancel()

    def _start(self, key: K, start: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = _Flight(asyncio.create_task(_call(start)))
        self._flights[key] = flight
        flight.task.add_done_callback(lambda task: self._on_done(key, flight, task))
        return flight

    def _on_done(self, key: K, flight: _Flight[V], task: asyncio.Task[V]) -> None:
        # Calling `exception` also keeps asyncio from reporting it as never retrieved.
        if task.cancelled() or task.exception() is not None:
            self._forget(key, flight)

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


async def _call(start: Callable[[], Awaitable[V]]) -> V:
    return await start()
