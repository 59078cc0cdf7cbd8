"""Greedy answers through scheduler and runner equal plain Hugging Face's, token for token."""

from __future__ import annotations

import pytest

from tests.model.serving import NUM_TOKENS, Subject, compare, make_subject, serve

KINDS = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gpt_oss"),
    *("llava", "qwen2_5_vl", "gemma3", "qwen2_5_omni", "nano"),
)
MAX_LOGIT_ERROR = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def subject(request, folder) -> Subject:
    return make_subject(folder(request.param))


def assert_parity(subject: Subject, served, report) -> None:
    difference = compare(served.answers, subject.expected)
    report("near_ties", difference.near_ties)
    assert difference.wrong == 0
    assert difference.max_logit_error < MAX_LOGIT_ERROR


@pytest.mark.parametrize("budget", [16, 23, 64])
def test_mixed_batches_and_prefix_hits_change_no_token(subject, budget, record_property):
    served = serve(subject.loaded, subject.cases, budget=budget)
    assert served.stats["prefix_cache_hits_total"] > 0
    assert_parity(subject, served, record_property)


def test_forced_preemption_changes_no_token(subject, record_property):
    longest = max(len(case.token_ids) for case in subject.cases) + NUM_TOKENS
    served = serve(subject.loaded, subject.cases, budget=32, num_blocks=longest // 4 + 1)
    assert served.stats["num_preemptions_total"] > 0
    assert_parity(subject, served, record_property)
