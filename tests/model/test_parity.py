"""Greedy answers through scheduler and runner equal plain Hugging Face's, token for token.

With some kinds of model and one budget of tokens; in `make test-models` with all.
"""

from __future__ import annotations

import json

import pytest

from lookonce.types.model import ENCODER_DECODER, SUPPORTED
from tests.support.model.cases import ALL_MODELS, COMPARED, KINDS, MAX_LOGIT_ERROR
from tests.support.model.listed import assert_as_listed
from tests.support.model.serving import Subject, blocks_for_preemption, compare, serve

BLOCK = 4


@pytest.fixture(scope="module", params=COMPARED)
def subject(request, subjects) -> Subject:
    return subjects(request.param)


def test_every_supported_type_is_compared(folder):
    compared = {
        json.loads((folder(kind) / "config.json").read_text())["model_type"] for kind in KINDS
    }
    # A whole Omni folder is compared with its thinker's: see test_omni_whole. The others take a
    # sound and no text: see test_encoder_decoder and test_voxtral_realtime.
    others = {*ENCODER_DECODER, "qwen2_5_omni", "qwen3_omni_moe", "voxtral_realtime"}
    assert {*compared, *others} == set(SUPPORTED)


def assert_parity(served, expected, report) -> None:
    difference = compare(served.answers, expected)
    report("near_ties", difference.near_ties)
    assert difference.wrong == 0
    assert difference.max_logit_error < MAX_LOGIT_ERROR


def test_it_is_what_lookonce_models_says(subject):
    assert_as_listed(subject.loaded)


@pytest.mark.parametrize("budget", [16, 23, 64] if ALL_MODELS else [23])
def test_mixed_batches_and_prefix_hits_change_no_token(subject, budget, record_property):
    served = serve(subject.loaded, subject.cases, budget=budget)
    assert served.stats["prefix_cache_hits_total"] > 0
    assert_parity(served, subject.expected, record_property)


def test_forced_preemption_changes_no_token(subject, record_property):
    """Two prompts fit, their answers do not: the later one, which has the media, is preempted."""
    picked = [1, 0]
    cases, expected = ([all_[i] for i in picked] for all_ in (subject.cases, subject.expected))
    num_blocks = blocks_for_preemption(cases, BLOCK)
    served = serve(subject.loaded, cases, budget=32, num_blocks=num_blocks, block_size=BLOCK)
    assert served.stats["num_preemptions_total"] > 0
    assert_parity(served, expected, record_property)
