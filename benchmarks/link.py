"""`lookonce bench link`: what the link between API process and engine process costs.

late p99 ms   how late the API process's event loop is (99th percentile) while ten items of 100 MB
              go to the engine; idle p99 ms: while nothing passes
late CPU ms   the API process's CPU time in that: without what other processes take
item ms       from the first item's sending until the engine has received the last one, per item
item CPU ms   of it, CPU time of the API process
send us       CPU time of the engine's step thread in sending one step's tokens of 8 streams
engine us     CPU time of the whole engine process per step, waiting for the next step included
token us      CPU time of the API process per streamed token, up to its listener
own us        CPU time of both processes per step

Another table hands items of 1, 25 and 100 MB from a media worker over to the encoder, with both
types of processor cache, in steady state: the cache is full, and each item replaces another one.

handover ms   from the end of decoding in the worker until the encoder has read the item (a sum);
              writing it is one copy in the worker. The lower quartile of 15 items
copies        the same, in copies of that size between two warm buffers, timed in that worker too
API CPU ms    CPU time of the API process per item, beyond reading the request
floor ms      the same six wake-ups of threads by plain sockets between processes, without an item:
              what is left of a small item's time is the system's; timed in the same turns

Two processes speak over the real channel, without a model, a millisecond between steps. With
`--against FOLDER` the same is measured with the LookOnce of another checkout, in turn; ratio is the
median of each turn's ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Report, median, publish

TURNS = 5
ROOT = Path(__file__).parents[1]
PROBE = Path(__file__).with_name("link_probe.py")
HANDOVER_PROBE = Path(__file__).with_name("handover_probe.py")
SIZES = (1, 25, 100)
"""Megabytes of the items that are handed over."""
PARTS = ("handover", "channel")
FIGURES = {
    "idle_p99_ms": "idle p99 ms",
    "late_p99_ms": "late p99 ms",
    "late_cpu_p99_ms": "late CPU p99 ms",
    "late_cpu_max_ms": "late CPU max ms",
    "item_ms": "item ms",
    "item_cpu_ms": "item CPU ms",
    "send_us": "send us",
    "engine_us": "engine us",
    "token_us": "token us",
    "own_us": "own us",
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lookonce bench link",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    made = {"handover": handover_report, "channel": channel_report}
    publish([made[part](options.against, options.turns) for part in options.parts], options.json)
    return 0


def handover_report(against: Path | None, turns: int) -> Report:
    """One row for each size and way."""
    columns = ("MB", "", "handover ms", "floor ms", "copies", "copies beyond", "API CPU ms")
    report = Report("handover", columns)
    ways = [("shm", ROOT, "shm"), ("lru", ROOT, "lru")]
    if against is not None:
        ways.append(("the other", against.resolve(), "lru"))
    for size in SIZES:
        found: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in ways}
        floors = []
        for _ in range(turns):
            floors.append(probe(ROOT, HANDOVER_PROBE, "floor")["floor_ms"])
            for name, checkout, cache_type in ways:
                arguments = ("api", cache_type, str(size * 1_000_000))
                found[name].append(probe(checkout, HANDOVER_PROBE, *arguments))
        for name, figures in found.items():
            copies = [each["handover_ms"] / each["copy_ms"] for each in figures]
            took, cpu = (
                median([each[key] for each in figures]) for key in ("handover_ms", "api_cpu_ms")
            )
            beyond = [
                (each["handover_ms"] - floor) / each["copy_ms"]
                for each, floor in zip(figures, floors, strict=True)
            ]
            report.add(size, name, took, median(floors), median(copies), median(beyond), cpu)
    report.notes.append("copies beyond: of what the hand-over takes beyond its wake-ups (floor)")
    report.notes.append(f"medians of {turns} turns, each in three new processes; the ways in turn")
    return report


def channel_report(against: Path | None, turns: int) -> Report:
    """One row for each figure."""
    others = () if against is None else ("the other", "ratio")
    report = Report("link", ("", "this checkout", *others))
    ours, theirs = [], []
    for _ in range(turns):
        ours.append(probe(ROOT, PROBE, "api"))
        if against is not None:
            theirs.append(probe(against.resolve(), PROBE, "api"))
    for name, label in FIGURES.items():
        mine, other = [turn[name] for turn in ours], [turn[name] for turn in theirs]
        if against is None:
            report.add(label, median(mine))
        else:
            ratio = median([a / b for a, b in zip(mine, other, strict=True)])
            report.add(label, median(mine), median(other), ratio)
    report.notes.append(f"medians of {turns} turns, each in two new processes, uvloop")
    return report


def probe(checkout: Path, script: Path, *arguments: str) -> dict[str, float]:
    """The figures of a script with the `lookonce` of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures
