"""Sampling against plain NumPy definitions; batches, seeds, penalties, failures."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lookonce.errors import BadRequestError
from lookonce.model import logits_processors
from lookonce.model.logits_processors import FAILED
from lookonce.model.native import compiled
from lookonce.model.sampler import Sampler, SamplerOutput
from lookonce.types.sampling import SamplingParams

EOS = 3
VOCAB = 40
GREEDY = SamplingParams(temperature=0.0)


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * spread


def sample_one(
    params: SamplingParams,
    logits: torch.Tensor,
    *,
    sample_index: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> SamplerOutput:
    """One row, at the position after `output`."""
    sampler = Sampler(logits.shape[-1], [EOS])
    sampler.add(1, params, sample_index, list(prompt), list(output))
    return sampler.sample(logits.view(1, -1), [1], [len(prompt) + len(output)])


def draw_many(params: SamplingParams, logits: torch.Tensor, count: int) -> np.ndarray:
    """Token counts [V] of `count` draws with as many seeds."""
    sampler = Sampler(logits.shape[-1], [EOS])
    for seq_id in range(count):
        seeded = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seq_id,
        )
        sampler.add(seq_id, seeded, 0, [], [])
    drawn = sampler.sample(logits.view(1, -1).repeat(count, 1), range(count), [0] * count)
    return np.bincount(drawn.token_ids, minlength=logits.shape[-1])


def expected_probs(params: SamplingParams, logits: torch.Tensor) -> np.ndarray:
    """The definition: temperature, min-p, top-k, then top-p on what is left."""
    scores = logits.double().numpy() / params.temperature
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.top_p]] = 0
    return probs / probs.sum()


FILTERS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.6),
    "min-p": SamplingParams(min_p=0.1),
    "top-k within which top-p": SamplingParams(top_k=8, top_p=0.7),
    "all": SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    "narrowest": SamplingParams(top_p=1e-6),
}


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits, count = logits_of(1), 4000
    seen, wanted = draw_many(params, logits[0], count), expected_probs(params, logits[0])
    assert seen[wanted == 0].sum() == 0
    deviation = np.abs(seen - count * wanted)
    assert (deviation <= 5 * np.sqrt(count * wanted * (1 - wanted)) + 1).all()


def test_control_the_bounds_notice_a_wrong_temperature() -> None:
    logits, count = logits_of(1), 4000
    seen = draw_many(SamplingParams(temperature=0.8), logits[0], count)
    wanted = expected_probs(FILTERS["temperature"], logits[0])
    deviation = np.abs(seen - count * wanted)
    assert (deviation > 5 * np.sqrt(count * wanted * (1 - wanted)) + 1).any()


@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([5, 513, 5000]),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    top_k=st.sampled_from([0, 1, 3, 100, 3000]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
@settings(max_examples=60, deadline=None)
def test_filters_keep_exactly_what_the_definition_keeps(
    seed: int, vocab: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Uniform numbers spread over [0, 1) fall on the tokens whose share of it they are."""
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    logits = logits_of(seed, vocab=vocab, spread=spread)
    wanted = expected_probs(params, logits[0])
    uniform = np.linspace(0, 1, 64, endpoint=False)
    row = logits_processors.RowFilter.from_params(params)
    drawn = logits_processors.draw(logits.repeat(64, 1), [row] * 64, uniform)
    running = np.cumsum(wanted)
    # Up to rounding, which may move a token over the edge of the nucleus.
    for number, token in zip(uniform, drawn, strict=True):
        assert running[token] - wanted[token] - 2e-3 <= number <= running[token] + 2e-3


def test_rows_with_different_parameters_share_a_batch() -> None:
    sampler = Sampler(VOCAB, [EOS])
    every = [GREEDY, *FILTERS.values(), GREEDY]
    for seq_id, params in enumerate(every):
        sampler.add(seq_id, params, 0, [], [])
    logits = logits_of(7, rows=len(every))
    drawn = sampler.sample(logits, range(len(every)), [0] * len(every))
    for row, (params, token) in enumerate(zip(every, drawn.token_ids, strict=True)):
        if params.greedy:
            assert token == int(logits[row].argmax())
        else:
            assert expected_probs(params, logits[row])[token] > 0


