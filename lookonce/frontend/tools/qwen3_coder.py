"""Calls as Qwen3-Coder writes them: tags, and values as they are.

<tool_call>
<function=get_weather>
<parameter=city>
Bern
</parameter>
</function>
</tool_call>

The type of a value is read off the function's schema. Where a grammar constrains the model, it
writes JSON between the outer tags, as Hermes models do.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from lookonce.frontend.tools.json_calls import END_TOOL_CALL, TOOL_CALL, HermesParser
from lookonce.frontend.tools.parser import LONGEST_NAME, SPACES, Delta, MarkerSearch

FUNCTION, END_FUNCTION, PARAMETER = "<function=", "</function>", "<parameter="
END_PARAMETER = "</parameter>"
UNCLOSED = ("\n<parameter=", "\n</function>")
"""What comes next where a model forgets the end of a value: only on a line of its own, since
elsewhere it belongs to the value."""
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}

Json = Mapping[str, Any]


class Qwen3CoderParser(HermesParser):
    """The tags around calls are those of `HermesParser`."""

    def __init__(self, schemas: Mapping[str, Json]) -> None:
        """`schemas`: function name → JSON schema of its parameters."""
        super().__init__(FUNCTION)  # which models begin with now and then, without the outer tag
        self._schemas = schemas
        self._function = MarkerSearch(FUNCTION)
        self._inside = MarkerSearch(PARAMETER, END_FUNCTION, END_TOOL_CALL, TOOL_CALL, FUNCTION)
        self._schema: Json = {}
        """The JSON schema of the current call's parameters."""
        self._name = self._key = ""
        self._has_arguments = False
        self._value = ParameterValue({}, {})

    def finish(self) -> list[Delta]:
        """A value that is cut off stays cut off; otherwise the arguments are closed."""
        if self.state == self._read_value:
            self.add_arguments(self._value.finish())
        elif self.state in (self._between, self._read_key):
            self._close_arguments()
        return super().finish()

    def unfinished(self) -> str:
        return super().unfinished() + self._function.held + self._name

    def open(self, marker: str) -> None:
        super().open(marker)
        if marker == FUNCTION:
            self.state = self._read_name

    def begin_object(self, character: str) -> None:
        """The state between the outer tag and the call: the first character tells the format."""
        if self._function.held or character == "<":
            self._find_function(character)
        elif character in SPACES:
            self.consumed += character
        else:
            super().begin_object(character)

    # --- inside -------------------------------------------------------------------------------

    def _find_function(self, character: str) -> None:
        passed, found = self._function.take(character)
        if found:
            self.consumed += found
            self.state = self._read_name
        elif passed:
            rest, self._function.held = passed[1:] + self._function.held, ""
            self.add_content(self.consumed + passed[0])
            self.state = self.text
            for each in rest:
                self.state(each)

    def _read_name(self, character: str) -> None:
        if character == ">" and self._name.strip():
            name, self._name = self._name.strip(), ""
            self.begin_call(name)
            self._schema, self._has_arguments = self._schemas.get(name, {}), False
            self.state = self._between
            return
        self._name += character
        if character in "\n<>" or len(self._name) > LONGEST_NAME:
            name, self._name = self._name, ""
            self.add_content(self.consumed + name)
            self.state = self.text

    def _between(self, character: str) -> None:
        """Whatever stands between parameters is dropped."""
        _, found = self._inside.take(character)
        if found == PARAMETER:
            self._key, self.state = "", self._read_key
        elif found:
            self._close_arguments()
            self.state = self.text if found == END_TOOL_CALL else self.after_call
            if found in (TOOL_CALL, FUNCTION):
                self.open(found)

    def _read_key(self, character: str) -> None:
        if character != ">":
            self._key += character
            return
        key = self._key.strip()
        self.add_arguments((", " if self._has_arguments else "{") + f"{_json(key)}: ")
        self._has_arguments = True
        self._value = ParameterValue(_property(self._schema, key), self._schema)
        self.state = self._read_value

    def _read_value(self, character: str) -> None:
        self.add_arguments(self._value.take(character))
        if self._value.ended:
            self.state = self._between
            for each in self._value.following:
                self.state(each)

    def _close_arguments(self) -> None:
        self.add_arguments("}" if self._has_arguments else "{}")


def _property(schema: Json, key: str) -> Json:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class ParameterValue:
    """One parameter's value, which the model writes without quotes, as JSON.

    Text is passed on as it comes, anything else once it is complete.
    """

    def __init__(self, schema: Json, root: Json) -> None:
        """`root`: what the schema's references are looked up in."""
        self._kinds = _kinds(schema, root)
        self._is_text = self._kinds <= {"string"}
        self._end = MarkerSearch("\n" + END_PARAMETER, END_PARAMETER, *UNCLOSED)
        self._has_begun = False
        self._written = ""
        """What was read of a value that is no text."""
        self.ended = False
        self.following = ""
        """The marker that ended the value in place of its end tag: it still has to be parsed."""

    def take(self, character: str) -> str:
        """More of the JSON text; `ended` says whether the value has ended."""
        passed, found = self._end.take(character)
        self.ended = bool(found)
        self.following = found if found in UNCLOSED else ""
        if not self._is_text:
            self._written += passed
            return _converted(self._written, self._kinds) if found else ""
        return self._quoted(passed) + ('"' if found else "")

    def finish(self) -> str:
        """What was held back of a value that is cut off."""
        return "" if self._is_text else self._written.strip()

    def _quoted(self, text: str) -> str:
        if self._has_begun or not (text or self.ended):
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._has_begun = True  # the line break after the tag is not part of the value
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
    """The JSON schema types of a value."""
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
    """The types that a schema names; an empty set stands for any."""
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
