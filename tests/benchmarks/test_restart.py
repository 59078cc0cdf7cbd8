"""The restart benchmark reads the new process's stages, counted from the kill."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.restart import parts_since
from benchmarks.start import process_began


@dataclass
class Ended:
    """A server whose new engine process is this one, with the log of two starts."""

    log: Path

    def process(self, module: str) -> int:
        return os.getpid()


def line(at: float, words: str) -> str:
    moment = datetime.fromtimestamp(at)
    return f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03} INFO engine: {words}\n"


def test_stages_of_the_start_before_the_kill_do_not_count(tmp_path: Path) -> None:
    began = process_began(os.getpid())
    first, killed, log = began - 50.0, began - 0.25, tmp_path / "log"
    starts = [(first, "loading x"), (first + 2, "serving x"), (began + 3, "loading x")]
    log.write_text("".join(line(at, words) for at, words in starts))
    parts = parts_since(Ended(log), "engine", killed)  # type: ignore[arg-type]
    assert [stage for stage, _, _ in parts] == ["interpreter, imports"]
    assert parts[0][1:] == pytest.approx((0.25, 3.25), abs=0.2)
