"""`lookonce bench link`: what the links between the processes cost, in three tables (`--parts`).

handover: items of 1, 25 and 100 MB on their way from a media worker to the encoder, with both types
of processor cache, in steady state: the cache is full, and each item replaces another one.

handover ms   from the end of decoding in the worker until the encoder has read the item (a sum);
              writing it is one copy in the worker. The lower quartile of 15 items
floor ms      the same six wake-ups of threads by plain sockets between processes, without an item:
              what is left of a small item's time is the system's; timed in the same turns
copies        handover ms in copies of that size between two warm buffers, timed in that worker too
copies beyond the same of what it takes beyond floor ms
API CPU ms    CPU time of the API process per item, beyond reading the request

requests: real servers of this checkout, one of each type of cache, side by side, are asked about
pictures of 2048 x 2048 pixels: each as a new one, then again, when reading the request is all that
is left to do. It compares the two types: `lru` is this code with arrays in messages, not an earlier
state of the code, and `--against` changes nothing here.

new ms        CPU time of the API process per request about a new picture
known ms      the same for a picture that it has just answered about: reading, hashing and rendering
beyond ms     the difference: handing the job to a worker and the item to the engine
of lru        that of `lru` is 1

channel (the table is named link): API process and engine process speak over the real channel,
without a model, a millisecond between steps.

idle p99 ms   how late the API process's event loop is (99th percentile) while nothing passes
late p99 ms   the same while ten items of 100 MB go to the engine
late CPU ms   the API process's CPU time in that: without what other processes take
item ms       from the first item's sending until the engine has received the last one, per item
item CPU ms   of it, CPU time of the API process
send us       CPU time of the engine's step thread in sending one step's tokens of 8 streams
engine us     CPU time of the whole engine process per step, waiting for the next step included
token us      CPU time of the API process per streamed token, up to its listener
own us        CPU time of both processes per step

With `--against FOLDER` handover and channel also have the LookOnce of another checkout, measured in
turn; ratio is the median of each turn's ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.known import long_model
from benchmarks.load_generator import Arrivals, run_load
from benchmarks.pictures import data_url, encoded_picture, variant
from benchmarks.report import Report, median, publish
from benchmarks.running_server import RunningServer, cpu_seconds, running_server, set_environment
from benchmarks.workloads import RequestShape

TURNS = 5
ROOT = Path(__file__).parents[1]
PROBE = Path(__file__).with_name("link_probe.py")
HANDOVER_PROBE = Path(__file__).with_name("handover_probe.py")
SIZES = (1, 25, 100)
"""Megabytes of the items that are handed over."""
PARTS = ("handover", "requests", "channel")
CACHE_TYPES = ("shm", "lru")
PICTURES = 3
"""New pictures of each turn and server."""
WARM_UP_TURNS = 2
API_PROCESS = "lookonce.server.process"
MODEL_SCALE = "8m"
SERVER_OPTIONS = ("--mm-processor-cache-gb", "0.5", "--kv-cache-gb", "0.5")
"""Of the cache's items of 100 MB each turn replaces some: memory is used again."""
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
    parser.add_argument(
        "--turns", type=int, default=TURNS, help="of which medians are taken [%(default)s]"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="tables [all]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(arguments)
    set_environment()
    made = {
        "handover": handover_report,
        "requests": requests_report,
        "channel": channel_report,
    }
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


def requests_report(_against: Path | None, turns: int) -> Report:
    """One row for each type of cache of this checkout; another one is not asked."""
    report = Report("requests", ("", "new ms", "known ms", "beyond ms", "of lru"))
    encoded = encoded_picture("2048", "JPEG")
    found: dict[str, list[tuple[float, float]]] = {each: [] for each in CACHE_TYPES}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        model = str(long_model(Path(scratch) / "model", MODEL_SCALE))
        servers = {
            each: running.enter_context(
                running_server([model, "--mm-processor-cache-type", each, *SERVER_OPTIONS])
            )
            for each in CACHE_TYPES
        }
        for turn in range(WARM_UP_TURNS + turns):
            pictures = [variant(encoded, turn * PICTURES + number) for number in range(PICTURES)]
            for each, server in servers.items():
                new, known = (_api_cpu_ms(server, pictures) for _ in range(2))
                if turn >= WARM_UP_TURNS:
                    found[each].append((new, known))
    beyond = {each: median([new - known for new, known in found[each]]) for each in CACHE_TYPES}
    for each in CACHE_TYPES:
        new, known = (median(list(figures)) for figures in zip(*found[each], strict=True))
        report.add(each, new, known, beyond[each], beyond[each] / beyond["lru"])
    report.notes.append(f"medians of {turns} turns of {PICTURES} pictures, one request at a time")
    report.notes.append("lru is this checkout's code with arrays in messages, no earlier code")
    return report


def _api_cpu_ms(server: RunningServer, pictures: Sequence[bytes]) -> float:
    """CPU time of the API process per request."""
    shape = RequestShape("", output_tokens=1, body={"model": None})
    text = {"type": "text", "text": "What?"}
    images = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in pictures]
    bodies = [shape.request([image, text]) for image in images]
    pid = server.process(API_PROCESS)
    before = cpu_seconds(pid)
    run_load(server.url, [], bodies, Arrivals(concurrency=1))
    return (cpu_seconds(pid) - before) * 1e3 / len(bodies)


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
