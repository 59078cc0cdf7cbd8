"""Tokens become words as transformers' Whisper tokenizer groups them."""

from __future__ import annotations

import pytest
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from lookonce.frontend.words import words_of

PIECES = [" He", "llo", ",", ' "', "you", '"', " there", "!", " 你", "好", "-", "x", " (", "a", ")"]


class Tokenizer:
    """Tokens of bytes: some hold a part of a character."""

    eos_token_id = 1000

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        for piece in PIECES:
            encoded = piece.encode()
            cut = len(encoded) - 1 if len(encoded) > len(piece) else len(encoded)
            self.tokens += [part for part in (encoded[:cut], encoded[cut:]) if part]

    def decode(self, token_ids, **_) -> str:
        return b"".join(self.tokens[token] for token in token_ids).decode("utf-8", "replace")


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_words_are_transformers_words(language) -> None:
    tokenizer = Tokenizer()
    ids = list(range(len(tokenizer.tokens)))
    texts, _, indices = _combine_tokens_into_words(tokenizer, ids, language)
    ours = words_of(ids, tokenizer.decode, language)
    assert [word.text for word in ours] == texts
    assert [word.indices for word in ours] == indices
    assert "".join(word.text for word in ours) == "".join(PIECES)
