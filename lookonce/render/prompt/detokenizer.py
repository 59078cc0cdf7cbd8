"""Generated token ids → text, piece by piece, up to a stop string.

    token ids ──▶ text stream ──▶ text that can no longer change ──▶ StopSearch ──▶ deltas
                  holds back unfinished characters      holds back a possible start of a stop string

The concatenated deltas equal the decoding of all tokens, up to the stop string.

`tokenizers.decoders.DecodeStream` is not used: it raises "Invalid prefix" on byte tokens that are
not UTF-8, and for a byte-level vocabulary a token takes 2.2 µs or more, not 0.2.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from lookonce.render.prompt.tokenizer import Tokenizer

CONTEXT_TOKENS = 6
"""Last tokens of the prompt, which decide whether the generated text begins with a space."""
MAX_UNFINISHED_TOKENS = 8
"""Tokens that are held back for an unfinished character. A character has at most 4 bytes, so more
byte tokens than this that do not decode never will."""
REPLACEMENT = "\ufffd"

Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextStream(Protocol):
    """Decodes one sample's tokens in order."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class ByteTextStream:
    """For byte-level tokenizers: tokens are bytes, decoded by an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, *, skipped: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = Utf8Decoder(errors="replace")
        self._in_character = False
        """Whether the last token ended within a character."""

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
    """For all other tokenizers: a short window is decoded without and with the new token, and the
    text by which the second is longer is new.

    `context` is the prompt: the first generated word keeps its space if a token precedes it.
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
        self._num_returned = len(self._window)
        """Tokens of the window whose text was returned already."""
        self._returned = self._decode(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        unfinished = text.endswith(REPLACEMENT)
        if unfinished and len(self._window) - self._num_returned <= MAX_UNFINISHED_TOKENS:
            return ""
        return self._take_new_text(text)

    def finish(self) -> str:
        return self._take_new_text(self._decode(self._window))

    def _take_new_text(self, text: str) -> str:
        delta = text[len(self._returned) :]
        # Tokens whose text was returned become the context of the next ones; of tokens without text
        # (skipped ones) only the last stay, so that the window stays short.
        self._window = self._window[self._num_returned if delta else -CONTEXT_TOKENS :]
        self._returned = self._decode(self._window)
        self._num_returned = len(self._window)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        kept = [token_id for token_id in token_ids if token_id not in self._skipped]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


def num_begun(markers: Sequence[str], text: str) -> int:
    """Length of the longest end of `text` with which one of `markers` begins, but is not whole."""
    longest = max(map(len, markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class StopSearch:
    """Finds the stop string that is complete first, in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        # Of two stop strings that end at the same place, the longer one began first.
        self._stops = sorted(stops, key=len, reverse=True)
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text so far that cannot belong to a stop string."""
        text = self._held + text
        found = self._first(text)
        if found is not None:
            end, self.stopped = found
            self._held = ""
            return text[: end if self._include_stop else end - len(self.stopped)]
        held = num_begun(self._stops, text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text that was held back but did not become a stop string."""
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


class Detokenizer:
    """The text of one sample.

    Tokens in `skipped` add no text. Stop strings are searched only after `min_tokens` tokens. After
    the stop string `stopped` no more text is returned. `num_tokens` counts the tokens used, up to
    and including the one that completed the stop string.
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
        """The text that these tokens complete."""
        if self._search is None:
            self.num_tokens += len(token_ids)
            if len(token_ids) == 1:
                return self._stream.push(token_ids[0])
            return "".join(map(self._stream.push, token_ids))
        return "".join([self._searched(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """The rest of the text after the last token. It may still complete a stop string."""
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
