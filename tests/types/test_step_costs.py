"""What a step costs whatever it computes, and what each of its units adds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.types.step_costs import StepCosts


@given(
    fixed=st.floats(1e-4, 1e-1),
    added=st.floats(1e-5, 1e-1),
    sizes=st.lists(st.integers(1, 64), min_size=2, max_size=40),
)
def test_both_costs_of_a_step_are_found(fixed: float, added: float, sizes: list[int]) -> None:
    costs = StepCosts()
    for size in sizes:
        costs.add(20, 20 * size, 20 * fixed + 20 * size * added)
    found = costs.added(), costs.fixed()
    if len(set(sizes)) == 1:
        assert found == (None, None)
    elif found != (None, None):
        assert found[0] == pytest.approx(added, rel=1e-3, abs=1e-3 * fixed)
        assert found[1] == pytest.approx(fixed, rel=1e-3, abs=1e-2 * added)


def test_nobody_knows_what_a_unit_adds_where_all_steps_have_as_many() -> None:
    costs = StepCosts()
    for seconds in (1.0, 1.1, 0.9):
        costs.add(1000, 4000, seconds)
    assert costs.added() is None
    assert costs.fixed() is None


def test_older_steps_count_less() -> None:
    costs = StepCosts()
    for added in (0.1, 0.2):
        for size in (1, 8) * 50:
            costs.add(1, size, 1 + added * size)
    assert costs.added() == pytest.approx(0.2, rel=1e-3)
    assert costs.fixed() == pytest.approx(1, rel=1e-3)
