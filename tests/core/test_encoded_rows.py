"""How much is encoded in one step: what is worth it, by what steps were measured to take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.core.encoder_scheduling import FIXED_TIMES, SHORT_SECONDS, EncodedRows
from tests.support.core.builders import Limits, feature, request, text
from tests.support.core.engine import Engine
from tests.support.core.feeding import Feed, feed, open_session

ROWS = 8
MOST = 64


def learned(row_seconds: float, run_seconds: float) -> Engine:
    """An engine that has encoded items of several sizes."""
    engine = Engine(Limits(max_num_batched_tokens=MOST, max_encoder_tokens=MOST))
    engine.runner.row_seconds, engine.runner.run_seconds = row_seconds, run_seconds
    for rows in (2, 16, 4, 10):
        engine.add(request(f"first {rows}", text(20, seed=rows), [feature(f"r{rows}", 1, rows)]))
        engine.run()
    return engine


def encoded_in_steps(engine: Engine, count: int) -> list[int]:
    """How many items each step encodes, of `count` requests that come together."""
    for number in range(count):
        item = feature(f"item {number}", 1, ROWS)
        prompt = text(ROWS + 4, seed=100 + number)
        engine.add(request(f"late {number}", prompt, [item], arrival=1.0 + number))
    steps = []
    while sum(steps) < count:
        steps.append(len(engine.step().encode))
        assert len(steps) <= count
    engine.run()
    return steps


def test_items_that_save_nothing_together_are_encoded_one_by_one() -> None:
    assert encoded_in_steps(learned(row_seconds=0.01, run_seconds=0.0), 4) == [1, 1, 1, 1]


def test_the_first_in_line_has_its_first_token_after_its_own_item() -> None:
    engine = learned(row_seconds=0.01, run_seconds=0.0)
    encoded_before = len(engine.runner.encoded)
    for number in range(3):
        item, prompt = feature(f"i{number}", 1, ROWS), text(12, seed=50 + number)
        engine.add(request(str(number), prompt, [item], arrival=1.0 + number))
    engine.step()
    assert len(engine.tokens["0", 0]) == 1
    assert len(engine.runner.encoded) - encoded_before == 1


def test_what_needs_no_item_is_computed_beside_the_first_one() -> None:
    engine = learned(row_seconds=0.01, run_seconds=0.0)
    for number in range(3):
        item, prompt = feature(f"i{number}", 1, ROWS), text(12, seed=50 + number)
        engine.add(request(str(number), prompt, [item], arrival=1.0 + number))
    engine.add(request("text", text(6, seed=60), arrival=9.0))
    engine.step()
    engine.step()
    assert len(engine.tokens["text", 0]) >= 1


def test_items_are_encoded_together_where_most_of_a_run_is_no_items() -> None:
    assert encoded_in_steps(learned(row_seconds=0.0001, run_seconds=0.1), 4) == [4]


def test_short_runs_are_not_cut() -> None:
    assert encoded_in_steps(learned(row_seconds=SHORT_SECONDS / MOST, run_seconds=0.0), 4) == [4]


def test_all_is_encoded_that_the_budget_has_room_for_until_costs_are_known() -> None:
    engine = Engine(Limits(max_num_batched_tokens=MOST, max_encoder_tokens=MOST))
    engine.runner.row_seconds = 0.01
    assert encoded_in_steps(engine, 4) == [4]


def test_items_of_a_request_that_is_alone_are_encoded_together() -> None:
    engine = learned(row_seconds=0.01, run_seconds=0.0)
    items = [feature(f"own {number}", 1 + 5 * number, 4) for number in range(6)]
    engine.add(request("alone", text(40, seed=70), items, arrival=1.0))
    assert len(engine.step().encode) == 6


def test_frames_of_live_sessions_are_encoded_together_and_pictures_of_others_are_not() -> None:
    engine = learned(row_seconds=0.01, run_seconds=0.0)
    sessions = {f"s{number}": Feed(rows=4) for number in range(3)}
    for name in sessions:
        open_session(engine, name)
    engine.step()
    for number, (name, what) in enumerate(sessions.items()):
        feed(engine, name, what, number)
    for number in range(3):
        item, prompt = feature(f"i{number}", 1, ROWS), text(12, seed=50 + number)
        engine.add(request(str(number), prompt, [item], arrival=1.0 + number))
    assert sorted(e.item.expansion.num_embeds for e in engine.step().encode) == [4, 4, 4, ROWS]


def test_a_late_item_that_is_no_more_than_the_budget_is_not_encoded_ahead() -> None:
    """It would run beside what others compute, and gain nothing."""
    engine = learned(row_seconds=0.01, run_seconds=0.0)
    for number in range(2):
        late = feature(f"late {number}", 100, 32)
        prompt = text(140, seed=80 + number)
        engine.add(request(str(number), prompt, [late], arrival=1.0 + number))
    assert not engine.step().encode


@pytest.mark.parametrize("row_seconds", [1e-6, 1e-3, 1.0, 100.0])
def test_every_item_is_encoded_however_long_it_takes(row_seconds: float) -> None:
    engine = learned(row_seconds=row_seconds, run_seconds=0.0)
    before = len(engine.runner.encoded)
    for number, rows in enumerate((1, 16, 2, 12, 7, 16)):
        item, prompt = feature(f"i{number}", 1, rows), text(rows + 4, seed=90 + number)
        engine.add(request(str(number), prompt, [item], arrival=1.0 + number))
    engine.run()
    assert len(engine.runner.encoded) - before == 6


def test_where_steps_encode_the_same_for_long_two_items_are_tried() -> None:
    engine = learned(row_seconds=0.01, run_seconds=0.0)
    for number in range(100):
        item, prompt = feature(f"lone {number}", 1, ROWS), text(12, seed=200 + number)
        engine.add(request(f"lone {number}", prompt, [item]))
        engine.run()
    engine.runner.row_seconds, engine.runner.run_seconds = 0.0001, 0.1
    assert encoded_in_steps(engine, 8) == [2, 5, 1], "what two say is tried with more"


@given(
    by_row=st.floats(1e-5, 1e-1),
    run=st.floats(0, 1.0),
    all_else=st.floats(0, 1.0),
    prefill=st.floats(0, 1e-1),
    size=st.integers(1, 500),
    times=st.integers(2, 9),
)
def test_what_a_step_takes_whatever_it_encodes_is_a_small_part_of_it(
    by_row: float, run: float, all_else: float, prefill: float, size: int, times: int
) -> None:
    """What is computed for the rows that it encodes is not."""
    rows = EncodedRows(2048)
    for each in (size, size * times) * 10:
        rows.note(each, run + by_row * each, all_else + prefill * each)
    worth = max(SHORT_SECONDS, FIXED_TIMES * (run + all_else)) / by_row
    assert rows.worth == pytest.approx(min(2048, max(1, worth)), rel=0.02, abs=1)


def test_what_few_steps_tell_raises_it_step_by_step() -> None:
    rows = EncodedRows(2048)
    for size in (100, 300, 100, 300):
        rows.note(size, 1e-3 * size, 0.0)
    assert rows.worth == 10
    for size in (100, 120, 90):  # a disturbed machine
        rows.note(size, 1.0, 0.0)
    assert rows.worth <= 300


def test_a_step_that_computes_much_else_encodes_more() -> None:
    rows = EncodedRows(2048)
    for size in (100, 300, 100, 300):
        rows.note(size, 1e-3 * size, 0.1)
    assert rows.worth == pytest.approx(400, rel=0.01)


def test_failed_items_tell_nothing() -> None:
    engine = learned(row_seconds=0.0001, run_seconds=0.1)
    broken, good = feature("broken", 1, 2), feature("good", 1, 32)
    engine.runner.failing_items.add(broken.key)
    engine.runner.row_seconds, engine.runner.run_seconds = 10.0, 0.0
    for name, item in (("broken", broken), ("good", good)):
        engine.add(request(name, text(40, seed=len(name)), [item], arrival=1.0))
    assert len(engine.step().encode) == 2
    engine.run()
    engine.runner.row_seconds, engine.runner.run_seconds = 0.0001, 0.1
    assert encoded_in_steps(engine, 4) == [4]


def test_an_accelerator_tells_nothing() -> None:
    """Its runs are measured otherwise, and more pictures in one cost little there."""
    engine = Engine(Limits(max_num_batched_tokens=MOST, max_encoder_tokens=MOST))
    engine.runner.row_seconds, engine.runner.device_seconds = 0.01, ()
    for rows in (2, 16, 4, 10):
        engine.add(request(f"first {rows}", text(20, seed=rows), [feature(f"r{rows}", 1, rows)]))
        engine.run()
    assert encoded_in_steps(engine, 4) == [4]
