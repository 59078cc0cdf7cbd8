"""Calls as Hermes and Qwen models write them, with or without text around.

Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Bern"}}
</tool_call>
"""

from __future__ import annotations

from lookonce.frontend.tools.deltas import Delta
from lookonce.frontend.tools.scanner import MarkerSearch, Scanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(Scanner):
    def __init__(self, *openings: str) -> None:
        """`openings`: what else a call may begin with."""
        super().__init__(self.text)
        self._open = MarkerSearch(OPEN, *openings)
        self._end = MarkerSearch(CLOSE, OPEN, *openings)
        self._loose = ""
        """What came after a call: nothing for the reader if its end marker follows, else text."""

    def finish(self) -> list[Delta]:
        """Half an end marker is nothing for the reader, as a whole one is not."""
        held = self._end.held
        if held.startswith("</") or (self._loose + held).strip() == "<":
            self._end.held = ""
        return super().finish()

    def unfinished(self) -> str:
        return self._loose + self._end.held + self._open.held

    def text(self, character: str) -> None:
        passed, found = self._open.take(character)
        if passed:
            self.say(passed)
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
        if found != CLOSE:
            self.say(loose)
            self.open(found)

    def open(self, marker: str) -> None:
        self.consumed = marker
        self.state = self.begin_object
