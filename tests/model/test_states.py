"""Models whose layers keep states beside keys and values: answered like transformers.

Snapshots of states make prefix hits possible; each rule about them has a negative control.
"""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest

from lookonce.core.state_snapshots import StateSnapshots
from lookonce.model.sampler import Sampler
from lookonce.model.state import StatePool, StepStates
from tests.support.model.listed import assert_as_listed
from tests.support.model.live import LiveCase, LiveModel, converse, whole_logits
from tests.support.model.serving import (
    Subject,
    assert_parity,
    blocks_for_preemption,
    compare,
    fork,
    missing_library,
    reference_model,
    serve,
)

KINDS = (
    *("text:lfm2", "text:lfm2_moe", "text:lfm3", "text:granitemoehybrid", "text:bamba"),
    *("text:falcon_h1", "text:jamba", "text:nemotron_h", "text:qwen3_next", "text:olmo_hybrid"),
    *("text:qwen3_5_text", "text:qwen3_5_moe_text"),
    *(
        "qwen3_5",
        "qwen3_5_moe",
        "media:lfm2_vl",
        "media:lfm3_vl",
        "media:minicpmv4_6",
        "media:nemotron_h_omni",
    ),
)
SAMPLE = ("text:lfm2", "qwen3_5")
ALL = bool(os.environ.get("ALL_MODELS"))
BLOCK = 4


@pytest.fixture(scope="module", params=KINDS if ALL else SAMPLE)
def kind(request) -> str:
    if library := missing_library(request.param.removeprefix("media:")):
        pytest.skip(f"it needs {library}")
    return request.param


@pytest.fixture(scope="module")
def subject(kind, subjects) -> Subject:
    return subjects(kind)


def test_it_is_what_lookonce_models_says(subject):
    assert_as_listed(subject.loaded)


@pytest.mark.parametrize("budget", [7, 64])
def test_chunks_mixed_batches_and_prefix_hits_change_no_token(subject, budget):
    served = serve(subject.loaded, subject.cases, budget=budget)
    assert served.stats["prefix_cache_hits_total"] > 0
    assert served.stats["state_cache_hits_total"] > 0
    assert_parity(served, subject.expected)


def test_forced_preemption_changes_no_token(subject):
    cases, expected = subject.cases[:2], subject.expected[:2]
    num_blocks = blocks_for_preemption(cases, BLOCK)
    served = serve(subject.loaded, cases, budget=32, num_blocks=num_blocks, block_size=BLOCK)
    assert served.stats["num_preemptions_total"] > 0
    assert_parity(served, expected)


@pytest.mark.parametrize("num_snapshots", [0, 1, 2])
def test_snapshots_stay_within_their_memory(subject, num_snapshots):
    served = serve(subject.loaded, subject.cases, budget=16, num_snapshots=num_snapshots)
    assert served.stats["state_cache_bytes"] <= num_snapshots * subject.loaded.info.state_bytes
    assert_parity(served, subject.expected)


def test_samples_of_one_request_go_on_from_its_prompt(subject):
    """With a negative control: one that begins with no state."""
    case, expected = subject.cases[0], [subject.expected[0]] * 3
    assert_close(fork(subject.loaded, case, 3, budget=64), expected)
    first, *others = fork(subject.loaded, case, 3, budget=64, edit=without_copies)
    assert_close([first], expected[:1])
    for other in others:
        assert is_wrong([other], expected[:1])


def assert_close(answers, expected) -> None:
    difference = compare(answers, expected)
    assert difference.wrong == 0
    assert difference.max_logit_error < 1e-3


def without_copies(plan):
    new = tuple(msgspec.structs.replace(each, snapshot=None) for each in plan.new)
    return msgspec.structs.replace(plan, new=new)