def test_a_seeded_request_draws_the_same_alone_in_a_crowd_and_after_preemption() -> None:
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=11, presence_penalty=0.5)
    steps = [logits_of(step, vocab=6000) for step in range(12)]

    def run(crowd: int, preempt_at: int | None) -> list[int]:
        sampler = Sampler(6000, [EOS])
        sampler.add(0, params, 0, [5, 6], [])
        for other in range(1, crowd + 1):
            sampler.add(other, SamplingParams(temperature=other / 2, top_k=other), 0, [], [])
        output: list[int] = []
        for step, logits in enumerate(steps):
            if step == preempt_at:
                sampler.remove(0)
                sampler.add(0, params, 0, [5, 6], output)
            batch = torch.cat([*(logits_of(99 + step, crowd, 6000).split(1)), logits])
            ids = [*range(1, crowd + 1), 0]
            output.append(sampler.sample(batch, ids, [step] * crowd + [2 + step]).token_ids[-1])
        return output

    alone = run(0, None)
    assert len(set(alone)) > 3
    assert run(9, None) == alone
    assert run(3, 5) == alone


def test_samples_of_one_request_draw_with_seed_plus_index() -> None:
    logits = logits_of(2, spread=0.3)
    params = SamplingParams(seed=40)
    second = [sample_one(params, logits, sample_index=1, output=[0] * i) for i in range(8)]
    shifted = [sample_one(SamplingParams(seed=41), logits, output=[0] * i) for i in range(8)]
    first = [sample_one(params, logits, output=[0] * i) for i in range(8)]
    assert second == shifted
    assert second != first


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_any_64_bit_seed_works(seed: int) -> None:
    params = SamplingParams(seed=seed)
    logits = logits_of(3)
    assert sample_one(params, logits, sample_index=5) == sample_one(params, logits, sample_index=5)


def test_without_a_seed_requests_differ() -> None:
    logits = torch.zeros(1, 5000)
    drawn = {sample_one(SamplingParams(), logits).token_ids[0] for _ in range(20)}
    assert len(drawn) > 10


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    many = np.arange(20_000)
    for numbers in (
        logits_processors.uniforms(many.tolist(), [7] * len(many)),
        logits_processors.uniforms([7] * len(many), many.tolist()),
    ):
        assert ((numbers >= 0) & (numbers < 1)).all()
        histogram = np.histogram(numbers, 20, (0, 1))[0]
        assert np.abs(histogram - 1000).max() < 150
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def penalised(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    """vLLM's definition, token by token."""
    scores = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        scores[token] *= (
            1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        )
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token)
        scores[token] -= params.presence_penalty
    return scores


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
EXTREMES = (
    *(0.0, 5e-324, 1e-300, 1e-45, 1e-38, 1e-30, 1e-5, 1.1e-5, 0.01, 0.5, 1.0, 2.0, 100.0),
    *(3e38, 4e38, 1e300, math.inf, math.nan),
)


@given(
    seed=st.integers(0, 10**6),
    values=st.fixed_dictionaries(
        {},
        optional={
            name: st.sampled_from([sign * x for x in EXTREMES for sign in (1, -1)]) | st.floats()
            for name in (*NUMBERS, "repetition_penalty", "bias")
        },
    ),
    spread=st.sampled_from([0.01, 2.0, 100.0]),
    is_compiled=st.booleans(),
)
@example(seed=0, values={"repetition_penalty": 1e-300}, spread=2.0, is_compiled=True)
@example(
    seed=0,
    values={"repetition_penalty": 0.01, "temperature": 1e-5},
    spread=100.0,
    is_compiled=False,
)
@example(seed=0, values={"top_p": 1e-300, "min_p": 1e-300}, spread=2.0, is_compiled=False)
@settings(max_examples=300, deadline=None)
def test_any_numbers_are_refused_by_name_or_give_a_token(
    seed: int, values: dict[str, float], spread: float, is_compiled: bool
) -> None:
    """No number that is taken makes scores infinite: the row would fail, which is a 500."""
    named = {name: value for name, value in values.items() if name != "bias"}
    biases = {token: values["bias"] for token in (1, 2) if "bias" in values}
    refusal = None
    try:
        params = SamplingParams(seed=seed, logprobs=2, logit_bias=biases or None, **named)
    except BadRequestError as error:
        refusal = error
    if refusal is not None:
        assert refusal.param in {*named, "logit_bias" if biases else ""}
        assert refusal.message.startswith(str(refusal.param))
        return
    logits = logits_of(seed, spread=spread)
    kernels = compiled.kernels if is_compiled else None
    with mock.patch.object(compiled, "kernels", kernels):
        found = sample_one(params, logits, prompt=range(VOCAB), output=[1, 1, 2])
    assert 0 <= found.token_ids[0] < VOCAB
    assert found.logprobs is not None
    assert found.logprobs[0] is not None
    assert math.isfinite(found.logprobs[0].logprob)


