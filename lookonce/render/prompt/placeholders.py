"""Placeholders of media in a prompt: no user text can forge one, and each becomes its expansion.

**Escaping.** Inside the renderer every media token has a secret text, which users cannot write:

    template source   <|vision_bos|><|IMAGE|>…   →  written with the secret texts
    tokenizer         knows media tokens by their secret texts only
    user text         `<|IMAGE|>` is ordinary text to that tokenizer: nothing to search or escape

Everything else about the tokenizer is unchanged, so a chat without media tokens in its texts has
the ids that Hugging Face gives it. A secret text begins with U+FDD0, a noncharacter that Unicode
reserves for use inside a program; user text that contains it is refused.

**Expansion.** A template writes one placeholder token per media part; the k-th placeholder of a
modality belongs to the k-th part of that modality, and is replaced by the part's expansion:

    ids         … <bos> P <eos> …          P: placeholder of the image
    expansion           P P P P            4 embed tokens
    prompt      … <bos> P P P P <eos> …    feature at its first P, length 4
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.json_places import parts_of, place_name
from lookonce.types.media import MediaFeature, Modality, feature_at
from lookonce.types.request import RenderedItem, RenderedPrompt, as_ids

RESERVED = "\ufdd0"
RESERVED_BYTES = RESERVED.encode()
_FIRST_SECRET = 0xE000
"""The character after `RESERVED` differs by token; it is from the private-use area."""
_MEDIA_WORDS = re.compile("image|img|audio|video|vision|sound|speech|picture|<[be]o[iav]>", re.I)


class PlaceholderEscaping:
    """Text ↔ secret text of a tokenizer's media tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Longest first: a token's text may contain another's.
        ordered = sorted(set(texts), key=lambda text: (-len(text), text))
        self.secrets = {
            text: RESERVED + chr(_FIRST_SECRET + number) for number, text in enumerate(ordered)
        }
        self._text_of = {secret: text for text, secret in self.secrets.items()}
        self._text_pattern = _any_of(self.secrets)
        self._secret_pattern = _any_of(self._text_of)

    def escape(self, text: str) -> str:
        """A trusted text (a template's source, its variables) with its media tokens escaped."""
        return self._text_pattern.sub(lambda found: self.secrets[found[0]], text)

    def unescape(self, text: str) -> str:
        """A rendered text, or an error message about it, with the tokens' own texts."""
        if RESERVED not in text:
            return text
        return self._secret_pattern.sub(lambda found: self._text_of[found[0]], text)


def escaping_of(tokenizer: Tokenizer, placeholder_ids: Iterable[int]) -> PlaceholderEscaping:
    """The escaping of every added token about media; empty if the model takes no media."""
    placeholders = set(placeholder_ids)
    if not placeholders:
        return PlaceholderEscaping(())
    return PlaceholderEscaping(
        text
        for token_id, text in tokenizer.added_tokens.items()
        if token_id in placeholders or _MEDIA_WORDS.search(text)
    )


def escaped_tokenizer(
    tokenizer: Tokenizer, escaping: PlaceholderEscaping, placeholder_ids: Iterable[int]
) -> Tokenizer:
    """The tokenizer that knows media tokens by their secret texts only.

    Raises `ModelLoadError` if no text gives the placeholder token.
    """
    if not escaping.secrets:
        return tokenizer
    secret = tokenizer.with_renamed_tokens(escaping.secrets)
    for token_id in placeholder_ids:
        text = secret.added_tokens.get(token_id)
        if text is None or token_id not in secret.encode(text, add_special_tokens=False):
            raise ModelLoadError(f"the tokenizer cannot produce the placeholder token {token_id}")
    return secret


def refuse_reserved(value: object, param: str) -> None:
    """Raise `BadRequestError` if a text anywhere in a JSON value contains U+FDD0."""
    if not isinstance(value, str) and not _may_hold_reserved(value):
        return
    for part, place in parts_of(value):
        if isinstance(part, str) and not part.isascii() and RESERVED in part:
            where = place_name(place, param)
            raise BadRequestError(
                f"{where}: the text holds U+FDD0, which is not a character", param=where
            )


