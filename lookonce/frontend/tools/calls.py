"""Tool calls of one response: from the request's tools to OpenAI's `tool_calls`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec

from lookonce.errors import BadRequestError
from lookonce.frontend.responses import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from lookonce.frontend.tools.asked import NO_TOOLS, AskedTools
from lookonce.frontend.tools.deltas import Arguments, CallStart, Thought, Words, joined
from lookonce.frontend.tools.forced import calls_grammar
from lookonce.frontend.tools.formats import NO_PLACE, ToolDialect
from lookonce.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class UsableTools:
    """A request's tools, if it has any, and how the served model answers with calls."""

    asked: AskedTools
    dialect: ToolDialect

    @property
    def markers(self) -> tuple[str, ...]:
        return self.dialect.format.markers

    def constrain(self, sampling: SamplingParams) -> SamplingParams:
        """With the grammar of the calls that must come, or be right; an answer without calls keeps
        the form that was asked for. Raises `BadRequestError`."""
        grammar = calls_grammar(self.asked, self.dialect, sampling.grammar)
        ends = () if sampling.ignore_eos else self.dialect.ends
        return msgspec.structs.replace(
            sampling,
            grammar=grammar or sampling.grammar,
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ends))),
        )

    def reader(self) -> CallReader:
        return CallReader(self)


def usable_tools(asked: AskedTools | None, dialect: ToolDialect | None) -> UsableTools | None:
    """None where answers are text alone. Raises `BadRequestError` where the served model takes no
    tools."""
    if asked is None:
        if dialect is None or not dialect.format.always:
            return None
        return UsableTools(NO_TOOLS, dialect)
    if dialect is None or dialect.refusal:
        raise BadRequestError(
            NO_PLACE if dialect is None else dialect.refusal,
            param="tools",
            code="unsupported_parameter",
        )
    return UsableTools(asked.described() if dialect.format.describes else asked, dialect)


Told: TypeAlias = Words | Thought | ToolCallDelta


class CallReader:
    """One sample's text, told as words, thoughts and calls; with ids, and no more calls than may
    come."""

    def __init__(self, tools: UsableTools) -> None:
        self._format = tools.dialect.format
        self._parser = self._format.parser(tools.asked)
        self._most = None if tools.asked.parallel else 1
        self.calls: list[ToolCall] = []
        """Complete as far as the text goes."""

    @property
    def num_held(self) -> int:
        """How many of the last characters may be words or not: what follows decides."""
        return self._parser.num_held

    def push(self, text: str, *, last: bool) -> list[Told]:
        """What is new, in the order it was written; `last`: no more text comes."""
        deltas = self._parser.push(text) if text else []
        if last:
            deltas = joined(deltas + self._parser.finish())
        told: list[Told] = []
        for delta in deltas:
            match delta:
                case CallStart(index, name) if self._may_come(index):
                    told.append(self._begin(index, name))
                case Arguments(index, more) if self._may_come(index):
                    self._add_arguments(told, index, more)
                case Words() | Thought():
                    told.append(delta)
        return told

    def _may_come(self, index: int) -> bool:
        return self._most is None or index < self._most

    def _begin(self, index: int, name: str) -> ToolCallDelta:
        call = ToolCall(id=self._format.call_id(), function=FunctionCall(name, ""))
        self.calls.append(call)
        function = FunctionDelta("", name)
        return ToolCallDelta(index=index, id=call.id, type="function", function=function)

    def _add_arguments(self, told: list[Told], index: int, text: str) -> None:
        """To what was just told of the call, if that is so: a call has one change at a time."""
        self.calls[index].function.arguments += text
        last = told[-1] if told else None
        if not isinstance(last, ToolCallDelta):
            last = ToolCallDelta(index, FunctionDelta(""))
            told.append(last)
        last.function.arguments += text


class PlainReader:
    """Of answers that are text alone."""

    num_held = 0

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []

    def push(self, text: str, *, last: bool) -> list[Told]:
        return [Words(text)] if text else []


def reader_of(tools: UsableTools | None) -> CallReader | PlainReader:
    """For one sample's text."""
    return PlainReader() if tools is None else tools.reader()


def words_of(told: Sequence[Told]) -> str:
    return "".join(each.text for each in told if isinstance(each, Words))


def thoughts_of(told: Sequence[Told]) -> str:
    return "".join(each.text for each in told if isinstance(each, Thought))


def calls_of(told: Sequence[Told]) -> list[ToolCallDelta]:
    return [each for each in told if isinstance(each, ToolCallDelta)]


Reason = TypeVar("Reason", str, str | None)


def shown_reason(finish_reason: Reason, *, called: bool) -> Reason:
    """A sample that ended by itself after calling says so."""
    return "tool_calls" if called and finish_reason == "stop" else finish_reason
