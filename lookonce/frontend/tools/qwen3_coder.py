"""Calls as Qwen3-Coder writes them: tags, and values as they are.

<tool_call>
<function=get_weather>
<parameter=city>
Bern
</parameter>
</function>
</tool_call>

What a value is, the function's schema says. Where a grammar holds the model, it writes JSON between
the outer tags, as Hermes' models do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lookonce.frontend.tools.asked import LONGEST_NAME, AskedTools
from lookonce.frontend.tools.call_object import SPACES
from lookonce.frontend.tools.deltas import Delta
from lookonce.frontend.tools.hermes import CLOSE, OPEN, HermesParser
from lookonce.frontend.tools.parameter import ParameterValue
from lookonce.frontend.tools.scanner import MarkerSearch

FUNCTION, END_FUNCTION, PARAMETER = "<function=", "</function>", "<parameter="

Json = Mapping[str, Any]


class Qwen3CoderParser(HermesParser):
    def __init__(self, asked: AskedTools) -> None:
        super().__init__(FUNCTION)  # which models begin with now and then, without the outer tag
        self._schemas: dict[str, Json] = {f.name: f.parameters or {} for f in asked.functions}
        self._function = MarkerSearch(FUNCTION)
        self._inside = MarkerSearch(PARAMETER, END_FUNCTION, CLOSE, OPEN, FUNCTION)
        self._schema: Json = {}
        """Of the call's parameters."""
        self._name = self._key = ""
        self._has_arguments = False
        self._value = ParameterValue({}, {})

    def finish(self) -> list[Delta]:
        """A value that is cut off stays so; else the arguments are closed."""
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
        """Between the outer tag and the call, whose first character tells how it is written."""
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
            self.say(self.consumed + passed[0])
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
            said, self._name = self.consumed + self._name, ""
            self.say(said)
            self.state = self.text

    def _between(self, character: str) -> None:
        """Whatever stands between parameters is nothing for the reader."""
        _, found = self._inside.take(character)
        if found == PARAMETER:
            self._key, self.state = "", self._read_key
        elif found:
            self._close_arguments()
            self.state = self.text if found == CLOSE else self.after_call
            if found in (OPEN, FUNCTION):
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
