"""Calls as Hermes and Qwen models write them, with or without text around.

Let me look.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Bern"}}
</tool_call>
"""

from __future__ import annotations

from lookonce.server.tools.scanner import MarkerSearch, Scanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(Scanner):
    def __init__(self) -> None:
        super().__init__(self.text)
        self._open = MarkerSearch(OPEN)
        self._close = MarkerSearch(CLOSE)

    def unfinished(self) -> str:
        return self._open.held

    def text(self, character: str) -> None:
        passed, found = self._open.take(character)
        if passed:
            self.say(passed)
        if found:
            self.consumed = found
            self.state = self.begin_object

    def after_call(self, character: str) -> None:
        """Whatever stands before the end marker is nothing for the reader."""
        _, found = self._close.take(character)
        if found:
            self.state = self.text
