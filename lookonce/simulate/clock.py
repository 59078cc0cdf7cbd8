"""The clock of a simulation: time passes from one event to the next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """Events in order of their time, then of their making. Calling it gives the time, seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, moment: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at `moment`, or now where that has passed."""
        if moment < self.now:
            moment = self.now
        self.num_events += 1
        heapq.heappush(self._events, (moment, self.num_events, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.num_events += 1
        heapq.heappush(self._events, (self.now + seconds, self.num_events, call, arguments))

    @property
    def next_moment(self) -> float:
        """Of the next event; infinite where there is none."""
        return self._events[0][0] if self._events else math.inf

    def run(self, until: float = math.inf) -> None:
        """All events before `until`."""
        events = self._events
        while events and events[0][0] < until:
            self.now, _, call, arguments = heapq.heappop(events)
            call(*arguments)
