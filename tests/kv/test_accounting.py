"""The accounting table, line by line: over a scheduler, real workers, and tiers that misbehave.

The tier is a dict, host memory, a disk and a real Valkey in turn, behind one that injects faults.
"""

from __future__ import annotations

import threading
import time

import pytest

from lookonce.kv.accounting import matched_tokens, usable_tokens
from lookonce.kv.tier import Reason
from lookonce.types.kv import ExternalCacheStats
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, request, text
from tests.support.core.fake_runner import reference
from tests.support.kv.tiers import FaultyTier, eventually
from tests.support.kv.world import LAYOUT, World

TOKENS = text(42)
"""10 whole blocks of 4, and 2 more tokens."""


def check(world: World, one: GenerateRequest) -> ExternalCacheStats:
    """Right tokens whatever happened, and figures that add up; what was told."""
    for index in range(one.sampling.n):
        tokens = world.tokens[one.request_id, index]
        assert tokens == reference(one, one.sampling.max_tokens or 0, index)
    reuse_stats = world.reuse_stats[one.request_id]
    external = reuse_stats.external
    assert external is not None
    assert 0 <= external.loaded <= external.matched
    assert (
        reuse_stats.external_cached_tokens == external.loaded == sum(n for _, n in external.by_tier)
    )
    assert reuse_stats.prefix_cached_tokens + external.loaded < one.prompt.shape[0]
    return external


def warmed(tier: FaultyTier, tokens: list[int] = TOKENS) -> None:
    """The tier holds the prompt's whole blocks."""
    with World(tier) as world:
        world.serve(request("warm", tokens))
    tier.reads = tier.calls = 0


def test_usable_tokens_are_whole_blocks_and_leave_one_to_compute() -> None:
    assert usable_tokens(512, 600, 16) == 512
    assert usable_tokens(512, 512, 16) == 496
    assert usable_tokens(100, 600, 16) == 96
    assert usable_tokens(0, 600, 16) == usable_tokens(512, 1, 16) == 0


def test_a_local_prefix_that_ends_within_the_tiers_chunk() -> None:
    """272 tokens are here, 512 there in chunks of 256: 240 are loaded."""
    assert matched_tokens(512, 272, 600, 16) == 240
    assert matched_tokens(256, 272, 600, 16) == 0


def test_nothing_held(tier: FaultyTier) -> None:
    with World(tier) as world:
        one = request("a", TOKENS)
        world.serve(one)
        assert check(world, one) == ExternalCacheStats(0, 0, "none")


def test_the_whole_prompt_held(tier: FaultyTier) -> None:
    """E' - L tokens, and the last token is computed all the same."""
    warmed(tier, text(40))
    with World(tier) as world:
        one = request("a", text(40))
        world.serve(one)
        assert check(world, one) == ExternalCacheStats(36, 36, "loaded", (("near", 36),))


def test_local_at_least_as_long_as_external(tier: FaultyTier) -> None:
    with World(tier) as world:
        first, again = request("a", TOKENS), request("b", TOKENS)
        world.serve(first)
        world.serve(again)
        assert check(world, again) == ExternalCacheStats(0, 0, "shadowed")
        assert world.reuse_stats["b"].prefix_cached_tokens == 40
        eventually(lambda: tier.num_leases == 0)


def test_local_longer_than_what_the_tier_holds_of_a_longer_prompt(tier: FaultyTier) -> None:
    warmed(tier, TOKENS[:20])
    with World(tier) as world:
        world.serve(request("local", TOKENS[:30]))
        tier.forget(4)
        longer = request("b", TOKENS)
        world.serve(longer)
        assert check(world, longer).status == "shadowed"
        eventually(lambda: tier.num_leases == 0)


def test_local_ends_within_external(tier: FaultyTier) -> None:
    warmed(tier)
    with World(tier) as world:
        world.serve(request("local", [*TOKENS[:13], 7, 7]))
        one = request("a", TOKENS)
        world.serve(one)
        assert world.reuse_stats["a"].prefix_cached_tokens == 12
        assert check(world, one) == ExternalCacheStats(28, 28, "loaded", (("near", 28),))


@pytest.mark.parametrize("reason", ["missing", "corrupt", "timeout", "connection", "io"])
@pytest.mark.parametrize("good", [0, 3])
def test_a_load_that_fails_at_block_k(tier: FaultyTier, reason: Reason, good: int) -> None:
    warmed(tier)
    tier.fail_reads_after, tier.read_reason = good, reason
    with World(tier) as world:
        one = request("a", TOKENS)
        world.serve(one)
        reuse_stats = check(world, one)
    assert (reuse_stats.matched, reuse_stats.loaded) == (40, 4 * good)
    assert reuse_stats.status == ("partial" if good else "failed")
    assert tier.num_leases == 0


