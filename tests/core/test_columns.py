"""Columns of features: compiled and in Python they say the same, and nothing odd slips through."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.core import mm_features
from lookonce.core.mm_features import one_run_items_in_python, plain_columns_in_python
from lookonce.types.media import Expansion, MediaFeature, ProcessedItem
from tests.support.core.builders import feature, item_for, items_for, key

compiled = mm_features.plain_columns is not plain_columns_in_python
BOTH = pytest.mark.parametrize(
    ("plain_columns", "one_run_items"),
    [
        (plain_columns_in_python, one_run_items_in_python),
        pytest.param(
            mm_features.plain_columns,
            mm_features.one_run_items,
            marks=pytest.mark.skipif(not compiled, reason="it was not compiled"),
        ),
    ],
    ids=["python", "compiled"],
)
ROW = [feature("a", 3, 2), feature("b", 5, 1, modality="audio"), feature("c", 9, 4)]

odd_features = st.builds(
    MediaFeature,
    key=st.sampled_from([key("x"), key("y"), b"short", b""]),
    modality=st.sampled_from(["image", "audio"]),
    offset=st.one_of(st.integers(-1, 12), st.integers(2**62 - 2, 2**64)),
    length=st.one_of(st.integers(-1, 3), st.integers(2**62 - 2, 2**64)),
    num_embeds=st.integers(-1, 3),
    is_embed=st.sampled_from([None, None, ((0, 1),)]),
)


def bounds(features: list[MediaFeature]) -> tuple[array, array]:
    return array("q", [f.offset for f in features]), array("q", [f.end for f in features])


@BOTH
class TestPlainColumns:
    def test_columns_of_plain_features(self, plain_columns: Callable, one_run_items: Callable):
        keys, offsets, ends, longest, modalities = plain_columns(tuple(ROW), 3)
        assert keys == [key("a"), key("b"), key("c")]
        assert (array("q", offsets), array("q", ends)) == bounds(ROW)
        assert (longest, modalities) == (4, {"image", "audio"})

    @pytest.mark.parametrize(
        "odd",
        [
            feature("x", 12, 2),
            feature("x", 13, 3, is_embed=((0, 1), (2, 3))),
            MediaFeature(b"short", "image", 13, 1, 1),
            MediaFeature(key("x"), "image", 13, 2, 1),
            MediaFeature(key("x"), "image", 13, 0, 0),
            feature("x", 2**62, 1),
            feature("x", 2**63 - 1, 5),
            feature("x", 2**64, 5),
            feature("x", -(2**64), 5),
            feature("x", 13, 2**62),
        ],
    )
    def test_an_odd_one_among_them_is_noticed(
        self, plain_columns: Callable, one_run_items: Callable, odd: MediaFeature
    ):
        assert plain_columns((*ROW, odd), 0) is None

    def test_they_begin_after_what_is_there_already(
        self, plain_columns: Callable, one_run_items: Callable
    ):
        assert plain_columns(tuple(ROW), 4) is None


@BOTH
class TestOneRunItems:
    def test_items_come_in_the_order_of_the_keys(
        self, plain_columns: Callable, one_run_items: Callable
    ):
        items = items_for(ROW)
        keys = [f.key for f in ROW]
        for order in (keys, keys[::-1], [*keys[1:], keys[0]]):
            shuffled = {name: items[name] for name in order} | {key("other"): item_for(ROW[0])}
            found = one_run_items(keys, shuffled, *bounds(ROW))
            assert [id(item) for item in found] == [id(items[name]) for name in keys]

    def test_the_same_key_twice_is_the_same_item(
        self, plain_columns: Callable, one_run_items: Callable
    ):
        twice = [feature("a", 3, 2), feature("a", 5, 2)]
        found = one_run_items([f.key for f in twice], items_for(twice), *bounds(twice))
        assert len(found) == 2

    @pytest.mark.parametrize(
        "odd",
        [
            Expansion(((999, 3),), 999),
            Expansion(((999, 2),), 998),
            Expansion(((999, 1), (999, 1)), 999),
            Expansion(((7, 1), (999, 2)), 999),
            Expansion((), 999),
        ],
    )
    def test_an_item_of_another_shape_is_noticed(
        self, plain_columns: Callable, one_run_items: Callable, odd: Expansion
    ):
        items = items_for(ROW) | {key("a"): ProcessedItem("image", {}, odd)}
        assert one_run_items([f.key for f in ROW], items, *bounds(ROW)) is None

    def test_a_missing_item_is_noticed(self, plain_columns: Callable, one_run_items: Callable):
        items = items_for(ROW[:2])
        assert one_run_items([f.key for f in ROW], items, *bounds(ROW)) is None


@pytest.mark.skipif(not compiled, reason="it was not compiled")
class TestCompiled:
    @given(st.lists(odd_features, min_size=1, max_size=5), st.integers(0, 3))
    def test_says_the_same_of_any_features(self, features: list[MediaFeature], start: int):
        answer = mm_features.plain_columns(tuple(features), start)
        assert answer == plain_columns_in_python(tuple(features), start)

    def test_refuses_what_it_does_not_know(self):
        with pytest.raises(TypeError):
            mm_features.plain_columns(list(ROW), 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            mm_features.one_run_items((), {}, array("q"), array("q"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="different lengths"):
            mm_features.one_run_items([key("a")], {}, array("q"), array("q"))

    def test_objects_of_other_classes_are_out_of_the_ordinary(self):
        assert mm_features.plain_columns((object(),), 0) is None  # type: ignore[arg-type]
        other = {key("a"): object()}
        assert mm_features.one_run_items([key("a")], other, *bounds(ROW[:1])) is None  # type: ignore
