"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lookonce.server.responses import ChatLogprobs, CompletionLogprobs, TokenEntry, TopLogprob
from lookonce.types.request import TokenLogprob

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

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._offset = 0

    def take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """The entry of the next `token_ids`."""
        tokens = [_text(self._token_bytes(token)) for token in token_ids]
        return CompletionLogprobs(
            text_offset=[self._advance(token) for token in tokens],
            token_logprobs=[max(entry.logprob, LOWEST) for entry in logprobs],
            tokens=tokens,
            top_logprobs=[self._top(entry) for entry in logprobs],
        )

    def _advance(self, token: str) -> int:
        offset, self._offset = self._offset, self._offset + len(token)
        return offset

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        return {_text(self._token_bytes(token)): max(value, LOWEST) for token, value in entry.top}


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
