"""Encoder outputs in external tiers: what is encoded once is encoded nowhere else, and whatever
becomes of a tier, every token is right and nothing is left behind."""

from __future__ import annotations

import itertools
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from lookonce.config import EncoderConfig, Options, resolve
from lookonce.engine.process.kv_tiers import open_external_outputs
from lookonce.errors import ConfigError
from lookonce.kv.chain import CircuitBreaker
from lookonce.kv.host import HostTier
from lookonce.kv.objects import ObjectFormat, output_namespace_digest, piece_keys
from lookonce.kv.tier import Reason
from lookonce.kv.valkey import ValkeyTier
from lookonce.model.encoder_runner import EncoderRunner, OutputCopier
from lookonce.types.kv import OutputLayout, TierSpec
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, items_for, key, model_info, request, text
from tests.support.kv.real_engines import HOST, Served, Subject
from tests.support.kv.tiers import DictTier, FaultyTier, StoredObjects, eventually
from tests.support.kv.world import OUTPUTS, OutputWorld
from tests.support.kv_servers import ValkeyServer
from tests.support.model_folders.make import FolderMaker

OBJECTS = ObjectFormat(bytes(32), OUTPUTS)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
NAMES = itertools.count()


def prompt(*pictures: str, rows: int = 5, seed: int = 0) -> GenerateRequest:
    """Pictures of `rows` rows with text between them; no two prompts share a block."""
    features = [
        feature(name, 4 + number * (rows + 3), rows) for number, name in enumerate(pictures)
    ]
    tokens = text(8 + len(pictures) * (rows + 3), seed=seed)
    number = next(NAMES)
    tokens[0] = 3 + number % 900
    tokens[1] = 3 + number // 900
    return request(f"r{number}", tokens, features, sampling=SHORT)


def piece_names(*pictures: str, rows: int = 5) -> list[bytes]:
    return [name for each in pictures for name in piece_keys(key(each), rows, OUTPUTS)]


# --- what is shared ------------------------------------------------------------------------------


def test_a_picture_encoded_by_one_engine_is_not_encoded_by_another() -> None:
    tier = DictTier()
    with OutputWorld(tier) as first, OutputWorld(tier) as second:
        first.serve(prompt("a", "b"), prompt("b", "c"))
        assert sorted(first.runner.encoded) == sorted(map(key, "abc"))
        one = prompt("c", "a", "b")
        second.serve(one, prompt("a"))
        assert second.runner.encoded == []
        assert sorted(second.runner.received) == sorted(map(key, "abc"))
        stats = second.scheduler.stats()
        assert stats["encoder_runs_total"] == 0
        assert stats["encoder_cache_queries_total"] == stats["encoder_cache_hits_total"] == 4
        assert stats["external_encoder_cache_queries_total"] == 3, "one load serves both requests"
        assert stats["external_encoder_cache_hits_total"] == 3
        assert stats["encoder_tier_outputs_total:dict"] == 3
        reuse = second.reuse_stats[one.request_id]
        assert reuse.encoder == ("hit", "hit", "hit")
        assert reuse.encoder_tiers == ((0, "dict"), (1, "dict"), (2, "dict"))
        second.serve(again := prompt("a"))
        assert second.reuse_stats[again.request_id].encoder_tiers == (), "the device holds it"


def test_outputs_found_far_are_kept_near() -> None:
    near, far = FaultyTier(name="near"), FaultyTier(name="far")
    with OutputWorld(far) as other:
        other.serve(prompt("a"))
    with OutputWorld(near, far) as world:
        world.serve(one := prompt("a"))
        assert world.reuse_stats[one.request_id].encoder_tiers == ((0, "far"),)
        world.forget_device()
        world.serve(two := prompt("a"))
        assert world.reuse_stats[two.request_id].encoder_tiers == ((0, "near"),)
        assert world.runner.encoded == []


