"""What an answer says, its words with the log-probabilities of their tokens.

    tokens       <|channel|> analysis <|message|> Hm .  …  <|message|>  Hel  lo
    characters   decided: not said                                      decided: words
    entries      left out                                               told with them

A token counts as said if any of its characters is. One without characters (part of a character, a
special token) goes where the next character does. So it never matters how the tokens came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

from msgspec import UNSET

from lookonce.frontend.logprobs import TextCursor
from lookonce.frontend.responses import TokenEntry, ToolCallDelta
from lookonce.frontend.tools.calls import AnswerDelta, CallReader, PlainTextReader
from lookonce.frontend.tools.parser import ContentText

Scored: TypeAlias = tuple[AnswerDelta, list[TokenEntry]]


@dataclass(frozen=True, slots=True)
class Place:
    """An entry, and the characters of the text it stands for."""

    start: int
    end: int
    entry: TokenEntry


@dataclass(slots=True)
class Waiting:
    """Entries in the order of their tokens, until their characters are decided."""

    cursor: TextCursor
    _places: deque[Place] = field(default_factory=deque)

    def add(self, token_id: int, entry: TokenEntry) -> None:
        start = self.cursor.take(token_id, bytes(entry.bytes))
        self._places.append(Place(start, max(self.cursor.at, start + 1), entry))

    def decide(self, end: int, *, said: bool) -> list[TokenEntry]:
        """Those to be told now that the characters up to `end` are decided, the newest so."""
        told = []
        while self._places and self._places[0].start < end:
            if said:
                told.append(self._places.popleft().entry)
            elif self._places[0].end <= end:
                self._places.popleft()
            else:
                break
        return told


class ScoredReader:
    def __init__(
        self, reader: CallReader | PlainTextReader, *, unheard: Collection[int], scored: bool
    ) -> None:
        """`scored`: there are log-probabilities."""
        self._reader = reader
        self._scored = scored
        self._waiting = Waiting(TextCursor(unheard))
        self._num_read = self._num_decided = 0

    def note(self, token_ids: Sequence[int], entries: Sequence[TokenEntry]) -> None:
        """Of tokens whose text comes next; it may be held back for a while."""
        for token_id, entry in zip(token_ids, entries, strict=False):
            self._waiting.add(token_id, entry)

    def push(self, text: str, *, last: bool) -> list[Scored]:
        """What is new, in the order it was written; `last`: no more text comes."""
        if not self._scored:
            return [(told, []) for told in self._reader.push(text, last=last)]
        # One character at a time, for a reader of calls does not say where its words were.
        pieces = text if isinstance(self._reader, CallReader) else (text,)
        parts = [scored for piece in pieces for scored in self._decided(piece, last=False)]
        if last:
            parts += self._decided("", last=True)
        return _joined(parts)

    def _decided(self, text: str, *, last: bool) -> Iterator[Scored]:
        told = self._reader.push(text, last=last)
        self._num_read += len(text)
        num_said = sum(len(each.text) for each in told if isinstance(each, ContentText))
        num_held = 0 if last else self._reader.num_held
        entries = self._decide(self._num_read - num_held, num_said)
        for each in told:
            yield each, entries if isinstance(each, ContentText) else []

    def _decide(self, end: int, num_said: int) -> list[TokenEntry]:
        """What the reader decides at once are words, or words before a marker, or none."""
        begin, self._num_decided = self._num_decided, end
        entries = self._waiting.decide(min(begin + num_said, end), said=True) if num_said else []
        self._waiting.decide(end, said=False)
        return entries


def _joined(scored: list[Scored]) -> list[Scored]:
    """Neighbours made one, as the reader makes them of a text that comes at once."""
    result: list[Scored] = []
    for are_words, group in groupby(scored, key=lambda each: isinstance(each[0], ContentText)):
        run = list(group)
        if are_words:
            text = "".join(told.text for told, _ in run if isinstance(told, ContentText))
            result.append((ContentText(text), [entry for _, entries in run for entry in entries]))
        else:
            result += _joined_calls(run)
    return result


def _joined_calls(scored: list[Scored]) -> list[Scored]:
    result: list[Scored] = []
    for told, entries in scored:
        last = result[-1][0] if result else None
        more = isinstance(told, ToolCallDelta) and told.id is UNSET
        if isinstance(last, ToolCallDelta) and isinstance(told, ToolCallDelta) and more:
            last.function.arguments += told.function.arguments
        else:
            result.append((told, entries))
    return result
