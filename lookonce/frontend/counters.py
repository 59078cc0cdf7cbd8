"""Figures the API process counts itself: plain numbers, written on its event loop alone.

They are counted for every token, where prometheus_client's own, which any thread may use, take ten
times as long. What they show is the same.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric


class Counted(Protocol):
    def family(self) -> Metric:
        """All that was counted until now."""


class Total:
    """How much there was in all."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self._value += amount

    def family(self) -> Metric:
        return CounterMetricFamily(self._name, self._text, self._value)


class TotalByLabel:
    """How many there were of each kind; kinds appear with their first."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self._name, self._text, self._label = name, text, label
        self._values: dict[str, float] = {}

    def inc(self, value: str) -> None:
        self._values[value] = self._values.get(value, 0.0) + 1.0

    def family(self) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in self._values.items():
            family.add_metric([value], count)
        return family


class Durations:
    """How many took how long: a histogram of seconds over `bounds`, which ascend."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def time(self) -> _Timing:
        """A block whose duration is observed, however it ends."""
        return _Timing(self)

    def family(self) -> Metric:
        buckets: list[tuple[str, float]] = []
        below = 0
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            below += count
            buckets.append((name, float(below)))
        return HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class _Timing:
    def __init__(self, durations: Durations) -> None:
        self._durations = durations

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._durations.observe(time.perf_counter() - self._started)