def converse_twice(loaded) -> list[LiveCase]:
    """Two sessions side by side, each given one to seven tokens at a time."""
    random = np.random.default_rng(5)
    model = LiveModel(loaded, loaded.info)
    prompts = [random.integers(10, 200, length).tolist() for length in (5, 40)]
    cases = [LiveCase(model, str(index), prompt) for index, prompt in enumerate(prompts)]
    converse(model, cases, 6, lambda *_: random.integers(10, 200, random.integers(1, 8)).tolist())
    return cases


def errors(cases, reference) -> list[float]:
    return [float((case.logits - whole_logits(reference, case)).abs().max()) for case in cases]


def test_live_sessions_compute_what_a_whole_forward_does(kind, subject, folder, monkeypatch):
    reference = reference_model(folder(kind), subject.loaded.info)
    assert max(errors(converse_twice(subject.loaded), reference)) < 1e-3
    monkeypatch.setattr(StepStates, "commit", lambda _: None)
    assert min(errors(converse_twice(subject.loaded), reference)) > 1e-2


# --- negative controls --------------------------------------------------------------------------


def assert_wrong(subject: Subject, **options) -> None:
    served = serve(subject.loaded, subject.cases, budget=16, **options)
    assert is_wrong(served.answers, subject.expected)


def is_wrong(answers, expected) -> bool:
    difference = compare(answers, expected)
    return difference.wrong > 0 or difference.max_logit_error > 1e-3


def test_a_snapshot_one_block_off_is_found(subject, monkeypatch):
    """Of a prompt with several media, where the model has any, that comes again."""
    twice, expected = [subject.cases[2]] * 2, [subject.expected[2]] * 2
    served = serve(subject.loaded, twice, budget=16, apart=True)
    assert served.stats["state_cache_hits_total"] == 1
    assert_parity(served, expected)
    longest = StateSnapshots.longest

    def one_block_off(snapshots, hashes):
        found = longest(snapshots, hashes)
        return found - 1 if found > 1 else found

    pin = StateSnapshots.pin

    def newest(snapshots, block_hash):
        held = block_hash if snapshots.holds(block_hash) else next(reversed(snapshots._held))
        return pin(snapshots, held)

    monkeypatch.setattr(StateSnapshots, "longest", one_block_off)
    monkeypatch.setattr(StateSnapshots, "pin", newest)
    monkeypatch.setattr(StateSnapshots, "unpin", lambda *_: None)
    monkeypatch.setattr(StateSnapshots, "check_integrity", lambda _: None)
    served = serve(subject.loaded, twice, budget=16, apart=True)
    assert is_wrong(served.answers[1:], expected[1:])


def test_a_state_that_is_not_copied_is_found(subject):
    assert_wrong(subject, edit=without_copies)


def test_a_state_that_stays_after_its_sequence_is_found(subject, monkeypatch):
    begin = StatePool.begin

    def keep(pool, row, snapshot):
        if snapshot is not None:
            begin(pool, row, snapshot)

    monkeypatch.setattr(StatePool, "begin", keep)
    num_blocks = blocks_for_preemption(subject.cases[:2], BLOCK)
    served = serve(
        subject.loaded,
        subject.cases[:2],
        budget=32,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_snapshots=0,
    )
    assert served.stats["num_preemptions_total"] > 0
    assert is_wrong(served.answers, subject.expected[:2])


def test_a_step_that_failed_is_computed_again(subject, monkeypatch):
    """What a failed step has done to states is not kept: each sequence is computed again alone."""
    begin, calls = Sampler.begin, []

    def fails_once(sampler, logits, seq_ids, *given):
        calls.append(len(seq_ids))
        if len(seq_ids) > 1 and calls.count(len(seq_ids)) == 1:
            raise RuntimeError("after all layers have run")
        return begin(sampler, logits, seq_ids, *given)

    monkeypatch.setattr(Sampler, "begin", fails_once)
    served = serve(subject.loaded, subject.cases, budget=64)
    assert max(calls) > 1
    for answer, expected in zip(served.answers, subject.expected, strict=True):
        assert answer.token_ids == expected.token_ids
