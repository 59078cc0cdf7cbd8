"""Window lookup by bisection agrees with the plain linear scan, and bad features are named."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lookonce.core import mm_features
from lookonce.core.mm_features import EncoderInputs, MultiModalFeatures, feature_slices, next_embed
from lookonce.errors import BadRequestError
from lookonce.types.media import MediaFeature
from lookonce.types.step import EmbedSlice
from tests.support.core.builders import feature, key

CASES = 100_000


def scan(features: Sequence[MediaFeature], start: int, end: int) -> list[int]:
    """The reference: which features share a position with `[start, end)`, one by one."""
    return [
        index
        for index, at in enumerate(features)
        if max(at.offset, start) < min(at.offset + at.length, end)
    ]


def embed_positions(at: MediaFeature) -> list[int]:
    ranges = at.is_embed or ((0, at.length),)
    return [at.offset + p for first, last in ranges for p in range(first, last)]


def scan_rows(features: Sequence[MediaFeature], start: int, end: int) -> dict[int, tuple]:
    """Row of the chunk → (key, row of the output), position by position."""
    return {
        position - start: (at.key, row)
        for at in features
        for row, position in enumerate(embed_positions(at))
        if start <= position < end
    }


def rows_of(slices: Sequence[EmbedSlice]) -> dict[int, tuple]:
    rows = {}
    for part in slices:
        for count, row in enumerate(range(part.start, part.end)):
            assert part.row + count not in rows
            rows[part.row + count] = (part.key, row)
    return rows


def random_ranges(draw: random.Random, length: int) -> tuple[tuple[int, int], ...] | None:
    """Embed ranges from the first position to the last, as `feature_at` makes them, or None."""
    if length < 3 or draw.random() < 0.6:
        return None
    cuts = sorted(draw.sample(range(1, length), draw.randrange(2, min(length, 7), 2)))
    edges = [0, *cuts, length]
    return tuple(zip(edges[::2], edges[1::2], strict=True)) if len(edges) % 2 == 0 else None


def random_features(draw: random.Random) -> list[MediaFeature]:
    features, at = [], 0
    for index in range(draw.choice((0, 1, 2, 5, 12))):
        at += draw.choice((0, 0, 1, draw.randrange(10)))
        length = draw.choice((1, 2, draw.randrange(1, 12)))
        features.append(feature(str(index), at, length, is_embed=random_ranges(draw, length)))
        at += length
    return features


def random_windows(
    count: int, seed: int
) -> list[tuple[MultiModalFeatures, list[MediaFeature], int, int]]:
    draw, cases = random.Random(seed), []
    while len(cases) < count:
        plain = random_features(draw)
        built = MultiModalFeatures(plain)
        for _ in range(25):
            start = draw.randrange(built.end + 4)
            cases.append((built, plain, start, start + draw.randrange(-1, 16)))
    return cases


class TestWindow:
    def test_agrees_with_a_linear_scan_on_100_000_random_cases(self) -> None:
        for built, plain, start, end in random_windows(CASES, seed=1):
            assert list(built.overlapping(start, end)) == scan(plain, start, end)

    def test_embed_slices_agree_with_a_scan_over_every_position(self) -> None:
        for built, plain, start, end in random_windows(5_000, seed=2):
            expected = scan_rows(plain, start, end)
            assert rows_of(built.embed_slices(start, end)) == expected

    def test_next_embed_agrees_with_a_scan_over_every_position(self) -> None:
        for _, plain, start, _ in random_windows(5_000, seed=3):
            for at in plain:
                later = [p for p in embed_positions(at) if p >= start]
                assert next_embed(at, start) == (later[0] if later else None)

    def test_touching_edges_do_not_count(self) -> None:
        features = MultiModalFeatures([feature("x", 4, 4)])
        assert not features.overlapping(0, 4)
        assert not features.overlapping(8, 12)
        assert list(features.overlapping(3, 5)) == list(features.overlapping(7, 8)) == [0]

    def test_a_window_in_a_gap_touches_nothing(self) -> None:
        features = MultiModalFeatures([feature("x", 0, 4), feature("y", 8, 4)])
        assert not features.overlapping(4, 8)

    def test_without_features_nothing_is_touched(self) -> None:
        assert not MultiModalFeatures().overlapping(0, 100)
        assert MultiModalFeatures().end == 0

    def test_an_empty_window_touches_nothing(self) -> None:
        assert not MultiModalFeatures([feature("x", 0, 9)]).overlapping(5, 5)

    def test_a_window_inside_one_item_takes_its_middle_rows(self) -> None:
        at = feature("x", 10, 20)
        assert feature_slices(at, 15, 18) == [EmbedSlice(at.key, 5, 8, 0)]

    def test_rows_are_counted_across_the_stretches_of_an_item(self) -> None:
        at = feature("x", 10, 10, is_embed=((0, 3), (5, 10)))
        assert feature_slices(at, 12, 17) == [
            EmbedSlice(at.key, 2, 3, 0),
            EmbedSlice(at.key, 3, 5, 3),
        ]


class TestChecks:
    def test_two_that_overlap_are_named(self) -> None:
        with pytest.raises(BadRequestError, match=r"items 1 and 2 overlap.*\[4, 8\).*\[7, 9\)"):
            MultiModalFeatures([feature("x", 0, 4), feature("y", 4, 4), feature("z", 7, 2)])

    def test_two_out_of_order_are_named(self) -> None:
        with pytest.raises(BadRequestError, match="items 0 and 1 are out of order"):
            MultiModalFeatures([feature("x", 10, 4), feature("y", 0, 4)])

    def test_touching_items_are_fine(self) -> None:
        assert len(MultiModalFeatures([feature("x", 0, 4), feature("y", 4, 4)])) == 2

    @pytest.mark.parametrize(
        "wrong",
        [
            MediaFeature(key("x"), "image", -1, 4, 4),
            MediaFeature(key("x"), "image", 0, 0, 0),
            MediaFeature(key("x"), "image", 0, 4, 3),
            MediaFeature(key("x"), "image", 0, 4, 4, ((0, 2), (1, 3))),
            MediaFeature(key("x"), "image", 0, 4, 2, ((3, 5),)),
            MediaFeature(key("x"), "image", 0, 4, 0, ((2, 2),)),
            MediaFeature(key("x"), "image", 0, 4, 2, ((-1, 1),)),
            MediaFeature(b"short", "image", 0, 4, 4),
        ],
    )
    def test_an_item_of_impossible_shape_is_named(self, wrong: MediaFeature) -> None:
        with pytest.raises(BadRequestError, match="item 0"):
            MultiModalFeatures([wrong])

    @pytest.mark.parametrize("before", [0, 1, 40])
    @pytest.mark.parametrize(
        ("offset", "length"),
        [(2**62, 1), (2**63 - 1, 5), (2**63, 5), (2**64, 5), (1_000, 2**62), (1_000, 2**64)],
    )
    def test_numbers_beyond_64_bits_are_refused_and_named(
        self, before: int, offset: int, length: int
    ) -> None:
        """One by one, and column by column where they are many."""
        far = feature("far", offset, length)
        features = [feature(str(index), 2 * index, 2) for index in range(before)]
        with pytest.raises(BadRequestError, match=f"item {before} has offset {offset}"):
            MultiModalFeatures([*features, far])

    @pytest.mark.parametrize("before", [0, 1, 40])
    @pytest.mark.parametrize("grid", [(1, 1, 1 << 63), ((1 << 64) - 1, 1, 1), (1, -1, -4)])
    def test_a_grid_that_no_item_has_is_refused_and_named(
        self, before: int, grid: tuple[int, int, int]
    ) -> None:
        """Hashes and positions are computed from it, for all requests of a step together."""
        lies = MediaFeature(key("lies"), "image", 100, 4, 4, None, grid)
        features = [feature(str(index), 2 * index, 2) for index in range(before)]
        with pytest.raises(BadRequestError, match=f"item {before} has the grid"):
            MultiModalFeatures([*features, lies])

    def test_an_item_at_the_last_position_there_can_be_is_found(self) -> None:
        last = 2**62 - 1
        assert list(MultiModalFeatures([feature("x", last, last)]).overlapping(last, last + 1)) == [
            0
        ]


class TestAppend:
    def test_appended_features_are_found(self) -> None:
        features = MultiModalFeatures()
        for index in range(50):
            features.append(feature(str(index), 3 * index, 2))
            assert list(features.overlapping(3 * index, 3 * index + 1)) == [index]
        assert len(features.as_tuple()) == 50

    def test_a_refused_feature_changes_nothing(self) -> None:
        features = MultiModalFeatures([feature("x", 0, 4)])
        with pytest.raises(BadRequestError):
            features.append(feature("y", 2, 4))
        assert len(features) == 1
        assert features.end == 4


class TestForgetting:
    def test_indices_and_windows_stay_what_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mm_features, "SPARE_FEATURES", 1)
        for _, plain, start, end in random_windows(5_000, seed=4):
            built = MultiModalFeatures(plain)
            built.forget_before(start)
            indices = built.overlapping(start, end)
            assert list(indices) == scan(plain, start, end)
            assert built.window(indices) == [plain[index] for index in indices]
            assert built.keys_of(indices) == [plain[index].key for index in indices]
            assert rows_of(built.embed_slices(start, end)) == scan_rows(plain, start, end)
            assert len(built) == len(plain)
            assert built.end == (plain[-1].end if plain else 0)
            if len(indices):
                assert built.rows(indices) == [plain[index].num_embeds for index in indices]
                assert built[indices.start] is plain[indices.start]

    def test_what_is_forgotten_is_not_answered_wrongly(self) -> None:
        built = MultiModalFeatures([feature(str(index), 2 * index, 2) for index in range(40)])
        built.forget_before(60)
        assert list(built.overlapping(60, 64)) == [30, 31]
        for ask in (
            lambda: built.overlapping(59, 64),
            lambda: built[29],
            lambda: built.window(range(28, 32)),
            lambda: built.keys,
            built.as_tuple,
        ):
            with pytest.raises(RuntimeError, match="forgotten"):
                ask()

    def test_appending_goes_on_and_little_is_stored(self) -> None:
        built = MultiModalFeatures()
        for index in range(5_000):
            built.append(feature(str(index), 3 * index, 2))
            built.forget_before(3 * index)
            assert len(built._features) <= 2 * mm_features.SPARE_FEATURES
        assert len(built) == 5_000
        with pytest.raises(BadRequestError, match="items 4999 and 5000 overlap"):
            built.append(feature("x", 3 * 4_999 + 1, 2))


class TestEncoderInputs:
    def test_every_input_is_needed_for_whatever_is_computed(self) -> None:
        inputs = EncoderInputs((feature("x", 0, 30), feature("y", 0, 12)))
        assert list(inputs.overlapping(0, 1)) == list(inputs.overlapping(40, 41)) == [0, 1]
        assert not inputs.overlapping(7, 7)
        assert inputs.next_index(1_000) == 0
        assert inputs.rows(range(2)) == [30, 12]

    def test_they_take_no_positions(self) -> None:
        inputs = EncoderInputs((feature("x", 0, 30),))
        assert inputs.end == 0
        assert inputs.embed_slices(0, 40) == ()
        assert not inputs.covered(40).any()

    @pytest.mark.parametrize(
        "wrong", [feature("y", 3, 12), feature("y", 0, 12, is_embed=((0, 2), (10, 12)))]
    )
    def test_an_input_elsewhere_or_in_parts_is_named(self, wrong: MediaFeature) -> None:
        with pytest.raises(BadRequestError, match=r"item 1 .* at offset"):
            EncoderInputs((feature("x", 0, 30), wrong))
