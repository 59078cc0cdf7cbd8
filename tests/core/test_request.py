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


class TestRequestQueues:
    def test_queues_are_in_order_of_arrival_whatever_the_order_of_moves(self) -> None:
        queues = RequestQueues()
        requests = [new_request(str(i), arrival=arrival) for i, arrival in enumerate((3, 1, 2))]
        for one in requests:
            queues.add(one)
        assert [s.order[0] for s in queues.waiting] == [1, 2, 3]
        for one in requests:
            queues.move(one.sequences[0], SequenceState.PREFILLING)
        assert [s.order[0] for s in queues.prefilling] == [1, 2, 3]
        queues.check_integrity()

    def test_a_request_runs_while_one_of_its_samples_does(self) -> None:
        queues = RequestQueues()
        one = new_request(samples=2)
        queues.add(one)
        first, second = one.sequences
        queues.move(first, SequenceState.PREFILLING)
        queues.move(second, SequenceState.WAITING)
        queues.move(second, SequenceState.PREFILLING)
        assert (queues.num_running_requests, queues.num_waiting_requests) == (1, 0)
        queues.move(first, SequenceState.FINISHED)
        assert queues.num_running_requests == 1
        queues.move(second, SequenceState.WAITING)
        assert (queues.num_running_requests, queues.num_waiting_requests) == (0, 1)
        queues.check_integrity()


class TestReuseStats:
    def test_the_first_use_of_an_output_decides(self) -> None:
        stats = ReuseStats(2)
        stats.note(1, "miss")
        stats.note(1, "hit")
        assert stats.freeze(0.0).encoder == ("skipped", "miss")

    def test_the_first_admission_decides_what_was_cached(self) -> None:
        stats = ReuseStats(0)
        assert not stats.admitted
        stats.note_admission(8)
        stats.note_admission(16)
        assert stats.freeze(0.0).prefix_cached_tokens == 8

    def test_at_most_a_thousand_items_are_listed(self) -> None:
        stats = ReuseStats(5000)
        stats.note(4000, "miss")
        stats.note_encoding(4000, 1.0)
        assert (
            len(stats.freeze(0.0).encoder) == len(stats.freeze(0.0).encode_ms) == MAX_LISTED_ITEMS
        )
