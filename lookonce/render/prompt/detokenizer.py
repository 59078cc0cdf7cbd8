"""Generated token ids → text, piece by piece, and where a stop string ends it.

    tokens ──▶ TextStream ──▶ text that can no longer change ──▶ StopSearch ──▶ deltas
                 holds back unfinished characters       holds back what may become a stop string

Concatenated deltas equal the decoding of all tokens, up to the stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from lookonce.render.prompt.tokenizer import Tokenizer

CONTEXT_TOKENS = 6
"""Tokens of the prompt's end that decide whether a text begins with a space."""
MAX_UNFINISHED_TOKENS = 8
"""A character spans at most 4 byte tokens; more in a row that decode badly are bad for good."""
REPLACEMENT = "\ufffd"

Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextStream(Protocol):
    """Decodes one sample's tokens in order."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class ByteTextStream:
    """For byte-level tokenizers: a token is bytes, and UTF-8 is decoded as it comes."""

    def __init__(self, tokenizer: Tokenizer, *, skipped: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = Utf8Decoder(errors="replace")
        self._in_character = False
        """The last token ended within a character."""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = None if self._in_character else self._tokenizer.whole_text(token_id)
        if text is None:
            text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
            self._in_character = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowTextStream:
    """For all other tokenizers: decode a short window twice, without and with the new token.

    `context` is the prompt: a first word keeps its space if something stands before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skipped: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window = list(context[-CONTEXT_TOKENS:])
        self._num_told = len(self._window)
        """Tokens of the window whose text has been given out."""
        self._told = self._decode(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        unfinished = text.endswith(REPLACEMENT)
        if unfinished and len(self._window) - self._num_told <= MAX_UNFINISHED_TOKENS:
            return ""
        return self._give_out(text)

    def finish(self) -> str:
        return self._give_out(self._decode(self._window))

    def _give_out(self, text: str) -> str:
        delta = text[len(self._told) :]
        # The tokens just told become the context of the next ones; silent ones must not pile up.
        self._window = self._window[self._num_told if delta else -CONTEXT_TOKENS :]
        self._told = self._decode(self._window)
        self._num_told = len(self._window)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        heard = [token_id for token_id in token_ids if token_id not in self._skipped]
        return self._tokenizer.decode(heard, skip_special_tokens=False)


class StopSearch:
    """Finds the stop string that is complete first, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        # Of two that end at the same place the longer one began first.
        self._stops = sorted(stops, key=len, reverse=True)
        self._longest = max(map(len, stops), default=0)
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """What of the text so far is certain not to belong to a stop string."""
        text = self._held + text
        found = self._first(text)
        if found is not None:
            end, self.stopped = found
            self._held = ""
            return text[: end if self._include_stop else end - len(self.stopped)]
        held = self._num_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str) -> tuple[int, str] | None:
        """`(end, stop)` of the stop string that ends first."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = start + len(stop), stop
        return best

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class Detokenizer:
    """One sample's text; tokens in `skipped` add nothing to it.

    `min_tokens` tokens pass before stop strings are looked for.

    `stopped` is the stop string that ended the text; after it nothing more comes. `num_tokens`
    counts the tokens taken, the one that completed the stop string included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skipped: Collection[int] = (),
        min_tokens: int = 0,
        context: Sequence[int] = (),
    ) -> None:
        self.num_tokens = 0
        self._min_tokens = min_tokens
        self._search = StopSearch(stops, include_stop=include_stop) if stops else None
        self._stream: TextStream
        if tokenizer.is_byte_level:
            self._stream = ByteTextStream(tokenizer, skipped=skipped)
        else:
            self._stream = WindowTextStream(tokenizer, skipped=skipped, context=context)

    @property
    def stopped(self) -> str | None:
        return None if self._search is None else self._search.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens."""
        if self._search is None:
            self.num_tokens += len(token_ids)
            if len(token_ids) == 1:
                return self._stream.push(token_ids[0])
            return "".join(map(self._stream.push, token_ids))
        return "".join([self._searched(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """The rest, once no more tokens come. It may still complete a stop string."""
        if self._search is None:
            return self._stream.finish()
        if self._search.stopped is not None:
            return ""
        return self._search.push(self._stream.finish()) + self._search.finish()

    def _searched(self, token_id: int) -> str:
        search = self._search
        if search is None or search.stopped is not None:
            return ""
        self.num_tokens += 1
        text = self._stream.push(token_id)
        return text if self.num_tokens <= self._min_tokens else search.push(text)
