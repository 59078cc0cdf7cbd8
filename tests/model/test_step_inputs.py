"""Compiled code builds a decode step exactly as NumPy does, and leaves other steps to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.model import step_inputs
from lookonce.model.input_batch import InputBatch
from lookonce.model.step_inputs import StepInputBuilder, StepInputs
from lookonce.types.media import MediaFeature
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import NewSequence, ScheduledSequence

pytestmark = pytest.mark.skipif(step_inputs.fill_decodes is None, reason="it was not compiled")

BLOCK = 4
MAX_LEN = 40
MAX_SEQS = 6


def builder(axes: int, lengths: list[int], picture_at: list[int | None]) -> StepInputBuilder:
    """Sequence i has `lengths[i]` tokens, and a picture of six if it is to have one."""
    table = InputBatch(max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, block_size=BLOCK)
    for seq_id, (length, at) in enumerate(zip(lengths, picture_at, strict=True)):
        features = ()
        if at is not None:
            features = (MediaFeature(bytes(32), "image", at, 6, 6, None, (1, 2, 3)),)
        ids = np.arange(length, dtype=np.int32) + 100 * seq_id
        table.add(NewSequence(seq_id, ids, length, features, SamplingParams()), mrope=axes > 1)
        blocks = tuple(range(20 * seq_id, 20 * seq_id + -(-length // BLOCK)))
        table.append_blocks(table.row_of(seq_id), blocks)
    return StepInputBuilder(
        table,
        position_axes=axes,
        max_num_seqs=MAX_SEQS,
        max_num_tokens=64,
        block_size=BLOCK,
        device=torch.device("cpu"),
    )


def as_lists(inputs: StepInputs) -> dict[str, object]:
    metadata = inputs.metadata
    count = metadata.num_sequences
    blocks = [-(-length // BLOCK) for length in metadata.context_lens]
    return {
        "token_ids": inputs.token_ids.tolist(),
        "position_ids": inputs.position_ids.tolist(),
        "lens": (metadata.num_tokens, metadata.num_decodes, metadata.query_lens),
        "context": metadata.context_lens,
        "starts": (metadata.query_start.tolist(), metadata.kv_start.tolist()),
        "kv_lens": metadata.kv_lens.tolist(),
        "tables": [metadata.block_tables[i, : blocks[i]].tolist() for i in range(count)],
        "slots": metadata.slot_mapping.tolist(),
        "rest": (inputs.embeds, inputs.embed_at, inputs.sample_rows, metadata.visible_end),
    }


@given(
    axes=st.sampled_from([1, 3, 4]),
    lengths=st.lists(st.integers(1, MAX_LEN - 1), min_size=1, max_size=MAX_SEQS),
    data=st.data(),
)
def test_a_decode_step_is_the_same_either_way(axes, lengths, data):
    places = [
        data.draw(st.none() | st.integers(0, length - 6)) if length > 6 else None
        for length in lengths
    ]
    order = data.draw(st.permutations(range(len(lengths))))
    chunks = [
        ScheduledSequence(seq_id, lengths[seq_id] - 1, 1, sample=True)
        for seq_id in order[: data.draw(st.integers(1, len(lengths)))]
    ]
    compiled = as_lists(builder(axes, lengths, places).build(chunks))
    assert compiled == as_lists(builder(axes, lengths, places)._build_any(chunks))


def test_one_buffer_serves_step_after_step():
    inputs = builder(3, [9, 5, 30], [None, None, None])
    inputs.build([ScheduledSequence(2, 0, 30, sample=True), ScheduledSequence(1, 0, 5)])
    chunks = [ScheduledSequence(0, 8, 1, sample=True), ScheduledSequence(1, 4, 1, sample=True)]
    fresh = builder(3, [9, 5, 30], [None, None, None])
    assert as_lists(inputs.build(chunks)) == as_lists(fresh._build_any(chunks))


def test_a_token_within_its_picture_takes_the_general_way():
    inputs = builder(3, [9], [2])
    token = ScheduledSequence(0, 5, 1, sample=True)
    assert inputs._build_decodes([token]) is None
    assert inputs._build_decodes([ScheduledSequence(0, 8, 1, sample=True)]) is not None


@pytest.mark.parametrize("start", [-1, MAX_LEN + 1, 2**40])
def test_an_index_outside_the_table_is_an_error_not_a_write(start):
    with pytest.raises(IndexError, match="sequence 0 is out of range"):
        builder(1, [9], [None])._build_decodes([ScheduledSequence(0, start, 1, sample=True)])


def test_arrays_of_another_layout_are_refused():
    arrays = list(builder(1, [9], [None])._decode_arrays)
    arrays[0] = arrays[0].astype(np.int64)
    with pytest.raises(ValueError, match="array 0 has another type or layout"):
        step_inputs.fill_decodes([0], [8], BLOCK, *arrays)
