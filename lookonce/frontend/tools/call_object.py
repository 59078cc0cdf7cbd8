"""Reads a call written as a JSON object, character by character.

    {"name": "get_weather", "arguments": {"city": "Bern"}}
              └─ told at once  └─ told as it comes, once the name is known

Only as much of JSON is understood as finding these two members takes; what the arguments hold is
passed on as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

Where = Literal["open", "key", "colon", "value", "after"]

SPACES = " \t\r\n"
CLOSERS = {"{": "}", "[": "]"}


class Value:
    """The extent of one JSON value."""

    def __init__(self) -> None:
        self.ended = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._bare = False

    @property
    def begun(self) -> bool:
        return self._bare or self._in_string or self.ended or bool(self._closers)

    def take(self, character: str) -> bool:
        """Whether the character belongs to the value; `ended` says if it was the last one.

        A bare value (a number, `true`) ends before the first character that is none of it. Raises
        `ValueError` where brackets do not match.
        """
        if self._in_string:
            self._take_in_string(character)
        elif character == '"':
            self._in_string = True
        elif character in CLOSERS:
            self._closers.append(CLOSERS[character])
        elif self._closers:
            self._take_inside(character)
        elif character in ",}]:" or character in SPACES:
            if not self._bare:
                raise ValueError("a value is missing")
            self.ended = True
            return False
        else:
            self._bare = True
        return True

    def _take_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self.ended = not self._closers

    def _take_inside(self, character: str) -> None:
        if character in "]}":
            if character != self._closers.pop():
                raise ValueError("brackets do not match")
            self.ended = not self._closers


class CallObject:
    """One call, told by `on_name` and `on_arguments`. `raw` is what was read before the name.

    `broken`: it is no call after all; if it `started`, what was told stays.
    """

    def __init__(
        self,
        argument_keys: tuple[str, ...],
        on_name: Callable[[str], None],
        on_arguments: Callable[[str], None],
        accepts: Callable[[str], bool] = bool,
    ) -> None:
        self.started = self.ended = self.broken = False
        self.raw = ""
        self._argument_keys = argument_keys
        self._on_name, self._on_arguments, self._accepts = on_name, on_arguments, accepts
        self._where: Where = "open"
        self._key = ""
        self._value = Value()
        self._text = ""
        """Of the key or value being read, what is not told yet."""
        self._early_arguments = ""
        """Arguments that came before the name."""
        self._has_arguments = False

    def take(self, character: str) -> None:
        """Not called any more once it `ended` or is `broken`."""
        if not self.started:
            self.raw += character
        try:
            self._take(character)
        except ValueError:
            self.broken = True

    def _take(self, character: str) -> None:
        if self._where in ("key", "value") and (self._text or character not in SPACES):
            self._take_text(character)
        elif character in SPACES:
            return
        elif self._where == "open" and character == "{":
            self._expect("key")
        elif self._where == "colon" and character == ":":
            self._expect("value")
        elif self._where == "after" and character == ",":
            self._expect("key")
        elif self._where == "after" and character == "}":
            self._end()
        else:
            raise ValueError(f"{character!r} is not expected here")

    def _expect(self, where: Where) -> None:
        self._where, self._value, self._text = where, Value(), ""

    def _take_text(self, character: str) -> None:
        if self._where == "key" and not self._text and character != '"':
            raise ValueError("a key is a string")
        belongs = self._value.take(character)
        if belongs:
            self._text += character
            self._tell_arguments(character)
        if self._value.ended:
            self._end_text()
            if not belongs:
                self._take(character)

    def _end_text(self) -> None:
        if self._where == "key":
            self._key, self._where = str(json.loads(self._text)), "colon"
            return
        self._where = "after"
        if self._key == "name":
            self._name(json.loads(self._text))
        elif self._key in self._argument_keys and self._text.startswith('"'):
            self._add_arguments(str(json.loads(self._text)))  # JSON within a JSON string

    def _name(self, name: object) -> None:
        if self.started or not isinstance(name, str) or not self._accepts(name):
            raise ValueError("not the name of a function")
        self.started = True
        self.raw = ""
        self._on_name(name)
        if self._early_arguments:
            self._on_arguments(self._early_arguments)

    def _tell_arguments(self, character: str) -> None:
        is_arguments = self._where == "value" and self._key in self._argument_keys
        if is_arguments and not self._text.startswith('"'):
            self._add_arguments(character)

    def _add_arguments(self, text: str) -> None:
        self._has_arguments = True
        if self.started:
            self._on_arguments(text)
        else:
            self._early_arguments += text

    def _end(self) -> None:
        if not self.started:
            raise ValueError("a call has a name")
        if not self._has_arguments:
            self._on_arguments("{}")
        self.ended = True
