"""Sampling parameters are refused where they are made, or the engine can read them."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.errors import BadRequestError
from lookonce.types.sampling import MAX_GRAMMAR_BYTES, Grammar, Kind, SamplingParams

FIELDS = SamplingParams.__struct_fields__
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 30), st.floats(-3, 130), st.text(max_size=3),
    st.just(Grammar(kind="regex", source="a+")),
)  # fmt: skip
VALUES = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.lists(PLAIN, max_size=3).map(tuple),
    st.dictionaries(st.one_of(st.integers(0, 9), st.text(max_size=1)), PLAIN, max_size=2),
)


def make_or_refuse(fields):
    """The error, or None where what was made reads the same at the other end."""
    try:
        made = SamplingParams(**fields)
    except BadRequestError as error:
        return error
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made
    return None


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_whatever_can_be_made_can_be_read_at_the_other_end(fields):
    error = make_or_refuse(fields)
    assert error is None or error.param in FIELDS


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [4.5, True, "4", {"5": 1.0}, [1.0], object()])
def test_a_value_of_another_type_is_refused_by_the_field_s_name(name, value):
    error = make_or_refuse({name: value})
    assert error is None or (error.param == name and name in error.message)


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",)])
def test_stop_takes_one_string_or_a_list(stop):
    assert SamplingParams(stop=stop).stop == ("END",)
    assert msgspec.structs.replace(SamplingParams(), stop=stop).stop == ("END",)


def test_stop_token_ids_take_a_list():
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


@pytest.mark.parametrize("wrong", [{"kind": "sql"}, {"source": b"a"}, {"param": 5}])
def test_a_grammar_that_the_engine_could_not_read_is_refused(wrong):
    with pytest.raises(BadRequestError):
        Grammar(**{"kind": "regex", "source": "a+", **wrong})


def test_a_grammar_has_a_limit_in_bytes_whatever_its_kind():
    for kind in get_args(Kind):
        assert Grammar(kind=kind, source="a" * MAX_GRAMMAR_BYTES)
        for source in ("a" * (MAX_GRAMMAR_BYTES + 1), "é" * (MAX_GRAMMAR_BYTES // 2 + 1)):
            with pytest.raises(BadRequestError, match="at most") as caught:
                Grammar(kind=kind, source=source, param="guided_regex")
            assert caught.value.param == "guided_regex"


def test_the_parts_of_a_grammar_have_the_same_limit_together_and_no_parts():
    part = Grammar(kind="json_schema", source="a" * (MAX_GRAMMAR_BYTES // 2))
    whole = Grammar(kind="lark", source="start: x", parts=(part, part))
    with pytest.raises(BadRequestError, match="at most"):
        Grammar(kind="lark", source="start: x", parts=(part, part, part))
    with pytest.raises(BadRequestError, match="no parts"):
        Grammar(kind="lark", source="start: x", parts=(whole,))
    with pytest.raises(BadRequestError, match="too long"):
        Grammar(kind="lark", source="start: x", param="p" * 300)
