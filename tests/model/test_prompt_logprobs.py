"""Log-probabilities of prompts equal those of Hugging Face's own logits."""

from __future__ import annotations

import msgspec
import pytest
import torch

from lookonce.model import logits_processors, sampler
from lookonce.model.device import StepReads
from lookonce.types.request import PromptLogprob
from lookonce.types.step import StepPlan
from tests.support.model.cases import Case
from tests.support.model.serving import (
    NUM_TOKENS,
    compare,
    reference_model,
    reference_prompt_logits,
    serve,
)

KINDS = ("llama", "gemma2", "llava", "gemma3", "qwen2_5_vl", "nano")
TOP = 3
BLOCK = 4


@pytest.fixture(scope="module", params=KINDS)
def scene(request, subjects, folder):
    """A subject, and by case Hugging Face's logits [P, V] after each token of the prompt."""
    subject = subjects(request.param)
    model = reference_model(folder(request.param), subject.loaded.info)
    return subject, [reference_prompt_logits(model, case) for case in subject.cases]


def worst_error(found: list[PromptLogprob], case: Case, logits: torch.Tensor) -> float:
    """Largest difference of any log-probability told, and whether places are all there."""
    assert len(found) == len(case.token_ids) - 1
    expected = logits.log_softmax(dim=-1)
    errors = [0.0]
    for place, entry in enumerate(found):
        token, row = case.token_ids[place + 1], expected[place]
        if token < len(row):
            errors.append(abs(entry.logprob - row[token].item()))
            higher = (row > row[token] + 1e-4).sum().item(), (row > row[token] - 1e-4).sum().item()
            assert higher[0] < entry.rank <= max(higher[1], 1)
        else:
            assert entry.logprob == -float("inf")
        assert len(entry.top) == TOP
        best = row.topk(TOP).values.tolist()
        errors += [abs(value - row[other].item()) for other, value in entry.top]
        errors += [abs(value - b) for (_, value), b in zip(entry.top, best, strict=True)]
    return max(errors)


@pytest.mark.parametrize("budget", [16, 64])
def test_every_prompt_in_mixed_batches_past_prefixes_that_are_cached(scene, budget):
    """The last case repeats the first, whose blocks are cached by then."""
    subject, logits = scene
    last = len(subject.cases) - 1
    asked = dict.fromkeys((1, 2, last), TOP)
    served = serve(subject.loaded, subject.cases, budget=budget, prompt_logprobs=asked)
    assert served.scored.keys() == asked.keys()
    for index in asked:
        assert worst_error(served.scored[index], subject.cases[index], logits[index]) < 1e-4
    assert compare(served.answers, subject.expected).wrong == 0


def test_after_a_preemption_they_are_complete(subjects, folder):
    """The later prompt is preempted before or after it is computed; it is told once, whole."""
    subject = subjects("llama")
    cases = [subject.cases[1], subject.cases[0]]
    lengths = [len(case.token_ids) for case in cases]
    num_blocks = max((max(lengths) + NUM_TOKENS) // BLOCK + 1, sum(lengths) // BLOCK + 4)
    served = serve(
        subject.loaded, cases, budget=8, num_blocks=num_blocks, prompt_logprobs={0: TOP, 1: TOP}
    )
    assert served.stats["num_preemptions_total"] > 0
    model = reference_model(folder("llama"), subject.loaded.info)
    for index, case in enumerate(cases):
        expected = reference_prompt_logits(model, case)
        assert worst_error(served.scored[index], case, expected) < 1e-4


def test_a_large_vocabulary_is_scored_in_slices(scene, monkeypatch):
    subject, logits = scene
    monkeypatch.setattr(sampler, "SLICE_ELEMENTS", 3 * subject.loaded.info.vocab_size)
    served = serve(subject.loaded, subject.cases[:1], budget=64, prompt_logprobs={0: TOP})
    assert worst_error(served.scored[0], subject.cases[0], logits[0]) < 1e-4


def test_scores_of_the_wrong_place_would_be_seen(subjects, folder, monkeypatch):
    """Negative control: each token judged by the logits at its own place, not before it."""
    subject = subjects("llama")
    honest = sampler.PromptLogprobScorer.parts

    def shifted(self, chunks):
        return [part._replace(first=part.first + 1) for part in honest(self, chunks)]

    monkeypatch.setattr(sampler.PromptLogprobScorer, "parts", shifted)
    served = serve(subject.loaded, subject.cases[:1], budget=64, prompt_logprobs={0: TOP})
    model = reference_model(folder("llama"), subject.loaded.info)
    logits = reference_prompt_logits(model, subject.cases[0])
    expected = logits.log_softmax(dim=-1)
    tokens = subject.cases[0].token_ids
    wrong = [
        abs(e.logprob - expected[i, tokens[i + 1]].item()) for i, e in enumerate(served.scored[0])
    ]
    assert max(wrong) > 1e-2


def test_one_that_nobody_asked_for_is_not_scored(subjects):
    plans: list[StepPlan] = []

    def keep(plan: StepPlan) -> StepPlan:
        plans.append(plan)
        return plan

    subject = subjects("llama")
    served = serve(subject.loaded, subject.cases, budget=64, edit=keep)
    assert served.scored == {}
    assert all(new.sampling.prompt_logprobs is None for plan in plans for new in plan.new)


def scores_of(logits: torch.Tensor, token_ids: list[int], wanted: int) -> list[PromptLogprob]:
    reads = StepReads(logits.device)
    told = logits_processors.prompt_logprobs(logits, torch.tensor(token_ids), wanted, reads)
    reads.wait()
    return told()


def test_the_best_of_equals_share_a_rank_and_an_unknown_token_has_no_chance():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 4)
    found = scores_of(logits, [1, 2, 0, 9], 2)
    assert [entry.rank for entry in found] == [1, 1, 3, 5]
    assert found[3].logprob == -float("inf")
    assert all(len(entry.top) == 2 for entry in found)
    assert scores_of(logits[:1], [1], 0)[0].top == ()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=list[PromptLogprob]) == found
