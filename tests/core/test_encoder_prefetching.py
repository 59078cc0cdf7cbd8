"""Items encoded ahead: in spare budget only, not held, and never delaying a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lookonce.core.encoder_scheduling import BROUGHT_ALONG
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, request, text
from tests.support.core.engine import COUNTS_STEPS, Engine
from tests.support.core.fake_runner import reference

EARLY, LATE, LAST = feature("early", 2, 4), feature("late", 20, 4), feature("last", 34, 4)
AHEAD = Limits(max_num_batched_tokens=8, max_encoder_tokens=6)
"""Of two items of 4 rows one is encoded ahead: both could not be encoded in one step."""
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def test_items_of_a_prompt_that_one_step_could_not_encode_are_encoded_ahead() -> None:
    engine = Engine(AHEAD)
    one = request("a", text(40), [LATE, LAST])
    engine.add(one)
    assert [e.key for e in engine.step().encode] == [LATE.key]
    assert not engine.step().encode, "the rest fits one step"
    engine.run()
    assert engine.runner.encoded == [LATE.key, LAST.key]
    assert engine.tokens["a", 0] == reference(one, 8)
    assert engine.scheduler.stats()["encoder_prefetches_total"] == 1


def test_an_item_alone_is_encoded_no_sooner_than_it_is_needed() -> None:
    """It would gain nothing, and delay the first token of another request."""
    engine = Engine(Limits(max_num_batched_tokens=8))
    engine.add(request("a", text(30), [LATE]))
    assert [len(engine.step().encode) for _ in range(3)] == [0, 0, 1]


def test_items_of_several_waiting_requests_come_along_with_the_one_that_is_needed() -> None:
    engine = Engine(Limits(max_num_batched_tokens=8))
    for i in range(3):
        engine.add(request(str(i), text(12, seed=i), [feature(str(i), 2, 4)], arrival=i))
    assert len(engine.step().encode) == 3
    engine.run()
    assert len(engine.runner.encoded) == 3


def test_a_later_item_of_another_prompt_that_runs_comes_along() -> None:
    engine = Engine(Limits(max_num_batched_tokens=8, max_num_seqs=2))
    engine.add(request("a", text(12), [feature("a", 9, 3)]))
    engine.add(request("b", text(30, seed=1), [LATE], arrival=1.0))
    assert not engine.step().encode
    assert [e.key for e in engine.step().encode] == [feature("a", 9, 3).key, LATE.key]
    engine.run()
    assert len(engine.runner.encoded) == 2


def test_rows_that_come_along_are_bounded_by_the_rows_needed() -> None:
    engine = Engine(Limits(max_num_batched_tokens=8))
    for i in range(8):
        engine.add(request(str(i), text(12, seed=i), [feature(str(i), 2, 4)], arrival=i))
    assert len(engine.step().encode) == 1 + BROUGHT_ALONG


@COUNTS_STEPS
def test_while_no_prompt_is_computed_items_of_waiting_requests_are_encoded() -> None:
    engine = Engine(Limits(max_num_batched_tokens=16, max_num_seqs=1))
    engine.add(request("a", text(12)))
    for i in range(8):
        engine.add(request(str(i), text(12, seed=i), [feature(str(i), 2, 4)], arrival=1.0 + i))
    assert not engine.step().encode
    assert len(engine.step().encode) == 8
    engine.run()
    assert len(engine.runner.encoded) == 8


def test_a_prefetched_item_is_a_miss_of_the_one_it_was_encoded_for_and_a_hit_of_others() -> None:
    engine = Engine(AHEAD)
    for i in range(2):
        engine.add(request(str(i), text(40, seed=i), [LATE, LAST], arrival=i))
    assert engine.step().encode
    engine.run()
    stats = engine.scheduler.stats()
    outcomes = [engine.reuse_stats[str(i)].encoder for i in range(2)]
    assert outcomes == [("miss", "miss"), ("hit", "hit")]
    assert engine.reuse_stats["0"].encode_ms == (4.0, 4.0)
    assert (stats["encoder_cache_queries_total"], stats["encoder_cache_hits_total"]) == (4, 2)
    assert (stats["encoder_runs_total"], stats["encoder_prefetches_total"]) == (2, 1)


def test_nothing_is_encoded_ahead_beyond_the_encoder_budget() -> None:
    engine = Engine(Limits(max_num_batched_tokens=8, max_encoder_tokens=6))
    engine.add(request("a", text(40), [EARLY, LATE, LAST]))
    assert [e.key for e in engine.step().encode] == [EARLY.key]
    assert [e.key for e in engine.step().encode] == [LATE.key]


def test_prefetched_outputs_take_at_most_half_of_the_cache() -> None:
    engine = Engine(Limits(max_num_batched_tokens=8, encoder_rows=8, max_encoder_tokens=10))
    engine.add(request("a", text(40), [feature("x", 12, 3), LATE, LAST]))
    engine.step()
    assert len(engine.runner.outputs) == 1
    engine.run()
    assert sorted(engine.runner.encoded) == sorted(set(engine.runner.encoded))


def test_nothing_is_encoded_ahead_when_it_is_turned_off() -> None:
    engine = Engine(replace(AHEAD, encoder_prefetch=False))
    engine.add(request("a", text(40), [LATE, LAST]))
    assert not engine.step().encode


def test_an_item_that_a_cached_prefix_covers_is_not_encoded_ahead() -> None:
    engine = Engine(Limits(max_num_batched_tokens=8))
    engine.add(request("a", text(30), [LATE], sampling=ONE_TOKEN))
    engine.run()
    engine.scheduler.reset_encoder_cache()
    engine.add(request("first", text(30, seed=9)))
    engine.add(request("b", text(30), [LATE], arrival=1.0))
    engine.run()
    assert engine.runner.encoded == [LATE.key]
    assert engine.reuse_stats["b"].encoder == ("skipped",)


def test_a_prefix_that_becomes_cached_while_one_waits_is_noticed() -> None:
    """Both have one prompt; the cache holds one item, and the leader has left it behind."""
    engine = Engine(Limits(max_num_batched_tokens=8, encoder_rows=8, max_num_seqs=1))
    for i in range(2):
        engine.add(request(str(i), text(40), [feature("x", 2, 8), feature("y", 20, 8)], arrival=i))
    engine.run()
    assert len(engine.runner.encoded) == 2
    assert engine.reuse_stats["1"].encoder == ("skipped", "skipped")


def test_a_prefetched_output_of_an_ended_request_is_evicted_next() -> None:
    engine = Engine(replace(AHEAD, encoder_rows=8))
    engine.add(request("a", text(40), [LATE, LAST]))
    assert engine.step().encode
    engine.scheduler.abort("a")
    engine.add(request("b", text(12, seed=1), [feature("big", 2, 8)]))
    engine.run()
    assert list(engine.runner.outputs) == [feature("big", 2, 8).key]
    engine.assert_all_free()


def test_a_failed_prefetch_harms_nobody_and_the_chunk_tries_again() -> None:
    engine = Engine(AHEAD)
    one = request("a", text(40), [LATE, LAST])
    engine.add(one)
    engine.runner.failing_items = {LATE.key}
    assert engine.step().encode
    engine.runner.failing_items = set()
    engine.run()
    assert engine.tokens["a", 0] == reference(one, 8)
    assert engine.reuse_stats["a"].encoder == ("miss", "miss")


@pytest.mark.parametrize("host_rows", [0, 16])
def test_items_that_each_fill_the_cache_do_not_block_each_other(host_rows: int) -> None:
    engine = Engine(Limits(max_num_batched_tokens=6, encoder_rows=8, host_rows=host_rows))
    items = [feature("x", 4, 8), feature("y", 20, 8)]
    prompts = [request(str(i), text(40, seed=i), items, arrival=i) for i in range(3)]
    for one in prompts:
        engine.add(one)
    engine.run(max_steps=200)
    for one in prompts:
        assert engine.tokens[one.request_id, 0] == reference(one, 8)
    engine.assert_all_free()


def test_a_holder_that_is_preempted_gives_its_outputs_to_others() -> None:
    """The later one is cut inside its item, which fills the cache, when the earlier one grows."""
    limits = Limits(num_blocks=14, max_num_batched_tokens=7, encoder_rows=24)
    engine = Engine(limits)
    lasting = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    early = request("early", text(6), sampling=lasting)
    late = request("late", text(40, seed=1), [feature("x", 2, 24)], arrival=1.0)
    engine.add(early)
    engine.add(late)
    while engine.scheduler.stats()["num_preemptions_total"] == 0:
        engine.step()
    assert engine.scheduler.stats()["encoder_cache_holders"] == 0
    engine.add(request("other", text(30, seed=2), [feature("y", 2, 24)], arrival=0.5))
    engine.run(max_steps=300)
    assert engine.tokens["late", 0] == reference(late, 8)
    engine.assert_all_free()


@pytest.mark.parametrize("times", [1, 2, 5, 10])
def test_with_a_host_tier_each_item_is_encoded_once_however_small_the_device_cache(
    times: int,
) -> None:
    """The working set is so many times what the device holds, and comes round three times."""
    device_rows, rows = 32, 4
    names = [f"{times}-{i}" for i in range(times * device_rows // rows)]
    engine = Engine(
        Limits(
            num_blocks=256, encoder_rows=device_rows, host_rows=times * device_rows,
            max_num_batched_tokens=16, prefix_caching=False,
        )
    )  # fmt: skip
    for turn in range(3):
        for i, name in enumerate(names):
            prompt = text(20, seed=i)
            engine.add(
                request(f"{turn}/{name}", prompt, [feature(name, 8, rows)], sampling=ONE_TOKEN)
            )
        engine.run()
    stats = engine.scheduler.stats()
    assert stats["encoder_runs_total"] == len(names) == len(engine.runner.encoded)
    assert (stats["encoder_cache_restores_total"] > 0) == (times > 1)
    engine.assert_all_free()
