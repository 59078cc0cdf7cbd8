"""Keeps strangers from filling the log: each place in the code may write so many lines a minute."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from lookonce.types.ports import Clock

MAX_LINES = 20
WINDOW_SECONDS = 60.0


@dataclass(slots=True)
class _Window:
    begun: float
    lines: int = 0
    left_out: int = 0


class LogLimiter(logging.Filter):
    """Lets the first `max_lines` records of each line of code pass in every `seconds`.

    The first record after others were left out says how many. Add it to a handler.
    """

    def __init__(
        self,
        max_lines: int = MAX_LINES,
        seconds: float = WINDOW_SECONDS,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__()
        self._max_lines = max_lines
        self._seconds = seconds
        self._clock = clock
        self._windows: dict[tuple[str, int], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        window = self._windows.setdefault((record.pathname, record.lineno), _Window(now))
        if now - window.begun >= self._seconds:
            if window.left_out:
                record.msg = f"{record.msg} ({window.left_out} more such lines were left out)"
            window.begun, window.lines, window.left_out = now, 0, 0
        window.lines += 1
        if window.lines > self._max_lines:
            window.left_out += 1
            return False
        return True


def limit_log_lines() -> None:
    """Put a limiter before every handler of the root logger."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimiter())
