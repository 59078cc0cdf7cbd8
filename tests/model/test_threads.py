"""Steps take as many cores as they are worth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lookonce.model import threads
from lookonce.model.threads import HEAVY_TOKENS, Threads
from lookonce.types.step import ScheduledSequence, StepPlan

DECODE = StepPlan(0, scheduled=tuple(ScheduledSequence(number, 9, 1) for number in range(8)))
PREFILL = StepPlan(0, scheduled=(ScheduledSequence(0, 0, HEAVY_TOKENS),))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def on_cores(count: int, given: int, monkeypatch: pytest.MonkeyPatch) -> Threads:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(count)))
    torch.set_num_threads(given)
    return Threads.of_machine()


@pytest.mark.parametrize(
    ("cores", "given", "light", "heavy"), [(1, 1, 1, 1), (2, 2, 1, 2), (4, 4, 3, 4), (4, 2, 2, 2)]
)
def test_a_core_is_left_to_others_unless_the_user_chose(cores, given, light, heavy, monkeypatch):
    assert on_cores(cores, given, monkeypatch) == Threads(light, heavy)
    assert torch.get_num_threads() == light


def test_a_long_chunk_takes_every_core_and_gives_it_back(monkeypatch):
    machine = on_cores(2, 2, monkeypatch)
    with machine.working_on(PREFILL):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1
    with machine.working_on(DECODE):
        assert torch.get_num_threads() == 1


def test_a_failing_step_gives_it_back_too(monkeypatch):
    machine = on_cores(2, 2, monkeypatch)
    with pytest.raises(ZeroDivisionError), machine.working_on(PREFILL):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 1