def test_an_item_that_the_engine_lacks_is_not_asked_for_where_a_tier_has_its_output() -> None:
    tier = DictTier()
    with OutputWorld(tier) as first, OutputWorld(tier) as second:
        first.serve(prompt("a"))
        one = prompt("a")
        second.add(one, missing=[key("a")])
        second.settle()
        second.check(one)
        assert second.needs == []
        other = prompt("b")
        second.add(other, missing=[key("b")])
        eventually(lambda: second.step() is None and second.needs)
        assert second.needs == [(other.request_id, (key("b"),))]
        second.supply(other)
        second.settle()
        second.check(other)


def test_what_a_cached_prefix_covers_is_not_looked_for() -> None:
    with OutputWorld(DictTier()) as world:
        one = prompt("a")
        world.serve(one)
        world.scheduler.reset_encoder_cache()
        asked = world.connector.stats()["external_encoder_cache_queries_total"]
        tokens = np.frombuffer(one.prompt.data, "<i4").tolist()
        again = request("again", tokens, one.features, sampling=SHORT)
        world.serve(again)
        assert world.connector.stats()["external_encoder_cache_queries_total"] == asked
        assert world.reuse_stats["again"].encoder == ("skipped",)


def test_live_sessions_neither_ask_nor_store() -> None:
    tier = FaultyTier()
    with OutputWorld(tier) as world:
        one = prompt("a")
        world.scheduler.add(one, items_for(one.features), live=True)
        while world.step() is not None:
            pass
        assert world.runner.encoded == [key("a")]
        world.scheduler.abort(one.request_id)
        world.settle()
        assert tier.calls == 0


def test_loads_take_no_more_memory_than_the_encoder_cache() -> None:
    tier = DictTier()
    limits = Limits(encoder_rows=12, max_encoder_tokens=12)
    with OutputWorld(tier, limits=limits) as first, OutputWorld(tier, limits=limits) as second:
        for name in "abcd":
            first.serve(prompt(name))
        second.serve(prompt("a", "b", "c", "d"))
        assert second.runner.received == [key("a"), key("b")], "two of five rows fit into twelve"
        assert second.runner.encoded == [key("c"), key("d")]


def test_outputs_that_find_no_room_to_wait_are_not_stored_and_counted() -> None:
    tier = FaultyTier()
    with OutputWorld(tier, max_queued_bytes=1) as world:
        world.serve(prompt("a", "b"))
        assert world.connector.stats()["encoder_transfer_dropped_stores_total"] == 2
        assert tier.calls == 1, "one lookup asks for both, and none is given"


def test_a_request_that_ends_while_it_loads_leaves_nothing() -> None:
    tier = FaultyTier()
    with OutputWorld(tier) as world:
        world.serve(prompt("a"))
        world.forget_device()
        tier.hang = threading.Event()
        gone, stays = prompt("a"), prompt("a")
        world.add(gone)
        world.add(stays)
        world.step()
        assert world.scheduler.stats()["encoder_transfer_requests_loading"] == 2
        world.scheduler.abort(gone.request_id)
        world.scheduler.check_integrity()
        tier.hang.set()
        world.settle()
        world.check(stays)
        assert world.runner.received == [key("a")]
        assert tier.num_leases == 0


def test_what_comes_for_a_request_that_has_ended_is_dropped() -> None:
    tier = FaultyTier()
    with OutputWorld(tier) as world:
        world.serve(prompt("a"))
        world.forget_device()
        tier.hang = threading.Event()
        world.add(gone := prompt("a"))
        world.step()
        world.scheduler.abort(gone.request_id)
        tier.hang.set()
        eventually(lambda: world.connector._loaded)
        world.settle()
        world.forget_device()
        world.serve(one := prompt("a"))
        assert world.reuse_stats[one.request_id].encoder_tiers == ((0, "faulty"),)


def test_an_item_that_cannot_be_encoded_is_not_stored() -> None:
    tier = FaultyTier()
    with OutputWorld(tier) as world:
        world.runner.failing_items.add(key("a"))
        world.add(one := prompt("a", "b"))
        world.settle()
        assert world.reason(one.request_id) == "error"
        assert list(tier.stored) == piece_names("b")


