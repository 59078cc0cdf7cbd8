"""Calls as Llama 3 models write them: the whole answer is calls, or it is text.

    {"name": "get_weather", "parameters": {"city": "Bern"}}; {"name": …}

A JSON object may also be an answer: it is a call only if it names a function the request declares.
"""

from __future__ import annotations

from collections.abc import Callable

from lookonce.frontend.tools.call_object import SPACES
from lookonce.frontend.tools.scanner import MarkerSearch, Scanner

TAG = "<|python_tag|>"


class Llama3Parser(Scanner):
    def __init__(self, accepts: Callable[[str], bool]) -> None:
        super().__init__(self._start, accepts)
        self._tag = MarkerSearch(TAG)

    def unfinished(self) -> str:
        return self._tag.held

    def text(self, character: str) -> None:
        self.say(character)

    def after_call(self, character: str) -> None:
        if character in SPACES:
            self.say(character)
        elif character == ";":
            self.consumed = character
            self.state = self._expect_object
        else:
            self._expect_object(character)

    def _start(self, character: str) -> None:
        passed, found = self._tag.take(character)
        for number, each in enumerate(passed):
            if each in SPACES:
                self.say(each)
                continue
            self._expect_object(each)
            for rest in passed[number + 1 :] + self._tag.held:
                self.state(rest)
            self._tag.held = ""
            return
        if found:
            self.consumed = found
            self.state = self._expect_object

    def _expect_object(self, character: str) -> None:
        if character == "{":
            self.begin_object(character)
        elif character in SPACES:
            self.consumed += character
        else:
            self.say(self.consumed + character)
            self.state = self.text