def test_evicted_between_lookup_and_load(tier: FaultyTier) -> None:
    warmed(tier)
    with World(tier) as world:
        one = request("a", TOKENS)
        world.add(one)
        world.step()  # the lookup begins
        eventually(lambda: tier.num_leases == 10)
        tier.forget()
        world.settle()
        assert check(world, one).status == "failed"


def test_a_lookup_that_fails_is_computed(tier: FaultyTier) -> None:
    tier.fault = "connection"
    with World(tier) as world:
        one = request("a", TOKENS)
        world.serve(one)
        assert check(world, one) == ExternalCacheStats(0, 0, "failed")


def test_a_lookup_that_hangs_costs_its_deadline_and_no_more(tier: FaultyTier) -> None:
    warmed(tier)
    tier.hang = threading.Event()
    with World(tier, lookup_seconds=0.05) as world:
        one = request("a", TOKENS)
        world.add(one)
        world.run_until_ended("a")
        assert check(world, one).status == "failed"
        tier.hang.set()
        world.settle()
        eventually(lambda: tier.num_leases == 0)


def test_a_load_that_hangs_costs_its_deadline_and_its_blocks_are_quarantined(
    tier: FaultyTier,
) -> None:
    """The worker that wakes up late writes into blocks that nobody else was given."""
    warmed(tier)
    with World(tier, load_seconds=0.05, limits=Limits(num_blocks=32)) as world:
        one = request("a", TOKENS)
        world.add(one)
        world.step()
        eventually(lambda: tier.num_leases == 10)
        tier.hang = threading.Event()
        world.run_until_ended("a")
        assert check(world, one).status == "failed"
        assert world.scheduler.stats()["kv_transfer_blocks_quarantined"] == 10
        others = [request(f"o{i}", text(40, seed=i + 1)) for i in range(4)]
        for other in others:
            world.add(other)
        for other in others:
            world.run_until_ended(other.request_id, or_hang=tier.hang)
        tier.hang.set()
        world.settle()
        for other in others:
            check(world, other)
        world.assert_all_free()


@pytest.mark.parametrize("moment", ["queued", "looking", "loading"])
def test_aborted_before_admission(tier: FaultyTier, moment: str) -> None:
    """Leases are given back and the engine goes on: there is always a record to finish."""
    warmed(tier)
    with World(tier) as world:
        if moment != "queued":
            tier.hang = threading.Event()
        world.add(request("a", TOKENS))
        if moment == "looking":
            world.step()
        if moment == "loading":
            assert tier.hang is not None
            world.step()
            tier.hang.set()
            tier.hang = None
            eventually(lambda: tier.num_leases == 10)
            tier.hang = threading.Event()
            world.step()
        world.scheduler.abort("a")
        world.scheduler.abort("a")
        world.step()
        assert world.reason("a") == "abort"
        if tier.hang is not None:
            tier.hang.set()
        world.settle()
        world.assert_all_free()
        eventually(lambda: tier.num_leases == 0)
        assert world.connector.stats()["external_prefix_cache_hits_total"] == 0
        after = request("b", TOKENS)
        world.serve(after)
        assert check(world, after).loaded == 40


def test_preempted_requests_keep_the_figures_of_their_first_admission(tier: FaultyTier) -> None:
    warmed(tier, text(12))
    lasting = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    crowd = [request(str(i), text(12, seed=i), arrival=i, sampling=lasting) for i in range(3)]
    with World(tier, limits=Limits(num_blocks=10)) as world:
        world.serve_at_once(*crowd)
        assert world.scheduler.stats()["num_preemptions_total"] > 0
        assert check(world, crowd[0]).loaded == 8
        assert [check(world, one).loaded for one in crowd[1:]] == [0, 0]
        assert world.connector.stats()["external_prefix_cache_hits_total"] == 8


def test_several_samples_count_once_per_prompt(tier: FaultyTier) -> None:
    warmed(tier)
    three = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, n=3)
    with World(tier) as world:
        one = request("a", TOKENS, sampling=three)
        world.serve(one)
        assert check(world, one) == ExternalCacheStats(40, 40, "loaded", (("near", 40),))
        stats = world.connector.stats()
        assert stats["external_prefix_cache_hits_total"] == 40
        assert stats["external_prefix_cache_queries_total"] == 42


