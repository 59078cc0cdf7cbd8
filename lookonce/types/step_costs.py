"""What steps of an engine take, by how much they compute: found from those that were measured."""

from __future__ import annotations

KEPT = 0.9
"""Weight of earlier measurements at a new one."""
MIN_INDEPENDENT = 0.01
"""Least 1 - r² of the numbers of steps and of units: with less, the fit cannot tell their costs
apart."""


class StepCosts:
    """What a step takes whatever it computes, and what each unit of it (a sequence, a row of an
    encoder) adds: least squares of seconds = steps x fixed + units x added, over measurements of
    which older ones count less."""

    def __init__(self) -> None:
        self._steps = self._both = self._units = 0.0
        self._steps_seconds = self._units_seconds = 0.0

    def add(self, steps: int, units: int, seconds: float) -> None:
        """`units` of all `steps` together, as `seconds`."""
        self._steps = KEPT * self._steps + steps * steps
        self._both = KEPT * self._both + steps * units
        self._units = KEPT * self._units + units * units
        self._steps_seconds = KEPT * self._steps_seconds + steps * seconds
        self._units_seconds = KEPT * self._units_seconds + units * seconds

    def added(self) -> float | None:
        """Seconds that a unit adds to a step; None where all steps had about as many."""
        found = self._independent()
        if found is None:
            return None
        return (self._steps * self._units_seconds - self._both * self._steps_seconds) / found

    def fixed(self) -> float | None:
        """Seconds of a step without its units; None as of `added`."""
        found = self._independent()
        if found is None:
            return None
        return (self._units * self._steps_seconds - self._both * self._units_seconds) / found

    def _independent(self) -> float | None:
        """The determinant of the normal equations, where it can be told from 0."""
        independent = self._steps * self._units - self._both * self._both
        return independent if independent > MIN_INDEPENDENT * self._steps * self._units else None
