"""`lookonce bench items`: what one request costs that has media items by the ten thousand.

live      one item of one row in each step, as live audio does: the last steps before so many items
memory    what such a session keeps of each item
chunks    a prompt of 4-token items, one after the other, computed in chunks of 8,192 tokens
held      a request that is aborted while its step holds so many encoder outputs
host      a working set larger than the device's cache, three times over: runs per unique item

CPU time of one thread. Everything is the engine's own but the model: the encoder returns constants.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.items_memory import memory_report
from benchmarks.items_world import LiveSession, Times, World, items_in_a_row, request
from benchmarks.report import Report, median, percentile, write_json

NUM_ITEMS = (1_000, 8_000, 32_000, 128_000)
SAMPLES, TURNS = 1_000, 10
"""Steps measured of each session, in so many turns: the sessions alternate, noise hits all."""
CHUNK, ITEM_TOKENS = 8_192, 4
DEVICE_ITEMS, WORKING_SETS = 256, (1, 2, 5, 10)
ROUNDS = 5
"""Times a build and a free are repeated; the median counts."""


def live_report(sizes: Sequence[int]) -> Report:
    """One row per number of items."""
    report = Report(
        "items (live: one item a step)",
        (
            "items", "extend us", "plan p50 us", "p99", "gather p50 us", "p99", "apply p50 us",
            "p99", "plan+apply p50 us", "all / first", "free ms",
        ),
    )  # fmt: skip
    sessions = {size: LiveSession(size) for size in sizes}
    for size, session in sessions.items():
        session.run(max(0, size - SAMPLES))
    measured = {size: Times() for size in sizes}
    for _ in range(TURNS):
        for size in sizes:
            _merge(measured[size], sessions[size].run(SAMPLES // TURNS))
    first: float | None = None
    for size in sizes:
        times = measured[size]
        total = median(_sums(times))
        first = first or total
        report.add(
            size,
            1e3 * median(times.extend),
            *(1e3 * figure for row in (times.plan, times.gather, times.apply)
              for figure in (median(row), percentile(row, 99))),
            1e3 * median(times.plan_and_apply),
            total / first,
            sessions.pop(size).end(),
        )  # fmt: skip
    report.notes.append(
        f"the last {SAMPLES} items of each, the sessions taking turns; all / first: extend, plan, "
        "gather and apply over those of the first row"
    )
    return report


def chunk_report(sizes: Sequence[int]) -> Report:
    report = Report(
        f"items (chunks of {CHUNK:,} tokens, items of {ITEM_TOKENS})",
        ("items", "build ms", "plan p50 ms", "gather p50 ms", "apply p50 ms", "free ms"),
    )
    for size in sizes:
        rounds = [_chunk_round(size) for _ in range(ROUNDS)]
        report.add(size, *map(median, zip(*rounds, strict=True)))
    report.notes.append(
        f"median of {ROUNDS} rounds; build: from message to queue; free: an abort, and the step "
        "that tells the runner"
    )
    return report


def _chunk_round(size: int) -> tuple[float, ...]:
    """Milliseconds to build, of plan, gather and apply of a step, and to free."""
    num_tokens = size * ITEM_TOKENS
    world = World(
        max_tokens=num_tokens + 64, chunk=CHUNK, rows_cached=2 * CHUNK, longest_item=ITEM_TOKENS
    )
    features, items = items_in_a_row(size, ITEM_TOKENS)
    prompt = request(features, num_tokens=num_tokens + 1, max_tokens=1)
    started = time.thread_time()
    world.scheduler.add(prompt, items)
    built, times = time.thread_time(), Times()
    for _ in range(max(1, num_tokens // CHUNK)):
        world.step(times)
    computed = time.thread_time()
    world.scheduler.abort("live")
    world.step(Times())
    freed = time.thread_time()
    steps = map(median, (times.plan, times.gather, times.apply))
    return 1e3 * (built - started), *steps, 1e3 * (freed - computed)


def held_report(sizes: Sequence[int]) -> Report:
    report = Report("items (held by one step)", ("items held", "free ms"))
    for size in sizes:
        features, items = items_in_a_row(size, ITEM_TOKENS)
        tokens = size * ITEM_TOKENS + 1
        prompt = request(features, num_tokens=tokens, max_tokens=1)
        taken = []
        for _ in range(ROUNDS):
            world = World(
                max_tokens=tokens + 64, chunk=tokens, rows_cached=tokens, longest_item=ITEM_TOKENS
            )
            world.scheduler.add(prompt, items)
            world.scheduler.plan()
            gc.collect()
            started = time.thread_time()
            world.scheduler.abort("live")
            taken.append(1e3 * (time.thread_time() - started))
        report.add(size, median(taken))
    return report


def host_report(ratios: Sequence[int]) -> Report:
    report = Report(
        "items (encoder runs per unique item)",
        ("working set / device cache", "items", "with host tier", "without"),
    )
    for ratio in ratios:
        count = ratio * DEVICE_ITEMS
        report.add(
            ratio, count, _runs_per_item(count, host=True), _runs_per_item(count, host=False)
        )
    report.notes.append("each item in a request of its own, all of them three times in order")
    return report


def _runs_per_item(count: int, *, host: bool) -> float:
    world = World(
        max_tokens=64, chunk=64, rows_cached=DEVICE_ITEMS * ITEM_TOKENS, longest_item=ITEM_TOKENS,
        rows_on_host=count * ITEM_TOKENS if host else 0,
    )  # fmt: skip
    features, items = items_in_a_row(count, ITEM_TOKENS)
    for feature in 3 * features:
        alone = msgspec.structs.replace(feature, offset=0)
        prompt = request((alone,), num_tokens=ITEM_TOKENS + 1, max_tokens=1)
        world.scheduler.add(prompt, {feature.key: items[feature.key]})
        world.step(Times())
        world.scheduler.reset_prefix_cache()  # a cached prefix would spare the item altogether
    return world.scheduler.stats()["encoder_runs_total"] / count


def _merge(into: Times, more: Times) -> None:
    into.extend += more.extend
    into.plan += more.plan
    into.gather += more.gather
    into.apply += more.apply


def _sums(times: Times) -> list[float]:
    rows = zip(times.extend, times.plan, times.gather, times.apply, strict=True)
    return [sum(row) for row in rows]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench items", description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=list(NUM_ITEMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = sorted(options.items)
    reports: list[Report] = []
    for measure in (live_report, chunk_report, held_report, memory_report):
        reports.append(measure(sizes))
        reports[-1].show()
    reports.append(host_report(WORKING_SETS))
    reports[-1].show()
    if options.json is not None:
        write_json(options.json, reports)
    return 0
