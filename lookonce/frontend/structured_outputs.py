"""What a request says its answer must look like → the grammar the engine follows.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` fields all say the
same; one of them may be used.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lookonce.errors import BadRequestError
from lookonce.frontend.unsupported_parameters import Unbuilt
from lookonce.types.sampling import Grammar

Schema = dict[str, Any] | bool
MAX_CHOICES = 10_000
ANY_OBJECT = '{"type":"object"}'


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None
    """The answer conforms either way."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str = "text"
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's. The `disable_*` fields are about how its libraries search: nothing to us."""

    json: str | Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: Literal[False] | None = None


class Structured(Unbuilt, kw_only=True):
    """Base of bodies whose answer may be given a form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def grammar_of(body: Structured) -> Grammar | None:
    """None where the answer is free. Raises `BadRequestError` naming the field at fault."""
    if all(asked is None for asked in (
        body.response_format, body.structured_outputs, body.guided_json, body.guided_regex,
        body.guided_choice, body.guided_grammar,
    )):  # fmt: skip
        return None
    found = [
        *_of_format(body.response_format, "response_format"),
        *_of_outputs(body.structured_outputs or StructuredOutputs(), "structured_outputs."),
        *_of_outputs(
            StructuredOutputs(
                json=body.guided_json,
                regex=body.guided_regex,
                choice=body.guided_choice,
                grammar=body.guided_grammar,
            ),
            "guided_",
        ),
    ]
    if len(found) > 1:
        names = " and ".join(grammar.param for grammar in found)
        raise BadRequestError(f"{names} cannot be used together", param=found[1].param)
    return found[0] if found else None


def _of_format(asked: ResponseFormat | None, param: str) -> list[Grammar]:
    match asked:
        case None | ResponseFormat(type="text"):
            return []
        case ResponseFormat(type="json_object"):
            return [Grammar(kind="json_schema", source=ANY_OBJECT, param=param)]
        case ResponseFormat(type="json_schema"):
            return [schema_grammar(asked.json_schema, f"{param}.json_schema")]
    raise BadRequestError(
        f"{param}.type: {asked.type[:50]!r} is none of text, json_object, json_schema",
        param=f"{param}.type",
        code="unsupported_parameter",
    )


def schema_grammar(asked: JsonSchemaFormat | None, param: str) -> Grammar:
    """Raises `BadRequestError` where the schema itself is missing."""
    if asked is None:
        raise BadRequestError(f"{param} is missing", param=param)
    if asked.schema is None:
        raise BadRequestError(f"{param}.schema is missing", param=f"{param}.schema")
    return _json_grammar(asked.schema, f"{param}.schema")


def _of_outputs(asked: StructuredOutputs, prefix: str) -> list[Grammar]:
    found = []
    if asked.json is not None:
        found.append(_json_grammar(asked.json, f"{prefix}json"))
    if asked.regex is not None:
        found.append(Grammar(kind="regex", source=asked.regex, param=f"{prefix}regex"))
    if asked.choice is not None:
        found.append(_choice(asked.choice, f"{prefix}choice"))
    if asked.grammar is not None:
        found.append(Grammar(kind="grammar", source=asked.grammar, param=f"{prefix}grammar"))
    if asked.json_object:
        param = f"{prefix}json_object"
        found.append(Grammar(kind="json_schema", source=ANY_OBJECT, param=param))
    return found


def _json_grammar(schema: str | Schema, param: str) -> Grammar:
    """A schema may come as JSON text, as vLLM takes it."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=Schema)
        except (ValueError, RecursionError):
            raise BadRequestError(f"{param}: not a JSON schema", param=param) from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return Grammar(kind="json_schema", source=_json_text(schema, param), param=param)


def _json_text(value: object, param: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (ValueError, RecursionError):
        raise BadRequestError(f"{param}: nested too deeply", param=param) from None


def _choice(choices: list[str], param: str) -> Grammar:
    if not choices or not all(choices):
        raise BadRequestError(f"{param}: at least one text, none of them empty", param=param)
    if len(choices) > MAX_CHOICES:
        raise BadRequestError(
            f"{param}: {len(choices)} choices, {MAX_CHOICES} are allowed", param=param
        )
    return Grammar(kind="choice", source=_json_text(choices, param), param=param)
