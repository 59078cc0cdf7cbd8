"""Attention metadata describes every token of a step, in buffers that keep their addresses."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.model.step_inputs import AttentionMetadataBuilder

BLOCK_SIZE = 4
TABLES = np.random.default_rng(0).permutation(60).astype(np.int32).reshape(6, 10)


def buffers() -> AttentionMetadataBuilder:
    return AttentionMetadataBuilder(
        max_num_seqs=6, max_num_tokens=100, max_blocks_per_seq=10, block_size=BLOCK_SIZE
    )


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(table row, new tokens, keys before them), rows distinct."""
    rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
    return [(row, draw(st.integers(1, 15)), draw(st.integers(0, 25))) for row in rows]


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_every_new_token_has_the_slot_its_block_table_gives_it(
    step: list[tuple[int, int, int]],
) -> None:
    metadata = buffers().build(
        [new for _, new, _ in step],
        [new + before for _, new, before in step],
        TABLES,
        rows=np.array([row for row, _, _ in step]),
    )
    slots, starts, ends = [], [0], [0]
    for index, (row, new, before) in enumerate(step):
        for position in range(before, before + new):
            block = TABLES[row, position // BLOCK_SIZE]
            slots.append(int(block) * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(starts[-1] + new)
        ends.append(ends[-1] + new + before)
        blocks = -(-(new + before) // BLOCK_SIZE)
        assert metadata.block_tables[index, :blocks].tolist() == TABLES[row, :blocks].tolist()
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.query_start.tolist() == starts
    assert metadata.kv_start.tolist() == ends
    assert metadata.kv_lens.tolist() == list(metadata.context_lens)
    assert metadata.num_tokens == len(slots)
    assert metadata.visible_end is None


def test_a_step_reuses_the_addresses_of_the_step_before() -> None:
    static = buffers()

    def addresses(lens: list[int]) -> list[int]:
        metadata = static.build(lens, [n + 3 for n in lens], TABLES)
        tensors = (
            metadata.query_start,
            metadata.kv_start,
            metadata.kv_lens,
            metadata.block_tables,
            metadata.slot_mapping,
        )
        return [tensor.data_ptr() for tensor in tensors]

    assert addresses([5, 1, 7]) == addresses([1])


def test_a_smaller_step_carries_nothing_over_from_a_larger_one() -> None:
    static = buffers()
    static.build([9, 9], [30, 35], TABLES, bidirectional=[[(22, 25)], []])
    metadata = static.build([1, 2], [6, 2], TABLES, num_decodes=1)
    fresh = buffers().build([1, 2], [6, 2], TABLES, num_decodes=1)
    assert metadata.visible_end is None
    assert metadata.query_start.tolist() == fresh.query_start.tolist() == [0, 1, 3]
    assert metadata.slot_mapping.tolist() == fresh.slot_mapping.tolist()
    assert metadata.num_decodes == 1


def test_tokens_of_an_item_see_to_its_end_and_others_to_themselves() -> None:
    metadata = buffers().build(
        [4, 6], [10, 6], TABLES, bidirectional=[[(0, 3), (7, 9)], [(0, 2), (3, 6)]]
    )
    assert metadata.visible_end is not None
    assert metadata.visible_end.dtype == torch.int32
    # Positions 6-9, of which 7 and 8 are an item; then 0-5, of which 0-1 and 3-5 are.
    assert metadata.visible_end.tolist() == [7, 9, 9, 10, 2, 2, 3, 6, 6, 6]


def test_an_item_that_ends_later_is_seen_as_far_as_there_are_keys() -> None:
    metadata = buffers().build([3], [5], TABLES, bidirectional=[[(3, 9)]])
    assert metadata.visible_end is not None
    assert metadata.visible_end.tolist() == [3, 5, 5]
