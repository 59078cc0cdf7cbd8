"""Models whose layers keep states beside keys and values: answered like transformers.

Snapshots of states make prefix hits possible; each rule about them has a negative control.
"""

from __future__ import annotations

import dataclasses
import os

import msgspec
import pytest

from lookonce.core.state_snapshots import StateSnapshots
from lookonce.model.sampler import Sampler
from lookonce.model.state import StatePool
from tests.support.model.serving import (
    Subject,
    assert_parity,
    blocks_for_preemption,
    compare,
    serve,
)

KINDS = (
    *("lfm2", "lfm3", "granitemoehybrid", "nemotron_h", "qwen3_next", "olmo_hybrid"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
)
SAMPLE = ("lfm2", "qwen3_next")
ALL = bool(os.environ.get("ALL_MODELS"))
BLOCK = 4


@pytest.fixture(scope="module", params=KINDS if ALL else SAMPLE)
def subject(request, subjects) -> Subject:
    return subjects(f"text:{request.param}")


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


# --- negative controls --------------------------------------------------------------------------


def assert_wrong(subject: Subject, **options) -> None:
    served = serve(subject.loaded, subject.cases, budget=16, **options)
    difference = compare(served.answers, subject.expected)
    assert difference.wrong or difference.max_logit_error > 1e-2


def test_a_snapshot_one_block_off_is_found(subject, monkeypatch):
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
    assert_wrong(subject)


def test_a_state_that_is_not_copied_is_found(subject):
    def without_copies(plan):
        new = tuple(dataclasses.replace(each, snapshot=None) for each in plan.new)
        return msgspec.structs.replace(plan, new=new)

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
    difference = compare(served.answers, subject.expected[:2])
    assert difference.wrong or difference.max_logit_error > 1e-2


def test_a_step_that_failed_is_computed_again(subject, monkeypatch):
    """What a failed step has done to states is not kept: each sequence is computed again alone."""
    sample, calls = Sampler.sample, []

    def fails_once(sampler, logits, seq_ids, *given):
        calls.append(len(seq_ids))
        if len(seq_ids) > 1 and calls.count(len(seq_ids)) == 1:
            raise RuntimeError("after all layers have run")
        return sample(sampler, logits, seq_ids, *given)

    monkeypatch.setattr(Sampler, "sample", fails_once)
    served = serve(subject.loaded, subject.cases, budget=64)
    assert max(calls) > 1
    for answer, expected in zip(served.answers, subject.expected, strict=True):
        assert answer.token_ids == expected.token_ids
