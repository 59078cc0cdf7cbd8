"""Tool calls of one response: from the request's tools to OpenAI's `tool_calls`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from lookonce.errors import BadRequestError
from lookonce.server.responses import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from lookonce.server.tools.asked import AskedTools
from lookonce.server.tools.deltas import Arguments, CallStart, Delta, Words
from lookonce.server.tools.forced import calls_grammar
from lookonce.server.tools.formats import ToolDialect
from lookonce.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class UsableTools:
    """A request's tools, and how the served model calls them."""

    asked: AskedTools
    dialect: ToolDialect

    @property
    def markers(self) -> tuple[str, ...]:
        return self.dialect.format.markers

    def constrain(self, sampling: SamplingParams) -> SamplingParams:
        """With the grammar of the calls that must come, or be right. Raises `BadRequestError`."""
        if sampling.grammar is not None:
            param = sampling.grammar.param
            raise BadRequestError(
                f"{param} cannot be used with tools, unless tool_choice is none", param=param
            )
        grammar = calls_grammar(self.asked, self.dialect)
        return sampling if grammar is None else msgspec.structs.replace(sampling, grammar=grammar)

    def reader(self) -> CallReader:
        return CallReader(self)


def usable_tools(asked: AskedTools | None, dialect: ToolDialect | None) -> UsableTools | None:
    """Raises `BadRequestError` where the served model takes no tools."""
    if asked is None:
        return None
    if dialect is None:
        raise BadRequestError(
            "the model's chat template has no place for tools; the server's option "
            "--chat-template can give it one",
            param="tools",
            code="unsupported_parameter",
        )
    return UsableTools(asked, dialect)


class CallReader:
    """One sample's text, told as words and calls; with ids, and no more calls than may come."""

    def __init__(self, tools: UsableTools) -> None:
        self._format = tools.dialect.format
        self._parser = self._format.parser(tools.asked.names)
        self._most = None if tools.asked.parallel else 1
        self.calls: list[ToolCall] = []
        """Complete as far as the text goes."""

    def push(self, text: str, *, last: bool) -> tuple[str, list[ToolCallDelta]]:
        """New words, and what is new of the calls; `last`: no more text comes."""
        deltas = self._parser.push(text) if text else []
        if last:
            deltas += self._parser.finish()
        words, changes = "", dict[int, ToolCallDelta]()
        for delta in deltas:
            if isinstance(delta, Words):
                words += delta.text
            elif self._most is None or delta.index < self._most:
                self._note(delta, changes)
        return words, list(changes.values())

    def _note(self, delta: Delta, changes: dict[int, ToolCallDelta]) -> None:
        match delta:
            case CallStart(index, name):
                call = ToolCall(id=self._format.call_id(), function=FunctionCall(name, ""))
                self.calls.append(call)
                changes[index] = ToolCallDelta(
                    index=index, id=call.id, type="function", function=FunctionDelta("", name)
                )
            case Arguments(index, text):
                self.calls[index].function.arguments += text
                change = changes.setdefault(index, ToolCallDelta(index, FunctionDelta("")))
                change.function.arguments += text


Reason = TypeVar("Reason", str, str | None)


def shown_reason(finish_reason: Reason, *, called: bool) -> Reason:
    """A sample that ended by itself after calling says so."""
    return "tool_calls" if called and finish_reason == "stop" else finish_reason
