"""LMCache's real multi-process server under real models, while it hangs, dies and forgets."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookonce.kv import lmcache as tier_module
from lookonce.kv.chain import CircuitBreaker
from lookonce.kv.lmcache import LMCacheTier
from lookonce.kv.objects import ObjectFormat
from lookonce.kv.tier import TierError
from lookonce.types.kv import TierSpec
from tests.support.core.builders import Limits, request, text
from tests.support.core.fake_runner import reference
from tests.support.kv.real_engines import HOST, Served, Subject, check
from tests.support.kv.tiers import LAYOUT as SMALL
from tests.support.kv.tiers import OBJECTS, eventually, key, payload, read
from tests.support.kv.world import LAYOUT, World
from tests.support.kv_answers import by_tier, look, status, stored
from tests.support.kv_servers import LMCacheServer, needs_lmcache
from tests.support.live_server import LiveServer
from tests.support.model_folders.make import FolderMaker

pytestmark = needs_lmcache


def spec(server: LMCacheServer) -> TierSpec:
    return TierSpec("lmcache", host="127.0.0.1", port=server.port)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[LMCacheServer]:
    """For a test that kills it; its chunks are of another size."""
    server = LMCacheServer(tmp_path, chunk_size=16)
    yield server
    server.close()


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("near", [(), (HOST,)], ids=["alone", "behind host"])
def test_same_tokens_cold_warm_and_on_another_engine(
    kind: str, near: tuple[TierSpec, ...], folder: FolderMaker, lmcache: LMCacheServer
) -> None:
    subject = Subject(folder(kind, seed=len(near)))
    with Served(subject.loaded, *near, spec(lmcache)) as first:
        check(subject, first, warm=False)
        check(subject, first, warm=True)
    with Served(subject.loaded, spec(lmcache)) as other:
        check(subject, other, warm=True)
    gc.collect()


def test_two_server_processes_share_what_one_computed(lmcache: LMCacheServer) -> None:
    options = ("--kv-load", "always", "--kv-tier", f"lmcache://{lmcache.address}")
    with LiveServer(*options) as first:
        assert status(stored(first, "lmcache")) == "none"
        with LiveServer(*options) as other:
            assert by_tier(look(other)).keys() == {"lmcache"}
            assert status(look(other, scope="another")) == "none"


def test_a_bit_that_flipped_in_its_memory_is_seen(lmcache: LMCacheServer) -> None:
    tier = LMCacheTier(ObjectFormat(b"f" * 32, SMALL), lmcache.address)
    tier.write([key(1), key(2)], [payload(1), payload(2)])
    with lmcache.pool.open("r+b") as pool:
        at = pool.read().find(tier._objects.header(key(1), payload(1)))
        assert at >= 0
        pool.seek(at + 300)
        (byte,) = pool.read(1)
        pool.seek(at + 300)
        pool.write(bytes([byte ^ 1]))
    assert read(tier, [key(1)])[0].reason == "corrupt"
    assert tier.lease([key(1), key(2)]) == [False, True], "known to be broken"
    tier.release([key(2)])
    tier.close()


def test_a_released_lease_leaves_no_lock_behind(lmcache: LMCacheServer) -> None:
    tier = LMCacheTier(ObjectFormat(b"l" * 32, SMALL), lmcache.address)
    tier.write([key(1)], [payload(1)])
    for _ in range(3):
        assert tier.lease([key(1)]) == [True]
        tier.release([key(1)])
    assert not tier._leases
    assert tier.lease([key(1)]) == [True]
    assert read(tier, [key(1)])[0].num_blocks == 1
    assert not tier._leases, "reading used the lease up"
    tier.release([key(1)])
    tier.close()


def test_after_a_pause_it_registers_again(
    lmcache: LMCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = LMCacheTier(ObjectFormat(b"p" * 32, SMALL), lmcache.address)
    tier.write([key(1)], [payload(1)])
    monkeypatch.setattr(tier_module, "IDLE_SECONDS", -1.0)
    assert read(tier, [key(1)])[0].num_blocks == 1
    tier.close()


def test_a_server_on_another_machine_is_refused() -> None:
    with pytest.raises(TierError) as caught:
        LMCacheTier(OBJECTS, "192.0.2.7:5555").lease([key(1)])
    assert caught.value.reason == "connection"


def test_nothing_listens_there() -> None:
    tier = LMCacheTier(OBJECTS, "127.0.0.1:1", timeout=0.2)
    with pytest.raises(TierError) as caught:
        tier.lease([key(1)])
    assert caught.value.reason == "timeout"
    tier.close()


def test_paused_killed_and_restarted_while_requests_run(own_server: LMCacheServer) -> None:
    objects = ObjectFormat(b"w" * 32, LAYOUT)
    tier = LMCacheTier(objects, own_server.address, timeout=0.3)
    limits = Limits(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=40)
    asked = iter(range(10_000))

    with World(tier, limits=limits, lookup_seconds=0.3, load_seconds=0.5) as world:
        (guarded,) = world.chain.tiers
        guarded._breaker = CircuitBreaker(time.monotonic, first_cooldown=0.02)

        def work(count: int) -> list[str]:
            statuses = []
            for _ in range(count):
                world.forget_device()
                number = next(asked)
                one = request(str(number), text(30, seed=number % 4))
                world.serve(one)
                assert world.tokens[one.request_id, 0] == reference(one, 8)
                reuse_stats = world.reuse_stats[one.request_id].external
                assert reuse_stats is not None
                statuses.append(reuse_stats.status)
            return statuses

        work(8)
        assert "loaded" in work(4)
        own_server.pause()
        assert "loaded" not in work(8)
        own_server.resume()
        eventually(lambda: work(4)[-1] == "loaded", 20.0)
        own_server.kill()
        assert "loaded" not in work(8)
        own_server.start()
        eventually(lambda: work(4)[-1] == "loaded", 20.0)
        world.assert_all_free()
