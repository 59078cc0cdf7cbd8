"""How much is encoded in one step: what is worth it, by what steps were measured to take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.core.encoder_scheduling import FIXED_SHARE, SHORT_RUN_SECONDS, EncoderRows
from tests.support.core.builders import Limits, feature, request, text
from tests.support.core.engine import Engine

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
    assert encoded_in_steps(learned(row_seconds=SHORT_RUN_SECONDS / MOST, run_seconds=0.0), 4) == [
        4
    ]


def test_all_is_encoded_that_the_budget_has_room_for_until_costs_are_known() -> None:
    engine = Engine(Limits(max_num_batched_tokens=MOST, max_encoder_tokens=MOST))
    engine.runner.row_seconds = 0.01
    assert encoded_in_steps(engine, 4) == [4]


def test_where_steps_encode_the_same_for_long_more_is_tried_again() -> None:
    engine = learned(row_seconds=0.01, run_seconds=0.0)
    for number in range(100):
        item, prompt = feature(f"lone {number}", 1, ROWS), text(12, seed=200 + number)
        engine.add(request(f"lone {number}", prompt, [item]))
        engine.run()
    engine.runner.row_seconds, engine.runner.run_seconds = 0.0001, 0.1
    assert encoded_in_steps(engine, 4) == [4]


@given(
    costs=st.tuples(st.floats(1e-6, 1e-1), st.floats(0, 1.0)),
    sizes=st.lists(st.integers(1, 4096), min_size=2, max_size=30),
)
def test_what_encoding_takes_whatever_it_encodes_is_a_small_part_of_a_step(
    costs: tuple[float, float], sizes: list[int]
) -> None:
    by_row, fixed = costs
    rows = EncoderRows(2048)
    for size in sizes:
        rows.note(size, fixed + by_row * size)
    assert 0 <= rows.value <= 2048
    if rows.value < 2048:
        seconds = by_row * (rows.value + 1)
        assert seconds == pytest.approx(SHORT_RUN_SECONDS, rel=0.1, abs=2 * by_row) or (
            fixed / (fixed + seconds) <= FIXED_SHARE * 1.1
        )


def test_failed_items_tell_nothing() -> None:
    engine = learned(row_seconds=0.0001, run_seconds=0.1)
    item = feature("broken", 1, ROWS)
    engine.runner.failing_items.add(item.key)
    engine.runner.row_seconds, engine.runner.run_seconds = 10.0, 0.0
    engine.add(request("broken", text(12, seed=70), [item], arrival=1.0))
    engine.run()
    engine.runner.row_seconds, engine.runner.run_seconds = 0.0001, 0.1
    assert encoded_in_steps(engine, 4) == [4]
