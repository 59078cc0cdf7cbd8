"""`lookonce bench warmup`: the first request after `/ready` beside later ones like it.

    first ms      from sending the first request of a new server to the end of its answer
    steady ms     median of the requests after it; each brings new pictures
    ratio         first over steady, median over the starts
    ... CPU ...   the same for the CPU time of all processes of the server, which other programs
                  on the machine disturb less

Every start serves one route alone, so each route has a first request of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.pictures import data_url, encoded_picture, variant
from benchmarks.report import Report, median, publish
from benchmarks.running_server import RunningServer, cpu_seconds, running_server, set_environment

ROUTES = {
    "chat": "/v1/chat/completions",
    "render": "/v1/chat/completions/render",
    "tokenize": "/tokenize",
}
STARTS = 3
REPEATS = 9
SETTLE_SECONDS = 1.0
"""Seconds between `/ready` and the first request."""


class _Cost(NamedTuple):
    """Wall and CPU milliseconds of one request."""

    wall_ms: float
    cpu_ms: float


def _bodies(num_pictures: int) -> Iterator[bytes]:
    """Requests with new pictures and a new question, without end."""
    encoded = encoded_picture("1024", "JPEG")
    number = 0
    while True:
        pictures = [variant(encoded, number + index) for index in range(num_pictures)]
        number += num_pictures
        parts = [{"type": "image_url", "image_url": {"url": data_url(p)}} for p in pictures]
        question = {"type": "text", "text": f"What is in picture {number}?"}
        message = {"role": "user", "content": [*parts, question]}
        yield json.dumps({"messages": [message], "temperature": 0, "max_tokens": 4}).encode()


def _costs(server: RunningServer, path: str, num_pictures: int, repeats: int) -> list[_Cost]:
    """The costs of the first request and of `repeats` more, one at a time."""
    found = []
    bodies = _bodies(num_pictures)
    prepared = [next(bodies) for _ in range(repeats + 1)]
    processes = server.processes("lookonce.")
    with httpx.Client(base_url=server.url, timeout=300) as client:
        client.get("/ready")  # opens the connection
        time.sleep(SETTLE_SECONDS)
        for body in prepared:
            cpu, started = sum(map(cpu_seconds, processes)), time.perf_counter()
            client.post(path, content=body).raise_for_status()
            seconds = time.perf_counter() - started
            found.append(_Cost(seconds * 1e3, (sum(map(cpu_seconds, processes)) - cpu) * 1e3))
    return found


def warmup_report(
    counts: Sequence[int], starts: int, repeats: int, options: Sequence[str]
) -> Report:
    """One row per route and number of pictures."""
    cpu = ("first CPU ms", "steady CPU ms", "CPU ratio")
    report = Report(
        "warmup",
        ("route", "pictures", "first ms", "steady ms", "ratio", *cpu),
        notes=[
            f"1024 px JPEGs, new in every request; {starts} starts of a server a row, "
            f"{repeats} later requests each; options: {' '.join(options) or 'none (nano)'}"
        ],
    )
    for name, path in ROUTES.items():
        for count in counts:
            firsts, steadies = [], []
            for _ in range(starts):
                with running_server(options) as server:
                    first, *later = _costs(server, path, count, repeats)
                firsts.append(first)
                steadies.append(_Cost(*map(median, zip(*later, strict=True))))
            report.add(name, count, *_compared(firsts, steadies))
    return report


def _compared(firsts: Sequence[_Cost], steadies: Sequence[_Cost]) -> list[float]:
    """First, steady and their ratio, in wall and in CPU time: medians over the starts."""
    figures = []
    for kind in range(2):
        pairs = [(f[kind], s[kind]) for f, s in zip(firsts, steadies, strict=True)]
        first, steady = (median(column) for column in zip(*pairs, strict=True))
        figures += [first, steady, median([f / s for f, s in pairs])]
    return figures


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench warmup", description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4], help="pictures")
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of `lookonce serve`, MODEL first, after --")
    given = parser.parse_args(arguments)
    set_environment()
    report = warmup_report(given.counts, given.starts, given.repeats, given.options)
    publish([report], given.json)
    return 0
