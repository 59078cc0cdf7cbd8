"""What a model thinks before it answers, in `<think>…</think>` and its kin, told apart.

    <think> They ask for … </think> It is sunny.
            reasoning           what the reader of content and tool calls gets

Only what an answer begins with is a thought: a marker further on is text. The prompt's end decides
where the answer begins, since some templates open a thought, and others write an empty one where
the model shall not think. gpt-oss's channels are read by `tools.harmony`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from lookonce.frontend.logprobs import TextCursor
from lookonce.frontend.responses import ToolCall
from lookonce.frontend.tools import harmony
from lookonce.frontend.tools.calls import AnswerDelta, ToolCalling, reader_of
from lookonce.frontend.tools.parser import ReasoningText
from lookonce.render.prompt.detokenizer import num_begun
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams

AnswerStart = Literal["in thought", "free", "after thought"]
"""Where an answer begins: in a thought that the prompt opened; anywhere, and a thought may come; or
after the thought, and none may come."""
END_CHARACTERS = 64
"""Characters at a prompt's end that are looked at."""
END_TOKENS = 16

THINK = ("<think>", "</think>")
MARKERS = {
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "ernie45": THINK,
    "glm45": THINK,
    "kimi_k2": THINK,
    "minimax_m2": THINK,
    "nemotron_v3": THINK,
    "olmo3": THINK,
    "qwen3": THINK,
    "step3": THINK,
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "kimi_vl": ("◁think▷", "◁/think▷"),
}
"""Name of the option `--reasoning-parser` → what a thought is written between. One pair of
markers has many names since those are vLLM's, whose parsers differ in what the prompt decides here.
"""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers that the served model writes its thoughts between."""

    begin: str
    end: str
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Those of the two that are tokens of their own, with their ids."""

    @property
    def markers(self) -> tuple[str, str]:
        """Tokens that stay in the text even where they are special tokens."""
        return self.begin, self.end

    def start_after(self, prompt: str, continued: str | None = None) -> AnswerStart:
        """Where the answer to a prompt begins; the end of the prompt is enough. `continued`: the
        beginning of the answer, where the prompt ends with one."""
        if continued is not None:
            in_thought = continued.rfind(self.begin) > continued.rfind(self.end)
            return "in thought" if in_thought else "after thought"
        written = prompt.rstrip()
        if written.endswith(self.begin):
            return "in thought"
        return "after thought" if written.endswith(self.end) else "free"

    def constrain(self, sampling: SamplingParams, start: AnswerStart) -> SamplingParams:
        """The same; its grammar, if there is one, begins after the thought."""
        if sampling.grammar is None or start == "after thought":
            return sampling
        grammar = msgspec.structs.replace(sampling.grammar, before=self._thought_rules(start))
        return msgspec.structs.replace(sampling, grammar=grammar)

    def _thought_rules(self, start: AnswerStart) -> str:
        """Lark: a thought and white space, and then `@answer`."""
        begin, rules = self._token(self.begin) or json.dumps(self.begin), []
        if end := self._token(self.end):
            thought = f"TEXT {end}"
            rules.append(r"TEXT: /(.|\n)*/")  # a special token is no text
        else:
            thought = "thought"
            rules.append(rf"thought[lazy]: /(.|\n)*{_regex(self.end)}/")
        thought = f"{thought} SPACES"
        before = thought if start == "in thought" else f"({begin} {thought})?"
        return "\n".join([f"start: {before} @answer", *rules, r"SPACES: /[ \n]{0,4}/"])

    def _token(self, marker: str) -> str | None:
        """The marker as a token in a grammar, where llguidance takes it for one: text has none."""
        token_id = self.tokens.get(marker)
        return None if token_id is None else f"<[{token_id}]>"


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def choose_reasoning(
    option: str,
    template: str | None,
    added_tokens: Mapping[str, int],
    special_tokens: Collection[str] = (),
) -> ReasoningFormat | None:
    """The format for an option `--reasoning-parser`; None where answers have no thoughts apart.

    `added_tokens` is text → id of the tokens that the tokenizer cuts out of a text; those of
    `special_tokens` are no text. With `auto` the markers are found among the tokens, or in the chat
    template.
    """
    template = template or ""
    if option == "none":
        return None
    if option != "auto":
        found = MARKERS[option]
    elif harmony.CHANNEL in template:
        return None
    else:
        pairs = list(dict.fromkeys(MARKERS.values()))
        known = [pair for pair in pairs if all(marker in added_tokens for marker in pair)]
        known += [pair for pair in pairs if pair[1] in template]
        if not known:
            return None
        found = known[0]
    # llguidance takes added tokens in angle brackets for special ones too.
    tokens = {
        marker: added_tokens[marker]
        for marker in found
        if marker in added_tokens and (marker in special_tokens or marker.startswith("<"))
    }
    return ReasoningFormat(*found, tokens)


