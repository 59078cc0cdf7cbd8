"""What the parsers of all call formats share: a state machine fed one character at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from lookonce.frontend.tools.call_object import CallObject
from lookonce.frontend.tools.deltas import Arguments, CallStart, Delta, Words, joined

State: TypeAlias = Callable[[str], None]
ARGUMENT_KEYS = ("arguments", "parameters")


class MarkerSearch:
    """Finds the first of some markers, none of which begins another."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self.held = ""
        """What may become a marker."""

    def take(self, character: str) -> tuple[str, str]:
        """What is no part of a marker for certain, and the marker that is complete, or ""."""
        self.held += character
        passed = ""
        while self.held:
            if self.held in self._markers:
                found, self.held = self.held, ""
                return passed, found
            if any(marker.startswith(self.held) for marker in self._markers):
                break
            passed, self.held = passed + self.held[0], self.held[1:]
        return passed, ""


class Scanner:
    """Base of the parsers: `state` takes the next character.

    Whitespace that only separates calls from each other and from text is nobody's. What turns out
    to be no call is text, its markers included.
    """

    def __init__(self, start: State, accepts: Callable[[str], bool] = bool) -> None:
        """`accepts`: whether a name is that of a function."""
        self.state = start
        self.consumed = ""
        """Markers read since the last text or call."""
        self.num_calls = 0
        self._accepts = accepts
        self._call = self._new_call()
        self._blank = ""
        """Whitespace that is text only if more text follows."""
        self._deltas: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        for character in text:
            self.state(character)
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        """An unfinished call that has its name stays a call."""
        self.say(self.consumed + self._call.raw + self.unfinished())
        if not self.num_calls and self._blank:
            self._deltas.append(Words(self._blank))
        return self._take_deltas()

    @property
    def num_held(self) -> int:
        raw = len(self._blank) + len(self.consumed) + len(self._call.raw)
        return raw + len(self.unfinished())

    # --- for the formats ----------------------------------------------------------------------

    def unfinished(self) -> str:
        """What the format itself still holds when no more comes."""
        return ""

    def text(self, character: str) -> None:
        """The state outside of calls."""
        raise NotImplementedError

    def after_call(self, character: str) -> None:
        """The state once a call written as an object has ended."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Text for the reader."""
        self.consumed = ""
        shown = text.rstrip()
        if shown:
            self._deltas.append(Words(self._blank + shown))
            self._blank = ""
        self._blank += text[len(shown) :]

    def begin_object(self, character: str) -> None:
        """A call written as an object begins with `character`."""
        self._call = self._new_call()
        self.state = self._object
        self._object(character)

    def begin_call(self, name: str) -> None:
        self.consumed = self._blank = ""
        self._deltas.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        self._deltas.append(Arguments(self.num_calls - 1, text))

    # --- inside -------------------------------------------------------------------------------

    def _object(self, character: str) -> None:
        call = self._call
        call.take(character)
        if call.ended or (call.broken and call.started):
            self._call = self._new_call()
            self.state = self.after_call
        elif call.broken:
            self._call = self._new_call()
            self.say(self.consumed + call.raw)
            self.state = self.text

    def _new_call(self) -> CallObject:
        return CallObject(ARGUMENT_KEYS, self.begin_call, self.add_arguments, self._accepts)

    def _take_deltas(self) -> list[Delta]:
        taken, self._deltas = self._deltas, []
        return joined(taken)
