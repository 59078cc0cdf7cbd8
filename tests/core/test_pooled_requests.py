"""Any workload of a model that pools: results are right, equal inputs are computed once where they
do not overlap, and everything is free at the end."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lookonce.core.pooled_outputs import ENTRY_BYTES, PooledOutputs
from lookonce.core.request_validation import RequestValidator
from lookonce.errors import TooLargeError
from lookonce.types.pooling import PoolingInfo
from lookonce.types.request import GenerateRequest
from tests.support.core.builders import (
    Limits,
    feature,
    items_for,
    key,
    make_scheduler,
    model_info,
    request,
    text,
)
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import pooled_reference

LONGEST = 40
LAST = PoolingInfo("last", 4, reuses_prefixes=True)
MEAN = PoolingInfo("mean", 4)
PICTURES = [
    [],
    [feature("d", 2, 8), feature("a", 12, 2)],
    [feature("e", 2, 8), feature("a", 12, 2)],
    [feature("d", 2, 8), feature("c", 20, 5), feature("d", 30, 8)],
]


def limits() -> st.SearchStrategy[Limits]:
    """An encoder that computes whole prompts has steps of the longest, and takes no items."""
    models = st.sampled_from(
        [
            model_info(max_model_len=LONGEST, pooling=LAST),
            model_info(max_model_len=LONGEST, pooling=MEAN),
        ]
    )
    cut = st.builds(
        Limits,
        num_blocks=st.integers(10, 20),
        encoder_rows=st.sampled_from([8, 13, 64]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([8, 11, 64]),
        max_encoder_tokens=st.sampled_from([1, 8, 13]),
        prefix_caching=st.booleans(),
        model=models,
    )
    whole = st.builds(
        Limits,
        num_blocks=st.integers(10, 20),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([LONGEST, LONGEST + 7]),
        model=st.just(model_info(max_model_len=LONGEST, pooling=MEAN, encoder_only=True)),
    )
    return st.one_of(cut, whole)


class PooledMachine(RuleBasedStateMachine):
    @initialize(chosen=limits())
    def start(self, chosen: Limits) -> None:
        self.engine = Engine(chosen)
        self.requests: dict[str, GenerateRequest] = {}
        self.asked = 0

    @rule(
        lengths=st.lists(st.sampled_from([LONGEST, 30, 24, 17, 5, 1]), min_size=1, max_size=4),
        pictures=st.sampled_from(PICTURES),
        lacking=st.sets(st.sampled_from(["a", "c", "d", "e"])),
        arrival=st.floats(0, 10),
        scope=st.sampled_from([b"1" * 32, b"1" * 32, b"2" * 32]),
    )
    def add(self, lengths, pictures, lacking, arrival, scope) -> None:
        for length in lengths:
            held = [] if self.engine.limits.model.encoder_only else pictures
            features = [each for each in held if each.end <= length]
            made = request(
                f"r{len(self.requests)}",
                text(LONGEST)[:length],
                features,
                arrival=arrival,
                scope=scope,
            )
            missing = [key(name) for name in lacking if key(name) in {f.key for f in features}]
            with suppress(TooLargeError):  # an item that the encoder cache has no room for
                self.engine.add(made, missing=missing)
                self.requests[made.request_id] = made

    @rule()
    def step(self) -> None:
        self.engine.step()

    @rule()
    def supply(self) -> None:
        for request_id, _ in self.engine.needs[self.asked :]:
            self.engine.supply(self.requests[request_id])
        self.asked = len(self.engine.needs)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            self.engine.scheduler.abort(data.draw(st.sampled_from(sorted(self.requests))))

    @rule()
    def reset(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def sums_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(100):
            self.supply()
            self.engine.run()
            if self.asked == len(self.engine.needs) and not self.engine.scheduler.has_work:
                break
        for name, made in self.requests.items():
            delta = self.engine.ended[name, 0]
            assert delta.finish_reason in ("stop", "abort")
            if delta.finish_reason == "stop":
                assert delta.pooled == pooled_reference(made)
                assert delta.token_ids == []
        stats = self.engine.scheduler.stats()
        known = self.engine.reuse_stats.values()
        assert stats["prefix_cache_hits_total"] >= sum(s.prefix_cached_tokens for s in known)
        assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
        assert stats["generation_tokens_total"] == 0
        assert self.engine.scheduler._state.block_pool.num_free == self.engine.limits.num_blocks


PooledMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
test_any_workload_of_a_model_that_pools = PooledMachine.TestCase


def test_a_known_input_needs_no_items_and_no_room():
    """What it was made of may have gone: nothing is asked for, and nobody is waited for."""
    engine = Engine(Limits(model=model_info(pooling=LAST), num_blocks=12))
    first = request("first", text(20), [feature("d", 2, 8)])
    engine.add(first)
    engine.run()
    engine.add(request("long", text(44, seed=1)))
    engine.step()  # it has all blocks
    engine.add(request("again", text(20), [feature("d", 2, 8)]), missing=[key("d")])
    engine.step()
    assert engine.ended["again", 0].pooled == pooled_reference(first)
    assert not engine.needs
    assert engine.reuse_stats["again"].prefix_cached_tokens == 20
    assert engine.scheduler.stats()["pooled_cache_hits_total"] == 1


def test_an_input_is_never_answered_from_another_scope():
    engine = Engine(Limits(model=model_info(pooling=LAST)))
    for scope in (b"1" * 32, b"2" * 32):
        engine.add(request(f"of {scope[0]}", text(20), scope=scope))
        engine.run()
    assert engine.scheduler.stats()["pooled_cache_hits_total"] == 0


def test_results_stay_within_their_memory():
    """The least recently used leaves; one that is too large is not kept."""
    held = PooledOutputs(3 * (ENTRY_BYTES + 8))
    limits = Limits(model=model_info(pooling=LAST))
    state = make_scheduler(limits)._state
    validator = RequestValidator(state.block_pool, state.encoder_cache, limits.model, 32)
    built = {
        name: validator.build_request(request(name, text(5, seed=number)), items_for([]))
        for number, name in enumerate("abcd")
    }
    for name in "abc":
        held.put(built[name], b"8 bytes.")
    assert held.get(built["a"]) == b"8 bytes."
    held.put(built["d"], b"8 bytes.")
    assert held.get(built["b"]) is None
    assert [held.get(built[name]) for name in "acd"] == [b"8 bytes."] * 3
    assert held.used_bytes == 3 * (ENTRY_BYTES + 8)
    held.put(built["b"], bytes(5000))
    assert len(held) == 3
    held.clear()
    assert (len(held), held.used_bytes) == (0, 0)
