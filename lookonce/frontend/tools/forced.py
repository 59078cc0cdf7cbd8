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
from collections.abc import Mapping
from typing import Any

from lookonce.errors import BadRequestError
from lookonce.frontend.tools import harmony, hermes, mistral
from lookonce.frontend.tools.asked import AskedTools, Function
from lookonce.frontend.tools.formats import ToolDialect
from lookonce.types.sampling import JSON_SPACES, Grammar

NO_OBJECT = r"/[^{<\s](.|\n)*/"
CLIENTS_OWN = ("regex", "grammar", "lark")
Json = dict[str, Any]


def calls_grammar(tools: AskedTools, dialect: ToolDialect, form: Grammar | None) -> Grammar | None:
    """What the answer must look like; None where it may be anything. Raises `BadRequestError`.

    `form`: what an answer without calls must look like.
    """
    if form is None and not (tools.forced or tools.strict):
        return None
    if dialect.format.name == "harmony":
        return _harmony_grammar(tools, dialect, form)
    rules = _calls(tools, dialect)
    if tools.forced:
        rules["start"] = "calls"
    elif form is not None:
        rules["start"] = f"calls | {_form(form, dialect)}"
    elif dialect.format.name == "llama3":
        rules |= {"start": "TEXT | calls", "TEXT": NO_OBJECT}
    else:
        rules |= {"start": "TEXT* calls?", "TEXT": _free_text(dialect)}
    return _grammar(rules, tools, form)


def _grammar(rules: Mapping[str, str], tools: AskedTools, form: Grammar | None) -> Grammar:
    lark = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
    parts = [
        Grammar(kind="json_schema", source=json.dumps(function.parameters), param=param)
        for function, param in zip(tools.functions, tools.params, strict=True)
        if function.parameters is not None
    ]
    if form is not None and not tools.forced:
        parts.append(form)
    param = "tools" if tools.functions or form is None else form.param
    return Grammar(kind="lark", source=lark, param=param, parts=tuple(parts))


def _harmony_grammar(
    tools: AskedTools, dialect: ToolDialect, form: Grammar | None
) -> Grammar | None:
    """Thoughts, and then one call or the answer."""
    if form is not None and form.kind in CLIENTS_OWN and not tools.functions:
        return None  # holds for all that is written, without channels
    channel, message = _marker(harmony.CHANNEL, dialect), _marker(harmony.MESSAGE, dialect)
    # What is said before the answer would break its form.
    before = f"{channel} " + ('("analysis" | "commentary")' if form is None else '"analysis"')
    end, start = _marker(harmony.END, dialect), _marker(harmony.START, dialect)
    constrain = _marker(harmony.CONSTRAIN, dialect)
    calls = [
        f"{channel} {_text(f'commentary to={harmony.FUNCTIONS}{f.name} ')} {constrain} "
        f'"json" {message} {_parameters(f)}'
        for f in tools.functions
    ]
    last = calls
    if not tools.forced:
        said = "TEXT?" if form is None else f"({_form(form, dialect)})"
        last = [*calls, f'{channel} "final" {message} {said}']
    rules = {
        "start": "thought* last",
        "thought": f'{before} {message} TEXT? {end} {start} "assistant"',
        "last": " | ".join(last),
        "TEXT": r"/(.|\n)+/" if harmony.CHANNEL in dialect.special else r"/([^<]|<[^|])+/",
    }
    return _grammar(rules, tools, form)


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
    """Of all formats but harmony."""
    objects = " | ".join(_object(f, dialect.format.arguments_key) for f in tools.functions)
    match dialect.format.name:
        case "hermes" | "qwen3_coder":
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
    # A client's own may begin as calls do, and so may any form where calls have no markers.
    raise BadRequestError(
        f"{form.param} cannot be used with tools here, unless tool_choice is none", param=form.param
    )


def _text(text: str) -> str:
    return json.dumps(text)


def _marker(text: str, dialect: ToolDialect) -> str:
    return f"<[{dialect.special[text]}]>" if text in dialect.special else _text(text)