def test_the_leader_aborted_while_its_prefix_loads(tier: FaultyTier) -> None:
    warmed(tier)
    two = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, n=2)
    with World(tier) as world:
        one = request("a", TOKENS, sampling=two)
        world.add(one)
        world.step()
        world.scheduler.abort("a", 0)
        world.settle()
        assert world.tokens["a", 1] == reference(one, 5, 1)
        world.assert_all_free()


def test_pictures_in_the_prefix_and_pixels_that_differ(tier: FaultyTier) -> None:
    def seen(name: str, picture: str) -> GenerateRequest:
        return request(name, TOKENS, [feature(picture, 6, 10)])

    with World(tier) as world:
        world.serve(seen("x", "x"))
        world.forget_device()
        same, other = seen("same", "x"), seen("other", "y")
        world.serve(same)
        world.forget_device()
        world.serve(other)
        assert check(world, same).loaded == 40
        assert check(world, other).loaded == 4, "only what comes before the picture"
        assert world.runner.encoded.count(same.features[0].key) == 1, "no encoder run"


def test_scopes_share_nothing(tier: FaultyTier) -> None:
    with World(tier) as world:
        world.serve(request("a", TOKENS, scope=b"a" * 32))
        other = request("b", TOKENS, scope=b"b" * 32)
        world.serve(other)
        assert check(world, other) == ExternalCacheStats(0, 0, "none")


def test_found_far_is_kept_near(tier: FaultyTier) -> None:
    warmed(tier)
    near, far = FaultyTier(name="host"), tier
    whole = list(far.stored)[:10]
    size = LAYOUT.block_bytes
    copied = memoryview(bytearray(3 * size))
    far.inner.read(whole[:3], copied)
    near.write(whole[:3], [copied[n * size : (n + 1) * size] for n in range(3)])
    with World(near, far) as world:
        one = request("a", TOKENS)
        world.serve(one)
        assert check(world, one).by_tier == (("host", 12), ("near", 28))
        eventually(lambda: near.stored.keys() >= set(whole))
        world.forget_device()
        far.forget()
        again = request("b", TOKENS)
        world.serve(again)
        assert check(world, again).by_tier == (("host", 40),)


def test_a_near_tier_that_is_gone_does_not_hide_the_far_one(tier: FaultyTier) -> None:
    warmed(tier)
    gone = FaultyTier(name="gone", fault="connection")
    with World(gone, tier) as world:
        one = request("a", TOKENS)
        world.serve(one)
        assert check(world, one).by_tier == (("near", 40),)


def test_policy_fail_ends_the_request_whose_load_failed(tier: FaultyTier) -> None:
    warmed(tier)
    tier.fail_reads_after, tier.read_reason = 3, "corrupt"
    with World(tier, fail_on_loss=True) as world:
        world.serve(request("a", TOKENS), other := request("b", text(20, seed=9)))
        assert world.reason("a") == "error"
        error = world.ended["a", 0].error
        assert error is not None
        assert error[0] == "UnavailableError"
        check(world, other)
        world.assert_all_free()


def test_a_reset_of_the_device_while_loading_counts_as_not_loaded(tier: FaultyTier) -> None:
    warmed(tier)
    with World(tier) as world:
        one = request("a", TOKENS)
        world.add(one)
        world.step()
        eventually(lambda: tier.num_leases == 10)
        tier.hang = threading.Event()
        world.step()
        world.scheduler.reset_prefix_cache()
        tier.hang.set()
        world.settle()
        assert check(world, one).loaded == 0


def test_a_full_store_queue_drops_counts_and_delays_nobody(tier: FaultyTier) -> None:
    tier.hang = threading.Event()
    with World(tier, max_queued_bytes=5 * 64, lookup_seconds=0.01) as world:
        one = request("a", TOKENS)
        world.add(one)
        started = time.monotonic()
        world.run_until_ended("a")
        assert time.monotonic() - started < 5.0
        check(world, one)
        tier.hang.set()
        world.settle()
        stats = world.connector.stats()
        dropped = stats["kv_transfer_dropped_stores_total"]
        dropped += stats["kv_tier_dropped_stores_total:near"]
        assert dropped > 0


def test_auto_loads_what_is_cheaper_and_computes_the_rest(tier: FaultyTier) -> None:
    warmed(tier)
    with World(tier, policy="auto") as world:
        world.connector.observe_prefill(4000, 0.001)
        world.connector._cost.observe_load(0, 10, 1.0)
        one = request("a", TOKENS)
        world.serve(one)
        assert check(world, one) == ExternalCacheStats(40, 0, "none")
        eventually(lambda: tier.num_leases == 0)
        world.forget_device()
        world.connector.observe_prefill(4000, 10_000.0)
        again = request("b", TOKENS)
        world.serve(again)
        assert check(world, again).loaded == 40
