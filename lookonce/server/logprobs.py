"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence

from lookonce.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptEntries,
    PromptEntry,
    TokenEntry,
    TopLogprob,
)
from lookonce.types.request import PromptLogprob, TokenLogprob

TokenBytes = Callable[[int], bytes]
"""A token's own bytes: not always whole characters."""

LOWEST = -9999.0
"""What stands for minus infinity, which JSON cannot write."""


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], token_bytes: TokenBytes
) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenEntry(
                *_named(token_bytes(token), entry.logprob),
                [TopLogprob(*_named(token_bytes(other), value)) for other, value in entry.top],
            )
            for token, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


def _named(token: bytes, logprob: float) -> tuple[str, float, list[int]]:
    return _text(token), max(logprob, LOWEST), list(token)


class CompletionFormat:
    """Builds the parallel lists of `/v1/completions`, whose offsets count characters of text.

    A token that is part of a character stands where the character does; one that the text leaves
    out, where the next does.
    """

    def __init__(self, token_bytes: TokenBytes, wanted: int, unheard: Collection[int] = ()) -> None:
        """`wanted`: how many of the likeliest to name beside each token; `unheard` tokens add
        nothing to generated text."""
        self._token_bytes = token_bytes
        self._wanted = wanted
        self._unheard = unheard
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def echo(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[PromptLogprob | None]
    ) -> CompletionLogprobs:
        """The entries of a prompt; what was added to its `text` (a first token) shows nowhere."""
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        offsets = []
        for token in token_ids:
            offsets.append(self._offset)
            shown = characters.decode(self._token_bytes(token))
            if not text.startswith(shown, self._offset):
                shown = shown.removeprefix(" ")  # one that a tokenizer puts before the first word
            if text.startswith(shown, self._offset):
                self._offset += len(shown)
        self._offset = len(text)
        return self._lists(token_ids, offsets, logprobs)

    def take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """The entries of the next generated tokens."""
        return self._lists(token_ids, [self._advance(token) for token in token_ids], logprobs)

    def _advance(self, token: int) -> int:
        offset = self._offset
        if token not in self._unheard:
            self._offset += len(self._characters.decode(self._token_bytes(token)))
        return offset

    def _lists(
        self,
        token_ids: Sequence[int],
        offsets: list[int],
        logprobs: Sequence[TokenLogprob] | Sequence[PromptLogprob | None],
    ) -> CompletionLogprobs:
        tokens = [_text(self._token_bytes(token)) for token in token_ids]
        values = [None if entry is None else max(entry.logprob, LOWEST) for entry in logprobs]
        tops = [
            None if entry is None else self._top(token, entry)
            for token, entry in zip(tokens, logprobs, strict=True)
        ]
        return CompletionLogprobs(offsets, values, tokens, tops)

    def _top(self, token: str, entry: TokenLogprob | PromptLogprob) -> dict[str, float]:
        """The token that stands there and the likeliest; of those with one text the likelier."""
        top = {token: max(entry.logprob, LOWEST)}
        for other, value in entry.top[: self._wanted]:
            text = _text(self._token_bytes(other))
            top[text] = max(value, top.get(text, LOWEST))
        return top


def prompt_entries(
    token_ids: Sequence[int],
    logprobs: Sequence[PromptLogprob | None],
    wanted: int,
    token_bytes: TokenBytes,
) -> PromptEntries:
    """vLLM's form: at each place of the prompt its token and the `wanted` likeliest."""

    def entry(token: int, logprob: float, rank: int) -> PromptEntry:
        return PromptEntry(max(logprob, LOWEST), rank, _text(token_bytes(token)))

    entries: PromptEntries = []
    for token, scored in zip(token_ids, logprobs, strict=True):
        if scored is None:
            entries.append(None)
            continue
        place = {str(token): entry(token, scored.logprob, scored.rank)}
        for rank, (other, logprob) in enumerate(scored.top[:wanted], 1):
            place.setdefault(str(other), entry(other, logprob, rank))
        entries.append(place)
    return entries


def joined_chat(parts: Iterable[ChatLogprobs]) -> ChatLogprobs:
    return ChatLogprobs([entry for part in parts for entry in part.content])


def joined_completion(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        text_offset=[x for part in parts for x in part.text_offset],
        token_logprobs=[x for part in parts for x in part.token_logprobs],
        tokens=[x for part in parts for x in part.tokens],
        top_logprobs=[x for part in parts for x in part.top_logprobs],
    )


def _text(token: bytes) -> str:
    """A token that is part of a character reads as `bytes:\\xe2\\x82`, as OpenAI writes it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
