"""Real models over real tiers: the same greedy tokens cold, warm, after a restart, from afar.

Each `Served` is one engine with its own pages; two that share a disk folder or a Valkey are two
servers, or one before and after a restart.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from lookonce.config import ModelConfig
from lookonce.model.kv_pages import KVPages, PageCopier, kv_layout
from lookonce.model.loader import load_model
from lookonce.types.kv import ExternalCacheStats, TierSpec
from tests.support.kv.real_engines import BLOCK_SIZE, HOST, Served, Subject, check
from tests.support.kv_servers import ValkeyServer
from tests.support.model.cases import Case, picture
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
