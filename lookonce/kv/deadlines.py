"""One thread that calls back when a moment has passed: workers that wait cannot tell."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count


class Deadlines:
    """Callbacks at monotonic seconds. They are not taken back: one that came too late does nothing.

    Callbacks must be quick and must not raise.
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-deadlines", daemon=True)
        self._thread.start()

    def at(self, moment: float, call: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._numbers), call))
            if self._due[0][2] is call:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        """Waits for the earliest; None once closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._due and self._due[0][0] <= now:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(self._due[0][0] - now if self._due else None)
        return None
