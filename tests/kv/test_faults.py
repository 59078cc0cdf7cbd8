"""The fault matrix: whatever becomes of a tier, every token is right and nothing is left behind."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from lookonce.cache.identity import item_key, media_hash
from lookonce.core.kv_connector_state import KVConnectorState
from lookonce.core.mm_features import MultiModalFeatures
from lookonce.core.request import TokenBuffer, extend_chain, root_hash
from lookonce.kv.chain import CircuitBreaker
from lookonce.kv.objects import ObjectFormat
from lookonce.kv.tier import ReadOutcome
from lookonce.kv.transfer import Loaded
from lookonce.kv.valkey import ValkeyTier
from lookonce.types.kv import LoadReport, TierSpec
from lookonce.types.media import MediaFeature
from tests.support.core.builders import Limits, request, text
from tests.support.core.fake_runner import PlanError, reference
from tests.support.kv.tiers import FaultyTier, StoredObjects, eventually
from tests.support.kv.world import LAYOUT, World
from tests.support.kv_servers import ValkeyServer

OBJECTS = ObjectFormat(bytes(32), LAYOUT)
LIMITS = Limits(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=40)
NAMES = itertools.count()


def work(
    world: World, count: int, *, between: Callable[[int], None] = lambda number: None
) -> list[str]:
    """Serve prompts that share prefixes, each on a cold device; the statuses, in order."""
    statuses = []
    for number in range(count):
        between(number)
        world.forget_device()
        one = request(str(next(NAMES)), text(30, seed=number % 4))
        world.serve(one)
        assert world.tokens[one.request_id, 0] == reference(one, 8)
        reuse_stats = world.reuse_stats[one.request_id].external
        assert reuse_stats is not None
        statuses.append(reuse_stats.status)
    return statuses


def test_a_real_valkey_paused_killed_and_restarted_while_requests_run(
    valkey: ValkeyServer,
) -> None:
    tier = ValkeyTier(OBJECTS, TierSpec("valkey", path=valkey.socket), timeout=0.5)

    def disturb(number: int) -> None:
        match number:
            case 20:
                valkey.pause()
            case 30:
                valkey.resume()
            case 40:
                valkey.kill()
            case 50:
                valkey.start()

    with World(tier, limits=LIMITS, lookup_seconds=1.0, load_seconds=2.0) as world:
        (guarded,) = world.chain.tiers
        guarded._breaker = CircuitBreaker(time.monotonic, first_cooldown=0.02)
        statuses = work(world, 60, between=disturb)
        assert statuses[4:20] == ["loaded"] * 16
        assert "loaded" not in statuses[20:30] + statuses[40:50]
        eventually(lambda: work(world, 5)[-1] == "loaded", 60.0)
        world.assert_all_free()


@pytest.mark.parametrize("kind", ["host", "disk", "valkey"])
def test_bits_that_flip_at_rest(kind: str, tmp_path: Path, valkey: ValkeyServer) -> None:
    """Recomputed from the last good block; the bad one is gone and gets stored again."""
    chance = random.Random(3)
    stored = StoredObjects(kind, OBJECTS, tmp_path, valkey)

    def flip(number: int) -> None:
        if number >= 4 and number % 2 == 0:
            stored.flip(chance)

    with World(stored.tier, limits=LIMITS) as world:
        statuses = work(world, 60, between=flip)
        assert set(statuses[4:]) >= {"loaded"}
        assert {"partial", "failed"} & set(statuses)
        stats = world.connector.stats()
        assert stats[f"kv_tier_failures_total:{kind},corrupt"] > 0
        assert stats[f"kv_tier_breaker_state:{kind}"] == 0, "a bad object is not a bad tier"


def test_a_slow_link_delays_its_own_request_alone() -> None:
    arrived = threading.Event()

    class Slow(FaultyTier):
        def read(self, keys: Sequence[bytes], into: memoryview) -> ReadOutcome:
            arrived.wait(60)
            return super().read(keys, into)

    tier = Slow(name="slow")
    with World(tier, load_seconds=60.0) as world:
        world.serve(request("warm", text(30)))
        world.forget_device()
        world.add(request("far", text(30)))
        world.step()
        world.add(request("here", text(9, seed=5)))
        world.run_until_ended("here")
        assert ("far", 0) not in world.ended
        arrived.set()
        world.settle()
        assert world.tokens["far", 0] == reference(request("far", text(30)), 8)


def test_without_the_quarantine_a_late_write_lands_in_a_reused_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: blocks given back when the request gives up are written to later."""
    end_load = KVConnectorState._end_load

    def hasty(self: KVConnectorState, report: LoadReport) -> None:
        end_load(self, report)
        self._acknowledge(report.ticket)

    def scenario() -> None:
        tier = FaultyTier()
        with World(tier, limits=Limits(num_blocks=14), load_seconds=0.05) as world:
            world.serve(request("warm", text(42)))
            world.forget_device()
            world.add(one := request("a", text(42)))
            world.step()
            eventually(lambda: tier.num_leases == 10)
            tier.hang = threading.Event()
            world.step()  # the load begins, and hangs
            eventually(lambda: any(isinstance(e, Loaded) for e in world.connector._events))
            world.step()  # the request gives up and computes
            tier.hang.set()
            eventually(lambda: not world.connector._workers._loads)
            world.settle()
            assert not world.pages.errors, world.pages.errors
            assert world.tokens["a", 0] == reference(one, 8)

    scenario()
    monkeypatch.setattr(KVConnectorState, "_end_load", hasty)
    with pytest.raises((AssertionError, PlanError, RuntimeError)):
        scenario()


def test_a_thousand_pairs_of_pictures_one_pixel_apart_share_no_block_from_there_on() -> None:
    chance = np.random.default_rng(5)
    scope = bytes(32)
    tokens = TokenBuffer(np.arange(40, dtype=np.int32))
    seen = set()
    for _ in range(1000):
        image = chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        other = image.copy()
        other[tuple(chance.integers(0, (8, 8, 3)))] ^= 1
        for pixels in (image, other):
            key = item_key(scope, media_hash(pixels, modality="image"))
            features = MultiModalFeatures((MediaFeature(key, "image", 6, 9, 9),))
            chain: list[bytes] = []
            extend_chain(chain, root_hash(scope), tokens, features, 4, 10)
            seen.add(chain[0])
            assert not seen & set(chain[1:])
            seen.update(chain[1:])
    assert len(seen) == 1 + 2000 * 9
