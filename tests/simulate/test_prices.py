"""Prices: what steps took is found again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from lookonce.simulate.prices import STEP_PRICES, Prices, amounts_of, fit
from lookonce.types.step import ScheduledSequence, StepPlan

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
