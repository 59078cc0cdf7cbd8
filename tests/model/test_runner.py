"""The runner does what a plan says and nothing else: update the batch, encode, compute, sample."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from lookonce.config import ModelConfig
from lookonce.errors import DeviceLostError, RequestFailedError
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.loader import load_model
from lookonce.model.runner import HEAVY_KEYS, HEAVY_TOKENS, Runner, ThreadCounts
from lookonce.types import cpu
from lookonce.types.media import Array, Expansion, MediaFeature, ProcessedItem
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import (
    EmbedSlice,
    EncodeItem,
    NewSequence,
    ScheduledSequence,
    StepPlan,
)

BLOCK = 4
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def llama(folder):
    return load_model(ModelConfig(folder=str(folder("llama")), served_name="m"))


@pytest.fixture(scope="module")
def llava(folder):
    return load_model(ModelConfig(folder=str(folder("llava")), served_name="m"))


def make_runner(loaded, **options) -> Runner:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
    pages = loaded.kv_pages(64, BLOCK)
    return Runner(loaded, kv_pages=pages, backend=ReferenceBackend(), **sizes)


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 300, count).astype(np.int32)


def new(seq_id: int, ids: np.ndarray, sampling=GREEDY, **options) -> NewSequence:
    return NewSequence(seq_id, ids, len(ids), (), sampling, **options)


def whole(seq_id: int, ids: np.ndarray, first_block: int, **options) -> ScheduledSequence:
    """The whole prompt in one chunk, with room for two blocks of answer."""
    count = -(-len(ids) // BLOCK) + 2
    blocks = tuple(range(first_block, first_block + count))
    return ScheduledSequence(seq_id, 0, len(ids), blocks, sample=True, **options)


def decode(seq_id: int, start: int) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, 1, sample=True)


def item(value: float, rows: int = 16) -> ProcessedItem:
    pixels = np.full((3, 56, 56), value, np.float32)
    return ProcessedItem(
        "image",
        {"pixel_values": Array("float32", pixels.shape, pixels.tobytes())},
        Expansion(((3, rows),), 3),
    )


def answer(runner: Runner, ids: np.ndarray, count: int = 3, seq_id: int = 0) -> list[int]:
    """Greedy tokens of one sequence that runs alone."""
    plan = StepPlan(0, new=(new(seq_id, ids),), scheduled=(whole(seq_id, ids, 0),))
    found = list(runner.execute(plan).token_ids)
    for step in range(1, count):
        chunk = decode(seq_id, len(ids) + step - 1)
        found += runner.execute(StepPlan(step, scheduled=(chunk,))).token_ids
    return found


def test_a_batch_answers_as_each_sequence_alone(llama):
    prompts = [tokens(1, 9), tokens(2, 5), tokens(3, 14)]
    alone = [answer(make_runner(llama), ids) for ids in prompts]
    runner = make_runner(llama)
    plan = StepPlan(
        0,
        new=tuple(new(i, ids) for i, ids in enumerate(prompts)),
        scheduled=tuple(whole(i, ids, 20 * i) for i, ids in enumerate(prompts)),
    )
    found = [runner.execute(plan).token_ids]
    for step in range(2):
        chunks = tuple(decode(i, len(ids) + step) for i, ids in enumerate(prompts))
        found.append(runner.execute(StepPlan(step, scheduled=chunks)).token_ids)
    assert [list(column) for column in zip(*found, strict=True)] == alone


def test_a_preempted_sequence_goes_on_where_it_was(llama):
    prompt = tokens(1, 9)
    expected = answer(make_runner(llama), prompt, count=4)
    runner = make_runner(llama)
    so_far = np.array([*prompt, *answer(runner, prompt, count=2)], np.int32)
    again = msgspec.structs.replace(new(0, so_far), num_prompt_tokens=len(prompt))
    plan = StepPlan(9, finished=(0,), new=(again,), scheduled=(whole(0, so_far, 30),))
    assert list(runner.execute(plan).token_ids) == expected[2:3]


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing(llama):
    ids = tokens(1, 9)
    chunk = ScheduledSequence(0, 0, 5, (0, 1))
    result = make_runner(llama).execute(StepPlan(0, new=(new(0, ids),), scheduled=(chunk,)))
    assert result.token_ids == ()


def test_rows_of_removed_sequences_are_reused(llama):
    runner = make_runner(llama, max_num_seqs=1)
    first = answer(runner, tokens(1, 9), seq_id=1)
    runner.execute(StepPlan(8, finished=(1,)))
    answer(runner, tokens(2, 5), seq_id=2)
    runner.execute(StepPlan(9, finished=(2,)))
    assert answer(runner, tokens(1, 9), seq_id=3) == first


def test_removing_an_unknown_sequence_is_no_error(llama):
    assert make_runner(llama).execute(StepPlan(0, finished=(77,))).token_ids == ()


def test_only_rows_that_ask_get_logprobs(llama):
    first, second = tokens(1, 9), tokens(2, 5)
    asking = SamplingParams(temperature=0, logprobs=2)
    plan = StepPlan(
        0,
        new=(new(0, first), new(1, second, asking)),
        scheduled=(whole(0, first, 0), whole(1, second, 20)),
    )
    result = make_runner(llama).execute(plan)
    assert result.logprobs is not None
    assert result.logprobs[0] is None
    best, _ = result.logprobs[1].top
    assert best == (result.token_ids[1], result.logprobs[1].logprob)


def test_placeholder_ids_beyond_the_vocabulary_are_replaced(llava):
    ids = np.array([5, *[9999] * 16, 6], np.int32)
    embeds = (EmbedSlice(b"k", 0, 16, 1),)
    penalised = SamplingParams(temperature=0, repetition_penalty=1.1)
    plan = StepPlan(
        0,
        new=(new(0, ids, penalised),),
        encode=(EncodeItem(b"k", item(0.5)),),
        scheduled=(whole(0, ids, 0, embeds=embeds),),
    )
    result = make_runner(llava).execute(plan)
    assert not result.failed_sequences
    assert result.token_ids[0] >= 0
    assert result.encode_seconds[b"k"] > 0


def test_a_failing_item_leaves_its_own_sequence_uncomputed(llava):
    runner = make_runner(llava)
    with_item = np.array([5, *[3] * 16, 6], np.int32)
    plain = tokens(2, 5)
    alone = answer(make_runner(llava), plain, count=1)
    plan = StepPlan(
        0,
        new=(new(0, with_item), new(1, plain)),
        encode=(EncodeItem(b"bad", item(0.5, rows=7)),),
        scheduled=(
            whole(0, with_item, 0, embeds=(EmbedSlice(b"bad", 0, 16, 1),)),
            whole(1, plain, 20),
        ),
    )
    result = runner.execute(plan)
    assert list(result.failed_items) == [b"bad"]
    assert result.token_ids == (-1, *alone)
    assert not result.failed_sequences


def test_an_embedding_that_is_not_held_fails_its_sequence(llava):
    ids = np.array([5, *[3] * 16, 6], np.int32)
    embeds = (EmbedSlice(b"gone", 0, 16, 1),)
    plan = StepPlan(0, new=(new(0, ids),), scheduled=(whole(0, ids, 0, embeds=embeds),))
    result = make_runner(llava).execute(plan)
    assert isinstance(result.failed_sequences[0], RequestFailedError)
    assert result.token_ids == (-1,)


def test_an_embedding_that_one_of_several_ranks_lacks_ends_the_engine(llava):
    """The others may hold it, and compute a sequence that this one does not."""
    rank = dataclasses.replace(llava, group=SimpleNamespace(rank=1))
    ids = np.array([5, *[3] * 16, 6], np.int32)
    embeds = (EmbedSlice(b"gone", 0, 16, 1),)
    plan = StepPlan(0, new=(new(0, ids),), scheduled=(whole(0, ids, 0, embeds=embeds),))
    with pytest.raises(DeviceLostError, match="rank 1 lacks an encoder output"):
        make_runner(rank).execute(plan)


def test_a_sequence_that_breaks_the_model_fails_alone(llama):
    good, bad = tokens(1, 9), np.array([5, 10_000, 6], np.int32)
    alone = answer(make_runner(llama), good, count=1)
    plan = StepPlan(
        0,
        new=(new(0, good), new(1, bad)),
        scheduled=(whole(0, good, 0), whole(1, bad, 20)),
    )
    result = make_runner(llama).execute(plan)
    assert result.token_ids == (*alone, -1)
    assert list(result.failed_sequences) == [1]


def test_a_picture_whose_rows_are_not_numbers_fails_those_that_need_it(llava):
    ids = np.array([5, *[3] * 16, 6], np.int32)
    other = tokens(2, 5)
    plan = StepPlan(
        0,
        new=(new(0, ids), new(1, other)),
        encode=(EncodeItem(b"nan", item(float("nan"))),),
        scheduled=(
            whole(0, ids, 0, embeds=(EmbedSlice(b"nan", 0, 16, 1),)),
            whole(1, other, 20),
        ),
    )
    result = make_runner(llava).execute(plan)
    assert list(result.failed_items) == [b"nan"]
    assert result.token_ids[0] == -1
    assert result.token_ids[1] >= 0


def test_output_that_is_not_a_number_fails_its_sequence(llama, monkeypatch):
    ids, other = tokens(1, 3), tokens(2, 5)
    runner = make_runner(llama)
    sound = runner.logits

    def broken(inputs, seq_ids, hidden):
        logits = sound(inputs, seq_ids)
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(runner, "logits", broken)
    plan = StepPlan(
        0, new=(new(0, ids), new(1, other)), scheduled=(whole(0, ids, 0), whole(1, other, 20))
    )
    result = runner.execute(plan)
    assert list(result.failed_sequences) == [0]
    assert result.token_ids[0] == -1
    assert result.token_ids[1] >= 0


def test_results_are_plain_python(llama):
    ids = tokens(1, 3)
    result = make_runner(llama).execute(
        StepPlan(0, new=(new(0, ids),), scheduled=(whole(0, ids, 0),))
    )
    assert [type(token) for token in result.token_ids] == [int]
    assert not torch.is_inference_mode_enabled()


def test_min_tokens_hold_after_placeholder_ids_outside_the_vocabulary(llava):
    """Such ids are prompt like any other; what the model would end with stays forbidden."""
    size = llava.info.vocab_size
    ids = np.array([11, 12, size + 5, size + 5, size + 5, size + 5, 13], np.int32)
    feature = MediaFeature(bytes(32), "image", 2, 4, 4, None)
    embeds = (EmbedSlice(bytes(32), 0, 4, 2),)
    encode = (EncodeItem(bytes(32), item(0.5, rows=16)),)

    def first(sampling: SamplingParams) -> int:
        plan = StepPlan(
            0,
            new=(NewSequence(0, ids, len(ids), (feature,), sampling),),
            encode=encode,
            scheduled=(whole(0, ids, 0, embeds=embeds),),
        )
        return make_runner(llava).execute(plan).token_ids[0]

    favourite = first(GREEDY)
    stopping = SamplingParams(
        temperature=0, min_tokens=4, max_tokens=9, stop_token_ids=(favourite,)
    )
    assert first(stopping) != favourite


DECODE = StepPlan(0, scheduled=tuple(ScheduledSequence(number, 9, 1) for number in range(8)))
PREFILL = StepPlan(0, scheduled=(ScheduledSequence(0, 0, HEAVY_TOKENS),))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def on_cores(count: int, given: int, monkeypatch: pytest.MonkeyPatch) -> ThreadCounts:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    monkeypatch.setattr(cpu, "CGROUPS", Path("/no/such/folder"))
    torch.set_num_threads(given)
    return ThreadCounts.of_machine()


@pytest.mark.parametrize(
    ("cores", "given", "light", "heavy"),
    [(1, 1, 1, 1), (1, 4, 1, 1), (2, 2, 1, 2), (4, 4, 3, 4), (4, 2, 2, 2)],
)
def test_light_steps_leave_a_core_free_unless_a_number_of_threads_is_set(
    cores, given, light, heavy, monkeypatch
):
    assert on_cores(cores, given, monkeypatch) == ThreadCounts(light, heavy)
    assert torch.get_num_threads() == light


def test_a_long_chunk_uses_every_core_and_restores_the_number(monkeypatch):
    machine = on_cores(2, 2, monkeypatch)
    with machine.working_on(PREFILL):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1
    with machine.working_on(DECODE):
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("least", "threads"), [(1, 2), (1 << 40, 1)])
def test_every_step_of_a_large_model_uses_every_core(llama, monkeypatch, least, threads):
    monkeypatch.setattr("lookonce.model.runner.HEAVY_BYTES", least)
    runner = make_runner(llama, threads=on_cores(2, 2, monkeypatch))
    compute, used = runner.logits, set()

    def logits(*args):
        used.add(torch.get_num_threads())
        return compute(*args)

    monkeypatch.setattr(runner, "logits", logits)
    answer(runner, tokens(1, 9))
    assert used == {threads}


def decodes(count: int, context: int) -> StepPlan:
    return StepPlan(0, scheduled=tuple(ScheduledSequence(i, context - 1, 1) for i in range(count)))


SUFFIX = StepPlan(0, scheduled=(*decodes(8, 10).scheduled, ScheduledSequence(9, HEAVY_KEYS - 5, 5)))


@pytest.mark.parametrize(
    ("plan", "threads"),
    [
        (decodes(1, HEAVY_KEYS - 1), 1),
        (decodes(1, HEAVY_KEYS), 2),
        (decodes(2, HEAVY_KEYS), 1),
        (SUFFIX, 2),
    ],
    ids=["short context", "long context", "as many as threads", "end of a cached prompt"],
)
def test_few_tokens_over_long_contexts_use_every_core(plan, threads, monkeypatch):
    with on_cores(2, 2, monkeypatch).working_on(plan):
        assert torch.get_num_threads() == threads


def test_a_failing_step_restores_the_number_of_threads(monkeypatch):
    machine = on_cores(2, 2, monkeypatch)
    with pytest.raises(ZeroDivisionError), machine.working_on(PREFILL):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 1