# --- the fault matrix ----------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["missing", "corrupt", "timeout", "connection", "io"])
@pytest.mark.parametrize("good", [None, 0, 1, 2, 4])
def test_a_tier_that_fails_costs_an_encoder_run_and_no_answer(
    reason: Reason, good: int | None
) -> None:
    """Every call fails, or every read from so many pieces on; three pieces to an output."""
    tier = FaultyTier()
    with OutputWorld(tier) as world:
        world.serve(prompt("a", "b"))
        assert list(tier.stored) == piece_names("a", "b")
        world.forget_device()
        world.runner.encoded.clear()
        if good is None:
            tier.fault = reason
        else:
            tier.fail_reads_after, tier.read_reason = good, reason
        world.serve(prompt("a", "b"))
        loaded = 0 if good is None else good // 3
        assert world.runner.received == [key(name) for name in "ab"[:loaded]]
        assert world.runner.encoded == [key(name) for name in "ab"[loaded:]]
        assert tier.num_leases == 0
        if good is None and reason in ("missing", "corrupt"):
            return  # no tier raises these
        assert world.connector.stats()[f"encoder_tier_failures_total:faulty,{reason}"] > 0


def test_a_tier_that_hangs_delays_a_request_by_one_deadline() -> None:
    tier = FaultyTier(hang=threading.Event())
    with OutputWorld(tier, lookup_seconds=0.02) as world:
        world.serve_until_ended(one := prompt("a"))
        world.check(one)
        assert world.runner.encoded == [key("a")]
        assert tier.hang is not None
        tier.hang.set()
        world.settle()


def test_a_load_that_comes_too_late_is_dropped() -> None:
    tier = FaultyTier()
    with OutputWorld(tier, load_seconds=0.05) as world:
        world.serve(prompt("a"))
        world.forget_device()
        read = tier.inner.read
        late = threading.Event()

        def slow(keys, into):  # type: ignore[no-untyped-def]
            late.wait(60)
            return read(keys, into)

        tier.inner.read = slow  # type: ignore[method-assign]
        world.serve_until_ended(one := prompt("a"))
        world.check(one)
        late.set()
        world.settle()
        eventually(lambda: tier.num_leases == 0)
        assert world.runner.received == []


def test_a_piece_evicted_between_lookup_and_load_is_a_miss() -> None:
    tier = FaultyTier()
    with OutputWorld(tier) as world:
        world.serve(prompt("a"))
        world.forget_device()
        lease = tier.inner.lease

        def evicting(keys):  # type: ignore[no-untyped-def]
            held = lease(keys)
            tier.forget(1)
            return held

        tier.inner.lease = evicting  # type: ignore[method-assign]
        world.serve(prompt("a"))
        assert world.runner.received == []


@pytest.mark.parametrize("kind", ["host", "disk", "valkey"])
def test_bits_that_flip_at_rest(kind: str, tmp_path: Path, valkey: ValkeyServer) -> None:
    """The output is encoded again; the bad piece is gone and gets stored again."""
    chance = random.Random(3)
    stored = StoredObjects(kind, OBJECTS, tmp_path, valkey)

    def flip() -> None:
        stored.flip(chance, chance.choice(piece_names("a", "b")))

    with OutputWorld(stored.tier) as world:
        for number in range(20):
            world.forget_device()
            world.serve(prompt("a", "b"))
            if number % 2:
                flip()
        assert len(world.runner.encoded) == 2 + 9, "each flip but the last costs one run"
        assert len(world.runner.received) == 40 - 11
        stats = world.connector.stats()
        assert stats[f"encoder_tier_failures_total:{kind},corrupt"] == 9
        assert stats[f"encoder_tier_breaker_state:{kind}"] == 0, "a bad object is not a bad tier"


