"""Who asked last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lookonce.types.last_asked import OTHERS_SECONDS, LastAsked


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1.5)), max_size=12))
def test_it_knows_of_everybody_whether_somebody_else_asks(asked):
    last, times, now = LastAsked(), {}, 100.0
    for who, seconds in asked:
        now += seconds
        last.note(who, now)
        times[who] = now
        for one in "abcd":
            others = [when for other, when in times.items() if other != one]
            assert last.others(one, now) == any(when > now - OTHERS_SECONDS for when in others)
            assert not last.others(one, now + OTHERS_SECONDS)
