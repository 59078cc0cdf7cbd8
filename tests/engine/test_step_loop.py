"""The step loop sleeps no longer than it must, and `OutputSender` tells each sender its own."""

from __future__ import annotations

import threading

import pytest

from lookonce.core import preemption
from lookonce.core.scheduler_state import SchedulerOutput
from lookonce.engine.process import engine_core
from lookonce.engine.process.cache_events import Load, StepEvents
from lookonce.engine.process.engine_core import EngineCore
from lookonce.engine.process.step_loop import (
    AddCommand,
    OutputSender,
    StepChannel,
    StepLoop,
    StopCommand,
    UnreachableSender,
)
from lookonce.ipc.messages import Accepted, Deltas
from lookonce.types.request import TokenDelta
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, make_scheduler, request, text
from tests.support.core.fake_runner import FakeRunner
from tests.support.engine.living import PATIENCE, fake_engine

LIMITS = Limits(max_num_seqs=1)


ANSWER = 8
"""Tokens, and so steps, that the request under test takes."""


class EndNotice:
    """Notices the end of a request."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def send(self, _sender, message) -> bool:
        if any(delta.finish_reason is not None for delta in message.deltas):
            self.ended.set()
        return True


class CountingCore(EngineCore):
    """Knows how often the loop has looked for something to do."""

    steps = 0

    def step(self):
        self.steps += 1
        return super().step()


@pytest.fixture
def core() -> CountingCore:
    """Its one seat is taken by an idle session."""
    core = CountingCore(make_scheduler(LIMITS), FakeRunner(LIMITS))
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    core.add(request("live", text(8), sampling=sampling), {}, live=True)
    while core.step() is not None:
        pass
    core.steps = 0
    return core


def test_who_waits_for_an_idle_session_gets_its_place_though_nothing_else_happens(
    core: CountingCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "IDLE_SECONDS", 0.3)
    writer = EndNotice()
    channel = StepChannel(lambda: None, writer)
    _, preprocessor = fake_engine(LIMITS, FakeRunner(LIMITS))
    added = preprocessor.preprocess(request("a", text(6)), {})
    channel.command(AddCommand(added, "sender", accepted=True))
    thread = threading.Thread(target=StepLoop(core, channel).run)
    thread.start()
    try:
        assert writer.ended.wait(PATIENCE)
    finally:
        channel.command(StopCommand())
        thread.join(PATIENCE)
    assert core.steps < 3 * ANSWER, "it has slept meanwhile"


class LoadNotices:
    """A publisher that counts the loads it is told."""

    def __init__(self, enough: int) -> None:
        self.loads: list[Load] = []
        self.told = threading.Event()
        self._enough = enough

    def open_step_events(self, _block_size, take_outputs, load, tier_stats) -> StepEvents:
        return StepEvents(self._publish, "kv-events", take_outputs, load, tier_stats)

    def _publish(self, _topic, changes) -> None:
        self.loads += [change for change in changes if isinstance(change, Load)]
        if len(self.loads) >= self._enough:
            self.told.set()


def test_an_engine_without_work_tells_its_load_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router, and scaling by queues, believe the last one."""
    monkeypatch.setattr(engine_core, "IDLE_LOAD_SECONDS", 0.15)
    idle = EngineCore(make_scheduler(LIMITS), FakeRunner(LIMITS))
    notices = LoadNotices(enough=4)
    idle.publish(notices)
    channel = StepChannel(lambda: None, EndNotice())
    thread = threading.Thread(target=StepLoop(idle, channel).run)
    thread.start()
    try:
        assert notices.told.wait(PATIENCE)
    finally:
        channel.command(StopCommand())
        thread.join(PATIENCE)
    assert {(load.running, load.waiting) for load in notices.loads} == {(0, 0)}


class FakeOutlet:
    """Reaches everybody but the `lost`."""

    def __init__(self):
        self.sent = []
        self.lost = set()

    def send(self, sender, message):
        if sender in self.lost:
            return False
        self.sent.append((sender, message))
        return True

    def take(self):
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def writer():
    return FakeOutlet()


@pytest.fixture
def sender(writer):
    """Requests a1 and a2 of sender a, b1 of sender b; b waits for `Accepted`."""
    sender = OutputSender(writer)
    sender.open("a1", "a", accepted=True)
    sender.open("a2", "a", accepted=True)
    sender.open("b1", "b", accepted=False)
    return sender


def token(request_id, token_id=7):
    return TokenDelta(request_id, 0, [token_id])


def test_one_message_a_step_carries_all_deltas_of_a_sender(sender, writer):
    sender.send(SchedulerOutput([token("a1"), token("b1"), token("a2")]))
    assert writer.take() == [
        ("a", Deltas([token("a1"), token("a2")])),
        ("b", Deltas([token("b1")])),
    ]


def test_acceptance_is_told_before_tokens_and_once(sender, writer):
    sender.send(SchedulerOutput([token("b1")], accepted=["a1", "b1"]))
    assert writer.take() == [("b", Accepted("b1", complete=False)), ("b", Deltas([token("b1")]))]
    sender.send(SchedulerOutput(accepted=["b1"]))
    assert writer.take() == []


def test_what_the_input_thread_accepted_is_not_accepted_again(sender, writer):
    sender.accept("b1")
    sender.send(SchedulerOutput(accepted=["b1"]))
    assert writer.take() == []


def test_a_released_request_is_nobodys(sender, writer):
    sender.send(SchedulerOutput([token("a1")], released=["a1"]))
    writer.take()
    sender.send(SchedulerOutput([token("a1"), token("a2")]))
    assert writer.take() == [("a", Deltas([token("a2")]))]


def test_who_was_out_of_reach_once_gets_no_tokens_with_a_gap(sender, writer):
    writer.lost = {"a"}
    both = SchedulerOutput([token("a1"), token("b1")])
    assert sender.send(both) == [UnreachableSender("a", ("a1", "a2"))]
    writer.lost = set()
    writer.take()
    assert sender.send(both) == []
    assert writer.take() == [("b", Deltas([token("b1")]))]


def test_a_request_whose_end_was_lost_is_among_the_cut_off(sender, writer):
    writer.lost = {"a"}
    assert sender.send(SchedulerOutput([token("a1")], released=["a1"])) == [
        UnreachableSender("a", ("a1", "a2"))
    ]


def test_a_sender_that_is_back_gets_what_it_asks_from_then_on(sender, writer):
    sender.cut_off("a")
    sender.open("a3", "a", accepted=True)
    sender.send(SchedulerOutput([token("a1"), token("a3")]))
    assert writer.take() == [("a", Deltas([token("a3")]))]
