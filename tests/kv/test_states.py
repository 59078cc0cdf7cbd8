"""States beside keys and values in the tiers: a hit ends at the newest state that is held whole.

The fake runner refuses every state that is not the one after all tokens before, so a wrong, torn or
misplaced state fails the test that loads it. A state takes three pieces here.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lookonce.core.request import Request
from lookonce.kv.objects import ObjectFormat, state_piece_keys
from lookonce.kv.tier import Reason
from lookonce.kv.transfer import Transfers
from lookonce.types.kv import ExternalCacheStats, StatePieces
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, model_info, request, text
from tests.support.core.fake_runner import PlanError, reference
from tests.support.kv.tiers import FaultyTier, StoredObjects, eventually, evict
from tests.support.kv.world import LAYOUT, Snapshots, World
from tests.support.kv_servers import ValkeyServer

STATE_BYTES = 150
PIECES = StatePieces(STATE_BYTES, LAYOUT.block_bytes)
assert PIECES.num_pieces == 3
LIMITS = Limits(model=model_info(state_bytes=STATE_BYTES), num_snapshots=8)
TOKENS = text(42)
"""10 whole blocks of 4, and 2 more tokens. Steps of 32 tokens take states after 8 and 10 blocks."""


def warmed(tier: FaultyTier, tokens: list[int] = TOKENS) -> list[bytes]:
    """The tier holds the prompt's blocks and states; the hashes of the blocks."""
    hashes: list[bytes] = []
    with World(tier, limits=LIMITS) as world:
        world.add(one := request("warm", tokens))
        built: Request = world.scheduler._state.queues.requests["warm"]
        world.settle()
        world.wait_stored()
        assert world.tokens["warm", 0] == reference(one, 8)
        hashes += built.sequences[0].block_hashes
    tier.reads = tier.calls = 0
    return hashes


def pieces_after(hashes: list[bytes], num_blocks: int) -> list[bytes]:
    return state_piece_keys(hashes[num_blocks - 1], PIECES)


def ask(world: World, name: str, tokens: list[int] = TOKENS) -> ExternalCacheStats:
    """Right tokens whatever happened, and figures that add up; what was told."""
    one = request(name, tokens)
    world.serve(one)
    return check(world, one)


def check(world: World, one: GenerateRequest) -> ExternalCacheStats:
    for index in range(one.sampling.n):
        tokens = world.tokens[one.request_id, index]
        assert tokens == reference(one, one.sampling.max_tokens or 0, index)
    told = world.reuse_stats[one.request_id]
    assert told.external is not None
    assert 0 <= told.external.loaded <= told.external.matched
    assert told.external.loaded == sum(count for _, count in told.external.by_tier)
    assert told.prefix_cached_tokens + told.external.loaded < one.prompt.shape[0]
    world.assert_all_free()
    return told.external


def whole(num_tokens: int) -> ExternalCacheStats:
    return ExternalCacheStats(num_tokens, num_tokens, "loaded", (("near", num_tokens),))


def test_after_a_restart_a_prompt_begins_at_its_last_whole_block(tier: FaultyTier) -> None:
    warmed(tier)
    with World(tier, limits=LIMITS) as world:
        assert ask(world, "a") == whole(40)
        assert world.runner.computed_tokens == 2 + 7
        stats = world.connector.stats()
        assert stats["kv_tier_loaded_states_total:near"] == 1
        assert stats["kv_tier_loaded_tokens_total:near"] == 40, "states are no tokens"
        assert stats["kv_tier_loaded_bytes_total:near"] == (10 + 3) * LAYOUT.block_bytes
        assert stats["kv_tier_hits_total:near"] == 40
    eventually(lambda: tier.num_leases == 0)


def test_a_prompt_that_goes_on_begins_where_the_answer_ended(tier: FaultyTier) -> None:
    """Of an answer of 8 tokens 49 are computed: twelve blocks, and a state after them."""
    warmed(tier)
    with World(tier, limits=LIMITS) as world:
        assert ask(world, "a", [*TOKENS, *reference(request("x", TOKENS), 8), 7]) == whole(48)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_hit_ends_at_the_newest_state_that_is_held_whole(tier: FaultyTier, lost: int) -> None:
    """Of the newest one a piece is gone: the first one, or another."""
    hashes = warmed(tier)
    evict(tier.inner, pieces_after(hashes, 10)[lost])
    with World(tier, limits=LIMITS) as world:
        assert ask(world, "a") == whole(32)
    eventually(lambda: tier.num_leases == 0)


def test_a_state_without_all_blocks_before_it_is_no_hit(tier: FaultyTier) -> None:
    hashes = warmed(tier)
    evict(tier.inner, hashes[5])
    with World(tier, limits=LIMITS) as world:
        assert ask(world, "a") == ExternalCacheStats(0, 0, "none")
    eventually(lambda: tier.num_leases == 0)


