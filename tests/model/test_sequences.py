"""Rows of running sequences: learnt, filled, forgotten, reused."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.items import deep_size
from lookonce.model.input_batch import SequenceTable
from lookonce.types.media import MediaFeature
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import Extension, NewSequence


@pytest.fixture
def table() -> SequenceTable:
    return SequenceTable(max_num_seqs=2, max_model_len=16, block_size=4)


def new(seq_id: int, *token_ids: int, features=()) -> NewSequence:
    ids = np.array(token_ids, np.int32)
    return NewSequence(seq_id, ids, len(ids), features, SamplingParams())


def test_tokens_are_copied(table):
    sequence = new(1, 5, 6, 7)
    table.learn(sequence, mrope=False)
    sequence.token_ids[:] = 0
    assert table.tokens[table.row_of(1), :3].tolist() == [5, 6, 7]


def test_blocks_are_appended(table):
    table.learn(new(1, 5), mrope=False)
    row = table.row_of(1)
    table.append_blocks(row, (9, 3))
    table.append_blocks(row, ())
    table.append_blocks(row, (7,))
    assert table.block_tables[row, :3].tolist() == [9, 3, 7]


def test_a_reused_row_remembers_nothing(table):
    picture = MediaFeature(bytes(32), "image", 1, 6, 6, None, (1, 2, 3))
    table.learn(new(1, 5, features=(picture,)), mrope=True)
    row = table.row_of(1)
    assert (table.tail_starts[row], table.tail_deltas[row]) == (7, -3)
    table.append_blocks(row, (9, 3))
    table.forget([1])
    table.learn(new(2, 6), mrope=True)
    assert table.row_of(2) == row
    assert (table.tail_starts[row], table.tail_deltas[row]) == (0, 0)
    table.append_blocks(row, (4,))
    assert table.block_tables[row, 0] == 4


def test_what_is_appended_goes_on_where_the_sequence_ends(table):
    picture = MediaFeature(bytes(32), "image", 3, 6, 6, None, (1, 2, 3))
    table.learn(new(1, 5, 6), mrope=True)
    table.write_tokens([1], [2], [7])
    table.extend(Extension(1, 3, np.arange(10, 16, dtype=np.int32), (picture,)))
    row = table.row_of(1)
    assert table.tokens[row, :9].tolist() == [5, 6, 7, *range(10, 16)]
    assert (table.tail_starts[row], table.tail_deltas[row]) == (9, -3)


def test_a_session_remembers_few_of_the_pictures_it_was_shown():
    table = SequenceTable(max_num_seqs=1, max_model_len=20_000, block_size=4)
    table.learn(new(1, 5), mrope=True)
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


def test_the_last_sample_of_a_full_sequence_has_room(table):
    table.learn(new(1, *range(16)), mrope=False)
    table.write_tokens([1], [16], [99])
    assert table.tokens[table.row_of(1), 16] == 99


def test_forgotten_sequences_are_unknown(table):
    table.learn(new(1, 5), mrope=False)
    table.forget([1, 1, 2])
    assert len(table) == 0
    with pytest.raises(KeyError):
        table.row_of(1)
