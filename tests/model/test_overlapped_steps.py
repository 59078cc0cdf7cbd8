"""Steps that are begun before the result of the last one is there: the answers are the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.device import StepReads, to_device
from lookonce.model.runner import Runner
from lookonce.model.sampled_tokens import SampledTokens
from lookonce.model.sampler import Sampler
from lookonce.model.step_inputs import StepInputBuilder
from lookonce.types.sampling import SamplingParams
from tests.support.device import ON_CUDA
from tests.support.model.cases import ALL_MODELS
from tests.support.model.serving import (
    answers,
    blocks_for_preemption,
    fork,
    loaded_with_cases,
    serve,
)
from tests.support.simulated_device import accelerator

VOCAB = 60


@dataclass
class Begun:
    """What was begun, and how much of it before the step ahead of it was waited for."""

    steps: int = 0
    ahead: int = 0
    under_way: int = 0


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    counted, begin = Begun(), Runner.begin

    def counting(self: Runner, plan) -> Callable:
        counted.steps += 1
        counted.ahead += counted.under_way > 0
        counted.under_way += 1
        finish = begin(self, plan)

        def finished():
            counted.under_way -= 1
            return finish()

        return finished

    monkeypatch.setattr(Runner, "begin", counting)
    return counted


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Refuse what waits while a step is begun."""

    def refuse(seen) -> None:
        begin = Runner.begin

        def watched(self: Runner, plan) -> Callable:
            before = seen.num_waits
            with seen.refusing():
                finish = begin(self, plan)
            assert seen.num_waits == before, "nothing is waited for between two steps"

            def finished():
                with seen.refusing():
                    return finish()

            return finished

        monkeypatch.setattr(Runner, "begin", watched)

    return refuse


@pytest.mark.parametrize("kind", ["llama", "llava", "qwen2_5_vl"] if ALL_MODELS else ["llava"])
def test_answers_are_those_of_steps_that_are_waited_for(kind, folder, begun):
    """Chunks, pictures, prefix hits and log-probabilities of prompts; then preemptions."""
    loaded, cases = loaded_with_cases(folder(kind))
    options = {"budget": 32, "prompt_logprobs": {0: 2}}
    expected = serve(loaded, cases, **options)
    found = serve(loaded, cases, overlapped=True, **options)
    assert answers(found) == answers(expected)
    assert found.scored == expected.scored
    assert found.reasons == expected.reasons
    assert begun.ahead > begun.steps // 2
    blocks = blocks_for_preemption(cases, 4)
    short = serve(loaded, cases, budget=512, num_blocks=blocks, overlapped=True)
    assert short.stats["num_preemptions_total"] > 0
    assert answers(short) == answers(expected)


def test_samples_of_one_request(folder, begun):
    loaded, cases = loaded_with_cases(folder("llava"))
    expected = fork(loaded, cases[0], 3, budget=64)
    found = fork(loaded, cases[0], 3, budget=64, overlapped=True)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert begun.ahead > 10


@pytest.mark.parametrize("kind", ["llama", "llava"] if ALL_MODELS else ["llava"])
def test_on_a_device_nothing_is_waited_for_between_two_steps(kind, folder, begun, refused):
    loaded, cases = loaded_with_cases(folder(kind))
    options = {"backend": ReferenceBackend(), "num_tokens": 6, "budget": 32}
    expected = serve(loaded, cases, **options)
    with accelerator() as (device, seen):
        there, _ = loaded_with_cases(folder(kind), str(device))
        refused(seen)
        found = serve(there, cases, overlapped=True, **options)
    assert answers(found) == answers(expected)
    assert begun.ahead > begun.steps // 2


@pytest.mark.skipif(ON_CUDA, reason="what is lost there is lost at random")
def test_tokens_that_were_not_taken_from_the_device_would_be_found(folder, monkeypatch):
    """The control: the next step computes what the host has for the token, which is nothing."""
    loaded, cases = loaded_with_cases(folder("llama"))
    expected = serve(loaded, cases, budget=32)
    monkeypatch.setattr(StepInputBuilder, "_feed", lambda *_: None)
    found = serve(loaded, cases, budget=32, overlapped=True)
    assert answers(found) != answers(expected)


PENALISED = {
    "all": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "drawn": SamplingParams(temperature=1.0, seed=3, presence_penalty=1.5, logprobs=2),
    "none": SamplingParams(temperature=0.0),
}


def draws(device: torch.device, seen=None, *, ahead: bool) -> list[list[int]]:
    """Eight tokens for each of `PENALISED`; with `ahead` each is told after the next was drawn.

    Logits are nearly flat, so that penalties decide.
    """
    generator = torch.Generator().manual_seed(4)
    steps = [torch.randn(len(PENALISED), VOCAB, generator=generator) for _ in range(8)]
    sampled = SampledTokens(device)
    sampler, seq_ids = Sampler(VOCAB, [], sampled), list(range(len(PENALISED)))
    for row, params in enumerate(PENALISED.values()):
        sampler.add(row, params, 0, [5, 9, 9], [])
    found, told = [], []
    with nullcontext() if seen is None else seen.refusing():
        for at, logits in enumerate(steps):
            step = sampled.begin_step()
            reads = StepReads(device)
            draw = sampler.begin(to_device(logits, device), seq_ids, [3 + at] * len(seq_ids), reads)
            sampled.note(seq_ids, draw.tokens)
            reads.close()
            told.append((reads, draw, step))
            while len(told) > ahead:
                reads, draw, step = told.pop(0)
                reads.wait()
                found.append(draw().token_ids)
                sampled.told(step)
    for reads, draw, _ in told:
        reads.wait()
        found.append(draw().token_ids)
    return found


def test_penalties_count_a_token_that_the_host_does_not_know():
    expected = draws(torch.device("cpu"), ahead=False)
    assert draws(torch.device("cpu"), ahead=True) == expected
    with accelerator() as (device, seen):
        assert draws(device, seen, ahead=True) == expected


def test_a_count_that_is_missing_would_be_found(monkeypatch):
    """The control of the last test."""
    expected = draws(torch.device("cpu"), ahead=False)
    monkeypatch.setattr(Sampler, "_untold", lambda *_: {})
    assert draws(torch.device("cpu"), ahead=True) != expected


def test_a_step_that_draws_nothing_takes_no_draws_of_the_next_one_along():
    """A chunk of a prompt is told after the step was begun that ends the prompt."""
    sampled = SampledTokens(torch.device("cpu"))
    chunk = sampled.begin_step()
    end = sampled.begin_step()
    sampled.note([7], [41])
    sampled.told(chunk)
    sampled.begin_step()
    assert sampled.tokens[sampled.rows[7]] == 41
    sampled.told(end)
    assert sampled.rows == {7: 0}, "it is an input of the step under way"
    sampled.begin_step()
    assert not sampled.rows
