"""Whisper's rules for tokens, and alignment by attention, equal those of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.generation_whisper import (
    _dynamic_time_warping,
    _median_filter,
)

from lookonce.errors import BadRequestError
from lookonce.model.alignment import aligned_positions, dynamic_time_warping
from lookonce.model.logits_processors import TokenRuleState
from lookonce.model.sampler import Sampler
from lookonce.types.sampling import Alignment, SamplingParams, TokenRules

VOCAB, END, NO_TIMES = 40, 20, 24
RULES = TokenRules(timestamp_begin=NO_TIMES + 1, max_initial_timestamp=4, text_end=END)
PROMPT = [21, 22]


@given(
    output=st.lists(st.integers(0, VOCAB - 1).filter(lambda token: token != END), max_size=6),
    seed=st.integers(0, 99),
    favour=st.sampled_from([0.0, 3.0, -3.0]),
)
def test_the_rules_for_timestamps_are_transformers_own(output, seed, favour) -> None:
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    scores[NO_TIMES + 1 :] += favour
    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMES,
        eos_token_id=END,
        bos_token_id=END,
        max_initial_timestamp_index=4,
    )
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    expected = theirs(torch.tensor([PROMPT + output]), scores[None].clone())[0]
    TokenRuleState(RULES, output, VOCAB).apply(scores)
    assert torch.equal(scores, expected)


def test_suppressed_and_only_tokens() -> None:
    rules = TokenRules(suppressed=(1, 99), suppressed_first=(2,))
    first, later = torch.zeros(4), torch.zeros(4)
    TokenRuleState(rules, [], 4).apply(first)
    TokenRuleState(rules, [3], 4).apply(later)
    assert first.isinf().tolist() == [False, True, True, False]
    assert later.isinf().tolist() == [False, True, False, False]
    one = torch.zeros(4)
    TokenRuleState(TokenRules(only=(2, 99)), [], 4).apply(one)
    assert one.isinf().tolist() == [True, True, False, True]


def test_rules_that_name_no_token_of_the_vocabulary_suppress_nothing_and_allow_nothing() -> None:
    scores = torch.zeros(4)
    TokenRuleState(TokenRules(suppressed=(99,), suppressed_first=(2**70,)), [], 4).apply(scores)
    assert not scores.isinf().any()
    TokenRuleState(TokenRules(only=(99,)), [], 4).apply(scores)
    assert scores.isinf().all()


def test_log_probabilities_are_under_the_rules_but_raw_for_forced_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 0.5]])
    plain = logits.log_softmax(-1)[0]
    for rules, token, expected in [
        (TokenRules(only=(3,)), 3, float(plain[3])),
        (TokenRules(suppressed=(1,)), 0, float(logits[0, [0, 2, 3]].log_softmax(-1)[0])),
    ]:
        sampler = Sampler(4, [])
        params = SamplingParams(temperature=0, logprobs=0, token_rules=rules)
        sampler.add(7, params, 0, [1], [])
        drawn = sampler.sample(logits, [7], [1])
        assert drawn.token_ids == [token]
        assert drawn.logprobs is not None
        assert drawn.logprobs[0] is not None
        assert drawn.logprobs[0].logprob == pytest.approx(expected)


def test_a_sequence_that_is_added_again_remembers_what_it_wrote() -> None:
    sampler, logits = Sampler(VOCAB, []), torch.zeros(1, VOCAB)
    logits[0, 3] = 9.0
    params = SamplingParams(temperature=0, token_rules=RULES)
    sampler.add(1, params, 0, PROMPT, [])
    sampler.add(2, params, 0, PROMPT, [NO_TIMES + 1])
    assert sampler.sample(logits, [1], [2]).token_ids[0] > NO_TIMES
    assert sampler.sample(logits, [2], [3]).token_ids == [3]


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 17), (20, 4), (12, 60)])
def test_time_warping_finds_transformers_path(shape) -> None:
    matrix = np.random.default_rng(shape[1]).standard_normal(shape)
    matrix = matrix.round(1)  # with ties
    for ours, theirs in zip(
        dynamic_time_warping(matrix), _dynamic_time_warping(matrix), strict=True
    ):
        assert ours.tolist() == theirs.tolist()


def test_positions_are_those_of_the_smoothed_mean_of_the_heads() -> None:
    weights = torch.rand(3, 9, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    alignment = Alignment(heads=((0, 0), (0, 1), (0, 2)), start=0, positions=40)
    cut = weights[..., :40]
    std, mean = torch.std(cut, dim=-2, keepdim=True, unbiased=False), cut.mean(-2, keepdim=True)
    matrix = _median_filter((cut - mean) / std, 7).mean(dim=0)
    texts, times = _dynamic_time_warping(-matrix.double().numpy())
    jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
    assert aligned_positions(weights, alignment) == times[jumps].tolist()


def test_an_alignment_that_makes_no_sense_is_refused() -> None:
    twice, outside = ((0, 0), (0, 0)), ((0, -1),)
    too_many = tuple((layer, 0) for layer in range(5000))
    wrong_heads = [{"heads": heads} for heads in ((), twice, outside, too_many)]
    for wrong in (*wrong_heads, {"positions": 0}, {"filter_width": 4}, {"start": -1}):
        with pytest.raises(BadRequestError):
            Alignment(**{"heads": ((0, 0),), "start": 0, "positions": 9, **wrong})
    good = Alignment(heads=((0, 0),), start=0, positions=9)
    with pytest.raises(BadRequestError, match="prompt_logprobs"):
        SamplingParams(alignment=good)
