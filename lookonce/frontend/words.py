"""Tokens → words, as transformers' Whisper tokenizer groups them (`_combine_tokens_into_words`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNSPACED = frozenset({"chinese", "japanese", "thai", "lao", "myanmar", "cantonese"})
"""Languages without spaces: each character is a word."""
PREPENDED = "\"'“¡¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
REPLACEMENT = "\ufffd"
Decode = Callable[[Sequence[int]], str]


class WordTokens:
    """A word and the indices of its tokens."""

    __slots__ = ("indices", "text")

    def __init__(self, text: str, indices: list[int]) -> None:
        self.text = text
        self.indices = indices


def words_of(token_ids: Sequence[int], decode: Decode, language: str) -> list[WordTokens]:
    """The words of text tokens, in order; `language` is an English name."""
    characters = _split_characters(token_ids, decode)
    words = characters if language in UNSPACED else _split_words(characters)
    return _merge_punctuation(words)


def _split_characters(token_ids: Sequence[int], decode: Decode) -> list[WordTokens]:
    """Pieces of whole characters: a token may hold a part of one."""
    whole, found, offset = decode(token_ids), [], 0
    tokens: list[int] = []
    indices: list[int] = []
    for index, token in enumerate(token_ids):
        tokens.append(token)
        indices.append(index)
        text = decode(tokens)
        broken = text.find(REPLACEMENT)
        at = offset + broken
        if broken < 0 or at >= len(whole) or whole[at] == REPLACEMENT:
            found.append(WordTokens(text, indices))
            offset += len(text)
            tokens, indices = [], []
    return found


def _split_words(pieces: Sequence[WordTokens]) -> list[WordTokens]:
    words: list[WordTokens] = []
    for piece in pieces:
        begins = piece.text.startswith(" ") or piece.text.strip() in PUNCTUATION
        if begins or not words:
            words.append(WordTokens(piece.text, list(piece.indices)))
        else:
            words[-1].text += piece.text
            words[-1].indices += piece.indices
    return words


def _merge_punctuation(words: list[WordTokens]) -> list[WordTokens]:
    """With opening marks at the word after them, and closing ones at the word before."""
    follower = len(words) - 1
    for at in range(len(words) - 2, -1, -1):
        word = words[at]
        if word.text.startswith(" ") and word.text.strip() in PREPENDED:
            words[follower].text = word.text + words[follower].text
            words[follower].indices = word.indices + words[follower].indices
            word.text, word.indices = "", []
        else:
            follower = at
    before = 0
    for at in range(1, len(words)):
        word = words[at]
        if not words[before].text.endswith(" ") and word.text in APPENDED:
            words[before].text += word.text
            words[before].indices += word.indices
            word.text, word.indices = "", []
        else:
            before = at
    return [word for word in words if word.text and word.indices]