def test_blocks_without_a_state_are_computed_and_leave_one_where_they_end(tier: FaultyTier) -> None:
    """A prompt that parts from another takes a state there, for the next one that does."""
    warmed(tier)
    parting = [[*TOKENS[:20], *text(9, seed=seed)] for seed in (1, 2)]
    with World(tier, limits=LIMITS) as world:
        assert ask(world, "a", parting[0]) == ExternalCacheStats(0, 0, "none")
    with World(tier, limits=LIMITS) as world:
        assert ask(world, "b", parting[1]) == whole(20)


@pytest.mark.parametrize("reason", ["missing", "corrupt", "timeout", "connection", "io"])
@pytest.mark.parametrize(
    ("good", "loaded"),
    [
        pytest.param(9, 32, id="a block after the older state"),
        pytest.param(7, 0, id="a block before it"),
        pytest.param(12, 0, id="the state, and all that comes after"),
    ],
)
def test_a_load_that_fails_ends_at_an_older_state_or_is_computed(
    tier: FaultyTier, reason: Reason, good: int, loaded: int
) -> None:
    warmed(tier)
    with World(tier, limits=LIMITS) as world:
        tier.fail_reads_after, tier.read_reason = good, reason
        if good == 9:  # only this block is gone
            read = tier.read

            def reads_again(keys: list[bytes], into: memoryview) -> object:
                outcome = read(keys, into)
                tier.fail_reads_after = None
                return outcome

            tier.read = reads_again  # type: ignore[method-assign,assignment]
        told = ask(world, "a")
        if reason == "timeout":  # its circuit breaker is open: no state is asked for
            loaded = 0
        assert (told.matched, told.loaded) == (40, loaded)
        assert told.status == ("partial" if loaded else "failed")
    eventually(lambda: tier.num_leases == 0)


@pytest.mark.parametrize("kind", ["host", "disk", "valkey"])
def test_a_torn_state_is_deleted_and_an_older_one_taken(
    kind: str, tmp_path: Path, valkey: ValkeyServer
) -> None:
    stored = StoredObjects(kind, ObjectFormat(bytes(32), LAYOUT), tmp_path, valkey)
    tier = FaultyTier(name="near", inner=stored.tier)
    hashes = warmed(tier)
    stored.flip(random.Random(4), pieces_after(hashes, 10)[1])
    with World(tier, limits=LIMITS) as world:
        told = ask(world, "a")
        assert (told.matched, told.loaded, told.status) == (40, 32, "partial")
        assert world.connector.stats()["kv_tier_failures_total:near,corrupt"] == 1
        world.forget_device()
        assert ask(world, "b") == whole(40), "it was taken again and stored again"
    stored.tier.close()


def test_evicted_between_lookup_and_load(tier: FaultyTier) -> None:
    hashes = warmed(tier)
    with World(tier, limits=LIMITS) as world:
        world.add(one := request("a", TOKENS))
        world.step()
        eventually(lambda: tier.num_leases == 10 + 3)
        for piece in pieces_after(hashes, 10):
            evict(tier.inner, piece)
        world.settle()
        told = check(world, one)
        assert (told.matched, told.loaded, told.status) == (40, 32, "partial")


def test_blocks_that_are_here_are_not_loaded_again_only_the_state(tier: FaultyTier) -> None:
    warmed(tier)
    with World(tier, limits=LIMITS) as world:
        assert ask(world, "a") == whole(40)
        assert world.scheduler._state.snapshots is not None
        world.scheduler._state.snapshots.clear()
        before = world.connector.stats()["kv_tier_loaded_tokens_total:near"]
        assert ask(world, "b") == whole(40), "the state made them usable"
        stats = world.connector.stats()
        assert stats["kv_tier_loaded_tokens_total:near"] == before
        assert stats["kv_tier_loaded_states_total:near"] == 2


def test_a_load_that_hangs_keeps_its_slot_until_it_has_ended(tier: FaultyTier) -> None:
    """The worker that wakes up late writes no state to a slot that a step was given."""
    warmed(tier)
    with World(tier, limits=LIMITS, load_seconds=0.05) as world:
        world.add(one := request("a", TOKENS))
        world.step()
        eventually(lambda: tier.num_leases == 13)
        tier.hang = threading.Event()
        world.run_until_ended("a")
        assert world.reuse_stats["a"].external == ExternalCacheStats(40, 0, "failed")
        assert world.scheduler.stats()["kv_transfer_states_held"] > 0
        others = [request(f"o{i}", text(40, seed=i + 1)) for i in range(4)]
        for other in others:
            world.add(other)
        for other in others:
            world.run_until_ended(other.request_id, or_hang=tier.hang)
        tier.hang.set()
        world.settle()
        for each in (one, *others):
            check(world, each)


