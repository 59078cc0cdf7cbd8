"""Grammars of calls, in the format the model speaks: for calls that must come, or be right.

Lark with JSON schemas inside. Markers that are special tokens are named by their ids.
"""

from __future__ import annotations

import json
import re
from typing import Any

from lookonce.errors import BadRequestError
from lookonce.server.tools import hermes, mistral
from lookonce.server.tools.asked import AskedTools, Function
from lookonce.server.tools.formats import ToolDialect
from lookonce.types.grammar import JSON_SPACES, Grammar

SHARED_DEFINITIONS = ("$defs", "definitions")
"""What a schema's `$ref`s point to from its root: it stays at the root."""
NOT_AN_OBJECT = r"/[^{<\s](.|\n)*/"


def calls_grammar(tools: AskedTools, dialect: ToolDialect) -> Grammar | None:
    """What the answer must look like; None where it may be anything. Raises `BadRequestError`."""
    if not (tools.forced or tools.strict):
        return None
    calls = _calls(tools, dialect)
    if tools.forced:
        lark = f"start: {calls}"
    elif dialect.format.name == "llama3":
        lark = f"start: TEXT | {calls}\nTEXT: {NOT_AN_OBJECT}"
    else:
        lark = f"start: TEXT* ({calls})?\nTEXT: {_free_text(dialect)}"
    return Grammar(kind="lark", source=lark, param="tools")


def _free_text(dialect: ToolDialect) -> str:
    """Pieces of text without a marker: what has no marker's first character, or the beginning of a
    marker alone. The longest match wins, so that a whole marker is never read as its beginning."""
    marker = mistral.MARKER if dialect.format.name == "mistral" else hermes.OPEN
    if marker in dialect.special:
        return r"/(.|\n)+/"  # a special token is no text
    beginning = ""
    for character in reversed(marker[1:-1]):
        beginning = f"({re.escape(character)}{beginning})?"
    first = re.escape(marker[0])
    return f"/[^{first}]+|{first}{beginning}/"


def _calls(tools: AskedTools, dialect: ToolDialect) -> str:
    match dialect.format.name:
        case "hermes":
            opening = _marker(hermes.OPEN, dialect)
            closing = _marker(hermes.CLOSE, dialect)
            call = f'{opening} "\\n" {_any_object(tools, dialect)} "\\n" {closing}'
            return _repeated(call, '"\\n"', tools)
        case "mistral" if dialect.writes_args:
            marker, args = _marker(mistral.MARKER, dialect), _marker(mistral.ARGS, dialect)
            each = [
                f"{json.dumps(function.name)} {args} {_json(_parameters(function))}"
                for function in tools.functions
            ]
            return _repeated(f"{marker} ({' | '.join(each)})", "", tools)
        case "mistral":
            calls = _repeated(_any_object(tools, dialect), '", "', tools)
            return f'{_marker(mistral.MARKER, dialect)} "[" {calls} "]"'
        case _:
            return _repeated(_any_object(tools, dialect), '"; "', tools)


def _repeated(call: str, separator: str, tools: AskedTools) -> str:
    return f"{call} ({separator} {call})*" if tools.parallel else call


def _any_object(tools: AskedTools, dialect: ToolDialect) -> str:
    key = dialect.format.arguments_key
    return "(" + " | ".join(_json(_call_schema(f, key)) for f in tools.functions) + ")"


def _call_schema(function: Function, arguments_key: str) -> dict[str, Any]:
    parameters = _parameters(function)
    shared = {name: parameters[name] for name in SHARED_DEFINITIONS if name in parameters}
    own = {name: value for name, value in parameters.items() if name not in shared}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments_key: own},
        "required": ["name", arguments_key],
        "additionalProperties": False,
        **shared,
    }


def _parameters(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}


def _json(schema: dict[str, Any]) -> str:
    guided = {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACES}}
    try:
        return f"%json {json.dumps(guided)}"
    except RecursionError:
        raise BadRequestError("tools: a schema is nested too deeply", param="tools") from None


def _marker(text: str, dialect: ToolDialect) -> str:
    return f"<[{dialect.special[text]}]>" if text in dialect.special else json.dumps(text)