def test_a_real_valkey_paused_killed_and_restarted_while_requests_run(
    valkey: ValkeyServer,
) -> None:
    tier = ValkeyTier(OBJECTS, TierSpec("valkey", path=valkey.socket), timeout=0.5)

    def received(world: OutputWorld) -> int:
        before = len(world.runner.received)
        world.forget_device()
        world.serve(prompt("a", "b"))
        return len(world.runner.received) - before

    with OutputWorld(tier, lookup_seconds=2.0, load_seconds=4.0) as world:
        (guarded,) = world.chain.tiers
        guarded._breaker = CircuitBreaker(time.monotonic, first_cooldown=0.02)
        received(world)
        assert received(world) == 2
        valkey.pause()
        assert [received(world) for _ in range(3)] == [0, 0, 0]
        valkey.resume()
        eventually(lambda: received(world) == 2, 20.0)
        valkey.kill()
        assert [received(world) for _ in range(3)] == [0, 0, 0]
        valkey.start()
        eventually(lambda: received(world) == 2, 20.0)


class TwoEngines(RuleBasedStateMachine):
    """Requests, aborts, resets and faults in any order, on two engines that share one tier."""

    @initialize(rows=st.sampled_from([12, 40]), host=st.booleans())
    def start(self, rows: int, host: bool) -> None:
        limits = Limits(encoder_rows=rows, max_encoder_tokens=12, num_blocks=32, max_num_seqs=3)
        self.tier = FaultyTier(inner=HostTier(OBJECTS, 16 * 192) if host else DictTier())
        self.worlds = [OutputWorld(self.tier, limits=limits) for _ in range(2)]
        for world in self.worlds:
            (guarded,) = world.chain.tiers
            guarded._breaker = CircuitBreaker(time.monotonic, first_cooldown=0.001)
        self.requests: list[tuple[OutputWorld, GenerateRequest]] = []

    @rule(
        number=st.integers(0, 1),
        pictures=st.lists(st.sampled_from("abcde"), max_size=3),
        lacks=st.booleans(),
    )
    def add(self, number: int, pictures: list[str], lacks: bool) -> None:
        world, one = self.worlds[number], prompt(*pictures)
        self.requests.append((world, one))
        world.add(one, missing=map(key, pictures) if lacks else ())

    @rule(number=st.integers(0, 1), count=st.integers(1, 4))
    def step(self, number: int, count: int) -> None:
        for _ in range(count):
            self.worlds[number].step()

    @rule(chance=st.randoms(use_true_random=False))
    def abort(self, chance: random.Random) -> None:
        if self.requests:
            world, one = chance.choice(self.requests)
            world.scheduler.abort(one.request_id)

    @rule(number=st.integers(0, 1))
    def forget(self, number: int) -> None:
        self.worlds[number].forget_device()

    @rule(fault=st.sampled_from([None, "io", "connection"]))
    def fail(self, fault: Reason | None) -> None:
        self.tier.fault = fault

    @rule(good=st.sampled_from([None, 0, 1, 5]), reason=st.sampled_from(["missing", "corrupt"]))
    def spoil(self, good: int | None, reason: Reason) -> None:
        self.tier.fail_reads_after, self.tier.read_reason, self.tier.reads = good, reason, 0

    @rule(kept=st.integers(0, 6))
    def evict(self, kept: int) -> None:
        self.tier.forget(kept)

    @invariant()
    def agree(self) -> None:
        for world in getattr(self, "worlds", ()):
            world.scheduler.check_integrity()

    def teardown(self) -> None:
        for world in getattr(self, "worlds", ()):
            self._finish(world)

    def _finish(self, world: OutputWorld) -> None:
        with world:
            supplied: set[str] = set()

            def supply() -> bool:
                world.step()
                for name, _ in world.needs:
                    if name not in supplied:
                        supplied.add(name)
                        world.supply(next(r for _, r in self.requests if r.request_id == name))
                return not world.unsettled()

            eventually(supply, 60.0)
            world.settle()
            for owner, one in self.requests:
                ended = world.ended.get((one.request_id, 0))
                if owner is world and ended is not None and ended.finish_reason != "abort":
                    assert ended.error is None
                    world.check(one)
        assert self.tier.num_leases == 0


TestTwoEngines = TwoEngines.TestCase
TestTwoEngines.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


# --- identity ------------------------------------------------------------------------------------


