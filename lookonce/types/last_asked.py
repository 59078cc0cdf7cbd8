"""Who asked last: whether others would be held up by what one of them asks for."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
OTHERS_SECONDS = 2.0
"""Who asked so long ago may still ask."""


class LastAsked(Generic[K]):
    """The last two that asked, and when: with these two known, it is known of everybody whether
    somebody else asks. Seconds are of any clock."""

    def __init__(self) -> None:
        self._last: list[tuple[K, float]] = []
        """The latest first."""

    def note(self, who: K, now: float) -> None:
        last = self._last
        if last and last[0][0] == who:
            last[0] = who, now
        else:
            self._last = [(who, now), *last[:1]]

    def others(self, who: K, now: float) -> bool:
        """Whether somebody else has asked in the last `OTHERS_SECONDS`."""
        return any(other != who and when > now - OTHERS_SECONDS for other, when in self._last)
