"""Grammars in the sampler: only what may come next is drawn, whatever else a row asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.model import logits_processors
from lookonce.model.logits_processors import FAILED
from lookonce.model.sampler import Sampler
from lookonce.types.sampling import SamplingParams
from tests.support.grammars import EOS, Spelled


def generate(
    sampler: Sampler, logits: torch.Tensor, seq_ids: list[int], steps: int, start: int = 0
) -> list[list[int]]:
    """[steps][sequence] tokens from position `start` on, the same logits at every step."""
    positions = range(start, start + steps)
    return [sampler.sample(logits, seq_ids, [at] * len(seq_ids)).token_ids for at in positions]


@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(st.lists(st.integers(4, 69), min_size=1, max_size=4), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    top_k=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 1000),
)
def test_only_words_of_the_grammar_are_said(words, temperature, top_k, seed):
    params = SamplingParams(
        temperature=temperature, top_k=top_k, seed=seed, repetition_penalty=1.2,
        logit_bias={5: 100.0, EOS: 50.0},
    )  # fmt: skip
    sampler = Sampler(70, [EOS])
    sampler.add(1, params, 0, [7], [], Spelled(words))
    logits = torch.randn(1, 70, generator=torch.Generator().manual_seed(seed))
    said = [row[0] for row in generate(sampler, logits, [1], 5, 1)]
    assert said[: said.index(EOS)] in words


def test_rows_beside_it_are_not_constrained():
    logits = torch.zeros(3, 40)
    logits[:, 9] = 5.0
    kept = logits.clone()
    sampler = Sampler(40, [EOS])
    greedy = SamplingParams(temperature=0.0)
    sampler.add(1, greedy, 0, [], [])
    sampler.add(2, greedy, 0, [], [], Spelled([[33, 7]]))
    sampler.add(3, greedy, 0, [], [])
    assert generate(sampler, logits, [1, 2, 3], 3) == [[9, 33, 9], [9, 7, 9], [9, EOS, 9]]
    assert torch.equal(logits, kept)


def test_after_a_preemption_it_goes_on_where_it_was():
    logits = torch.zeros(1, 40)
    sampler = Sampler(40, [EOS])
    sampler.add(1, SamplingParams(temperature=0.0), 0, [5, 5], [33, 7], Spelled([[33, 7, 8]]))
    assert generate(sampler, logits, [1], 2, 4) == [[8], [EOS]]


def test_a_grammar_that_gives_up_fails_its_own_row_and_says_why():
    logits = torch.zeros(2, 40)
    logits[:, 9] = 1.0
    sampler = Sampler(40, [EOS])
    greedy = SamplingParams(temperature=0.0)
    sampler.add(1, greedy, 0, [], [], Spelled([[6, 6]], gives_up_after=1))
    sampler.add(2, greedy, 0, [], [])
    assert sampler.sample(logits, [1, 2], [0, 0]).token_ids == [6, 9]
    second = sampler.sample(logits, [1, 2], [1, 1])
    assert second.token_ids == [FAILED, 9]
    assert list(second.errors) == [0]
    assert "too hard" in second.errors[0].message


def test_logprobs_are_of_the_model_not_of_the_grammar():
    logits = torch.zeros(1, 40)
    logits[0, 9] = 5.0
    sampler = Sampler(40, [EOS])
    sampler.add(1, SamplingParams(temperature=0.0, logprobs=1), 0, [], [], Spelled([[6]]))
    sampled = sampler.sample(logits, [1], [0])
    assert sampled.token_ids == [6]
    assert sampled.logprobs is not None
    entry = sampled.logprobs[0]
    assert entry is not None
    assert entry.top[0][0] == 9
    assert entry.logprob == pytest.approx(torch.log_softmax(logits, -1)[0, 6].item())


@pytest.mark.parametrize("vocab", [8, 31, 32, 33, 1000])
def test_bits_stand_for_tokens_in_order(vocab):
    rng = np.random.default_rng(vocab)
    allowed = rng.random((2, vocab)) < 0.5
    packed = np.zeros((2, logits_processors.mask_bytes(vocab)), np.uint8)
    bits = np.packbits(allowed, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    scores = torch.zeros(3, vocab)
    logits_processors.allow_only(scores, [2, 0], packed)
    assert torch.equal(scores[2].isfinite(), torch.from_numpy(allowed[0]))
    assert torch.equal(scores[0].isfinite(), torch.from_numpy(allowed[1]))
    assert scores[1].isfinite().all()
