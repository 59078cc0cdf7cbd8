"""Thousands of random requests over misbehaving tiers, aborted in every state: all sums agree."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from lookonce.core.request import Request, SequenceState
from lookonce.kv.tier import Reason
from lookonce.types.kv import ExternalCacheStats
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, model_info, request, text
from tests.support.core.fake_runner import reference
from tests.support.kv.tiers import FaultyTier
from tests.support.kv.world import World

NUM_REQUESTS = int(os.environ.get("ACCOUNTED_REQUESTS", "1500"))
"""`make soak` has more."""
REASONS: tuple[Reason, ...] = ("missing", "corrupt", "timeout", "connection", "io")


class RecordingWorld(World):
    """Also keeps what admission froze, for requests that end before their first token too."""

    def __init__(self, *tiers: FaultyTier, state_bytes: int) -> None:
        limits = Limits(
            num_blocks=40,
            max_num_seqs=5,
            max_num_batched_tokens=24,
            model=model_info(state_bytes=state_bytes),
            num_snapshots=6,
        )
        super().__init__(*tiers, limits=limits, lookup_seconds=0.02, load_seconds=0.02)
        self.frozen: dict[str, ExternalCacheStats] = {}
        on_admitted = self.connector.on_admitted

        def recorded(request_id: str, num_cached: int, used: frozenset[int]) -> ExternalCacheStats:
            reuse_stats = on_admitted(request_id, num_cached, used)
            assert request_id not in self.frozen, "admitted for the first time once"
            self.frozen[request_id] = reuse_stats
            return reuse_stats

        self.connector.on_admitted = recorded  # type: ignore[method-assign,assignment]


def random_request(chance: random.Random, number: int) -> GenerateRequest:
    """One of a few families of prompts that share prefixes, some with a picture in them."""
    family = chance.randrange(6)
    length = chance.choice([3, 9, 17, 26, 33])
    tokens = text(40, seed=family)[:length]
    pictures = [feature(f"p{chance.randrange(2)}", 4, 4)] if family < 3 and length > 9 else []
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=chance.randint(1, 6),
        ignore_eos=True,
        n=chance.choice([1, 1, 1, 1, 2]),
    )
    return request(str(number), tokens, pictures, sampling=sampling, arrival=float(number))


def disturb(chance: random.Random, tiers: list[FaultyTier]) -> None:
    tier = chance.choice(tiers)
    match chance.randrange(8):
        case 0:
            tier.fail_reads_after, tier.read_reason = tier.reads + 2, chance.choice(REASONS)
        case 1:
            tier.fault = chance.choice(REASONS)
        case 2:
            tier.forget()
        case _:
            tier.fault = tier.fail_reads_after = None


def rarest(world: RecordingWorld, aborted_in: Counter[SequenceState]) -> Request:
    """The request in the state that was aborted least so far."""
    requests = world.scheduler._state.queues.requests.values()
    return min(requests, key=lambda r: min(aborted_in[s.state] for s in r.unfinished_sequences()))


@pytest.mark.parametrize(
    "state_bytes", [pytest.param(0, id="keys and values"), pytest.param(150, id="states, too")]
)
def test_everything_adds_up(state_bytes: int) -> None:
    chance = random.Random(7)
    tiers = [FaultyTier(name="near"), FaultyTier(name="far")]
    requests: dict[str, GenerateRequest] = {}
    aborted_in: Counter[SequenceState] = Counter()
    with RecordingWorld(*tiers, state_bytes=state_bytes) as world:
        started = time.monotonic()
        while len(requests) < NUM_REQUESTS or world.scheduler.has_work:
            room = len(requests) < NUM_REQUESTS and world.scheduler.num_waiting < 8
            if room and chance.random() < 0.9:
                one = random_request(chance, len(requests))
                requests[one.request_id] = one
                world.add(one)
            if chance.random() < 0.08 and world.scheduler._state.queues.requests:
                victim = rarest(world, aborted_in)
                aborted_in.update(s.state for s in victim.unfinished_sequences())
                world.scheduler.abort(victim.request_id)
            if chance.random() < 0.02:
                disturb(chance, tiers)
            if chance.random() < 0.01:
                world.forget_device()
            if world.step() is None:
                time.sleep(0.0002)
        world.settle(seconds=30.0)
        world.assert_all_free()
        check_each(world, requests)
        check_sums(world, requests)
    waiting = {
        SequenceState.WAITING,
        SequenceState.LOADING,
        SequenceState.PREFILLING,
        SequenceState.DECODING,
        SequenceState.WAITING_FOR_SIBLING,
    }
    assert waiting <= aborted_in.keys(), "aborts came in every state"
    statuses = Counter(reuse_stats.status for reuse_stats in world.frozen.values())
    assert statuses.keys() == {"loaded", "partial", "failed", "shadowed", "none"}
    assert time.monotonic() - started < 120.0
    assert all(not any(tier.leased.values()) for tier in tiers)


def check_each(world: RecordingWorld, requests: dict[str, GenerateRequest]) -> None:
    for name, one in requests.items():
        for index in range(one.sampling.n):
            got = world.tokens[name, index]
            assert got == reference(one, len(got), index)
            if world.reason(name, index) == "length":
                assert len(got) == one.sampling.max_tokens
        reuse_stats = world.reuse_stats.get(name)
        if reuse_stats is None:
            continue
        external = reuse_stats.external
        assert external == world.frozen[name]
        assert external is not None
        assert 0 <= external.loaded <= external.matched < one.prompt.shape[0]
        assert reuse_stats.external_cached_tokens == external.loaded
        assert sum(tokens for _, tokens in external.by_tier) == external.loaded
        assert 0 <= reuse_stats.prefix_cached_tokens + external.loaded < one.prompt.shape[0]


def check_sums(world: RecordingWorld, requests: dict[str, GenerateRequest]) -> None:
    stats = world.scheduler.stats()
    frozen = world.frozen
    prompts = sum(requests[name].prompt.shape[0] for name in frozen)
    assert stats["prompt_tokens_total"] == prompts
    assert stats["external_prefix_cache_hits_total"] == sum(f.loaded for f in frozen.values())
    assert stats["external_prefix_cache_matched_total"] == sum(f.matched for f in frozen.values())
    local = stats["prefix_cache_hits_total"]
    assert stats["external_prefix_cache_queries_total"] == prompts - local
    told = [
        reuse_stats
        for reuse_stats in world.reuse_stats.values()
        if reuse_stats.external is not None
    ]
    assert sum(reuse_stats.prefix_cached_tokens for reuse_stats in told) <= local
    assert stats["kv_transfer_blocks_held"] == 0
    assert stats["kv_transfer_blocks_quarantined"] == 0
