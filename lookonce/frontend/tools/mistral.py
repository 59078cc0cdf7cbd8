"""Calls as Mistral models write them, older and newer ones, after text or without.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern"}}, …]
[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}[TOOL_CALLS]…
[TOOL_CALLS]get_weather{"city": "Bern"}
"""

from __future__ import annotations

from lookonce.frontend.tools.asked import LONGEST_NAME
from lookonce.frontend.tools.call_object import SPACES, Value
from lookonce.frontend.tools.scanner import MarkerSearch, Scanner

MARKER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(Scanner):
    def __init__(self) -> None:
        super().__init__(self.text)
        self._marker = MarkerSearch(MARKER)
        self._name = ""
        self._arguments = Value()

    def unfinished(self) -> str:
        return self._name + self._marker.held

    def text(self, character: str) -> None:
        passed, found = self._marker.take(character)
        if passed:
            self.say(passed)
        if found:
            self.consumed = found
            self.state = self._head

    def after_call(self, character: str) -> None:
        """In a list of objects."""
        if character == ",":
            self.consumed = character
            self.state = self._item
        elif character == "]":
            self.state = self.text
        elif character not in SPACES:
            self.state = self.text
            self.text(character)

    def _head(self, character: str) -> None:
        if character == "[":
            self.consumed += character
            self.state = self._item
        elif character in SPACES:
            self.consumed += character
        else:
            self.state = self._named
            self._named(character)

    def _item(self, character: str) -> None:
        if character == "{":
            self.begin_object(character)
        elif character in SPACES:
            self.consumed += character
        else:
            self.say(self.consumed + character)
            self.state = self.text

    def _named(self, character: str) -> None:
        self._name += character
        name = self._name.removesuffix(ARGS).partition(CALL_ID)[0].strip()
        if self._name.endswith(ARGS) and name:
            self._begin_named(name)
        elif character == "{" and name[:-1].strip():
            self._begin_named(name[:-1].strip())
            self._argument(character)
        elif character in "\n{" or len(self._name) > LONGEST_NAME:
            said, self._name = self.consumed + self._name, ""
            self.say(said)
            self.state = self.text

    def _begin_named(self, name: str) -> None:
        self._name = ""
        self.begin_call(name)
        self._arguments = Value()
        self.state = self._argument

    def _argument(self, character: str) -> None:
        if character in SPACES and not self._arguments.begun:
            return
        try:
            belongs = self._arguments.take(character)
        except ValueError:
            self.state = self.text
            return
        if belongs:
            self.add_arguments(character)
        if self._arguments.ended:
            self.state = self.text
            if not belongs:
                self.text(character)
