"""`lookonce bench items`: what one request costs that has tens of thousands of media items.

live      a live session that gets one item of one row in each step; its last steps are measured
chunks    a prompt of 4-token items, one after the other, computed in chunks of 8,192 tokens
held      aborting a request whose step holds that many encoder outputs
memory    what a live session keeps of each item once its K/V are computed
host      a working set larger than the device's cache, three times over: runs per unique item

Times are CPU times of one thread. Everything but the model is the engine's own code: the encoder
returns constants.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import msgspec
import torch

from benchmarks.engine_without_model import (
    EngineWithoutModel,
    LiveSession,
    Times,
    items_in_a_row,
    request,
)
from benchmarks.report import Report, median, percentile, write_json

NUM_ITEMS = (1_000, 8_000, 32_000, 128_000)
SAMPLES, TURNS = 1_000, 10
"""Measured steps of each session. The sessions alternate in `TURNS` turns, so noise hits all."""
CHUNK, ITEM_TOKENS = 8_192, 4
DEVICE_ITEMS, WORKING_SETS = 256, (1, 2, 5, 10)
ROUNDS = 5
"""Repetitions of a build and a free; the median counts."""


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
    write_json(options.json, reports)
    return 0


def live_report(sizes: Sequence[int]) -> Report:
    """One row per number of items."""
    steps = ("plan p50 us", "p99", "gather p50 us", "p99", "apply p50 us", "p99")
    columns = ("items", "extend us", *steps, "plan+apply p50 us", "all / first", "free ms")
    report = Report("items (live: one item a step)", columns)
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
        extend, both = 1e3 * median(times.extend), 1e3 * median(times.plan_and_apply)
        phases = [
            1e3 * figure
            for taken in (times.plan, times.gather, times.apply)
            for figure in (median(taken), percentile(taken, 99))
        ]
        total = median(_sums(times))
        first = first or total
        report.add(size, extend, *phases, both, total / first, sessions.pop(size).end())
    report.notes.append(
        f"the last {SAMPLES} items of each, the sessions taking turns; all / first: extend, plan, "
        "gather and apply over those of the first row"
    )
    return report


def _merge(into: Times, more: Times) -> None:
    into.extend += more.extend
    into.plan += more.plan
    into.gather += more.gather
    into.apply += more.apply


def _sums(times: Times) -> list[float]:
    rows = zip(times.extend, times.plan, times.gather, times.apply, strict=True)
    return [sum(row) for row in rows]


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
    engine = EngineWithoutModel(
        max_tokens=num_tokens + 64, chunk=CHUNK, rows_cached=2 * CHUNK, longest_item=ITEM_TOKENS
    )
    features, items = items_in_a_row(size, ITEM_TOKENS)
    prompt = request(features, num_tokens=num_tokens + 1, max_tokens=1)
    started = time.thread_time()
    engine.scheduler.add(prompt, items)
    built, times = time.thread_time(), Times()
    for _ in range(max(1, num_tokens // CHUNK)):
        engine.step(times)
    computed = time.thread_time()
    engine.scheduler.abort("live")
    engine.step(Times())
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
            engine = EngineWithoutModel(
                max_tokens=tokens + 64, chunk=tokens, rows_cached=tokens, longest_item=ITEM_TOKENS
            )
            engine.scheduler.add(prompt, items)
            engine.scheduler.plan()
            gc.collect()
            started = time.thread_time()
            engine.scheduler.abort("live")
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
    engine = EngineWithoutModel(
        max_tokens=64,
        chunk=64,
        rows_cached=DEVICE_ITEMS * ITEM_TOKENS,
        longest_item=ITEM_TOKENS,
        rows_on_host=count * ITEM_TOKENS if host else 0,
    )
    features, items = items_in_a_row(count, ITEM_TOKENS)
    for feature in 3 * features:
        alone = msgspec.structs.replace(feature, offset=0)
        prompt = request((alone,), num_tokens=ITEM_TOKENS + 1, max_tokens=1)
        engine.scheduler.add(prompt, {feature.key: items[feature.key]})
        engine.step(Times())
        engine.scheduler.reset_prefix_cache()  # a cached prefix would spare the item altogether
    return engine.scheduler.stats()["encoder_runs_total"] / count


# --- Memory of a live session --------------------------------------------------------------------

ROWS_CACHED = 64
"""Rows of the encoder cache: it is full before the second half of the smallest session begins."""
WARM_UP = 2_048
"""Items of an earlier session, which fills caches and static buffers."""
ITEMS_AT_A_TIME = 100
"""The step times of a whole session would take more memory than what is measured."""
READINGS = 16
"""Counts of each size, one after each of the last items; their mean counts."""
SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Types of objects that belong to no session: code."""