def test_models_dtypes_and_widths_have_namespaces_of_their_own() -> None:
    rows = ((64, "float32"), (64, "int32"), (128, "float32"))
    layouts = [OutputLayout.of_rows(*each) for each in rows]
    digests = {
        output_namespace_digest(weights_digest=weights, layout=layout, processor_fingerprint=by)
        for layout in layouts
        for weights in ("one", "two")
        for by in (b"", b"x")
    }
    assert len(digests) == 12
    with pytest.raises(ValueError, match="weights"):
        output_namespace_digest(weights_digest="", layout=layouts[0])


def test_pieces_of_another_output_or_number_of_rows_are_other_pieces() -> None:
    names = [*piece_names("a"), *piece_names("b"), *piece_names("a", rows=6)]
    assert len(set(names)) == len(names) == 9


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 5000])
@pytest.mark.parametrize("row_bytes", [64, 4096, 3 << 20])
def test_pieces_cover_all_rows(rows: int, row_bytes: int) -> None:
    layout = OutputLayout.of_rows(row_bytes, "float32")
    pieces, nbytes = layout.num_pieces(rows), rows * row_bytes
    assert (pieces - 1) * layout.piece_bytes < nbytes <= pieces * layout.piece_bytes


# --- real models ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen2_5_vl", "gemma3"])
def subject(request: pytest.FixtureRequest, folder: FolderMaker) -> Subject:
    return Subject(folder(request.param))


def test_same_tokens_from_outputs_that_another_engine_encoded(
    subject: Subject, tmp_path: Path, valkey: ValkeyServer
) -> None:
    disk = TierSpec("disk", path=str(tmp_path), capacity_bytes=1 << 30)
    tiers = [HOST, disk, TierSpec("valkey", path=valkey.socket)]
    with Served(subject.loaded, encoder_tiers=tiers) as first:
        for case, expected in zip(subject.cases, subject.expected, strict=True):
            ((tokens, _),) = first.answer(case)
            assert tokens == expected
        assert first.core.stats()["encoder_runs_total"] == 2
    for tier in tiers[1:]:
        with Served(subject.loaded, encoder_tiers=[tier]) as other:
            for case, expected in zip(subject.cases, subject.expected, strict=True):
                other.forget_device()
                ((tokens, _),) = other.answer(case)
                assert tokens == expected
            stats = other.core.stats()
            assert stats["encoder_runs_total"] == 0
            assert stats[f"encoder_tier_outputs_total:{tier.kind}"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    runner = EncoderRunner(None, dtype, torch.device("cpu"))  # type: ignore[arg-type]
    output = torch.randn(5, 6).to(dtype)
    runner._outputs[b"a"] = output
    copier = OutputCopier(runner)
    assert copier.pin(b"b") is None
    pinned = copier.pin(b"a")
    runner.drop([b"a"])
    out = np.empty(output.nbytes, dtype=np.uint8)
    copier.copy(pinned, out.data)
    assert np.array_equal(out, output.view(torch.uint8).numpy().ravel())


# --- options -------------------------------------------------------------------------------------


def test_a_mistake_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"^--encoder-tier: 'host:4' is none of"):
        resolve(Options(encoder_tier=("host:4",)))
    config = resolve(Options(encoder_tier=("host:64MB", "valkey://10.0.0.1:1")))
    assert [tier.kind for tier in config.encoder.tiers] == ["host", "valkey"]
    assert config.kv.tiers == ()


def test_a_model_without_an_encoder_and_a_tier_that_is_too_small_are_refused() -> None:
    none = EncoderConfig(tiers=(HOST,))
    info = model_info()
    copier = OutputCopier(EncoderRunner(None, torch.float32, torch.device("cpu")))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no encoder"):
        open_external_outputs(none, replace(info, encoder_row_bytes=0), copier)
    small = EncoderConfig(tiers=(TierSpec("host", capacity_bytes=1000),))
    with pytest.raises(ConfigError, match="--encoder-tier host: one block takes"):
        open_external_outputs(small, replace(info, weights_digest="x"), copier)
