"""Placeholders → expansions, in one pass over a prompt's token ids.

A template writes one placeholder token per media part; the k-th of a modality stands for the k-th
part of that modality. Whatever the template wraps around it stays; whatever the family's expansion
brings along comes with it.

    ids         … <bos> P <eos> …          P: placeholder of the image
    expansion           P P P P            4 embed tokens
    prompt      … <bos> P P P P <eos> …    feature at its first P, length 4
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.media import Expansion, MediaFeature, Modality, feature_at


@dataclass(frozen=True, slots=True)
class PlaceableItem:
    """One media part of a prompt, resolved far enough to be placed."""

    key: bytes
    modality: Modality
    expansion: Expansion


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """`order[i]` is the index, among the parts, of the one `features[i]` places."""

    token_ids: list[int]
    features: tuple[MediaFeature, ...]
    order: list[int]


def place_media(
    token_ids: list[int], parts: Sequence[PlaceableItem], spots: Sequence[tuple[int, int]]
) -> ExpandedPrompt:
    """Replace every placeholder by its part's expansion. O(tokens of the result).

    `spots` are those of `match_placeholders`.
    """
    placed: list[int] = []
    features, done = [], 0
    for position, index in spots:
        part = parts[index]
        placed += token_ids[done:position]
        features.append(feature_at(part.key, part.modality, part.expansion, len(placed)))
        placed += part.expansion.token_ids()
        done = position + 1
    placed += token_ids[done:]
    return ExpandedPrompt(placed, tuple(features), [index for _, index in spots])


def match_placeholders(
    token_ids: Sequence[int],
    modalities: Sequence[Modality],
    placeholder_ids: Mapping[Modality, int],
) -> list[tuple[int, int]]:
    """`(position, part index)` of every placeholder, by position. `modalities`: one per part.

    Raises `BadRequestError` when a template dropped a part or wrote a placeholder of its own.
    """
    if not modalities and not any(token in token_ids for token in placeholder_ids.values()):
        return []  # by far the commonest prompt
    spots: list[tuple[int, int]] = []
    for modality, placeholder in placeholder_ids.items():
        positions = _positions(token_ids, placeholder)
        indices = [index for index, each in enumerate(modalities) if each == modality]
        if len(positions) != len(indices):
            raise BadRequestError(
                f"the chat template wrote {len(positions)} placeholders for the {len(indices)} "
                f"parts of type {modality} in the messages",
                param="messages",
            )
        spots += zip(positions, indices, strict=True)
    return sorted(spots)


def _positions(token_ids: Sequence[int], wanted: int) -> list[int]:
    positions: list[int] = []
    start = 0
    try:
        while True:
            start = token_ids.index(wanted, start) + 1
            positions.append(start - 1)
    except ValueError:
        return positions


RESERVED = "\ufdd0"


_FIRST_LABEL = 0xE000
"""What follows `RESERVED` tells the tokens apart: private-use characters."""


_MEDIA_WORDS = re.compile("image|img|audio|video|vision|sound|speech|picture|<[be]o[iav]>", re.I)


class PlaceholderEscaping:
    """Public and secret spellings of a tokenizer's media tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Longest first: a token's text may contain another's.
        ordered = sorted(set(texts), key=lambda text: (-len(text), text))
        self.secrets = {
            text: RESERVED + chr(_FIRST_LABEL + number) for number, text in enumerate(ordered)
        }
        self._publics = {secret: text for text, secret in self.secrets.items()}
        self._public_pattern = _any_of(self.secrets)
        self._secret_pattern = _any_of(self._publics)

    def conceal(self, text: str) -> str:
        """Trusted text (a template's source, its variables) in the secret spelling."""
        return self._public_pattern.sub(lambda found: self.secrets[found[0]], text)

    def reveal(self, text: str) -> str:
        """Rendered text, or a message about it, as a person should read it."""
        if RESERVED not in text:
            return text
        return self._secret_pattern.sub(lambda found: self._publics[found[0]], text)


def escaping_of(tokenizer: Tokenizer, placeholder_ids: Iterable[int]) -> PlaceholderEscaping:
    """Covers every added token about media; none when the model takes no media."""
    placeholders = set(placeholder_ids)
    if not placeholders:
        return PlaceholderEscaping(())
    return PlaceholderEscaping(
        text
        for token_id, text in tokenizer.added_tokens.items()
        if token_id in placeholders or _MEDIA_WORDS.search(text)
    )


def escaped_tokenizer(
    tokenizer: Tokenizer, spelling: PlaceholderEscaping, placeholder_ids: Iterable[int]
) -> Tokenizer:
    """The tokenizer that knows media tokens by their secret spelling only.

    Raises `ModelLoadError` when a placeholder is no token of its own: no prompt could hold it.
    """
    if not spelling.secrets:
        return tokenizer
    secret = tokenizer.with_renamed_tokens(spelling.secrets)
    for token_id in placeholder_ids:
        text = secret.added_tokens.get(token_id)
        if text is None or token_id not in secret.encode(text, add_special_tokens=False):
            raise ModelLoadError(f"the tokenizer cannot produce the placeholder token {token_id}")
    return secret


def refuse_reserved(value: object, param: str) -> None:
    """Raise `BadRequestError` if a text anywhere in a JSON value holds the reserved character."""
    # Not recursive: a client chooses the depth.
    waiting = [(value, param)]
    while waiting:
        part, where = waiting.pop()
        if isinstance(part, str):
            if not part.isascii() and RESERVED in part:
                raise BadRequestError(
                    f"{where}: the text holds U+FDD0, which is not a character", param=where
                )
        elif isinstance(part, Mapping):
            waiting += [(key, where) for key in part]
            waiting += [(inner, f"{where}.{key}") for key, inner in part.items()]
        elif isinstance(part, Sequence):
            waiting += [(inner, f"{where}[{number}]") for number, inner in enumerate(part)]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `texts`, earlier ones first; `(?!)` never matches."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
