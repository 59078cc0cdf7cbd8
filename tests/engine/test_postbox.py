"""What the step thread sends by itself, and to whom it stops sending."""

from __future__ import annotations

import pytest

from lookonce.core.scheduler_output import SchedulerOutput
from lookonce.engine.process.output_sender import OutputSender, Unreachable
from lookonce.ipc.messages import Accepted, Deltas
from lookonce.types.request import TokenDelta


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
def outlet():
    return FakeOutlet()


@pytest.fixture
def postbox(outlet):
    """Requests a1 and a2 of sender a, b1 of sender b; b waits for `Accepted`."""
    postbox = OutputSender(outlet)
    postbox.open("a1", "a", accepted=True)
    postbox.open("a2", "a", accepted=True)
    postbox.open("b1", "b", accepted=False)
    return postbox


def token(request_id, token_id=7):
    return TokenDelta(request_id, 0, [token_id])


def test_one_message_a_step_carries_all_deltas_of_a_sender(postbox, outlet):
    postbox.send(SchedulerOutput([token("a1"), token("b1"), token("a2")]))
    assert outlet.take() == [
        ("a", Deltas([token("a1"), token("a2")])),
        ("b", Deltas([token("b1")])),
    ]


def test_acceptance_is_told_before_tokens_and_once(postbox, outlet):
    postbox.send(SchedulerOutput([token("b1")], accepted=["a1", "b1"]))
    assert outlet.take() == [("b", Accepted("b1", complete=False)), ("b", Deltas([token("b1")]))]
    postbox.send(SchedulerOutput(accepted=["b1"]))
    assert outlet.take() == []


def test_what_the_input_thread_accepted_is_not_accepted_again(postbox, outlet):
    postbox.accept("b1")
    postbox.send(SchedulerOutput(accepted=["b1"]))
    assert outlet.take() == []


def test_a_released_request_is_nobodys(postbox, outlet):
    postbox.send(SchedulerOutput([token("a1")], released=["a1"]))
    outlet.take()
    postbox.send(SchedulerOutput([token("a1"), token("a2")]))
    assert outlet.take() == [("a", Deltas([token("a2")]))]


def test_who_was_out_of_reach_once_gets_no_tokens_with_a_gap(postbox, outlet):
    outlet.lost = {"a"}
    both = SchedulerOutput([token("a1"), token("b1")])
    assert postbox.send(both) == [Unreachable("a", ("a1", "a2"))]
    outlet.lost = set()
    outlet.take()
    assert postbox.send(both) == []
    assert outlet.take() == [("b", Deltas([token("b1")]))]


def test_a_request_whose_end_was_lost_is_among_the_cut_off(postbox, outlet):
    outlet.lost = {"a"}
    assert postbox.send(SchedulerOutput([token("a1")], released=["a1"])) == [
        Unreachable("a", ("a1", "a2"))
    ]


def test_a_sender_that_is_back_gets_what_it_asks_from_then_on(postbox, outlet):
    postbox.cut_off("a")
    postbox.open("a3", "a", accepted=True)
    postbox.send(SchedulerOutput([token("a1"), token("a3")]))
    assert outlet.take() == [("a", Deltas([token("a3")]))]
