"""Parsers of calls that are written as JSON objects: Hermes' and Qwen's, Llama 3's, Mistral's."""

from __future__ import annotations

from collections.abc import Callable

from lookonce.frontend.tools.parser import (
    LONGEST_NAME,
    SPACES,
    Delta,
    JsonValueExtent,
    MarkerSearch,
    Scanner,
)

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"


class HermesParser(Scanner):
    """Calls as Hermes and Qwen models write them, with or without text around.

    Let me look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Bern"}}
    </tool_call>
    """

    def __init__(self, *openings: str) -> None:
        """`openings`: what else a call may begin with."""
        super().__init__(self.text)
        self._open = MarkerSearch(TOOL_CALL, *openings)
        self._end = MarkerSearch(END_TOOL_CALL, TOOL_CALL, *openings)
        self._loose = ""
        """What came after a call: dropped if its end marker follows, else text."""

    def finish(self) -> list[Delta]:
        """Half an end marker is dropped, as a whole one is."""
        held = self._end.held
        if held.startswith("</") or (self._loose + held).strip() == "<":
            self._end.held = ""
        return super().finish()

    def unfinished(self) -> str:
        return self._loose + self._end.held + self._open.held

    def text(self, character: str) -> None:
        passed, found = self._open.take(character)
        if passed:
            self.add_content(passed)
        if found:
            self.open(found)

    def after_call(self, character: str) -> None:
        """Models forget the end marker: the next call may begin without it."""
        passed, found = self._end.take(character)
        self._loose += passed
        if not found:
            return
        loose, self._loose = self._loose, ""
        self.state = self.text
        if found != END_TOOL_CALL:
            self.add_content(loose)
            self.open(found)

    def open(self, marker: str) -> None:
        self.consumed = marker
        self.state = self.begin_object


PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(Scanner):
    """Calls as Llama 3 models write them: the whole answer is calls, or it is text.

        {"name": "get_weather", "parameters": {"city": "Bern"}}; {"name": …}

    A JSON object may also be an answer: it is a call only if it names a function of the request.
    """

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        super().__init__(self._start, accepts)
        self._tag = MarkerSearch(PYTHON_TAG)

    def unfinished(self) -> str:
        return self._tag.held

    def text(self, character: str) -> None:
        self.add_content(character)

    def after_call(self, character: str) -> None:
        if character in SPACES:
            self.add_content(character)
        elif character == ";":
            self.consumed = character
            self.state = self.expect_object
        else:
            self.expect_object(character)

    def _start(self, character: str) -> None:
        passed, found = self._tag.take(character)
        for number, each in enumerate(passed):
            if each in SPACES:
                self.add_content(each)
                continue
            self.expect_object(each)
            for rest in passed[number + 1 :] + self._tag.held:
                self.state(rest)
            self._tag.held = ""
            return
        if found:
            self.consumed = found
            self.state = self.expect_object


TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(Scanner):
    """Calls as older and newer Mistral models write them, after text or without.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern"}}, …]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}[TOOL_CALLS]…
    [TOOL_CALLS]get_weather{"city": "Bern"}
    """

    def __init__(self) -> None:
        super().__init__(self.text)
        self._marker = MarkerSearch(TOOL_CALLS)
        self._name = ""
        self._arguments = JsonValueExtent()

    def unfinished(self) -> str:
        return self._name + self._marker.held

    def text(self, character: str) -> None:
        passed, found = self._marker.take(character)
        if passed:
            self.add_content(passed)
        if found:
            self.consumed = found
            self.state = self._head

    def after_call(self, character: str) -> None:
        """In a list of objects."""
        if character == ",":
            self.consumed = character
            self.state = self.expect_object
        elif character == "]":
            self.state = self.text
        elif character not in SPACES:
            self.state = self.text
            self.text(character)

    def _head(self, character: str) -> None:
        if character == "[":
            self.consumed += character
            self.state = self.expect_object
        elif character in SPACES:
            self.consumed += character
        else:
            self.state = self._named
            self._named(character)

    def _named(self, character: str) -> None:
        self._name += character
        name = self._name.removesuffix(ARGS).partition(CALL_ID)[0].strip()
        if self._name.endswith(ARGS) and name:
            self._begin_named(name)
        elif character == "{" and name[:-1].strip():
            self._begin_named(name[:-1].strip())
            self._argument(character)
        elif character in "\n{" or len(self._name) > LONGEST_NAME:
            name, self._name = self._name, ""
            self.add_content(self.consumed + name)
            self.state = self.text

    def _begin_named(self, name: str) -> None:
        self._name = ""
        self.begin_call(name)
        self._arguments = JsonValueExtent()
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
