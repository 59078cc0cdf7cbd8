"""`lookonce bench engine`: two processes, whose CPU time is told apart from the model's."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from benchmarks.engine import measure_device, open_engine
from benchmarks.engine_process import MODEL_SECONDS, PROCESS_SECONDS, Stopwatch
from lookonce.config import ModelConfig
from lookonce.errors import ConfigError


def test_a_turn_tells_model_engine_and_client_apart(folder):
    async def scenario():
        async with open_engine(ModelConfig(str(folder("llama")), "bench"), 2) as ours:
            return await ours.decode(2, prompt_tokens=8, steps=4)

    turn = asyncio.run(scenario())
    assert turn.model > 0
    assert turn.engine > 0
    assert turn.client > 0
    assert 0 < turn.span < turn.wall


def test_a_device_is_measured_by_the_clock(folder):
    """On a CPU here; `make test-cuda` has a GPU."""
    model = ModelConfig(str(folder("llama")), "bench")
    report = asyncio.run(measure_device(model, [1, 2], turns=1))
    assert [row[0] for row in report.rows] == [1, 2]
    for row in report.rows:
        shares = dict(zip(report.columns, row, strict=True))
        assert 0 <= shares["between"] < 1
        assert all(shares[name] > 0 for name in ("step ms", "ratio", "bandwidth", "arithmetic"))


def test_an_engine_that_cannot_start_says_why(monkeypatch):
    refusing = (sys.executable, "-m", "tests.support.engine.fake_process")
    monkeypatch.setattr("benchmarks.engine.COMMAND", refusing)

    async def scenario():
        async with open_engine(ModelConfig("refuse", "bench"), 1):
            pass

    with pytest.raises(ConfigError, match="at least 900 for this model"):
        asyncio.run(scenario())


def test_the_stopwatch_counts_what_runs_inside_the_call_and_only_there():
    def work() -> str:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return "done"

    watch = Stopwatch()
    timed = watch.around(work)
    work()
    assert watch.cpu == 0.0
    assert timed() == "done"
    figures = watch.figures()
    assert 0.01 <= figures[MODEL_SECONDS] <= figures[PROCESS_SECONDS]
