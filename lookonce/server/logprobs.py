"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
    """Builds the parallel lists of `/v1/completions`, whose offsets count characters of text."""

    def __init__(self, token_bytes: TokenBytes, wanted: int) -> None:
        """`wanted`: how many of the likeliest to name beside each token."""
        self._token_bytes = token_bytes
        self._wanted = wanted
        self._offset = 0

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | Sequence[PromptLogprob | None],
    ) -> CompletionLogprobs:
        """The entry of the next `token_ids`."""
        tokens = [_text(self._token_bytes(token)) for token in token_ids]
        return CompletionLogprobs(
            text_offset=[self._advance(token) for token in tokens],
            token_logprobs=[
                None if entry is None else max(entry.logprob, LOWEST) for entry in logprobs
            ],
            tokens=tokens,
            top_logprobs=[None if entry is None else self._top(entry) for entry in logprobs],
        )

    def _advance(self, token: str) -> int:
        offset, self._offset = self._offset, self._offset + len(token)
        return offset

    def _top(self, entry: TokenLogprob | PromptLogprob) -> dict[str, float]:
        return {
            _text(self._token_bytes(token)): max(value, LOWEST)
            for token, value in entry.top[: self._wanted]
        }


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