@pytest.mark.parametrize("moment", ["queued", "looking", "loading"])
def test_aborted_before_admission(tier: FaultyTier, moment: str) -> None:
    warmed(tier)
    with World(tier, limits=LIMITS) as world:
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
            eventually(lambda: tier.num_leases == 13)
            tier.hang = threading.Event()
            world.step()
        world.scheduler.abort("a")
        world.step()
        if tier.hang is not None:
            tier.hang.set()
        world.settle()
        world.assert_all_free()
        eventually(lambda: tier.num_leases == 0)
        assert ask(world, "b") == whole(40)


def test_samples_begin_with_the_loaded_state(tier: FaultyTier) -> None:
    warmed(tier)
    three = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, n=3)
    with World(tier, limits=LIMITS) as world:
        one = request("a", TOKENS, sampling=three)
        world.serve(one)
        assert check(world, one) == whole(40)


def test_a_reset_while_loading_counts_as_not_loaded(tier: FaultyTier) -> None:
    warmed(tier)
    with World(tier, limits=LIMITS) as world:
        world.add(one := request("a", TOKENS))
        world.step()
        eventually(lambda: tier.num_leases == 13)
        tier.hang = threading.Event()
        world.step()
        world.scheduler.reset_prefix_cache()
        tier.hang.set()
        world.settle()
        assert check(world, one).loaded == 0


def test_pictures_that_differ_share_no_state() -> None:
    tier = FaultyTier(name="near")

    def seen(name: str, picture: str) -> GenerateRequest:
        return request(name, TOKENS, [feature(picture, 6, 10)])

    with World(tier, limits=LIMITS) as world:
        world.serve(seen("x", "x"))
        world.forget_device()
        world.serve(same := seen("same", "x"))
        world.forget_device()
        world.serve(other := seen("other", "y"))
        assert check(world, same) == whole(40)
        assert check(world, other).loaded == 0
        assert world.runner.encoded.count(same.features[0].key) == 1, "no encoder run"


def test_found_far_is_kept_near() -> None:
    far, near = FaultyTier(name="near"), FaultyTier(name="host")
    hashes = warmed(far)
    with World(near, far, limits=LIMITS) as world:
        assert ask(world, "a") == whole(40)
        eventually(lambda: near.stored.keys() >= {*hashes[:10], *pieces_after(hashes, 10)})
        world.forget_device()
        far.forget()
        assert ask(world, "b").by_tier == (("host", 40),)


@pytest.mark.parametrize("num_snapshots", [0, 1, 2])
def test_few_snapshots_bound_what_is_stored_and_break_nothing(num_snapshots: int) -> None:
    tier = FaultyTier(name="near")
    limits = Limits(model=LIMITS.model, num_snapshots=num_snapshots)
    with World(tier, limits=limits) as world:
        for number in range(3):
            world.forget_device()
            told = ask(world, str(number))
        assert told == (whole(40) if num_snapshots else ExternalCacheStats(0, 0, "none"))
        assert world.scheduler.stats()["state_cache_bytes"] <= num_snapshots * STATE_BYTES


def test_loading_that_does_not_pay_is_refused_with_its_state() -> None:
    tier = FaultyTier(name="near")
    warmed(tier)
    with World(tier, limits=LIMITS, policy="auto") as world:
        world.connector._cost.observe_load(0, 10, 1.0)
        world.connector.observe_prefill(40, 1.2)
        assert ask(world, "a") == ExternalCacheStats(40, 0, "none"), "ten blocks pay, a state not"
        world.forget_device()
        world.connector.observe_prefill(4000, 10_000.0)
        assert ask(world, "b") == whole(40)


# --- negative controls --------------------------------------------------------------------------


def control(break_it: Callable[[], None]) -> None:
    tier = FaultyTier(name="near")
    warmed(tier)
    break_it()
    with World(tier, limits=LIMITS) as world, pytest.raises((AssertionError, PlanError)):
        ask(world, "a")


def test_a_state_one_block_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Transfers._load_state

    def one_off(self: Transfers, job: object, after: int, snapshot: int) -> Reason | None:
        reason = load(self, job, 8, snapshot)  # type: ignore[arg-type]
        job.state_after = after  # type: ignore[attr-defined]
        return reason

    control(lambda: monkeypatch.setattr(Transfers, "_load_state", one_off))


def test_a_state_that_never_comes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    control(lambda: monkeypatch.setattr(Snapshots, "scatter", lambda *_: None))
