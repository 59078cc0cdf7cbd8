"""Idle sessions keep their place until a request waits for it, and then for 30 seconds."""

from __future__ import annotations

import numpy as np
import pytest

from lookonce.core.preemption import IDLE_SECONDS
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import INTERRUPT, Limits, feature, items_for, request, text
from tests.support.core.engine import Engine

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def open_session(engine: Engine, name: str, num_tokens: int = 8) -> None:
    tokens = text(num_tokens, seed=ord(name[0]))
    engine.scheduler.add(request(name, tokens, sampling=ONE), {}, live=True)
    engine.step()
    engine.step()


def extend(engine: Engine, name: str) -> None:
    engine.scheduler.extend(name, np.array([5], np.int32), (), {}, INTERRUPT)


def assert_evicted(engine: Engine, name: str) -> None:
    error = engine.ended[name, 0].error
    assert error is not None
    assert error[0] == "SessionEvictedError"
    assert "idle for 30 seconds" in error[1]


@pytest.fixture
def engine() -> Engine:
    """A scheduler for one sequence, whose place an idle session has."""
    engine = Engine(Limits(max_num_seqs=1))
    open_session(engine, "live")
    return engine


def test_a_session_idle_for_long_is_evicted_for_a_request_that_waits_for_its_place(
    engine: Engine,
) -> None:
    engine.add(request("a", text(6), arrival=1.0))
    assert engine.step() is None
    assert engine.scheduler.seconds_to_next_eviction == IDLE_SECONDS
    engine.now = IDLE_SECONDS - 1
    assert engine.step() is None
    assert engine.scheduler.seconds_to_next_eviction == 1
    engine.now = IDLE_SECONDS
    engine.run()
    assert_evicted(engine, "live")
    assert engine.reason("a") == "length"
    engine.assert_all_free()


def test_a_session_stays_idle_for_ever_while_no_request_waits(engine: Engine) -> None:
    engine.now = 1000 * IDLE_SECONDS
    assert engine.step() is None
    assert engine.scheduler.seconds_to_next_eviction is None
    extend(engine, "live")
    engine.run()
    assert len(engine.tokens["live", 0]) == 2


def test_a_session_that_is_extended_keeps_its_place(engine: Engine) -> None:
    engine.add(request("a", text(6), arrival=1.0))
    for _ in range(10):
        engine.now += IDLE_SECONDS
        extend(engine, "live")
        engine.step()
        assert engine.step() is None
    assert not engine.ended
    assert len(engine.tokens["live", 0]) == 11


def test_no_eviction_is_due_once_the_waiting_request_is_gone(engine: Engine) -> None:
    engine.add(request("a", text(6), arrival=1.0))
    engine.step()
    engine.scheduler.abort("a")
    engine.run()
    assert engine.scheduler.seconds_to_next_eviction is None


def test_the_session_idle_the_longest_is_evicted_and_no_more_than_needed() -> None:
    engine = Engine(Limits(max_num_seqs=3))
    for name in ("x", "y", "z"):
        engine.now += 1
        open_session(engine, name)
    extend(engine, "x")
    engine.step()
    engine.now = 3 * IDLE_SECONDS
    engine.add(request("a", text(6), arrival=1.0))
    for _ in range(20):
        engine.step()
    assert_evicted(engine, "y")
    assert {name for name, _ in engine.ended} == {"y", "a"}


def test_sessions_are_evicted_until_there_are_enough_blocks() -> None:
    engine = Engine(Limits(num_blocks=12))
    for name in ("x", "y", "z"):
        open_session(engine, name, num_tokens=12)
    engine.now = IDLE_SECONDS
    engine.add(request("a", text(24, seed=1), arrival=1.0))
    engine.run()
    assert {name for name, _ in engine.ended} == {"x", "y", "a"}
    engine.scheduler.abort("z")
    engine.run()
    engine.assert_all_free()


def test_no_session_is_evicted_where_all_their_blocks_would_not_be_enough() -> None:
    engine = Engine(Limits(num_blocks=12))
    open_session(engine, "idle", num_tokens=12)
    open_session(engine, "busy", num_tokens=20)
    engine.now = IDLE_SECONDS
    extend(engine, "busy")
    engine.add(request("a", text(24, seed=1), arrival=1.0))
    for _ in range(3):
        engine.step()
    assert not engine.ended
    assert engine.scheduler.seconds_to_next_eviction == IDLE_SECONDS, (
        "when the other may go as well"
    )
    engine.now = 2 * IDLE_SECONDS
    engine.run()
    assert ("a", 0) in engine.ended


def test_an_idle_session_is_evicted_while_others_contend_in_every_step() -> None:
    """Then nothing is admitted in order of arrival, but the waiting request goes first at times."""
    engine = Engine(Limits(num_blocks=2000, encoder_rows=8, max_num_seqs=3))
    for name in ("x", "y", "idle"):
        open_session(engine, name)
    for number in range(200):
        for name in ("x", "y"):
            item = feature(f"{name} {number}", 0, 8, modality="audio")
            tokens = np.full(9, 999, np.int32)
            engine.scheduler.extend(name, tokens, (item,), items_for([item]), INTERRUPT)
    engine.now = IDLE_SECONDS
    engine.add(request("a", text(6), arrival=1.0))
    for _ in range(40):
        engine.step()
    assert_evicted(engine, "idle")
    assert engine.reason("a") == "length"


def test_no_session_is_evicted_where_places_are_short_and_its_blocks_are_too_few() -> None:
    """Admission of the waiting request has not been tried, since `max_num_seqs` was reached."""
    engine = Engine(Limits(num_blocks=12, max_num_seqs=2))
    open_session(engine, "idle", num_tokens=8)
    lasting = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add(request("busy", text(16, seed=3), sampling=lasting, arrival=0.5))
    engine.step()
    engine.now = IDLE_SECONDS
    engine.add(request("a", text(28, seed=1), arrival=1.0))
    while "a" not in engine.released:
        engine.step()
    assert engine.released == ["busy", "a"]
    extend(engine, "idle")
    engine.run()
    assert len(engine.tokens["idle", 0]) == 2
