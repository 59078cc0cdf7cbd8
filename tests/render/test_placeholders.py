"""Placeholders become expansions, in place and in order, and none is lost or invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.errors import BadRequestError
from lookonce.render.prompt.placeholders import MediaPart, match_placeholders, place_media
from lookonce.types.media import Expansion

IMAGE, AUDIO, BEGIN, END, EMBED = 9, 3, 20, 21, 22
IDS = {"image": IMAGE, "audio": AUDIO}


def image(name, tokens):
    return MediaPart(name, "image", Expansion(((IMAGE, tokens),), IMAGE))


def audio(name, tokens):
    return MediaPart(name, "audio", Expansion(((AUDIO, tokens),), AUDIO))


def wrapped(name, tokens):
    """An expansion that brings its own begin and end."""
    return MediaPart(name, "image", Expansion(((BEGIN, 1), (EMBED, tokens), (END, 1)), EMBED))


def placed_in(token_ids, parts, placeholder_ids=IDS):
    """The parts, each where the template wanted it."""
    modalities = [part.modality for part in parts]
    return place_media(token_ids, parts, match_placeholders(token_ids, modalities, placeholder_ids))


def test_the_template_s_wrapping_stays_around_the_expansion():
    placed = placed_in([1, 6, IMAGE, 7, 50], [image(b"a", 3)])
    assert placed.token_ids == [1, 6, IMAGE, IMAGE, IMAGE, 7, 50]
    [feature] = placed.features
    assert (feature.key, feature.offset, feature.length, feature.num_embeds) == (b"a", 2, 3, 3)


def test_an_expansion_brings_its_own_wrapping():
    placed = placed_in([1, BEGIN, 50], [wrapped(b"a", 2)], {"image": BEGIN})
    assert placed.token_ids == [1, BEGIN, EMBED, EMBED, END, 50]
    assert (placed.features[0].offset, placed.features[0].length) == (2, 2)


def test_parts_of_each_modality_are_taken_in_order_and_features_sorted_by_place():
    # The template wrote both pictures first, although the sound stood between them.
    parts = [image(b"a", 1), audio(b"s", 2), image(b"b", 2)]
    placed = placed_in([IMAGE, IMAGE, 50, AUDIO], parts)
    assert [f.key for f in placed.features] == [b"a", b"b", b"s"]
    assert [f.offset for f in placed.features] == [0, 1, 4]
    assert placed.order == [0, 2, 1]


@pytest.mark.parametrize(
    ("token_ids", "modalities"),
    [
        ([1, IMAGE], []),
        ([1], ["image"]),
        ([IMAGE, IMAGE], ["image"]),
        ([IMAGE, AUDIO], ["image", "image"]),
        ([AUDIO], ["image"]),
    ],
)
def test_a_template_that_drops_or_invents_a_placeholder_is_refused(token_ids, modalities):
    with pytest.raises(BadRequestError, match="placeholders"):
        match_placeholders(token_ids, modalities, IDS)


pieces = st.lists(
    st.one_of(
        st.integers(50, 60),
        st.tuples(st.sampled_from(["image", "audio"]), st.integers(1, 5)),
    ),
    max_size=30,
)


@given(pieces)
def test_every_feature_covers_exactly_its_part_s_embeds(sequence):
    parts, token_ids, expected = [], [], []
    for piece in sequence:
        if isinstance(piece, int):
            token_ids.append(piece)
            expected.append(piece)
            continue
        make = image if piece[0] == "image" else audio
        parts.append(make(str(len(parts)).encode(), piece[1]))
        token_ids.append(IDS[piece[0]])
        expected += [IDS[piece[0]]] * piece[1]
    placed = placed_in(token_ids, parts)
    assert placed.token_ids == expected
    assert [parts[index].key for index in placed.order] == [f.key for f in placed.features]
    covered = [p for f in placed.features for p in range(f.offset, f.end)]
    assert covered == [p for p, token in enumerate(expected) if token < 50]


def test_a_thousand_items_are_placed():
    parts = [image(str(n).encode(), 64) for n in range(1000)]
    placed = placed_in([token for _ in parts for token in (6, IMAGE, 7)], parts)
    assert len(placed.token_ids) == 1000 * 66
    assert placed.features[999].offset == 999 * 66 + 1
