"""`lookonce bench cpu`: a row for each type of weights; loading takes no second copy of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.cpu import LOADING, OwnMemory, _in_another_process, measure
from tests.support.model.cases import ALL_MODELS
from tests.support.model.quantized import packed_folder

SLACK = 16 << 20
"""Bytes that a process needs beside weights: threads' stacks, buffers of libraries."""
in_test_models = pytest.mark.skipif(not ALL_MODELS, reason="in `make test-models`")
"""Processes of their own, each of which imports torch."""
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="Linux tells a process's memory"
)


@needs_proc
@in_test_models
def test_a_type_gets_figures(folder):
    report = measure(folder("llama"), types=("int8",), batches=(2,), prompt=9, steps=3, turns=1)
    (row,) = (dict(zip(report.columns, row, strict=True)) for row in report.rows)
    assert row["weights"] == "int8"
    assert all(row[name] > 0 for name in ("MB", "read ms", "prefill", "decode 2", "of read"))


@needs_proc
@in_test_models
def test_unpacking_takes_no_more_than_the_weights(folder, tmp_path):
    path, _ = packed_folder(folder("llama", scale="8m"), tmp_path, "compressed-int4")
    found = _in_another_process(LOADING, str(path), "float32")
    assert found.weight_bytes > 25e6
    assert found.peak_bytes <= 1.1 * found.weight_bytes + SLACK


@needs_proc
def test_memory_that_is_freed_before_the_end_counts():
    with OwnMemory() as memory:
        held = []
        while memory.peak < 50 << 20:  # what others free meanwhile counts, too
            held.append(bytearray(b"1") * (16 << 20))
            time.sleep(0.005)
        count = len(held)
        del held
    assert memory.peak < (count + 4) * (16 << 20)
