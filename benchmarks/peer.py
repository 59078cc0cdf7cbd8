"""Another server's published figures, and the load they were taken with.

A random Qwen2.5-VL folder of 8 million parameters, 64 requests of 32 output tokens, 8 at a time,
with one JPEG of 1024 x 1024 pixels; all its options tuned. How many of the parameters the vision
tower has was not published; with new pictures it decides (--scale 8m: 15 %, 8m-small-tower: 7 %).
Ours is tuned by one option, --dtype bfloat16: the type such models are published and run in, while
our default on a CPU is float32 (--serve-options="--dtype float32" measures that).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from benchmarks.load import Arrivals, LoadResult, run_load
from benchmarks.report import Report
from benchmarks.workloads import Shape, text

FOLDER, SCALE, DTYPE = "qwen2_5_vl", "8m", "bfloat16"
PEER: Mapping[str, float] = {"new": 4.4, "same": 20.0, "text": 66.0}
"""Requests a second, by workload."""
PEER_FIRST_TEXT_MS = 8.2
"""Of a text prompt, median."""
ALONE = 32
"""Requests, one at a time."""


def settle(options: argparse.Namespace) -> None:
    """Sets what the published load fixes."""
    options.requests, options.concurrency, options.rate = 64, 8, None
    options.output_tokens, options.pictures, options.picture = 32, 1, "1024 JPEG"
    options.workload, options.prompts = ["text", "same", "new"], None
    options.serve_options = options.serve_options or f"--dtype {DTYPE}"


def text_alone(url: str, shape: Shape, api_key: str | None) -> LoadResult:
    """Text prompts one at a time, new questions all."""
    work = text(shape, 1000 + ALONE, 4)
    bodies = work.bodies[1000:]
    return run_load(url, work.warm_up, bodies, Arrivals(concurrency=1), api_key=api_key)


def beside(results: Mapping[str, LoadResult], alone: LoadResult) -> Report:
    """Ours and theirs; a ratio above 1 is ours ahead."""
    report = Report("serve (beside a peer)", ("figure", "ours", "peer", "ahead by"))
    for name, theirs in PEER.items():
        ours = len(results[name].answered) / results[name].seconds
        report.add(f"{name}: requests/s", ours, theirs, ours / theirs)
    first = alone.time_percentile("first_text", 50)
    ahead = None if first is None else PEER_FIRST_TEXT_MS / first
    report.add("text: TTFT ms, one at a time, p50", first, PEER_FIRST_TEXT_MS, ahead)
    return report
