"""Answers in OpenAI's harmony format, which gpt-oss speaks: messages, each on a channel.

<|channel|>analysis<|message|>They ask for the weather …<|end|><|start|>assistant
<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": …}<|call|>

(The prompt ends with <|start|>assistant.) A message on `analysis` is reasoning, a message addressed
to a function is a call, every other one is content. Text outside of messages is content too, since
an answer that was begun in the prompt continues without a header.

The library openai-harmony is not used: it parses token ids of one vocabulary, which it downloads
when it is first used (without a network `load_harmony_encoding` fails), while this parser reads the
text that the detokenizer and stop strings leave, of any tokenizer with these markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from lookonce.frontend.tools.parser import (
    CallArguments,
    CallStart,
    ContentText,
    Delta,
    MarkerSearch,
    ReasoningText,
    joined,
)

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, RETURN, CALL = "<|message|>", "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
FUNCTIONS = "functions."
RECIPIENT = re.compile(r"to=([^\s<]+)")
ON_ANALYSIS = re.compile(rf"{re.escape(CHANNEL)}\s*analysis")
LONGEST_HEADER = 512

Where = Literal["outside", "header", "content", "reasoning", "call"]


class AnalysisTokens:
    """Counts one sample's tokens on the channel `analysis`, without markers and headers."""

    def __init__(self, markers: Mapping[str, int], token_bytes: Callable[[int], bytes]) -> None:
        """`markers`: text → id, where they are tokens."""
        self._markers = {token_id: text for text, token_id in markers.items()}
        self._token_bytes = token_bytes
        self._header: bytes | None = None
        """Of the message that begins; None within a message, and outside of all."""
        self._on_analysis = False
        self.count = 0

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            match self._markers.get(token_id):
                case None if self._header is not None:
                    self._header += self._token_bytes(token_id)
                case None:
                    self.count += self._on_analysis
                case "<|message|>":
                    self._on_analysis = (self._header or b"").split()[:1] == [b"analysis"]
                    self._header = None
                case "<|channel|>":
                    self._on_analysis, self._header = False, b""
                case "<|constrain|>":
                    pass
                case _:
                    self._on_analysis, self._header = False, None


class HarmonyParser:
    def __init__(self, *, calls: bool) -> None:
        """`calls`: functions may be called; else a message to a function is content."""
        self._may_call = calls
        self._search = MarkerSearch(*MARKERS)
        self._where: Where = "outside"
        self._header = ""
        """The header of a message so far; outside of messages, text that may begin a header."""
        self._fresh: set[Where] = set()
        """Content or reasoning: a further message of its kind has begun, still without text."""
        self._begun: set[Where] = set()
        """Content or reasoning: there was some text."""
        self._num_calls = 0
        self._bare = False
        """The call has no arguments yet."""
        self._deltas: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        for character in text:
            passed, marker = self._search.take(character)
            self._take(passed)
            if marker:
                self._mark(marker)
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        """A header that is cut off is dropped."""
        self._take(self._search.held)
        self._search.held = ""
        self._leave()
        return self._take_deltas()

    @property
    def num_held(self) -> int:
        return len(self._header) + len(self._search.held)

    # --- inside -------------------------------------------------------------------------------

    def _take(self, text: str) -> None:
        if self._where not in ("outside", "header"):
            self._add(text)
            return
        for number, character in enumerate(text):
            self._header += character
            if not self._may_be_header():
                text, self._header = self._header + text[number + 1 :], ""
                self._enter("content")
                self._add(text)
                return

    def _may_be_header(self) -> bool:
        if len(self._header) > LONGEST_HEADER:
            return False
        beginning = self._header.lstrip()[:3]
        return self._where == "header" or "to=".startswith(beginning)

    def _mark(self, marker: str) -> None:
        in_header = self._where in ("outside", "header")
        match marker:
            case "<|message|>" if in_header:
                header, self._header = self._header, ""
                self._begin_message(header)
            case "<|channel|>" | "<|constrain|>" if in_header:
                self._where = "header"
                self._header += marker
            case "<|start|>" | "<|channel|>":
                self._leave()
                self._where, self._header = "header", marker
            case "<|end|>" | "<|return|>" | "<|call|>":
                self._leave()

    def _begin_message(self, header: str) -> None:
        recipient = RECIPIENT.search(header)
        name = recipient[1] if recipient else ""
        if self._may_call and name.startswith(FUNCTIONS) and name != FUNCTIONS:
            self._deltas.append(CallStart(self._num_calls, name.removeprefix(FUNCTIONS)))
            self._num_calls += 1
            self._where, self._bare = "call", True
        else:
            self._enter("reasoning" if ON_ANALYSIS.search(header) else "content")

    def _enter(self, where: Where) -> None:
        self._where = where
        if where in self._begun:
            self._fresh.add(where)

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._where == "call":
            self._bare = self._bare and text.isspace()
            self._deltas.append(CallArguments(self._num_calls - 1, text))
            return
        added = "\n" if self._where in self._fresh else ""
        self._fresh.discard(self._where)
        self._begun.add(self._where)
        text = added + text
        self._deltas.append(
            ReasoningText(text) if self._where == "reasoning" else ContentText(text, len(added))
        )

    def _leave(self) -> None:
        """The message has ended, or there was none."""
        if self._where == "call" and self._bare:
            self._deltas.append(CallArguments(self._num_calls - 1, "{}"))
        header, self._header = self._header, ""
        if self._where == "outside" and header.strip():
            self._enter("content")
            self._add(header)
        self._where = "outside"

    def _take_deltas(self) -> list[Delta]:
        taken, self._deltas = self._deltas, []
        return joined(taken)
