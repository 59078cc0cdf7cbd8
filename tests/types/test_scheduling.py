"""Turns on a core: what Linux says of threads that asked for them."""

from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from lookonce.types import scheduling

T = TypeVar("T")
SLICE = re.compile(r"^se\.slice\s*:\s*(\d+)", re.M)
pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or not hasattr(os, "sched_getscheduler"),
    reason="Linux's",
)


def in_own_thread(ask: Callable[[], T]) -> T:
    """What a thread of its own gives, so that this one stays as it is."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def seen() -> tuple[int, int, int | None]:
    """Policy, priority and nanoseconds of a slice (None: this kernel does not tell)."""
    try:
        text = Path("/proc/thread-self/sched").read_text()
    except OSError:
        text = ""
    told = SLICE.search(text)
    policy, nice = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    return policy, nice, None if told is None else int(told[1])


def test_a_thread_that_others_wait_for_has_short_slices():
    def ask() -> tuple[tuple[int, int, int | None], ...]:
        before = seen()
        scheduling.run_when_woken()
        return before, seen(), in_own_thread(seen)

    before, after, inherited = in_own_thread(ask)
    assert after[:2] == before[:2]
    if before[2] is not None:
        assert after[2] in (100_000, before[2])  # before Linux 6.12: as it was
    assert inherited == after


def test_the_thread_of_an_event_loop_gets_the_interpreter_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched: list[float] = []
    monkeypatch.setattr(scheduling.sys, "setswitchinterval", switched.append)

    def ask() -> tuple[int, int, int | None]:
        scheduling.prefer_event_loop()
        return seen()

    def woken() -> tuple[int, int, int | None]:
        scheduling.run_when_woken()
        return seen()

    assert in_own_thread(ask) == in_own_thread(woken)
    assert switched == [scheduling.SWITCH_SECONDS]


def test_a_thread_behind_others_keeps_its_priority_and_has_usual_slices():
    def ask() -> tuple[tuple[int, int, int | None], ...]:
        before = seen()
        scheduling.run_when_woken()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before[1] + 1)
        scheduling.run_behind_others()
        return before, seen()

    before, after = in_own_thread(ask)
    assert after == (os.SCHED_BATCH, before[1] + 1, before[2])


def test_where_it_is_forbidden_nothing_changes(monkeypatch):
    monkeypatch.setattr(scheduling, "_SCHED_SETATTR", 1 << 20)  # no system call
    before = seen()
    scheduling.run_behind_others()
    assert seen() == before
