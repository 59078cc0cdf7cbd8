"""What streaming costs the API process: its CPU time per request and per token under load."""

from __future__ import annotations

import itertools
import json
import statistics

from benchmarks.load import Arrivals, run_load
from benchmarks.report import Report
from benchmarks.serving import RunningServer, cpu_seconds, running_server
from lookonce.errors import UnavailableError

CONCURRENCY = (1, 8, 32)
SHORT, LONG = 2, 32
"""Tokens per answer: what a token costs is the difference."""
REQUESTS = 96
ROUNDS = 5
"""Short and long answers in turns, since a machine's speed changes; medians count."""

_numbers = itertools.count()


def streams_report() -> Report:
    """A row per number of streams at a time."""
    columns = ("streams", "API us/request", "API us/token", "tok/s")
    report = Report("look (streams)", columns)
    report.notes.append(
        f"nano, streamed text; a request: {SHORT} tokens; a token: by answers of {SHORT} and {LONG}"
    )
    with running_server() as server:
        _load(server, 8, LONG)
        for concurrency in CONCURRENCY:
            rounds = [
                (_load(server, concurrency, SHORT), _load(server, concurrency, LONG))
                for _ in range(ROUNDS)
            ]
            short = statistics.median(short for (short, _), _ in rounds)
            long = statistics.median(long for _, (long, _) in rounds)
            rate = statistics.median(rate for _, (_, rate) in rounds)
            report.add(concurrency, short, (long - short) / (LONG - SHORT), rate)
    return report


def _load(server: RunningServer, concurrency: int, tokens: int) -> tuple[float, float]:
    """Microseconds of the API process per request, and tokens per second."""
    api = server.process("lookonce.server.process")
    bodies = [_body(tokens) for _ in range(max(REQUESTS, 4 * concurrency))]
    used = cpu_seconds(api)
    result = run_load(server.url, [], bodies, Arrivals(concurrency))
    used = cpu_seconds(api) - used
    if len(result.answered) < len(bodies):
        raise UnavailableError("the server did not answer every request")
    return used / len(bodies) * 1e6, tokens * len(bodies) / result.seconds


def _body(tokens: int) -> bytes:
    return json.dumps(
        {
            "messages": [{"role": "user", "content": f"What is the number {next(_numbers)}?"}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
