"""Counts in a buffer: what is written is what others read, at any moment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.types.counts import SIZE, Counts, Values, add_up, read_counts

NAMES = st.text("abc_", min_size=1, max_size=4)


@given(st.lists(st.tuples(NAMES, st.integers(0, 2**40))))
def test_others_read_every_count_as_soon_as_it_is_made(changes):
    buffer = bytearray(SIZE)
    counts, expected = Counts(memoryview(buffer)), {}
    for name, amount in changes:
        counts.count(name).add(amount)
        expected[name] = expected.get(name, 0) + amount
        assert {n: v.numbers for n, v in read_counts(bytes(buffer)).items()} == {
            n: (v,) for n, v in expected.items()
        }


def test_callers_of_one_name_share_its_numbers():
    counts = Counts()
    counts.values("took", 3)[2] += 1.5
    counts.values("took", 3)[2] += 1.5
    assert counts.read() == {"took": Values((0.0, 0.0, 3.0))}


def test_a_counter_by_label_counts_as_a_counter_and_is_emptied_in_the_buffer_too():
    counts = Counts()
    decodes = counts.by_label("decodes")
    decodes["image"] += 1
    decodes["image"] += 1
    assert decodes == {"image": 2}
    assert counts.read() == {"decodes:image": Values((2.0,))}
    decodes.clear()
    assert decodes["image"] == 0
    assert counts.read() == {"decodes:image": Values((0.0,))}


def test_a_buffer_that_nobody_has_begun_is_empty():
    assert read_counts(bytes(SIZE)) == {}
    assert read_counts(b"") == {}


def test_more_names_than_there_is_space_for_are_refused():
    counts = Counts()
    for number in range(1000):
        counts.count(f"name_{number}")
    with pytest.raises(ValueError, match="more counts"):
        counts.values("many", 2000)
    assert len(counts.read()) == 1000


def test_sums_are_by_name_and_number():
    first, second = Counts(), Counts()
    first.values("took", 2)[1] += 1
    second.values("took", 2)[1] += 2
    second.count("held", gauge=True).set(5)
    sums = add_up([first.read(), second.read()])
    assert sums == {"took": Values((0.0, 3.0)), "held": Values((5.0,), gauge=True)}
