"""A parameter's value that a model wrote without quotes, as JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from lookonce.frontend.tools.scanner import MarkerSearch

END_PARAMETER = "</parameter>"
FORGOTTEN = ("\n<parameter=", "\n</function>")
"""What comes next where a model forgets the end: on a line of its own, or it is the value's."""
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}

Json = Mapping[str, Any]


class ParameterValue:
    """Text is told as it comes, all else once it is complete."""

    def __init__(self, schema: Json, root: Json) -> None:
        """`root`: what the schema's references are looked up in."""
        self._kinds = _kinds(schema, root)
        self._is_text = self._kinds <= {"string"}
        self._end = MarkerSearch("\n" + END_PARAMETER, END_PARAMETER, *FORGOTTEN)
        self._has_begun = False
        self._written = ""
        """Of what is no text."""
        self.ended = False
        self.following = ""
        """Read already, though none of the value: what ended it in its end's place."""

    def take(self, character: str) -> str:
        """More of the JSON; `ended` says that it was the last."""
        passed, found = self._end.take(character)
        self.ended = bool(found)
        self.following = found if found in FORGOTTEN else ""
        if not self._is_text:
            self._written += passed
            return _converted(self._written, self._kinds) if found else ""
        return self._quoted(passed) + ('"' if found else "")

    def finish(self) -> str:
        """What was held back, where the value is cut off."""
        return "" if self._is_text else self._written.strip()

    def _quoted(self, text: str) -> str:
        if self._has_begun or not (text or self.ended):
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._has_begun = True  # the line break after the tag is none of the value
        return json.dumps(text.removeprefix("\n"), ensure_ascii=False)[:-1]


def _converted(written: str, kinds: set[str]) -> str:
    text = written.strip()
    text = PYTHON_NAMES.get(text, text)
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        spelled = _from_python(text) if kinds & {"object", "array"} else None
        return spelled or json.dumps(written.removeprefix("\n"), ensure_ascii=False)
    if "string" in kinds and not kinds & _kinds_of(value):
        return json.dumps(written.removeprefix("\n"), ensure_ascii=False)
    return text


def _from_python(text: str) -> str | None:
    """An object or array that a model wrote as Python does: {'a': True}."""
    if not text.startswith(("{", "[")):
        return None
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, allow_nan=False) if isinstance(value, dict | list) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _kinds_of(value: object) -> set[str]:
    """What a schema may call the value."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def _kinds(schema: object, root: Json) -> set[str]:
    """The types that a schema names; none: it may be anything."""
    kinds: set[str] = set()
    followed: set[str] = set()
    todo = [schema]
    while todo:
        each = todo.pop()
        if not isinstance(each, Mapping):
            continue
        kind, reference = each.get("type"), each.get("$ref")
        kinds.update(k for k in (kind, *_listed(kind)) if isinstance(k, str))
        for value in (*_listed(each.get("enum")), *([each["const"]] if "const" in each else ())):
            kinds |= _kinds_of(value)
        for name in ("anyOf", "oneOf", "allOf"):
            todo += _listed(each.get(name))
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            todo.append(_referred(reference, root))
    return kinds


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Json) -> object:
    found: object = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None
