"""A circuit breaker: a tier that keeps failing is left alone for a while.

closed ──failures in a row──▶ open ──cooldown──▶ half open ──success──▶ closed
                               ▲                     │
                               └──── failure: cooldown doubled
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "half_open", "open"]

FAILURES_TO_OPEN = 3
FIRST_COOLDOWN = 1.0
LONGEST_COOLDOWN = 30.0


class Breaker:
    """Thread-safe. A timeout opens it at once: it has cost a request its patience already."""

    def __init__(
        self, clock: Callable[[], float], *, first_cooldown: float = FIRST_COOLDOWN
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._first_cooldown = self._cooldown = first_cooldown
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if self._opened_at is None:
                return "closed"
            cooled = self._clock() - self._opened_at >= self._cooldown
            return "half_open" if cooled or self._probing else "open"

    def try_enter(self) -> bool:
        """Whether the tier may be asked now; each True is followed by `succeed` or `fail`."""
        with self._lock:
            if self._opened_at is None:
                return True
            if self._probing or self._clock() - self._opened_at < self._cooldown:
                return False
            self._probing = True
            return True

    def succeed(self) -> None:
        with self._lock:
            self._opened_at = None
            self._probing = False
            self._failures = 0
            self._cooldown = self._first_cooldown

    def fail(self, *, timed_out: bool = False) -> None:
        with self._lock:
            self._failures += 1
            if self._probing:
                self._probing = False
                self._cooldown = min(2 * self._cooldown, LONGEST_COOLDOWN)
            elif self._opened_at is not None or not (
                timed_out or self._failures >= FAILURES_TO_OPEN
            ):
                return
            self._opened_at = self._clock()
