"""Real models over real tiers: the same greedy tokens cold, warm, after a restart, from afar.

Each `Served` is one engine with its own pages; two that share a disk folder or a Valkey are two
servers, or one before and after a restart.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lookonce.config import ModelConfig
from lookonce.core.state_snapshots import SnapshotPlanner
from lookonce.kv.transfer import Transfers
from lookonce.model.kv_pages import KVPages, PageCopier, kv_layout
from lookonce.model.loader import load_model
from lookonce.types.kv import ExternalCacheStats, TierSpec
from tests.support.kv.real_engines import (
    BLOCK_SIZE,
    HOST,
    Served,
    Subject,
    check,
    check_with_transformers,
)
from tests.support.kv_servers import ValkeyServer
from tests.support.model.cases import Case, picture
from tests.support.model.serving import Difference, make_subject
from tests.support.model.serving import Subject as ParitySubject
from tests.support.model_folders.make import FolderMaker


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "gemma3"])
def subject(request: pytest.FixtureRequest, folder: FolderMaker) -> Iterator[Subject]:
    yield Subject(folder(request.param))
    gc.collect()


KINDS = ("host", "disk", "valkey")
COMBINATIONS = [kinds for count in (1, 2, 3) for kinds in combinations(KINDS, count)]


@pytest.mark.parametrize("kinds", COMBINATIONS, ids="+".join)
def test_same_tokens_cold_warm_and_after_a_restart(
    subject: Subject, kinds: Sequence[str], tmp_path: Path, valkey: ValkeyServer
) -> None:
    specs = {
        "host": HOST,
        "disk": TierSpec("disk", path=str(tmp_path), capacity_bytes=1 << 30),
        "valkey": TierSpec("valkey", path=valkey.socket),
    }
    tiers = [specs[kind] for kind in kinds]
    with Served(subject.loaded, *tiers) as first:
        check(subject, first, warm=False)
        check(subject, first, warm=True)
    with Served(subject.loaded, *tiers) as again:
        check(subject, again, warm=kinds != ("host",))


HYBRIDS = ("text:lfm2", "qwen3_5", "text:granitemoehybrid", "text:qwen3_next", "text:nemotron_h")
ALL = bool(os.environ.get("ALL_MODELS"))


@pytest.fixture(scope="module", params=HYBRIDS if ALL else HYBRIDS[:2])
def hybrid(request: pytest.FixtureRequest, folder: FolderMaker) -> Iterator[ParitySubject]:
    yield make_subject(folder(request.param))
    gc.collect()


def is_right(difference: Difference) -> bool:
    return not difference.wrong and difference.max_logit_error < 1e-3


def test_models_with_states_answer_as_transformers_does_after_a_restart(
    hybrid: ParitySubject, tmp_path: Path, valkey: ValkeyServer
) -> None:
    disk = TierSpec("disk", path=str(tmp_path), capacity_bytes=1 << 30)
    shared = TierSpec("valkey", path=valkey.socket)
    with Served(hybrid.loaded, HOST, disk, shared) as first:
        assert is_right(check_with_transformers(hybrid, first))
        assert is_right(check_with_transformers(hybrid, first, warm=True))
    reusing = [case for case in hybrid.cases if len(case.token_ids) > BLOCK_SIZE]
    for tier in (disk, shared):
        with Served(hybrid.loaded, tier) as again:
            assert is_right(check_with_transformers(hybrid, again, warm=True))
            stats = again.core.stats()
            assert stats[f"kv_tier_loaded_states_total:{tier.kind}"] == len(reusing)


def test_a_tier_that_gives_the_state_of_another_block_is_found(
    hybrid: ParitySubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the state one block before is loaded in place of the newest."""
    load = Transfers._load_state

    def one_off(self: Transfers, job: Any, after: int, snapshot: int) -> object:
        reason = load(self, job, max(1, after - 1), snapshot)
        job.state_after = after
        return reason

    def at_each_block(self: SnapshotPlanner, sequence: Any, start: int, end: int) -> Any:
        ends = range(start // BLOCK_SIZE + 1, end // BLOCK_SIZE + 1)
        slots = [(at * BLOCK_SIZE, self._reserve(sequence, at * BLOCK_SIZE)) for at in ends]
        return tuple((at - start, slot) for at, slot in slots if slot is not None)

    monkeypatch.setattr(SnapshotPlanner, "of_chunk", at_each_block)
    with Served(hybrid.loaded, HOST) as served:
        check_with_transformers(hybrid, served)
        assert is_right(check_with_transformers(hybrid, served, warm=True))
        monkeypatch.setattr(Transfers, "_load_state", one_off)
        assert not is_right(check_with_transformers(hybrid, served, warm=True))


def test_one_pixel_apart_share_only_what_comes_before(subject: Subject) -> None:
    image = picture(7)
    changed = image.copy()
    red, green, blue = changed.getpixel((60, 40))  # type: ignore[misc]
    changed.putpixel((60, 40), (red ^ 1, green, blue))
    one = subject.maker.case("Look: ", image, " well, what is it now?")
    other = subject.maker.case("Look: ", changed, " well, what is it now?")
    before = one.features[0].offset // BLOCK_SIZE * BLOCK_SIZE
    with Served(subject.loaded, HOST) as served:
        served.answer(one)
        served.forget_device()
        ((_, reuse_stats),) = served.answer(other)
        assert reuse_stats is not None
        assert reuse_stats.matched == before


def test_two_folders_share_nothing(folder: FolderMaker, tmp_path: Path) -> None:
    """The same kind of model, the same shapes, other weights."""
    tier = TierSpec("disk", path=str(tmp_path), capacity_bytes=1 << 30)
    for seed in (0, 1):
        loaded = load_model(ModelConfig(folder=str(folder("llama", seed=seed)), served_name="x"))
        case = Case(np.arange(20, dtype=np.int32) + 5, (), {}, {})
        with Served(loaded, tier) as served:
            ((_, reuse_stats),) = served.answer(case)
            assert reuse_stats == ExternalCacheStats(0, 0, "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_go_out_and_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    pages = KVPages(kv_layout(3, 4, 2, 16, dtype), 8)
    for layer in pages.layers:
        for page in layer:
            page.copy_(torch.randn(page.shape))
    copier = PageCopier(pages)
    out = np.empty(3 * copier.layout.block_bytes, dtype=np.uint8)
    copier.gather([5, 0, 7], out.data)
    before = [page.clone() for layer in pages.layers for page in layer]
    copier.scatter([1, 2, 3], out.data)
    after = [page for layer in pages.layers for page in layer]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[[1, 2, 3]], old[[5, 0, 7]])
        assert torch.equal(new[[0, 4, 5, 6, 7]], old[[0, 4, 5, 6, 7]])
    first = np.frombuffer(out[: copier.layout.block_bytes].tobytes(), dtype=np.uint8)
    expected = torch.stack([page[5] for page in before]).view(torch.uint8).numpy().ravel()
    assert np.array_equal(first, expected), "layer by layer, keys before values"
