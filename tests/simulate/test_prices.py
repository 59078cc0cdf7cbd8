"""Prices: what steps took is found again, and each request has its part of the spread."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.errors import ConfigError
from lookonce.simulate.prices import (
    NANO_PRICES,
    STEP_PRICES,
    Prices,
    amounts_of,
    fit,
    read_prices,
)
from lookonce.types.step import EmbedSlice, ScheduledSequence, StepPlan

PRICES = Prices(
    step=1e-3,
    decode_row=2e-4,
    decode_context=1e-7,
    prompt_row=3e-4,
    prompt_token=5e-5,
    prompt_pair=2e-8,
    short_prompt=64,
    long_prompt_row=4e-3,
    long_prompt_token=3e-5,
    encode_step=0.0,
    encode_item=0.0,
)


def steps(count: int) -> list[StepPlan]:
    random = np.random.default_rng(count)
    made = []
    for number in range(count):
        rows = [
            ScheduledSequence(row, int(random.integers(500)), 1, sample=True)
            for row in range(int(random.integers(1, 9)))
        ]
        if number % 3 == 0:
            chunk = int(random.integers(2, 300))
            rows.append(ScheduledSequence(9, int(random.integers(200)), chunk, sample=True))
        made.append(StepPlan(number, scheduled=tuple(rows)))
    return made


def test_prices_are_found_again_from_what_steps_took() -> None:
    plans = steps(90)
    amounts = np.array([amounts_of(plan, PRICES.short_prompt) for plan in plans])
    seconds = np.array([PRICES.of_step(plan) for plan in plans])
    found = fit(amounts, seconds)
    wanted = [msgspec.structs.asdict(PRICES)[name] for name in STEP_PRICES]
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def test_no_price_is_negative() -> None:
    amounts = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    assert fit(amounts, np.array([3.0, 2.0, 1.0])).min() >= 0


def test_steps_that_only_decode_take_what_each_of_them_takes() -> None:
    rows = [ScheduledSequence(row, 100 * row, 1, sample=True) for row in range(4)]
    each = [
        PRICES.of_step(
            StepPlan(
                n, scheduled=tuple(msgspec.structs.replace(r, start=r.start + n) for r in rows)
            )
        )
        for n in range(7)
    ]
    context = sum(row.start + 1 for row in rows)
    assert PRICES.of_decodes(4, context, 7) == pytest.approx(sum(each))


def test_a_step_keeps_as_many_cores_busy_as_its_parts_do_on_average() -> None:
    prices = msgspec.structs.replace(PRICES, prompt_threads=2.0)
    rows = (ScheduledSequence(0, 99, 1, sample=True), ScheduledSequence(1, 0, 20, sample=True))
    prompt = 3e-4 + 20 * 5e-5 + 210 * 2e-8
    decoding = 1e-3 + 2e-4 + 100 * 1e-7
    plan = StepPlan(0, scheduled=rows)
    assert prices.of_step(plan) == pytest.approx(decoding + prompt)
    assert prices.threads_of(plan) == pytest.approx((decoding + 2 * prompt) / (decoding + prompt))


@given(first=st.integers(0, 1 << 40), count=st.integers(1, 2000), parts=st.integers(1, 100))
def test_any_requests_that_follow_one_another_have_nearly_the_whole_spread(
    first: int, count: int, parts: int
) -> None:
    prices = Prices(spread=tuple(np.linspace(0.5, 3.0, parts)))
    found = [prices.spread_of(number) for number in range(first, first + count)]
    assert found == [prices.spread_of(number) for number in range(first, first + count)]
    counts = Counter(found)
    assert all(abs(counts[each] - count / parts) < 3.0 for each in prices.spread)
    mean = float(np.mean(prices.spread))
    assert abs(float(np.mean(found)) - mean) < 2.5 * 3.0 / count


def test_without_a_spread_each_request_takes_its_price() -> None:
    assert {Prices().spread_of(number) for number in range(50)} == {1.0}
    assert {read_prices(NANO_PRICES).spread_of(number) for number in range(50)} == {1.0}


def test_a_price_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    written = msgspec.structs.replace(
        PRICES, spread=(0.8, 0.95, 1.0, 1.3, 4.0), idle=((0.0, 0.0), (0.1, 1e-3))
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(written), indent=1))
    assert read_prices(path) == written


def test_a_pause_adds_what_lies_between_the_points_around_it() -> None:
    prices = Prices(idle=((0.01, 0.0), (0.03, 1e-3), (0.1, 1e-3), (0.2, 4e-3)))
    pauses = (0.0, 0.01, 0.02, 0.03, 0.05, 0.15, 0.2, 5.0, float("inf"))
    more = [0.0, 0.0, 5e-4, 1e-3, 1e-3, 2.5e-3, 4e-3, 4e-3, 4e-3]
    assert [prices.of_idle(pause) for pause in pauses] == pytest.approx(more)
    assert Prices().of_idle(5.0) == 0.0


def test_a_chunk_with_encoder_outputs_takes_more_for_each_item() -> None:
    prices = msgspec.structs.replace(PRICES, embed_item=7e-4)
    chunk = ScheduledSequence(0, 160, 30, sample=True)
    rows = (EmbedSlice(b"one", 0, 9, 0), EmbedSlice(b"two", 0, 9, 12))
    with_rows = msgspec.structs.replace(chunk, embeds=rows)
    took = [prices.of_step(StepPlan(0, scheduled=(each,))) for each in (chunk, with_rows)]
    assert took[1] - took[0] == pytest.approx(2 * 7e-4)


@pytest.mark.parametrize(
    "idle",
    [
        [[0.1, 1e-3], [0.1, 2e-3]],
        [[0.1, 2e-3], [0.2, 1e-3]],
        [[-0.1, 0.0]],
        [[0.0, -1e-3]],
        [[0.0, 1e9]],
        [[0.0]],
        0.1,
    ],
)
def test_pauses_that_do_not_ascend_are_refused(tmp_path: Path, idle: object) -> None:
    path = tmp_path / "prices.json"
    path.write_bytes(msgspec.json.encode({"idle": idle}))
    with pytest.raises(ConfigError, match="idle"):
        read_prices(path)


@pytest.mark.parametrize("spread", [[], [0.0, 1.0], [1.0, -1.0], [1e9], 1.0])
def test_a_spread_that_no_requests_have_is_refused(tmp_path: Path, spread: object) -> None:
    path = tmp_path / "prices.json"
    path.write_bytes(msgspec.json.encode({"spread": spread}))
    with pytest.raises(ConfigError, match="spread"):
        read_prices(path)
