"""Placeholders → expansions, in one pass over a prompt's token ids.

A template writes one placeholder token per media part; the k-th of a modality stands for the k-th
part of that modality. Whatever the template wraps around it stays; whatever the family's expansion
brings along comes with it.

    ids         … <bos> P <eos> …          P: placeholder of the image
    expansion           P P P P            4 embed tokens
    prompt      … <bos> P P P P <eos> …    feature at its first P, length 4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lookonce.errors import BadRequestError
from lookonce.types.media import Expansion, MediaFeature, Modality, feature_at


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One media part of a prompt, resolved far enough to be placed."""

    key: bytes
    modality: Modality
    expansion: Expansion


@dataclass(frozen=True, slots=True)
class Placed:
    """`order[i]` is the index, among the parts, of the one `features[i]` places."""

    token_ids: list[int]
    features: tuple[MediaFeature, ...]
    order: list[int]


def place_media(
    token_ids: list[int], parts: Sequence[MediaPart], spots: Sequence[tuple[int, int]]
) -> Placed:
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
    return Placed(placed, tuple(features), [index for _, index in spots])


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
