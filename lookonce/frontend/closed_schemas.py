"""JSON schemas in which an object has no keys but those that it declares.

OpenAI's strict mode asks for `additionalProperties: false` in every object; clients of other
servers, and pydantic's models, leave it out and mean the same. A model that may write any key may
write keys for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lookonce.errors import BadRequestError

Json = dict[str, Any]

OPENED_BY = ("additionalProperties", "unevaluatedProperties", "patternProperties")
"""Keywords by which an object says itself what other keys it has."""
BRANCHES = ("allOf", "anyOf", "oneOf")
DEFINITIONS = ("$defs", "definitions")
REFERENCES = ("#/$defs/", "#/definitions/")
NAMING_KEYS = frozenset({"properties", "$ref", *BRANCHES})
"""Keywords by which a schema may name keys of an object."""
WITH_SCHEMAS = frozenset(
    {
        *DEFINITIONS, *BRANCHES, "properties", "patternProperties", "items", "prefixItems",
        "additionalProperties",
    }
)  # fmt: skip
"""Keywords whose value is a schema, or contains some."""


def closed_schema(schema: Json, param: str) -> Json:
    """`closed`, with a `BadRequestError` naming `param` where it raises `RecursionError`."""
    try:
        return closed(schema)
    except RecursionError:
        raise BadRequestError(f"{param}: nested too deeply", param=param) from None


def closed(schema: Json) -> Json:
    """A copy in which each object with `properties`, and without a word about other keys, has
    `additionalProperties: false`.

    Schemas that must hold together for one object (those of `allOf`, a `$ref` beside `properties`)
    each see the keys of the others, so they stay open. What is not a schema (`enum`, `default`) and
    what is beneath `not` and `if` stays as it is. Raises `RecursionError`.
    """
    combined = frozenset(_combined(schema))
    return _closed(schema, combined, alone=True)


def _closed(schema: Json, combined: frozenset[str], *, alone: bool) -> Json:
    """`combined`: names of definitions that stay open; `alone`: no other schema holds for the same
    object."""
    if schema.keys().isdisjoint(WITH_SCHEMAS):
        return schema
    alone = alone and not _combines(schema)
    result: Json = {}
    for name, value in schema.items():
        if name in DEFINITIONS and isinstance(value, dict):
            result[name] = {
                key: _inner(part, combined, alone=key not in combined)
                for key, part in value.items()
            }
        elif name in ("properties", "patternProperties") and isinstance(value, dict):
            result[name] = {key: _inner(part, combined) for key, part in value.items()}
        elif name in ("items", "additionalProperties"):
            result[name] = _inner(value, combined)
        elif name == "prefixItems" and isinstance(value, list):
            result[name] = [_inner(part, combined) for part in value]
        elif name in BRANCHES and isinstance(value, list):
            result[name] = [_inner(part, combined, alone=alone) for part in value]
        else:
            result[name] = value
    if alone and _declares(schema) and not any(name in schema for name in OPENED_BY):
        result["additionalProperties"] = False
    return result


def _inner(part: Any, combined: frozenset[str], *, alone: bool = True) -> Any:
    return _closed(part, combined, alone=alone) if isinstance(part, dict) else part


def _declares(schema: Json) -> bool:
    kind = schema.get("type", "object")
    is_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    return is_object and isinstance(schema.get("properties"), dict)


def _combines(schema: Json) -> bool:
    """Whether several parts of `schema` name keys of one object."""
    if not _names_keys(schema):
        return False
    parts = int("properties" in schema) + int("$ref" in schema)
    for name in BRANCHES:
        branches = [each for each in _dicts(schema.get(name)) if _names_keys(each)]
        parts += len(branches) if name == "allOf" else bool(branches)
    return parts > 1


def _names_keys(schema: Json) -> bool:
    return not schema.keys().isdisjoint(NAMING_KEYS)


def _combined(schema: Json, together: bool = False) -> Iterable[str]:
    """Names of definitions that some object has beside other keys."""
    if not together and schema.keys().isdisjoint(WITH_SCHEMAS):
        return
    together = together or _combines(schema)
    reference = schema.get("$ref")
    if together and isinstance(reference, str):
        for prefix in REFERENCES:
            if reference.startswith(prefix):
                yield reference.removeprefix(prefix)
    for name, value in schema.items():
        if name in BRANCHES:
            for part in _dicts(value):
                yield from _combined(part, together)
        elif name in (*DEFINITIONS, "properties", "patternProperties"):
            for part in _dicts(list(value.values()) if isinstance(value, Mapping) else None):
                yield from _combined(part)
        elif name in ("items", "additionalProperties", "prefixItems"):
            for part in _dicts(value if isinstance(value, list) else [value]):
                yield from _combined(part)


def _dicts(values: Any) -> list[Json]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