# --- one answer -----------------------------------------------------------------------------------


class TokenTexts(Protocol):
    """What is asked of a renderer about tokens."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def skipped(self, sampling: SamplingParams, keep: Collection[str] = ()) -> Collection[int]: ...


class AnswerReader(Protocol):
    """Splits one sample's text into reasoning, content and calls."""

    @property
    def calls(self) -> list[ToolCall]: ...

    @property
    def num_held(self) -> int: ...

    def push(self, text: str, *, last: bool) -> list[AnswerDelta]: ...


class ReasoningReader:
    """Tells the thought from what follows, which `reader` gets.

    White space around a thought is dropped. However the text is cut into pieces, joined deltas are
    the same.

        expecting ─▶ thinking ─▶ thought (white space) ─▶ answering
            └──────────────── no thought ────────────────────▲
    """

    def __init__(self, format: ReasoningFormat, start: AnswerStart, reader: AnswerReader) -> None:
        self._begin, self._end = format.begin, format.end
        self._in_thought = start == "in thought"
        self._reader = reader
        self._state: Literal["expecting", "thinking", "thought", "answering"] = (
            "answering" if start == "after thought" else "expecting"
        )
        self._held = ""
        self._has_text = False
        """The thought has some."""
        self._num_read = 0
        self._num_thought: int | None = 0
        """Characters up to the end of the thought, markers included; None: it has not ended."""

    @property
    def calls(self) -> list[ToolCall]:
        return self._reader.calls

    @property
    def answering(self) -> bool:
        """There is no thought, or it has ended."""
        return self._state == "answering"

    @property
    def num_held(self) -> int:
        """How many of the last characters are held back: what follows decides what they are."""
        return len(self._held) + self._reader.num_held

    @property
    def num_thought(self) -> int:
        """How many characters of the text so far are the thought and its markers."""
        return self._num_read if self._num_thought is None else self._num_thought

    def push(self, text: str, *, last: bool) -> list[AnswerDelta]:
        """What the text adds, in the order it was written; `last`: no more text comes."""
        self._num_read += len(text)
        self._held += text
        deltas: list[AnswerDelta] = []
        if self._state == "expecting":
            self._expect(last=last)
        if self._state == "thinking":
            deltas += self._think(last=last)
        if self._state == "thought":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answering"
        if self._state == "answering" or last:
            text, self._held = self._held, ""
            deltas += self._reader.push(text, last=last)
        return deltas

    def _expect(self, *, last: bool) -> None:
        written = self._held.lstrip()
        if written.startswith(self._begin):
            self._held = written[len(self._begin) :]
        elif self._begin.startswith(written) and not last:
            return
        elif not self._in_thought:
            self._state = "answering"
            return
        self._state, self._num_thought = "thinking", None

    def _think(self, *, last: bool) -> list[AnswerDelta]:
        """The end of the thought, or what may be the beginning of it, is held back with the white
        space before it."""
        thought, ended, rest = self._held.partition(self._end)
        if ended:
            self._state, self._held = "thought", rest
            self._num_thought = self._num_read - len(rest)
        elif last:
            self._held = ""
        else:
            thought = thought[: len(thought) - num_begun([self._end], thought)]
        shown = thought.rstrip()
        if not ended and not last:
            self._held = self._held[len(shown) :]
        if not self._has_text:
            shown = shown.lstrip()
            self._has_text = bool(shown)
        return [ReasoningText(shown)] if shown else []


