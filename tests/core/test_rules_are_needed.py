"""Negative controls: with one rule taken away, the workloads below must fail.

Each test first runs its workload with the rule (it passes), then without. A test suite that still
passes without a rule does not test it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
import pytest

from lookonce.core import planning
from lookonce.core import request as request_module
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.encoder_scheduling import EncoderBudget, StepPass
from lookonce.core.planning import Admission, Chunker, Fairness, Planner
from lookonce.core.preemption import Preemption, SessionEviction
from lookonce.core.request import Sequence, SequenceState, root_hash
from lookonce.core.scheduler import UpdateFromOutput
from lookonce.core.scheduler_state import RequestQueues, SchedulerState
from lookonce.types.lora import LoRAIdentity
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, model_info, request, text
from tests.support.core.engine import COUNTS_STEPS, Engine
from tests.support.core.fake_runner import prompt_scores, reference
from tests.support.core.feeding import (
    ROOMY,
    an_answer_beside_sessions_that_each_take_all_tokens,
    an_item_that_takes_a_whole_step_beside_a_session,
    an_item_that_takes_all_room_beside_a_session_that_always_holds_some,
    an_item_that_takes_all_room_beside_one_who_holds_some_and_gets_no_tokens,
    long_prompts_one_after_the_other,
    open_session,
)

LASTING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
Workload = Callable[[], None]


def serve(limits: Limits, requests: list[GenerateRequest], *, one_by_one: bool = False) -> Engine:
    """Run all requests to their end and compare every token with the reference."""
    engine = Engine(limits)
    for one in requests:
        engine.add(one)
        if one_by_one:
            engine.run(max_steps=500)
    engine.run(max_steps=500)
    for one in requests:
        for index in range(one.sampling.n):
            got = engine.tokens[one.request_id, index]
            assert got == reference(one, one.sampling.max_tokens or 0, index)
    engine.assert_all_free()
    return engine


def two_pictures_at_the_same_place() -> None:
    pictures = [request(name, text(30), [feature(name, 4, 8)]) for name in "xy"]
    serve(Limits(), pictures, one_by_one=True)


def two_tenants_with_the_same_prompt() -> None:
    prompts = [request(name, text(30), scope=name.encode() * 32) for name in "ab"]
    engine = serve(Limits(), prompts, one_by_one=True)
    assert engine.reuse_stats["b"].prefix_cached_tokens == 0


def the_same_prompt_with_and_without_an_adapter() -> None:
    plain, adapted = request("a", text(30)), request("b", text(30))
    adapted = msgspec.structs.replace(adapted, adapter=LoRAIdentity(b"a" * 32))
    engine = serve(Limits(), [plain, adapted], one_by_one=True)
    assert engine.reuse_stats["b"].prefix_cached_tokens == 0


def a_picture_with_and_without_an_adapter_of_the_encoder() -> None:
    plain, adapted = (request(name, text(30), [feature("x", 4, 8)]) for name in "ab")
    adapted = msgspec.structs.replace(adapted, adapter=LoRAIdentity(b"a" * 32, b"e" * 32))
    engine = serve(Limits(), [plain, adapted], one_by_one=True)
    assert len(engine.runner.encoded) == 2


def the_same_prompt_twice() -> None:
    serve(Limits(), [request(name, text(24)) for name in "ab"], one_by_one=True)


def three_that_outgrow_the_blocks() -> None:
    crowd = [request(str(i), text(12, seed=i), arrival=i, sampling=LASTING) for i in range(3)]
    engine = serve(Limits(num_blocks=10), crowd)
    assert engine.released[0] == "0", "the first to come is not the one to give way"


def many_items_in_a_small_encoder_cache() -> None:
    requests = [
        request(
            str(i), text(40, seed=i), [feature(f"{i % 3}", 2, 8), feature("y", 20, 8)], arrival=i
        )
        for i in range(6)
    ]
    serve(Limits(encoder_rows=16, max_num_batched_tokens=6), requests)


def two_items_that_each_fill_the_encoder_cache() -> None:
    items = [feature("x", 2, 8), feature("y", 20, 8)]
    serve(Limits(encoder_rows=8), [request("a", text(40), items)])


def two_items_above_one_encoder_budget() -> None:
    items = [feature("x", 2, 8), feature("y", 20, 8)]
    serve(Limits(max_encoder_tokens=12), [request("a", text(40), items)])


def pictures_that_must_stay_whole() -> None:
    limits = Limits(model=model_info(unsplittable=("image",)), max_num_batched_tokens=16)
    serve(limits, [request("a", text(40), [feature("x", 12, 10), feature("y", 30, 8)])])


def an_item_that_fills_the_budget_beside_a_stream_of_others() -> None:
    limits = Limits(model=model_info(unsplittable=("image",)), max_num_batched_tokens=16)
    engine = Engine(limits)
    big = request("big", text(20), [feature("x", 0, 16)], arrival=1.0)
    engine.add(request("0", text(5)))
    engine.step()
    engine.add(big)
    for number in range(1, 30):
        engine.add(request(str(number), text(5, seed=number), arrival=1.0 + number))
    engine.run()
    assert engine.released.index("big") <= 3


def an_item_that_waits_for_room_beside_a_stream_of_others() -> None:
    """Each of the others holds the same popular output for some steps, and so keeps it there."""
    engine = Engine(Limits(encoder_rows=16, max_num_batched_tokens=8, max_num_seqs=4))
    popular = feature("popular", 1, 12)
    engine.add(request("0", text(14), [popular]))
    engine.step()
    engine.add(request("big", text(20), [feature("big", 0, 8)], arrival=1.0))
    for number in range(1, 12):
        engine.add(request(str(number), text(14, seed=number), [popular], arrival=1.0 + number))
    engine.run()
    assert engine.released.index("big") <= 2


def a_crowd_with_one_whose_picture_is_not_here() -> None:
    picture = feature("x", 0, 8)
    engine = Engine(Limits(num_blocks=12))
    engine.add(request("seed", text(14), [picture]))
    engine.run()
    engine.add(request("a", text(8, seed=1), arrival=1.0, sampling=LASTING))
    late = request("b", text(14), [picture], arrival=2.0, sampling=LASTING)
    engine.add(late, missing=[picture.key])
    engine.run()
    assert engine.scheduler.stats()["num_preemptions_total"] > 0
    assert engine.released[1:] == ["b", "a"]


def a_prompt_scored_whose_beginning_is_cached() -> None:
    asking = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    one = request("b", text(40), arrival=1.0, sampling=asking)
    engine = serve(Limits(), [request("a", text(40)), one], one_by_one=True)
    assert engine.scored["b"] == prompt_scores(one)
    assert engine.reuse_stats["b"].prefix_cached_tokens == 0
    counted = engine.scheduler.stats()
    assert counted["prefix_cache_queries_total"] == 40, "nothing was looked up for the second"
    assert counted["prompt_tokens_total"] == 80
    engine.add(request("c", text(40), sampling=asking))
    engine.step()
    engine.scheduler.abort("c")
    engine.run()
    assert engine.scored.keys() == {"b"}


def samples_of_one_long_prompt() -> None:
    sampling = SamplingParams(n=3, max_tokens=4, ignore_eos=True)
    engine = serve(Limits(), [request("a", text(80), sampling=sampling)])
    assert engine.runner.computed_tokens < 2 * 80, "the prompt is computed once"


def a_blocked_queue_of_long_prompts() -> None:
    """Counts how often the blocked head walks over its prompt."""
    walks: list[int] = []
    match = BlockPool.match

    def counting(pool: BlockPool, hashes: Iterable[bytes]) -> list[int]:
        walks.append(1)
        return match(pool, hashes)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(BlockPool, "match", counting)
        long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        blocker = request("a", text(100), sampling=long)
        serve(Limits(), [blocker, request("b", text(200, seed=1), arrival=1.0)])
    assert len(walks) < 10


def prefixes_reset_under_a_running_request() -> None:
    engine = Engine()
    engine.add(request("a", text(40), sampling=LASTING))
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.run()
    engine.add(request("b", text(32)))
    engine.run()
    cached = engine.scheduler.stats()["prefix_cache_hits_total"]
    engine.add(request("c", text(40) + engine.tokens["a", 0]))
    engine.run()
    assert engine.scheduler.stats()["prefix_cache_hits_total"] - cached == 32


def one_who_waits_for_the_seat_of_an_idle_session() -> None:
    engine = Engine(replace(ROOMY, max_num_seqs=1))
    open_session(engine, "idle")
    for _ in range(2):
        engine.step()
    engine.now = 60.0
    engine.add(request("a", text(4), arrival=1.0))
    engine.run(max_steps=60)


def never(*_args: object, **_kwargs: object) -> None:
    return None


def earliest_first(preemption: Preemption) -> Sequence:
    return next(iter(preemption._state.queues.decoding))


def latest_of_all(preemption: Preemption) -> Sequence:
    return preemption._latest_first()[0]


def plan_without_stalling(planner: Planner, sequence: Sequence, step: StepPass) -> None:
    planner._chunker.plan(sequence, step)


def start_over(state: SchedulerState, leader: Sequence) -> None:
    """Siblings wait for the leader, but find nothing of what it computed."""
    leader.request.prefilled = True
    state.block_pool.reset()
    for sibling in leader.request.sequences[1:]:
        state.queues.move(sibling, SequenceState.WAITING)


def register_regardless(update: UpdateFromOutput, sequence: Sequence) -> None:
    sequence.cache_generation = update._state.block_pool.generation
    register_blocks(update, sequence)


def reuse_all(state: SchedulerState, sequence: Sequence) -> int:
    return state.max_cached_blocks(len(sequence.tokens))


def root_for_all(_scope: bytes, adapter: bytes) -> bytes:
    return root_hash(b"", adapter)


def root_without_adapter(scope: bytes, _adapter: bytes) -> bytes:
    return root_hash(scope)


def allocate_unheld(cache: EncoderCache, key: bytes, rows: int, _holder: int) -> object:
    return try_allocate(cache, key, rows)


try_allocate = EncoderCache.try_allocate
register_blocks = UpdateFromOutput._register_blocks

Patch = tuple[object, str, Callable[..., object]]
RULES: dict[str, tuple[Workload, list[Patch]]] = {
    "items enter the block hashes": (
        two_pictures_at_the_same_place,
        [(request_module, "_describe", lambda *_: b"")],
    ),
    "scope enters the block hashes": (
        two_tenants_with_the_same_prompt,
        [(request_module, "root_hash", root_for_all)],
    ),
    "the adapter enters the block hashes": (
        the_same_prompt_with_and_without_an_adapter,
        [(request_module, "root_hash", root_without_adapter)],
    ),
    "an adapter of the encoder enters the items' keys": (
        a_picture_with_and_without_an_adapter_of_the_encoder,
        [(request_module.AdaptedKeys, "key", lambda _, sent: sent)],
    ),
    "at least one token is computed": (
        the_same_prompt_twice,
        [(SchedulerState, "max_cached_blocks", lambda _, num_tokens: num_tokens // 4)],
    ),
    "what is asked about a prompt is computed, not found": (
        a_prompt_scored_whose_beginning_is_cached,
        [(SchedulerState, "max_reused_blocks", reuse_all)],
    ),
    "the latest arrival is preempted": (
        three_that_outgrow_the_blocks,
        [(Preemption, "_choose_victim", earliest_first)],
    ),
    "a decode gets its block before it crosses into it": (
        three_that_outgrow_the_blocks,
        [(Planner, "_grow_decodes", never)],
    ),
    "ended sequences give their blocks back": (
        three_that_outgrow_the_blocks,
        [(BlockPool, "release", never)],
    ),
    "outputs in use are held": (
        many_items_in_a_small_encoder_cache,
        [
            (EncoderCache, "try_hold", lambda cache, _holder, key: key in cache),
            (EncoderCache, "try_allocate", allocate_unheld),
            (EncoderCache, "release", never),
            (EncoderCache, "release_all", never),
        ],
    ),
    "outputs behind the window are released": (
        two_items_that_each_fill_the_encoder_cache,
        [(UpdateFromOutput, "_release_passed_items", never)],
    ),
    "dropped outputs are named to the runner": (
        many_items_in_a_small_encoder_cache,
        [(EncoderCache, "take_dropped", lambda _: ())],
    ),
    "the encoder budget holds": (
        two_items_above_one_encoder_budget,
        [(EncoderBudget, "affords", lambda *_, **__: True)],
    ),
    "unsplittable items are not cut": (
        pictures_that_must_stay_whole,
        [(Chunker, "_keep_whole", lambda _self, _features, _start, end: end)],
    ),
    "unsplittable items are named to the runner": (
        pictures_that_must_stay_whole,
        [(Chunker, "_bidirectional", lambda *_: ())],
    ),
    "nobody is admitted who could take the tokens a prompt waits for": (
        an_item_that_fills_the_budget_beside_a_stream_of_others,
        [(Planner, "_plan_chunk", plan_without_stalling)],
    ),
    "nobody is admitted who could take the room a prompt waits for": (
        an_item_that_waits_for_room_beside_a_stream_of_others,
        [(Planner, "_plan_chunk", plan_without_stalling)],
    ),
    "who got nothing goes first": (
        an_item_that_takes_a_whole_step_beside_a_session,
        [(Fairness, "first_candidates", lambda _: ())],
    ),
    "nobody goes first in every step": (
        an_answer_beside_sessions_that_each_take_all_tokens,
        [(Fairness, "note_first", never)],
    ),
    "other prompts keep to their order of arrival": (
        long_prompts_one_after_the_other,
        [(Fairness, "_may_queue", lambda *_: True)],
    ),
    "room is kept for the first in turn": (
        an_item_that_takes_all_room_beside_a_session_that_always_holds_some,
        [(StepPass, "room_kept", property(never, never))],
    ),
    "where room is kept those who hold some go on": (
        an_item_that_takes_all_room_beside_one_who_holds_some_and_gets_no_tokens,
        [(planning, "_holds_nothing", lambda _: False)],
    ),
    "idle sessions make way": (
        one_who_waits_for_the_seat_of_an_idle_session,
        [(SessionEviction, "try_evict", lambda *_: False)],
    ),
    "one that would have to ask for items again is the last victim": (
        a_crowd_with_one_whose_picture_is_not_here,
        [(Preemption, "_choose_victim", latest_of_all)],
    ),
    "samples share the computed prompt": (
        samples_of_one_long_prompt,
        [(SchedulerState, "release_siblings", start_over)],
    ),
    "a blocked queue does not walk over the prompt in every step": (
        a_blocked_queue_of_long_prompts,
        [(Admission, "_worth_trying", lambda *_: True)],
    ),
    "what was computed before a reset is not registered after it": (
        prefixes_reset_under_a_running_request,
        [(UpdateFromOutput, "_register_blocks", register_regardless)],
    ),
    "an ended request is forgotten": (
        the_same_prompt_twice,
        [(RequestQueues, "forget", never)],
    ),
}

FAILURES = (AssertionError, RuntimeError, LookupError, ValueError)


@COUNTS_STEPS
@pytest.mark.parametrize("rule", RULES)
def test_with_all_rules_the_workload_passes(rule: str) -> None:
    RULES[rule][0]()


@pytest.mark.parametrize("rule", RULES)
def test_the_workload_fails_without_the_rule_that(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, patches = RULES[rule]
    for target, name, replacement in patches:
        monkeypatch.setattr(target, name, replacement)
    with pytest.raises(FAILURES):
        workload()
