"""Base of the tool-call parsers: a state machine that is fed one character at a time.

    text of a sample ──▶ Scanner.state(character) ──▶ ContentText, CallStart, CallArguments …
                           │ a call written as a JSON object
                           └──▶ CallObjectReader ──▶ JsonValueExtent

A parser only finds out where text ends and arguments begin; arguments are passed on as the model
wrote them. That is why no partial-JSON library is used: jiter, pydantic_core and
partial-json-parser return values, which loses the model's own text (`1.50` becomes `1.5`), and do
not tell where an object ends and text follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

LONGEST_NAME = 256
"""Characters of a function's name."""
SPACES = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")
CLOSERS = {"{": "}", "[": "]"}

# --- what a parser makes of a text ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the answer: OpenAI's `content`."""

    text: str
    num_added: int = field(default=0, compare=False)
    """Characters of `text` that the sample lacks: line breaks between harmony's messages."""


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """What the model writes before it answers: `reasoning_content`."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index` of the answer begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call number `index`, as JSON text."""

    index: int
    text: str


Delta: TypeAlias = ContentText | ReasoningText | CallStart | CallArguments


class ToolParser(Protocol):
    """Splits one sample's text. However the text is cut into pieces, joined deltas are the same."""

    @property
    def num_held(self) -> int:
        """How many of the last characters are held back: what follows decides what they are."""

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """What was held back, once no more text comes."""


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas; neighbours of one kind are joined, empty texts are left out."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        match last, delta:
            case ContentText(before, num_before), ContentText(text, num_added):
                result[-1] = ContentText(before + text, num_before + num_added)
            case ReasoningText(before), ReasoningText(text):
                result[-1] = ReasoningText(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                result[-1] = CallArguments(index, before + text)
            case _, CallStart():
                result.append(delta)
            case _, (ContentText(text) | ReasoningText(text) | CallArguments(_, text)) if text:
                result.append(delta)
    return result


# --- the state machine ----------------------------------------------------------------------------

State: TypeAlias = Callable[[str], None]


class MarkerSearch:
    """Finds the first of some markers, none of which begins another."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self.held = ""
        """The end of the text so far, if it is the beginning of a marker."""

    def take(self, character: str) -> tuple[str, str]:
        """The text that is certainly part of no marker, and the marker that is complete or ""."""
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

    Whitespace that only separates calls from each other and from text is dropped. What looked like
    a call and is none becomes text, its markers included.
    """

    def __init__(self, start: State, accepts: Callable[[str], bool] = bool) -> None:
        """`accepts` says whether a name is that of a function."""
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
        self.add_content(self.consumed + self._call.raw + self.unfinished())
        if not self.num_calls and self._blank:
            self._deltas.append(ContentText(self._blank))
        return self._take_deltas()

    @property
    def num_held(self) -> int:
        raw = len(self._blank) + len(self.consumed) + self._call.num_raw
        return raw + len(self.unfinished())

    # --- for the formats ----------------------------------------------------------------------

    def unfinished(self) -> str:
        """The characters that the format itself holds back; they are text if no more comes."""
        return ""

    def text(self, character: str) -> None:
        """The state outside of calls."""
        raise NotImplementedError

    def after_call(self, character: str) -> None:
        """The state once a call written as an object has ended."""
        raise NotImplementedError

    def add_content(self, text: str) -> None:
        self.consumed = ""
        shown = text.rstrip()
        if shown:
            self._deltas.append(ContentText(self._blank + shown))
            self._blank = ""
        self._blank += text[len(shown) :]

    def expect_object(self, character: str) -> None:
        """The state where a call written as an object must begin."""
        if character == "{":
            self.begin_object(character)
        elif character in SPACES:
            self.consumed += character
        else:
            self.add_content(self.consumed + character)
            self.state = self.text

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
        self._deltas.append(CallArguments(self.num_calls - 1, text))

    # --- inside -------------------------------------------------------------------------------

    def _object(self, character: str) -> None:
        call = self._call
        call.take(character)
        if call.ended or (call.broken and call.started):
            self._call = self._new_call()
            self.state = self.after_call
        elif call.broken:
            self._call = self._new_call()
            self.add_content(self.consumed + call.raw)
            self.state = self.text

    def _new_call(self) -> CallObjectReader:
        return CallObjectReader(self.begin_call, self.add_arguments, self._accepts)

    def _take_deltas(self) -> list[Delta]:
        taken, self._deltas = self._deltas, []
        return joined(taken)


# --- calls written as JSON objects ----------------------------------------------------------------

Where = Literal["open", "key", "colon", "value", "after"]


class CallObjectReader:
    """Reads one call that is written as a JSON object, character by character.

        {"name": "get_weather", "arguments": {"city": "Bern"}}
                  │                          └─ passed to `on_arguments` as they come, once the
                  └─ passed to `on_name`        name is known

    `raw` is what was read before the name. `broken`: the text is no call after all; if the call has
    `started`, what was passed on stays.
    """

    def __init__(
        self,
        on_name: Callable[[str], None],
        on_arguments: Callable[[str], None],
        accepts: Callable[[str], bool],
    ) -> None:
        self.started = self.ended = self.broken = False
        self._raw: list[str] = []
        self._on_name, self._on_arguments, self._accepts = on_name, on_arguments, accepts
        self._where: Where = "open"
        self._key = ""
        self._value = JsonValueExtent()
        self._text: list[str] = []
        """The part of the current key or value that was read, in pieces: joining them at every
        character would take the square of its length."""
        self._early_arguments: list[str] = []
        """Arguments that came before the name."""
        self._has_arguments = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    @property
    def num_raw(self) -> int:
        return len(self._raw)

    def take(self, character: str) -> None:
        """Not to be called once the call has `ended` or is `broken`."""
        if not self.started:
            self._raw.append(character)
        try:
            self._take(character)
        except (ValueError, RecursionError):  # the latter: a name of a thousand brackets
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
        self._where, self._value, self._text = where, JsonValueExtent(), []

    def _take_text(self, character: str) -> None:
        if self._where == "key" and not self._text and character != '"':
            raise ValueError("a key is a string")
        belongs = self._value.take(character)
        if belongs:
            self._text.append(character)
            self._pass_on_argument(character)
        if self._value.ended:
            self._end_text()
            if not belongs:
                self._take(character)

    def _end_text(self) -> None:
        if self._where == "key":
            self._key, self._where = str(json.loads("".join(self._text))), "colon"
            return
        self._where = "after"
        if self._key == "name":
            self._name(json.loads("".join(self._text)))
        elif self._key in ARGUMENT_KEYS and self._text[0] == '"':
            # JSON within a JSON string
            self._add_arguments(str(json.loads("".join(self._text))))

    def _name(self, name: object) -> None:
        if self.started or not isinstance(name, str) or not self._accepts(name):
            raise ValueError("not the name of a function")
        self.started = True
        self._raw = []
        self._on_name(name)
        if self._early_arguments:
            self._on_arguments("".join(self._early_arguments))

    def _pass_on_argument(self, character: str) -> None:
        is_arguments = self._where == "value" and self._key in ARGUMENT_KEYS
        if is_arguments and self._text[0] != '"':
            self._add_arguments(character)

    def _add_arguments(self, text: str) -> None:
        self._has_arguments = True
        if self.started:
            self._on_arguments(text)
        else:
            self._early_arguments.append(text)

    def _end(self) -> None:
        if not self.started:
            raise ValueError("a call has a name")
        if not self._has_arguments:
            self._on_arguments("{}")
        self.ended = True


class JsonValueExtent:
    """Finds the end of one JSON value."""

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
        """Whether the character belongs to the value; `ended` says whether the value has ended.

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
