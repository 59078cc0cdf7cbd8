"""Log-probabilities in OpenAI's two formats, chat and completion, and in vLLM's for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence

from lookonce.frontend.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptEntries,
    PromptEntry,
    TokenEntry,
    TopLogprob,
)
from lookonce.types.request import PromptLogprob, TokenLogprob

TokenBytes = Callable[[int], bytes]
"""Token id → the token's bytes, which may be part of a character."""
TokenName = Callable[[int], str]
"""Token id → what a log-probability is listed under."""

LOWEST = -9999.0
"""What stands for minus infinity, which JSON cannot write."""


def token_id_name(token: int) -> str:
    """vLLM's name of a token where `return_tokens_as_token_ids` is asked for."""
    return f"token_id:{token}"


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    token_bytes: TokenBytes,
    name: TokenName | None = None,
) -> ChatLogprobs:
    """Tokens are listed by `name`, or by their text."""

    def named(token: int, logprob: float) -> tuple[str, float, list[int]]:
        data = token_bytes(token)
        return _text(data) if name is None else name(token), max(logprob, LOWEST), list(data)

    return ChatLogprobs(
        [
            TokenEntry(
                *named(token, entry.logprob),
                [TopLogprob(*named(other, value)) for other, value in entry.top],
            )
            for token, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


def _name_of(token_bytes: TokenBytes) -> TokenName:
    return lambda token: _text(token_bytes(token))


class TextCursor:
    """Finds where in the text each token begins.

    A token that is part of a character begins where the character does; a token that the text
    leaves out begins where the next token does.
    """

    def __init__(self, skipped: Collection[int] = (), at: int = 0) -> None:
        """`skipped`: tokens that add nothing to the text, which begins at offset `at`."""
        self.at = at
        self._skipped = skipped
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_id: int, token: bytes) -> int:
        """Where this token begins; `at` is where it ends."""
        begin = self.at
        if token_id not in self._skipped:
            self.at += len(self._characters.decode(token))
        return begin


class CompletionLogprobsBuilder:
    """Builds the parallel lists of `/v1/completions`; their offsets count characters."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        wanted: int,
        skipped: Collection[int] = (),
        offset: int = 0,
        name: TokenName | None = None,
    ) -> None:
        """`wanted`: how many of the likeliest tokens to list beside each token; `offset`: where in
        the text the first token begins; `skipped`: tokens that add nothing to the text; `name`:
        what tokens are listed by, if not by their text."""
        self._token_bytes = token_bytes
        self._name = name or _name_of(token_bytes)
        self._wanted = wanted
        self._cursor = TextCursor(skipped, offset)

    def take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """The entries of the next generated tokens."""
        offsets = [self._cursor.take(token, self._token_bytes(token)) for token in token_ids]
        return _lists(token_ids, offsets, logprobs, self._wanted, self._name)


def echoed_logprobs(
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[PromptLogprob | None],
    wanted: int,
    token_bytes: TokenBytes,
    name: TokenName | None = None,
) -> CompletionLogprobs:
    """The entries of a prompt's tokens; a token that is not part of `text` gets an empty place."""
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, offset = [], 0
    for token in token_ids:
        offsets.append(offset)
        shown = characters.decode(token_bytes(token))
        if not text.startswith(shown, offset):
            shown = shown.removeprefix(" ")  # a tokenizer may put a space before the first word
        if text.startswith(shown, offset):
            offset += len(shown)
    return _lists(token_ids, offsets, logprobs, wanted, name or _name_of(token_bytes))


def _lists(
    token_ids: Sequence[int],
    offsets: list[int],
    logprobs: Sequence[TokenLogprob] | Sequence[PromptLogprob | None],
    wanted: int,
    name: TokenName,
) -> CompletionLogprobs:
    tokens = [name(token) for token in token_ids]
    values = [None if entry is None else max(entry.logprob, LOWEST) for entry in logprobs]
    tops = [
        None if entry is None else _top(token, entry, wanted, name)
        for token, entry in zip(tokens, logprobs, strict=True)
    ]
    return CompletionLogprobs(offsets, values, tokens, tops)


def _top(
    token: str, entry: TokenLogprob | PromptLogprob, wanted: int, name: TokenName
) -> dict[str, float]:
    """The log-probabilities of the chosen token and the likeliest ones, by text; of several tokens
    with one text the highest."""
    top = {token: max(entry.logprob, LOWEST)}
    for other, value in entry.top[:wanted]:
        text = name(other)
        top[text] = max(value, top.get(text, LOWEST))
    return top


def prompt_entries(
    token_ids: Sequence[int],
    logprobs: Sequence[PromptLogprob | None],
    wanted: int,
    token_bytes: TokenBytes,
) -> PromptEntries:
    """vLLM's form: for each token of the prompt, the token itself and the `wanted` likeliest."""

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


def joined_completion(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        text_offset=[x for part in parts for x in part.text_offset],
        token_logprobs=[x for part in parts for x in part.token_logprobs],
        tokens=[x for part in parts for x in part.tokens],
        top_logprobs=[x for part in parts for x in part.top_logprobs],
    )


def _text(token: bytes) -> str:
    """The token's text; part of a character is written as OpenAI does: `bytes:\\xe2\\x82`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
