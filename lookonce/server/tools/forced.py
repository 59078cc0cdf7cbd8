"""Grammars of calls, in the format the model speaks: for calls that must come, or be right.

    start   what the answer is: calls, or words and perhaps calls, or calls or the form asked for
    calls   one or more of `call`
    call    markers, a function's name, and its parameters' schema, which stands by itself: what
            its `$ref`s point to is found from its own root

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

NO_OBJECT = r"/[^{<\s](.|\n)*/"
Json = dict[str, Any]


def calls_grammar(tools: AskedTools, dialect: ToolDialect, form: Grammar | None) -> Grammar | None:
    """What the answer must look like; None where it may be anything. Raises `BadRequestError`.

    `form`: what an answer without calls must look like.
    """
    if form is None and not (tools.forced or tools.strict):
        return None
    rules = _calls(tools, dialect)
    if tools.forced:
        rules["start"] = "calls"
    elif form is not None:
        rules["start"] = f"calls | {_form(form, dialect)}"
    elif dialect.format.name == "llama3":
        rules |= {"start": "TEXT | calls", "TEXT": NO_OBJECT}
    else:
        rules |= {"start": "TEXT* calls?", "TEXT": _free_text(dialect)}
    lark = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
    parts = [
        Grammar(kind="json_schema", source=json.dumps(function.parameters), param=param)
        for function, param in zip(tools.functions, tools.params, strict=True)
        if function.parameters is not None
    ]
    if form is not None and not tools.forced:
        parts.append(form)
    return Grammar(kind="lark", source=lark, param="tools", parts=tuple(parts))


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


def _calls(tools: AskedTools, dialect: ToolDialect) -> dict[str, str]:
    objects = " | ".join(_object(f, dialect.format.arguments_key) for f in tools.functions)
    match dialect.format.name:
        case "hermes":
            opening, closing = _marker(hermes.OPEN, dialect), _marker(hermes.CLOSE, dialect)
            call = f'{opening} "\\n" ({objects}) "\\n" {closing}'
            return {"call": call, "calls": _repeated('"\\n"', tools)}
        case "mistral" if dialect.writes_args:
            marker, args = _marker(mistral.MARKER, dialect), _marker(mistral.ARGS, dialect)
            named = [f"{_text(f.name)} {args} {_parameters(f)}" for f in tools.functions]
            return {"call": f"{marker} ({' | '.join(named)})", "calls": _repeated("", tools)}
        case "mistral":
            calls = f'{_marker(mistral.MARKER, dialect)} "[" {_repeated(_text(", "), tools)} "]"'
            return {"call": objects, "calls": calls}
        case _:
            return {"call": objects, "calls": _repeated('"; "', tools)}


def _repeated(separator: str, tools: AskedTools) -> str:
    return f"call ({separator} call)*" if tools.parallel else "call"


def _object(function: Function, arguments_key: str) -> str:
    """As the chat templates write calls."""
    name = json.dumps(function.name, ensure_ascii=False)
    before = f'{{"name": {name}, "{arguments_key}": '
    return f"{_text(before)} {_parameters(function)} {_text('}')}"


def _parameters(function: Function) -> str:
    if function.parameters is None:
        return _json({"type": "object", "properties": {}, "additionalProperties": False})
    return _json({"type": "object", **function.parameters})


def _json(schema: Json) -> str:
    guided = {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACES}}
    try:
        return f"%json {json.dumps(guided)}"
    except RecursionError:
        raise BadRequestError("tools: a schema is nested too deeply", param="tools") from None


def _form(form: Grammar, dialect: ToolDialect) -> str:
    match form.kind:
        case "json_schema" if dialect.format.name != "llama3":
            return _json(json.loads(form.source))
        case "choice" if dialect.format.name != "llama3":
            return " | ".join(map(_text, json.loads(form.source)))
    # A grammar of the client's has rules of its own, and a call of llama3 begins as a form may.
    raise BadRequestError(
        f"{form.param} cannot be used with tools here, unless tool_choice is none", param=form.param
    )


def _text(text: str) -> str:
    return json.dumps(text)


def _marker(text: str, dialect: ToolDialect) -> str:
    return f"<[{dialect.special[text]}]>" if text in dialect.special else _text(text)
