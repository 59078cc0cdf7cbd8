"""Stacks of other processes: seen while they live, weighed by time, never at a stranger's cost."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lookonce.types import stack_samples
from lookonce.types.stack_samples import sample_stacks

BUSY = """
import sys, time
from pathlib import Path
from lookonce.types.stack_samples import listen_for_samples

def find_me(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))

listen_for_samples(Path(sys.argv[1]), "busy one")
print("listening", flush=True)
find_me(30.0)
"""


@pytest.fixture
def left(tmp_path):
    """Files of processes that have ended: one that was read, and one that was not yet."""
    read, unread = (tmp_path / f"stacks-busy-one-{number}" for number in (1, 2))
    read.touch()
    unread.write_text("1 MainThread;x\n")
    return read, unread


@pytest.fixture
def busy(tmp_path):
    """A process that spends its time in `find_me`."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_it_is_seen_where_it_spends_its_time(busy, tmp_path):
    (found,) = sample_stacks(tmp_path, 0.5)
    assert (found.process, found.pid) == ("busy one", busy.pid)
    assert found.samples > 3
    there = sum(seconds for stack, seconds in found.stacks.items() if ".find_me:" in stack)
    assert there > 0.8 * sum(found.stacks.values()) > 0
    assert all(stack.startswith("MainThread;") for stack in found.stacks)
    (again,) = sample_stacks(tmp_path, 0.1)
    assert again.samples < found.samples  # each time begins anew


def test_a_process_that_has_ended_is_forgotten(busy, tmp_path):
    busy.kill()
    busy.wait()
    assert sample_stacks(tmp_path, 0.05) == []
    assert list(tmp_path.iterdir()) == []


def test_the_next_process_removes_the_files_of_ended_ones(left, busy, tmp_path):
    _, unread = left
    assert set(tmp_path.iterdir()) == {unread, tmp_path / f"stacks-busy-one-{busy.pid}"}


def test_a_process_that_ends_meanwhile_disturbs_nobody(busy, tmp_path):
    threading.Timer(0.1, busy.kill).start()
    (found,) = sample_stacks(tmp_path, 0.4)
    assert found.pid == busy.pid


@pytest.fixture
def signalled():
    """The numbers of the signals that this process got."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_files_that_no_process_holds_signal_nobody(tmp_path, signalled):
    Path(tmp_path, f"stacks-own-{os.getpid()}").write_text("1 MainThread;x\n")
    Path(tmp_path, "stacks-of-nobody").write_text("?")
    assert sample_stacks(tmp_path, 0.05) == []
    assert signalled == []


def test_no_more_is_read_than_a_process_may_write(tmp_path, signalled, monkeypatch):
    monkeypatch.setattr(stack_samples, "MAX_FILE_BYTES", 100)
    with Path(tmp_path, f"stacks-own-{os.getpid()}").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writing = threading.Timer(0.05, lambda: print("1 MainThread;x\n" * 1000, file=file))
        writing.start()
        (found,) = sample_stacks(tmp_path, 0.2)
        writing.join()
    assert 0 < found.samples <= 100 / len("1 MainThread;x")
    assert signalled
