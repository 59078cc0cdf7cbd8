"""What a tool parser makes of a model's words, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Words:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index` of the answer begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of call number `index`, as JSON text."""

    index: int
    text: str


Delta: TypeAlias = Words | Thought | CallStart | Arguments


class ToolParser(Protocol):
    """Splits one sample's text. However the text is cut into pieces, joined deltas are the same."""

    @property
    def num_held(self) -> int:
        """How many of the last characters may be words or not: what follows decides."""

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """What was held back, once no more text comes."""


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind made one; without empty text."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        match last, delta:
            case Words(before), Words(text):
                result[-1] = Words(before + text)
            case Thought(before), Thought(text):
                result[-1] = Thought(before + text)
            case Arguments(index, before), Arguments(same, text) if index == same:
                result[-1] = Arguments(index, before + text)
            case _, CallStart():
                result.append(delta)
            case _, (Words(text) | Thought(text) | Arguments(_, text)) if text:
                result.append(delta)
    return result
