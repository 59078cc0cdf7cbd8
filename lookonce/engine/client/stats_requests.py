"""StatsRequests to the engine that have one answer each: its counters."""

from __future__ import annotations

import asyncio

from lookonce.errors import LookOnceError
from lookonce.ipc.messages import Stats


class StatsRequests:
    """Pairs answers with who asked, by number."""

    def __init__(self) -> None:
        self.last_counters: dict[str, float] | None = None
        """The newest answer to anybody."""
        self._number = 0
        self._open: dict[int, asyncio.Future[dict[str, float]]] = {}

    def ask(self) -> tuple[int, asyncio.Future[dict[str, float]]]:
        """A number to send along, and what will hold the answer."""
        self._number += 1
        answer: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        self._open[self._number] = answer
        return self._number, answer

    def forget(self, number: int) -> None:
        self._open.pop(number, None)

    def answer(self, message: Stats) -> None:
        self.last_counters = message.counters
        asked = self._open.pop(message.nonce, None)
        if asked is not None and not asked.done():
            asked.set_result(message.counters)

    def fail(self, error: LookOnceError) -> None:
        """Nobody will answer any more."""
        asked, self._open = self._open, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(error)
