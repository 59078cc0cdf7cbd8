"""The state machine of a sequence: what is allowed happens, what is not raises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lookonce.core.mm_features import MultiModalFeatures
from lookonce.core.request import ALLOWED, Request, ReuseStats, Sequence, SequenceState
from lookonce.core.scheduler_state import RequestQueues
from lookonce.types.request import MAX_LISTED_ITEMS
from tests.support.core.builders import request, text


def new_request(name: str = "a", *, samples: int = 1, arrival: float = 0.0) -> Request:
    tokens = text(6)
    built = Request(
        request(name, tokens, arrival=arrival),
        np.asarray(tokens, np.int32),
        MultiModalFeatures(),
        {},
        (2,),
    )
    first_id = int(1000 * arrival)
    built.sequences = [Sequence(first_id + i, built, i, 10) for i in range(samples)]
    return built


def in_state(state: SequenceState) -> Sequence:
    sequence = new_request().sequences[0]
    sequence.state = state
    return sequence


@pytest.mark.parametrize(("start", "end"), itertools.product(SequenceState, SequenceState))
def test_a_sequence_moves_only_along_the_drawn_transitions(
    start: SequenceState, end: SequenceState
) -> None:
    sequence = in_state(start)
    if end in ALLOWED[start]:
        sequence.move_to(end)
        assert sequence.state is end
    else:
        with pytest.raises(RuntimeError, match=f"from {start.value} to {end.value}"):
            sequence.move_to(end)


def test_every_state_but_the_last_can_finish() -> None:
    finishing = {state for state in SequenceState if SequenceState.FINISHED in ALLOWED[state]}
    assert finishing == set(SequenceState) - {SequenceState.FINISHED}


def test_only_the_first_sample_starts_waiting() -> None:
    states = [s.state for s in new_request(samples=3).sequences]
    assert states == [
        SequenceState.WAITING,
        SequenceState.WAITING_FOR_SIBLING,
        SequenceState.WAITING_FOR_SIBLING,
    ]


class TestRoster:
    def test_lanes_are_in_order_of_arrival_whatever_the_order_of_moves(self) -> None:
        roster = RequestQueues()
        requests = [new_request(str(i), arrival=arrival) for i, arrival in enumerate((3, 1, 2))]
        for one in requests:
            roster.add(one)
        assert [s.order[0] for s in roster.waiting] == [1, 2, 3]
        for one in requests:
            roster.move(one.sequences[0], SequenceState.PREFILLING)
        assert [s.order[0] for s in roster.prefilling] == [1, 2, 3]
        roster.check_integrity()

    def test_a_request_runs_while_one_of_its_samples_does(self) -> None:
        roster = RequestQueues()
        one = new_request(samples=2)
        roster.add(one)
        first, second = one.sequences
        roster.move(first, SequenceState.PREFILLING)
        roster.move(second, SequenceState.WAITING)
        roster.move(second, SequenceState.PREFILLING)
        assert (roster.num_running_requests, roster.num_waiting_requests) == (1, 0)
        roster.move(first, SequenceState.FINISHED)
        assert roster.num_running_requests == 1
        roster.move(second, SequenceState.WAITING)
        assert (roster.num_running_requests, roster.num_waiting_requests) == (0, 1)
        roster.check_integrity()


class TestFacts:
    def test_the_first_use_of_an_output_decides(self) -> None:
        facts = ReuseStats(2)
        facts.note(1, "miss")
        facts.note(1, "hit")
        assert facts.freeze().encoder == ("skipped", "miss")

    def test_the_first_admission_decides_what_was_cached(self) -> None:
        facts = ReuseStats(0)
        assert not facts.admitted
        facts.note_admission(8)
        facts.note_admission(16)
        assert facts.freeze().prefix_cached_tokens == 8

    def test_at_most_a_thousand_items_are_listed(self) -> None:
        facts = ReuseStats(5000)
        facts.note(4000, "miss")
        facts.note_encoding(4000, 1.0)
        assert len(facts.freeze().encoder) == len(facts.freeze().encode_ms) == MAX_LISTED_ITEMS