def _may_hold_reserved(value: object) -> bool:
    """Whether a text in a JSON value contains U+FDD0, told much faster than where; also true of
    what is too deep, or not JSON, to tell."""
    try:
        return RESERVED_BYTES in msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return True


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of `texts`, earlier ones first; `(?!)` matches nothing."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


@dataclass(frozen=True, slots=True)
class PlacedFilm:
    """A film in a prompt: its items, the tokens between them, and what of the prompt they replace.

    `start` and `end` are positions of the prompt, around the placeholder.
    """

    items: Sequence[RenderedItem]
    times: Sequence[int | None]
    """`MediaFeature.film_time` of each item."""
    before: Sequence[Sequence[int]]
    """Tokens before each item."""
    after: Sequence[int]
    start: int
    end: int


def place_media(
    token_ids: Sequence[int] | NDArray[np.int32],
    items: Sequence[RenderedItem | PlacedFilm],
    positions: Sequence[tuple[int, int]],
) -> RenderedPrompt:
    """The prompt with every placeholder replaced by its item's expansion, or its film's. O(tokens
    of the result).

    `positions` are from `match_placeholders`; features and items are in their order.
    """
    ids = as_ids(token_ids)
    placed: list[NDArray[np.int32]] = []
    features: list[MediaFeature] = []
    rendered: list[RenderedItem] = []
    done, length = 0, 0

    def place(item: RenderedItem, time: int | None) -> None:
        nonlocal length
        expansion = item.expansion
        features.append(feature_at(item.key, item.modality, expansion, length, time))
        rendered.append(item)
        tokens, counts = np.array(expansion.runs, np.int32).reshape(-1, 2).T
        placed.append(np.repeat(tokens, counts))
        length += expansion.length

    def write(tokens: Sequence[int] | NDArray[np.int32]) -> None:
        nonlocal length
        placed.append(as_ids(tokens))
        length += len(tokens)

    for position, index in positions:
        part = items[index]
        if isinstance(part, PlacedFilm):
            write(ids[done : part.start])
            for item, time, before in zip(part.items, part.times, part.before, strict=True):
                write(before)
                place(item, time)
            write(part.after)
            done = part.end
        else:
            write(ids[done:position])
            place(part, None)
            done = position + 1
    placed.append(ids[done:])
    whole = np.concatenate(placed) if len(placed) > 1 else ids
    return RenderedPrompt(whole, tuple(features), rendered)


def place_sound(token_ids: Sequence[int], item: RenderedItem) -> RenderedPrompt:
    """The prompt of a model whose one sound takes none of its positions."""
    feature = feature_at(item.key, item.modality, item.expansion, 0)
    return RenderedPrompt(token_ids, (feature,), [item])


def match_placeholders(
    token_ids: Sequence[int] | NDArray[np.int32],
    modalities: Sequence[Modality],
    placeholder_ids: Mapping[Modality, int],
) -> list[tuple[int, int]]:
    """`(position, part index)` of every placeholder, by position. `modalities`: one per part.

    Raises `BadRequestError` when a template dropped a part or wrote a placeholder of its own.
    """
    ids = as_ids(token_ids)
    matches: list[tuple[int, int]] = []
    for modality, placeholder in placeholder_ids.items():
        positions: list[int] = np.flatnonzero(ids == placeholder).tolist()
        indices = [index for index, each in enumerate(modalities) if each == modality]
        if len(positions) != len(indices):
            raise BadRequestError(
                f"the chat template wrote {len(positions)} placeholders for the {len(indices)} "
                f"parts of type {modality} in the messages",
                param="messages",
            )
        matches += zip(positions, indices, strict=True)
    return sorted(matches)
