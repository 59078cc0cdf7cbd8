"""Rows of running sequences; multi-axis positions equal Hugging Face's `get_rope_index`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForMultimodalLM

from benchmarks.items import deep_size
from lookonce.model import input_batch
from lookonce.model.input_batch import InputBatch, MropePositions
from lookonce.types.media import MediaFeature
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import Extension, NewSequence


@pytest.fixture
def table() -> InputBatch:
    return InputBatch(max_num_seqs=2, max_model_len=16, block_size=4)


def new(seq_id: int, *token_ids: int, features=()) -> NewSequence:
    ids = np.array(token_ids, np.int32)
    return NewSequence(seq_id, ids, len(ids), features, SamplingParams())


def test_tokens_are_copied(table):
    sequence = new(1, 5, 6, 7)
    table.add(sequence, mrope=False)
    sequence.token_ids[:] = 0
    assert table.tokens[table.row_of(1), :3].tolist() == [5, 6, 7]


def test_blocks_are_appended(table):
    table.add(new(1, 5), mrope=False)
    row = table.row_of(1)
    table.append_blocks(row, (9, 3))
    table.append_blocks(row, ())
    table.append_blocks(row, (7,))
    assert table.block_tables[row, :3].tolist() == [9, 3, 7]


def test_a_reused_row_remembers_nothing(table):
    picture = MediaFeature(bytes(32), "image", 1, 6, 6, None, (1, 2, 3))
    table.add(new(1, 5, features=(picture,)), mrope=True)
    row = table.row_of(1)
    assert (table.tail_starts[row], table.tail_deltas[row]) == (7, -3)
    table.append_blocks(row, (9, 3))
    table.remove([1])
    table.add(new(2, 6), mrope=True)
    assert table.row_of(2) == row
    assert (table.tail_starts[row], table.tail_deltas[row]) == (0, 0)
    table.append_blocks(row, (4,))
    assert table.block_tables[row, 0] == 4


def test_what_is_appended_goes_on_where_the_sequence_ends(table):
    picture = MediaFeature(bytes(32), "image", 3, 6, 6, None, (1, 2, 3))
    table.add(new(1, 5, 6), mrope=True)
    table.write_tokens([1], [2], [7])
    table.extend(Extension(1, 3, np.arange(10, 16, dtype=np.int32), (picture,)))
    row = table.row_of(1)
    assert table.tokens[row, :9].tolist() == [5, 6, 7, *range(10, 16)]
    assert (table.tail_starts[row], table.tail_deltas[row]) == (9, -3)


def test_a_session_remembers_few_of_the_pictures_it_was_shown():
    table = InputBatch(max_num_seqs=1, max_model_len=20_000, block_size=4)
    table.add(new(1, 5), mrope=True)
    row, out = table.row_of(1), np.empty((3, 4), np.int64)
    sizes = set()
    for number in range(4_000):
        start = 1 + 4 * number
        picture = MediaFeature(bytes(32), "image", start, 4, 4, None, (1, 2, 2))
        table.extend(Extension(1, start, np.zeros(4, np.int32), (picture,)))
        table.fill_mrope(row, start, out)
        base = 1 + 2 * number
        assert out.tolist() == [
            [base, base, base, base],
            [base, base, base + 1, base + 1],
            [base, base + 1, base, base + 1],
        ]
        sizes.add(deep_size(table._positions[row]))
    assert max(sizes) < 10_000


def test_the_longest_sequence_has_room_for_its_last_sample(table):
    table.add(new(1, *range(16)), mrope=False)
    table.write_tokens([1], [16], [99])
    assert table.tokens[table.row_of(1), 16] == 99


def test_removed_sequences_are_unknown(table):
    table.add(new(1, 5), mrope=False)
    table.remove([1, 1, 2])
    assert len(table) == 0
    with pytest.raises(KeyError):
        table.row_of(1)


TEXT, IMAGE, AUDIO = 0, 1, 2


PARTS = st.lists(
    st.one_of(
        st.tuples(st.just(TEXT), st.integers(1, 9)),
        st.tuples(st.just(IMAGE), st.tuples(st.integers(1, 5), st.integers(1, 5))),
        st.tuples(st.just(AUDIO), st.integers(1, 12)),
    ),
    max_size=6,
)
TOKENS = SimpleNamespace(
    image_token_id=1,
    vision_start_token_id=2,
    vision_end_token_id=3,
    audio_token_id=4,
    audio_start_token_id=5,
    audio_end_token_id=6,
)


@pytest.fixture(scope="module")
def rope_models(folder):
    def load(kind: str):
        config = AutoConfig.from_pretrained(folder(kind))
        with torch.device("meta"):
            return AutoModelForMultimodalLM.from_config(config)

    return {kind: load(kind) for kind in ("qwen2_5_vl", "qwen2_5_omni")}


def layout(parts, config, *, sounds: bool):
    """Token ids, features and grids of parts that are separated as chat templates do."""
    ids, features, grids, frames = [11], [], [], []
    for kind, size in parts:
        if kind == TEXT:
            ids += [12] * size
        elif kind == IMAGE:
            height, width = size
            ids.append(config.vision_start_token_id)
            features.append(_feature("image", len(ids), height * width, (1, height, width)))
            ids += [config.image_token_id] * (height * width) + [config.vision_end_token_id]
            grids.append([1, 2 * height, 2 * width])
        elif sounds:
            ids.append(config.audio_start_token_id)
            features.append(_feature("audio", len(ids), size, None))
            ids += [config.audio_token_id] * size + [config.audio_end_token_id]
            frames.append(4 * size)
    return [*ids, 13], features, grids, frames


def _feature(modality, offset, length, grid):
    return MediaFeature(bytes(32), modality, offset, length, length, None, grid)


def reference(model, kind, ids, grids, frames):
    tokens, grid = torch.tensor([ids]), torch.tensor(grids) if grids else None
    if kind == "qwen2_5_vl":
        types = (tokens == model.config.image_token_id).int()
        found = model.model.get_rope_index(tokens, types, image_grid_thw=grid)
    else:
        mask = torch.ones_like(tokens)
        lengths = torch.tensor(frames) if frames else None
        found = model.get_rope_index(tokens, grid, None, mask, audio_seqlens=lengths)
    return found[0][:, 0].numpy()


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_5_omni"])
@given(parts=PARTS, start=st.floats(0, 1), size=st.floats(0, 1))
def test_any_window_equals_get_rope_index(rope_models, kind, parts, start, size):
    model = rope_models[kind]
    ids, features, grids, frames = layout(parts, model.config, sounds=kind == "qwen2_5_omni")
    if kind == "qwen2_5_omni" and not grids:
        return  # then Hugging Face numbers by the attention mask instead
    expected = reference(model, kind, ids, grids, frames)
    first = int(start * len(ids))
    last = first + int(size * (len(ids) - first))
    out = np.empty((3, last - first), np.int64)
    MropePositions(features).fill(first, out)
    np.testing.assert_array_equal(out, expected[:, first:last])


@given(parts=PARTS)
def test_decode_positions_go_on_after_the_largest_one(parts):
    ids, features, _, _ = layout(parts, TOKENS, sounds=True)
    positions = MropePositions(features)
    out = np.empty((3, len(ids) + 5), np.int64)
    positions.fill(0, out)
    largest = out[:, : len(ids)].max()
    np.testing.assert_array_equal(out[:, len(ids) :], largest + np.arange(1, 6) + np.zeros((3, 1)))
    assert positions.tail_start <= len(ids)
    assert positions.tail_delta == largest + 1 - len(ids)


@given(parts=PARTS, data=st.data())
def test_dropped_items_change_no_later_position(parts, data):
    ids, features, _, _ = layout(parts, TOKENS, sounds=True)
    expected = np.empty((3, len(ids) + 9), np.int64)
    MropePositions([*features, _feature("image", len(ids) + 1, 6, (1, 2, 3))]).fill(0, expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_batch, "SPARE_ITEMS", 1)
        positions, at = MropePositions(features), 0
        while at < len(ids):
            positions.forget_before(at)
            window = np.empty((3, data.draw(st.integers(1, len(ids) - at))), np.int64)
            positions.fill(at, window)
            np.testing.assert_array_equal(window, expected[:, at : at + window.shape[1]])
            at += window.shape[1]
        positions.forget_before(at)
        positions.append(_feature("image", len(ids) + 1, 6, (1, 2, 3)))
        window = np.empty((3, 9), np.int64)
        positions.fill(at, window)
        np.testing.assert_array_equal(window, expected[:, at:])


def test_dropped_positions_are_an_error():
    positions = MropePositions([_feature("image", 4 * n, 4, (1, 2, 2)) for n in range(40)])
    positions.forget_before(121)
    out = np.empty((3, 1), np.int64)
    positions.fill(121, out)
    with pytest.raises(RuntimeError, match="before 120 are forgotten"):
        positions.fill(119, out)


def test_items_appended_later_change_no_earlier_position():
    first = _feature("image", 3, 6, (1, 2, 3))
    positions = MropePositions([first])
    before = np.empty((3, 12), np.int64)
    positions.fill(0, before)
    positions.append(_feature("image", 12, 4, (1, 2, 2)))
    after = np.empty((3, 20), np.int64)
    positions.fill(0, after)
    np.testing.assert_array_equal(after[:, :12], before)


def test_the_picture_drawn_in_the_module_docstring():
    out = np.empty((3, 10), np.int64)
    MropePositions([_feature("image", 2, 6, (1, 2, 3))]).fill(0, out)
    assert out.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
