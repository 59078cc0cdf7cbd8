"""What `bench start` reads out of a server's log."""

from __future__ import annotations

from datetime import datetime

import pytest

from benchmarks.start import API, ENGINE, FORK_SERVER, Start, breakdown, read_events
from lookonce.errors import UnavailableError

LOG = """\
2026-01-02 03:04:05,800 INFO fork server: ready to fork after 0.3 s
2026-01-02 03:04:06,000 INFO api 0: opening /models/nano
2026-01-02 03:04:07,500 INFO engine: loading /models/nano
2026-01-02 03:04:07,600 INFO api 0: the renderer is ready
2026-01-02 03:04:08,000 INFO engine: serving llama on cpu: float32
2026-01-02 03:04:08,100 INFO engine: warmed up text, 8 tokens, in 0.1 s
2026-01-02 03:04:08,200 INFO api 0: warmed up /tokenize in 0.1 s
2026-01-02 03:04:08,400 INFO api 0: warmed up /v1/chat/completions in 0.2 s
2026-01-02 03:04:08,500 INFO server: the engine serves after 1.0 s
a line of another kind
"""
ZERO = datetime(2026, 1, 2, 3, 4, 5).timestamp()


def started(log: str) -> Start:
    events = read_events(log)
    events["engine", ENGINE] = events["fork server", FORK_SERVER] = ZERO + 0.5
    events["api 0", API] = ZERO + 0.9
    return Start(ZERO, ZERO + 3.6, events, {"engine": 2.0, "api 0": 1.0})


def test_each_stage_lies_between_its_two_lines():
    report = breakdown(started(LOG))
    spans = [(row[0], round(row[2], 3), round(row[3], 3)) for row in report.rows]
    assert spans == [
        ("supervisor", 0.0, 0.5),
        ("engine", 0.5, 2.5),
        ("engine", 2.5, 3.0),
        ("engine", 3.0, 3.5),
        ("fork server", 0.5, 0.8),
        ("api 0", 0.9, 1.0),
        ("api 0", 1.0, 2.6),
        ("api 0", 2.6, 3.4),
        ("all", 0.0, 3.6),
    ]
    assert "3.00 s in all" in report.notes[0]


def test_a_log_without_a_stage_is_said_to_lack_it():
    lines = [line for line in LOG.splitlines() if "the renderer is ready" not in line]
    with pytest.raises(UnavailableError, match="the renderer is ready"):
        breakdown(started("\n".join(lines)))