class ReasoningTokens:
    """Counts one sample's tokens that are the thought and its markers."""

    def __init__(
        self,
        reader: ReasoningReader,
        token_bytes: Callable[[int], bytes],
        textless: Collection[int],
    ) -> None:
        """`textless`: token ids that add no text."""
        self._reader = reader
        self._token_bytes = token_bytes
        self._cursor = TextCursor(textless)
        self._starts: list[int] = []
        """Where in the text each token begins, until the thought has ended."""

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._reader.answering and self._cursor.at >= self._reader.num_thought:
                return
            self._starts.append(self._cursor.take(token_id, self._token_bytes(token_id)))

    @property
    def count(self) -> int:
        return bisect_left(self._starts, self._reader.num_thought)


class AnswerReaders:
    """How the answers to one request are read: a reader for each sample. `begin` comes first."""

    def __init__(
        self, tools: ToolCalling | None, reasoning: ReasoningFormat | None, renderer: TokenTexts
    ) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._renderer = renderer
        self._start: AnswerStart = "free"
        self._textless: Collection[int] = ()
        self._readers: dict[int, AnswerReader] = {}
        self._tokens: dict[int, ReasoningTokens | harmony.AnalysisTokens] = {}
        special = {} if tools is None else tools.dialect.special
        self._channels = special if harmony.CHANNEL in special else None
        """Markers of harmony's channels and their ids; None of any other model."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that stay in the text."""
        tools = () if self._tools is None else self._tools.markers
        return tools if self._reasoning is None else (*tools, *self._reasoning.markers)

    def begin(
        self, prompt: RenderedPrompt, sampling: SamplingParams, continued: str | None = None
    ) -> SamplingParams:
        """How to sample after this prompt: a grammar begins after the thought. `continued`: the
        beginning of the answer, where the prompt ends with one."""
        if self._reasoning is None:
            return sampling
        self._textless = self._renderer.skipped(sampling, self.markers)
        last: list[int] = prompt.ids[-END_TOKENS:].tolist()
        text = prompt.text[-END_CHARACTERS:] if prompt.text else self._renderer.decode(last)
        self._start = self._reasoning.start_after(text, continued)
        return self._reasoning.constrain(sampling, self._start)

    def of(self, index: int) -> AnswerReader:
        """The reader of one sample's text."""
        if index not in self._readers:
            reader: AnswerReader = reader_of(self._tools)
            if self._reasoning is not None:
                reader = ReasoningReader(self._reasoning, self._start, reader)
            self._readers[index] = reader
        return self._readers[index]

    def note(self, index: int, token_ids: Sequence[int]) -> None:
        """Count the tokens whose text is pushed next, or later."""
        reader, token_bytes = self.of(index), self._renderer.token_bytes
        if index not in self._tokens:
            if isinstance(reader, ReasoningReader):
                self._tokens[index] = ReasoningTokens(reader, token_bytes, self._textless)
            elif self._channels is not None:
                self._tokens[index] = harmony.AnalysisTokens(self._channels, token_bytes)
            else:
                return
        self._tokens[index].take(token_ids)

    def called(self, index: int) -> bool:
        return bool(self.of(index).calls)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Of all samples so far; None where no thoughts are told apart."""
        if self._reasoning is None and self._channels is None:
            return None
        return sum(tokens.count for tokens in self._tokens.values())
