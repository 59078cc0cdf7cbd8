"""The stopwatches of `lookonce bench known`: each second is counted once, for one part."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.known_processes import PARTS, Stopwatches


@pytest.fixture
def watches(tmp_path):
    return Stopwatches.create(tmp_path / "parts")


def test_another_process_reads_what_was_added(watches, tmp_path):
    watches.add("hash", 1.5)
    watches.add("hash", 1.0)
    assert Stopwatches(tmp_path / "parts").read() == {**dict.fromkeys(PARTS, 0.0), "hash": 2.5}


def test_time_of_an_inner_part_counts_for_that_part_alone(watches, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))

    class Work:
        def outer(self):
            return self.inner() + 1

        def inner(self):
            time.perf_counter()  # one second passes
            return self.inner_again()

        def inner_again(self):
            return 1

    watches.around(Work, "inner", "hash")
    watches.around(Work, "outer", "schedule", without="hash")
    assert Work().outer() == 2
    assert watches.read()["hash"] == 2
    assert watches.read()["schedule"] == 2


def test_a_method_that_calls_itself_is_timed_once(watches, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))

    class Work:
        def descend(self, depth):
            return self.descend(depth - 1) if depth else "deep"

    watches.around(Work, "descend", "render")
    assert Work().descend(3) == "deep"
    assert watches.read()["render"] == 1


def test_a_call_that_fails_is_timed_and_the_next_one_too(watches, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))

    class Work:
        def fail(self):
            raise ValueError("no")

        async def wait(self):
            return "done"

    watches.around(Work, "fail", "template")
    watches.around_async(Work, "wait", "render")
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            Work().fail()
    assert asyncio.run(Work().wait()) == "done"
    assert (watches.read()["template"], watches.read()["render"]) == (2, 1)
