"""`lookonce bench kv` on a tiny model: every table has its rows and counts what it says."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks.bench_engine import BenchEngine, load_bench_model, prompt_with_pictures
from benchmarks.events import steps_report
from benchmarks.kv import (
    LoopStopwatch,
    bandwidth_report,
    encoder_report,
    first_token_report,
    stores_report,
)
from lookonce.model.loader import LoadedModel
from lookonce.types.kv import TierSpec
from tests.support.model_folders.make import FolderMaker

HOST = TierSpec("host", capacity_bytes=1 << 26)


@pytest.fixture(scope="module")
def loaded(folder: FolderMaker) -> LoadedModel:
    return load_bench_model(str(folder("llava")))


def test_bandwidth_stands_beside_the_plain_operation(loaded: LoadedModel, tmp_path: Path) -> None:
    disk = TierSpec("disk", path=str(tmp_path), capacity_bytes=1 << 30)
    report = bandwidth_report(loaded, {"host": HOST, "disk": disk})
    assert [row[0] for row in report.rows] == ["pages", "host", "disk"]
    assert all(isinstance(cell, float) and cell > 0 for row in report.rows for cell in row[1:5])


def test_a_first_token_from_a_tier_loads_the_whole_prompt(loaded: LoadedModel) -> None:
    report = first_token_report(loaded, {"host": HOST}, repeats=1)
    loads = {row[0]: row[3] for row in report.rows}
    assert loads == {"computed": 0, "device": 0, "host": 3984}


def test_outputs_from_a_tier_need_no_encoder_run(loaded: LoadedModel) -> None:
    rows = encoder_report(loaded, {"host": HOST}, repeats=1).rows
    assert [(row[0], row[3], row[4]) for row in rows] == [("encoded", 8, 0), ("host", 0, 8)]


def test_what_events_cost_is_measured_beside_an_engine_without(loaded: LoadedModel) -> None:
    with tempfile.TemporaryDirectory(prefix="lookonce-") as folder:  # short: socket paths
        (row,) = steps_report(loaded, Path(folder), pairs=1, new_tokens=16).rows
    assert all(isinstance(cell, float) and cell > 0 for cell in row[1:6])
    assert row[6] != 0


def test_throughput_is_compared_with_and_without_stores(loaded: LoadedModel) -> None:
    ((name, *_, stored, dropped),) = stores_report(loaded, {"host": HOST}, pairs=1).rows
    assert name == "host"
    assert isinstance(stored, float)
    assert stored > 0
    assert dropped == 0


def test_the_stopwatch_sees_every_call_of_the_step_loop(loaded: LoadedModel) -> None:
    stopwatch = LoopStopwatch()
    with BenchEngine(loaded, HOST, stopwatch=stopwatch.watch) as engine:
        engine.run([prompt_with_pictures("a", 64, 1, seed=1)])
    assert len(stopwatch.seconds) >= 4
    assert all(seconds >= 0 for seconds in stopwatch.seconds)