@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    frequency=st.sampled_from([0.0, 0.7, -0.5]),
    presence=st.sampled_from([0.0, 1.1]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
)
@settings(max_examples=80, deadline=None)
def test_penalties_and_bias_follow_their_definitions(
    seed: int,
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias or None,
    )
    logits = logits_of(seed)
    biased = logits[0].numpy().copy()
    for token, value in bias.items():
        biased[token] += value
    scores = penalised(biased, params, prompt, output)
    token = sample_one(params, logits, prompt=prompt, output=output).token_ids[0]
    assert scores[token] == pytest.approx(scores.max(), abs=1e-4)


@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    appended=st.lists(st.integers(0, VOCAB + 5), min_size=1, max_size=20),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    presence=st.sampled_from([0.0, 1.1]),
)
@settings(max_examples=60, deadline=None)
def test_what_a_session_is_given_counts_as_prompt(
    seed: int, prompt: list[int], appended: list[int], repetition: float, presence: float
) -> None:
    """A token is drawn, more is given (ids outside the vocabulary too), and one is drawn again."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=repetition, presence_penalty=presence
    )
    sampler = Sampler(VOCAB, [EOS])
    sampler.add(1, params, 0, prompt, [])
    logits = logits_of(seed)
    drawn = sampler.sample(logits, [1], [len(prompt)]).token_ids
    sampler.extend(1, len(prompt) + 1, np.array(appended, np.int32))
    again = sampler.sample(logits, [1], [len(prompt) + 1 + len(appended)]).token_ids[0]
    known = [token for token in prompt + appended if token < VOCAB]
    scores = penalised(logits[0].numpy(), params, known, drawn)
    assert scores[again] == pytest.approx(scores.max(), abs=1e-4)


def test_min_tokens_count_from_the_end_of_what_a_session_is_given() -> None:
    sampler = Sampler(VOCAB, [EOS])
    sampler.add(1, SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9), 0, [5, 6], [])
    logits = torch.zeros(1, VOCAB).index_fill_(1, torch.tensor([EOS]), 1.0)
    ended = [sampler.sample(logits, [1], [at]).token_ids == [EOS] for at in (2, 3, 4)]
    sampler.extend(1, 5, np.array([7, 8, 9], np.int32))
    ended += [sampler.sample(logits, [1], [at]).token_ids == [EOS] for at in (8, 9, 10)]
    assert ended == [False, False, True] * 2


def test_generated_tokens_are_counted_as_they_come() -> None:
    """Greedy with a strong presence penalty walks down the ranking and never repeats."""
    sampler = Sampler(VOCAB, [EOS])
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    sampler.add(1, params, 0, [], [])
    logits = torch.linspace(0, 1, VOCAB).view(1, -1)
    drawn = [sampler.sample(logits, [1], [step]).token_ids[0] for step in range(VOCAB)]
    assert drawn == list(reversed(range(VOCAB)))


def test_placeholder_ids_outside_the_vocabulary_are_passed_over() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias={VOCAB + 9: 50.0})
    logits = logits_of(4)
    drawn = sample_one(params, logits, prompt=[VOCAB, VOCAB + 7, -1])
    assert drawn.token_ids == [int(logits.argmax())]


def test_no_stop_token_comes_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(8,), max_tokens=9)
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 8, 20]] = torch.tensor([9.0, 8.0, 7.0])
    drawn = [
        sample_one(params, logits, prompt=[1], output=[20] * count).token_ids[0]
        for count in range(3)
    ]
    assert drawn == [20, 20, EOS]


def test_logprobs_are_of_the_raw_logits_whatever_the_sampling() -> None:
    params = SamplingParams(
        temperature=0.3, top_k=4, logit_bias={1: 3.0}, presence_penalty=1.0, logprobs=6, seed=1
    )
    logits = logits_of(5, vocab=6001)
    drawn = sample_one(params, logits, output=[2, 2])
    assert drawn.logprobs is not None
    entry = drawn.logprobs[0]
    assert entry is not None
    wanted = torch.log_softmax(logits[0], -1)
    assert entry.logprob == pytest.approx(float(wanted[drawn.token_ids[0]]), abs=1e-5)
    best = wanted.topk(6)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_only_rows_that_ask_get_logprobs_and_as_many_as_they_ask_for() -> None:
    sampler = Sampler(VOCAB, [EOS])
    for seq_id, count in enumerate([None, 0, 3]):
        sampler.add(seq_id, SamplingParams(temperature=0.0, logprobs=count), 0, [], [])
    drawn = sampler.sample(logits_of(6, rows=3), [0, 1, 2], [0, 0, 0])
    assert drawn.logprobs is not None
    assert drawn.logprobs[0] is None
    assert [len(entry.top) for entry in drawn.logprobs[1:] if entry is not None] == [0, 3]
    sampler.remove(1)
    sampler.remove(2)
    assert sampler.sample(logits_of(6), [0], [1]).logprobs is None


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, min_p=0.1, logprobs=2)]
)
def test_a_row_that_is_not_finite_fails_alone(broken: float, params: SamplingParams) -> None:
    logits = logits_of(8, rows=3)
    logits[1, 17] = broken
    sampler = Sampler(VOCAB, [EOS])
    for seq_id in range(3):
        sampler.add(seq_id, params, 0, [], [])
    drawn = sampler.sample(logits, [0, 1, 2], [0, 0, 0])
    assert drawn.token_ids[1] == FAILED
    assert all(0 <= drawn.token_ids[row] < VOCAB for row in (0, 2))
    if drawn.logprobs is not None:
        assert [entry is None for entry in drawn.logprobs] == [False, True, False]


def test_the_logits_are_left_as_they_were() -> None:
    logits = logits_of(9)
    before = logits.clone()
    sample_one(
        SamplingParams(top_k=3, min_p=0.1, logit_bias={1: 2.0}, presence_penalty=1.0, min_tokens=4),
        logits,
        output=[1],
    )
    assert torch.equal(logits, before)


def test_a_removed_sequence_may_come_back_with_other_parameters() -> None:
    sampler = Sampler(VOCAB, [EOS])
    sampler.add(1, SamplingParams(temperature=0.0, logit_bias={5: 100.0}), 0, [], [])
    logits = logits_of(10)
    assert sampler.sample(logits, [1], [0]).token_ids == [5]
    sampler.remove(1)
    sampler.remove(1)
    sampler.add(1, GREEDY, 0, [], [])
    assert sampler.sample(logits, [1], [0]).token_ids == [int(logits.argmax())]


@given(
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([300, 6001, 20_000]),
    count=st.integers(1, 9),
)
@settings(max_examples=30, deadline=None)
def test_the_largest_of_many_are_the_largest(seed: int, vocab: int, count: int) -> None:
    scores = logits_of(seed, rows=2, vocab=vocab)
    values, ids = logits_processors.largest(scores, count)
    wanted = scores.topk(count)
    assert torch.equal(values, wanted.values)
    assert torch.equal(ids, wanted.indices)


def test_equal_logits_are_kept_together() -> None:
    """bf16 weights give many ties: which of them a top-k keeps must not hang on sorting."""
    logits = torch.zeros(VOCAB)
    logits[[4, 9, 30]] = 2.0
    seen = draw_many(SamplingParams(top_k=2), logits, 300)
    assert set(np.flatnonzero(seen)) == {4, 9, 30}


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=4.0, seed=1)])
def test_only_allowed_tokens_are_sampled(params):
    allowed = msgspec.structs.replace(params, allowed_token_ids=(7, 9))
    sampler = Sampler(VOCAB, [EOS])
    for seq_id in range(20):
        sampler.add(seq_id, allowed if seq_id % 2 else params, seq_id, [], [])
    logits = logits_of(5, rows=20)
    logits[:, 9] = -20.0  # also the unlikely one is kept
    drawn = sampler.sample(logits, range(20), [0] * 20).token_ids
    assert set(drawn[1::2]) <= {7, 9}
    assert not set(drawn[::2]) <= {7, 9}


@pytest.mark.parametrize(
    "named", [{"logit_bias": dict.fromkeys(range(50000), 1.0)},
              {"allowed_token_ids": tuple(range(50_000))}]
)  # fmt: skip
def test_tokens_that_a_request_names_are_read_once_for_all_its_samples_and_steps(
    monkeypatch, named
) -> None:
    """They were converted for each sample in each step, which all tenants wait for."""
    num_read = 0
    of = logits_processors.NamedTokens.of

    def counted(*given: object) -> logits_processors.NamedTokens:
        nonlocal num_read
        num_read += 1
        return of(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(logits_processors.NamedTokens, "of", counted)
    params = SamplingParams(temperature=0.0, **named)
    sampler = Sampler(50_000, [EOS])
    for seq_id in range(4):
        sampler.add(seq_id, params, seq_id, [], [])
    logits = logits_of(5, rows=4, vocab=50_000)
    sampler.sample(logits, range(4), [0] * 4)
    tracemalloc.start()
    drawn = sampler.sample(logits, range(4), [1] * 4).token_ids
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drawn == logits.argmax(-1).tolist()
    assert num_read == 1
    assert peak < 4 * 50_000 * 24  # rows, columns and values of arrays; not a dict for each row
