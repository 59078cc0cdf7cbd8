"""`lookonce bench warmup`: the first request after `/ready` beside later ones like it.

    first ms      from sending the very first request of a fresh server to the end of its answer
    steady ms     median of the requests after it; each brings pictures never seen before
    ratio         first over steady, median over the starts

Every start serves one route alone, so each route has a first request of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from lookonce.bench.pictures import data_url, encoded_picture, variant
from lookonce.bench.report import Report, median
from lookonce.bench.serving import RunningServer, running_server, set_environment

ROUTES = {
    "chat": "/v1/chat/completions",
    "render": "/v1/chat/completions/render",
    "tokenize": "/tokenize",
}
STARTS = 3
REPEATS = 9
SETTLE_SECONDS = 1.0
"""Between `/ready` and the first request: whoever waited for it sends it about then."""


def _bodies(num_pictures: int) -> Iterator[bytes]:
    """Requests with pictures and a question never sent before."""
    encoded = encoded_picture("1024", "JPEG")
    number = 0
    while True:
        pictures = [variant(encoded, number + index) for index in range(num_pictures)]
        number += num_pictures
        parts = [{"type": "image_url", "image_url": {"url": data_url(p)}} for p in pictures]
        question = {"type": "text", "text": f"What is in picture {number}?"}
        message = {"role": "user", "content": [*parts, question]}
        yield json.dumps({"messages": [message], "temperature": 0, "max_tokens": 4}).encode()


def _latencies(server: RunningServer, path: str, num_pictures: int, repeats: int) -> list[float]:
    """Milliseconds of the first request and `repeats` more, one at a time."""
    found = []
    bodies = _bodies(num_pictures)
    prepared = [next(bodies) for _ in range(repeats + 1)]
    with httpx.Client(base_url=server.url, timeout=300) as client:
        client.get("/ready")  # the client's own first connection
        time.sleep(SETTLE_SECONDS)
        for body in prepared:
            started = time.perf_counter()
            client.post(path, content=body).raise_for_status()
            found.append((time.perf_counter() - started) * 1e3)
    return found


def warmup_report(
    counts: Sequence[int], starts: int, repeats: int, options: Sequence[str]
) -> Report:
    """One row per route and number of pictures."""
    report = Report(
        "warmup",
        ("route", "pictures", "first ms", "steady ms", "ratio"),
        notes=[
            f"1024 px JPEGs, new in every request; {starts} starts of a server a row, "
            f"{repeats} later requests each; options: {' '.join(options) or 'none (nano)'}"
        ],
    )
    for name, path in ROUTES.items():
        for count in counts:
            firsts, steadies, ratios = [], [], []
            for _ in range(starts):
                with running_server(options) as server:
                    first, *later = _latencies(server, path, count, repeats)
                firsts.append(first)
                steadies.append(median(later))
                ratios.append(firsts[-1] / steadies[-1])
            report.add(name, count, median(firsts), median(steadies), median(ratios))
    return report


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
    report.show()
    if given.json is not None:
        report.write_json(given.json)
    return 0