def memory_report(sizes: Sequence[int]) -> Report:
    """One row per number of items.

    `bytes/item` counts everything that can be reached from the scheduler and from the runner's
    sequence table, so that nothing of an item escapes and nothing else disturbs. Each item has a
    grid, as pictures have whose positions are numbered on three axes: the engine keeps most of
    those. The growth of the process is measured in a new process, since this one would use memory
    again that an earlier measurement left behind.
    """
    command = [sys.executable, "-m", "benchmarks.items", *map(str, sizes)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report = Report(
        "items (memory of a live session)", ("items", "bytes/item", "process KiB", "process/item")
    )
    for size, kept, resident in json.loads(child.stdout):
        report.add(size, kept, resident / 1024, resident / size)
    report.notes += [
        "bytes/item: what scheduler and runner keep, growth over the second half of the items "
        "(4 KiB of raw data came with each)",
        "process: growth of resident memory since the session began, with all that allocators "
        "keep for later",
    ]
    return report


def measure_memory(sizes: Sequence[int]) -> list[tuple[float, ...]]:
    """For each size: items, bytes per item of the second half, bytes that the process grew by."""
    resident = resident_growth(sizes)  # first: counting takes memory of its own
    kept = kept_bytes(sorted({number for size in sizes for number in (size // 2, size)}))
    return [
        (size, (kept[size] - kept[size // 2]) / (size - size // 2), resident[size])
        for size in sizes
    ]


def resident_growth(sizes: Sequence[int]) -> dict[int, int]:
    """Number of items → bytes that the process has grown by when a session has that many."""
    session = _warm_session(max(sizes))
    done, started, grown = 0, resident_bytes(), {}
    for size in sorted(sizes):
        _run(session, size - done)
        done = size
        grown[size] = resident_bytes() - started
    return grown


def kept_bytes(sizes: Sequence[int]) -> dict[int, float]:
    """Number of items → bytes that scheduler and runner keep when a session has that many."""
    session = _warm_session(max(sizes))
    done, kept = 0, {}
    for size in sizes:
        _run(session, size - done - READINGS)
        done, readings = size, []
        for _ in range(READINGS):
            session.run(1)
            readings.append(deep_size(session.kept))
        kept[size] = mean(readings)
    return kept


def _warm_session(num_items: int) -> LiveSession:
    session = LiveSession(num_items, rows_cached=ROWS_CACHED, gather=False, grid=(1, 1, 1))
    _run(session, min(WARM_UP, num_items))
    session.restart()
    return session


def _run(session: LiveSession, num_items: int) -> None:
    for done in range(0, num_items, ITEMS_AT_A_TIME):
        session.run(min(ITEMS_AT_A_TIME, num_items - done))


def deep_size(root: object) -> int:
    """Bytes of an object and of all objects that it keeps alive, each once, without code."""
    seen, total = {id(root)}, 0
    waiting = [root]
    while waiting:
        found = waiting.pop()
        total += sys.getsizeof(found)
        for inner in _inside(found):
            if id(inner) not in seen and not isinstance(inner, SHARED):
                seen.add(id(inner))
                waiting.append(inner)
    return total


def _inside(found: object) -> list[object]:
    if isinstance(found, msgspec.Struct):  # the garbage collector does not know all of them
        return [getattr(found, name) for name in found.__struct_fields__]
    if isinstance(found, memoryview):
        return [found.obj]
    base = getattr(found, "base", None)  # a NumPy view keeps the array alive that owns the data
    return [*gc.get_referents(found), *([] if base is None else [base])]


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(measure_memory([int(size) for size in sys.argv[1:]])))
