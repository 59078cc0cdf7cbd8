"""Bodies: whatever comes, a struct or a 400 that names a part of it."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.errors import BadRequestError
from lookonce.frontend.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from lookonce.server.http.body import parse

KINDS = [ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest]
FIELDS = sorted({f.name for kind in KINDS for f in msgspec.structs.fields(kind)})

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6) | values


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(KINDS), bodies)
def test_any_json_is_taken_or_refused_by_name(kind, body):
    try:
        raw = json.dumps(body, allow_nan=False).encode("utf-8", "surrogatepass")
    except ValueError:  # infinite floats are no JSON
        return
    try:
        request, param = parse(raw, kind), ""
    except BadRequestError as error:
        request, param = None, error.param or ""
    top = param.partition("[")[0].partition(".")[0]
    assert isinstance(request, kind) or top in {"", *(f.name for f in msgspec.structs.fields(kind))}


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(KINDS), st.binary(max_size=200).filter(lambda b: b.strip() != b"{}"))
def test_any_bytes_are_refused_without_breaking(kind, body):
    with pytest.raises(BadRequestError):
        parse(body, kind)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatRequest, {"messages": [{}, 3]}, "messages[1]"),
        (ChatRequest, {"messages": [], "stop": ["a", None]}, "stop[1]"),
        (ChatRequest, {"messages": [], "stream_options": {"include_usage": 1}},
         "stream_options.include_usage"),
        (CompletionRequest, {"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
        (DetokenizeRequest, {"tokens": [1, 2, -3]}, "tokens[2]"),
        (TokenizeRequest, {"prompt": ["a"]}, "prompt"),
    ],
)  # fmt: skip
def test_the_exact_part_is_named(kind, body, param):
    with pytest.raises(BadRequestError) as refused:
        parse(json.dumps(body).encode(), kind)
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param}: expected ")


def test_a_field_that_asks_for_nothing_is_no_reason_to_refuse():
    for nothing in ("null", "false", "[]", "{}", '""'):
        body = f'{{"messages": [], "functions": {nothing}, "echo": {nothing}}}'
        assert parse(body.encode(), ChatRequest).messages == []
