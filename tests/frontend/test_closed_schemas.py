"""Which objects of a JSON schema are closed, and which stay as they are."""

from __future__ import annotations

from typing import Literal

import pydantic
import pytest

from lookonce.frontend.closed_schemas import closed

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
SHUT = {"additionalProperties": False}


def test_objects_are_closed_at_every_level():
    schema = {
        **A,
        "properties": {"list": {"type": "array", "items": A}, "pair": {"prefixItems": [A, B]}},
        "$defs": {"A": A},
    }
    shut = {**A, **SHUT}
    assert closed(schema) == {
        **A, **SHUT,
        "properties": {
            "list": {"type": "array", "items": shut},
            "pair": {"prefixItems": [shut, {**B, **SHUT}]},
        },
        "$defs": {"A": shut},
    }  # fmt: skip
    assert "additionalProperties" not in schema, "what came in is not changed"


def test_a_choice_between_objects_closes_each():
    assert closed({"anyOf": [A, {"type": "null"}]}) == {"anyOf": [{**A, **SHUT}, {"type": "null"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "string", "properties": {}},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {"type": "string"}}},
        {"enum": [{"properties": {"a": 1}}], "default": {"properties": {}}},
        {"not": A},
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "anyOf": [B, {"type": "object"}]},
        {**A, "$ref": "#/$defs/B", "$defs": {"B": B}},
    ],
)
def test_what_says_otherwise_or_must_hold_together_stays_open(schema):
    assert closed(schema) == schema


def test_one_reference_alone_is_closed_where_it_is_defined():
    schema = {"properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}]}}, "$defs": {"A": A}}
    shut = closed(schema)
    assert shut["$defs"]["A"] == {**A, **SHUT}
    assert closed(shut) == shut


def test_a_condition_beside_properties_keeps_them_closed():
    schema = {**A, "anyOf": [{"required": ["a"]}, {"minProperties": 1}]}
    assert closed(schema) == {**schema, **SHUT}


class Inner(pydantic.BaseModel):
    size: Literal["small", "large"]


class Outer(pydantic.BaseModel):
    inner: Inner
    others: list[Inner] | None = None


def test_a_pydantic_model_is_closed_whole():
    shut = closed(Outer.model_json_schema())
    assert shut["additionalProperties"] is shut["$defs"]["Inner"]["additionalProperties"] is False


class Free(pydantic.BaseModel, extra="allow"):
    size: int


def test_a_pydantic_model_that_takes_more_stays_open():
    assert closed(Free.model_json_schema()) == Free.model_json_schema()
