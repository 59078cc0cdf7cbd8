"""What a live session keeps of an item once its K/V are computed, in bytes.

Everything that can be reached from the scheduler, and from what the runner knows of its sequences,
is counted, so that nothing of an item escapes and nothing else disturbs. Each item has a grid, as
pictures have whose positions are numbered on three axes: of no other is more remembered.

Beside it stands how much the process grew, as the system sees it: a process of its own, since
memory that an earlier measurement left behind would be used again.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import msgspec

from benchmarks.items_world import LiveSession
from benchmarks.report import Report

ROWS_CACHED = 64
"""Of the encoder's cache: full before the second half of the smallest session begins."""
WARM_UP = 2_048
"""Items of a session before it, so that caches and static buffers are filled."""
FEW = 100
READINGS = 16
"""Items at whose end it is counted, so that it does not matter what was tidied just now."""
SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Belongs to no session: code."""


def memory_report(sizes: Sequence[int]) -> Report:
    """One row per number of items."""
    command = [sys.executable, "-m", "benchmarks.items_memory", *map(str, sizes)]
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


def measure(sizes: Sequence[int]) -> list[tuple[float, ...]]:
    """Items, bytes per item of the second half, bytes that the process grew by."""
    resident = resident_growth(sizes)  # first: counting takes memory of its own
    kept = kept_bytes(sorted({number for size in sizes for number in (size // 2, size)}))
    return [
        (size, (kept[size] - kept[size // 2]) / (size - size // 2), resident[size])
        for size in sizes
    ]


def resident_growth(sizes: Sequence[int]) -> dict[int, int]:
    """Bytes that the process has grown by when a session has so many items."""
    session = _warm_session(max(sizes))
    done, started, grown = 0, resident_bytes(), {}
    for size in sorted(sizes):
        _run(session, size - done)
        done = size
        grown[size] = resident_bytes() - started
    return grown


def kept_bytes(sizes: Sequence[int]) -> dict[int, float]:
    """Bytes that scheduler and runner keep when a session has so many items."""
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
    """A few at a time: the times of all of them would take more memory than what is looked for."""
    for done in range(0, num_items, FEW):
        session.run(min(FEW, num_items - done))


def deep_size(root: object) -> int:
    """Bytes of an object and of all that it keeps alive, each once, but for code."""
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
    print(json.dumps(measure([int(size) for size in sys.argv[1:]])))
