"""The scheduler's rules, one at a time, with a runner that objects to any wrong plan."""

from __future__ import annotations

import pytest

from lookonce.errors import (
    BadRequestError,
    ConfigError,
    QueueFullError,
    TooLargeError,
    error_from_wire,
)
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import (
    EOS,
    GREEDY,
    Limits,
    feature,
    items_for,
    key,
    make_scheduler,
    model_info,
    request,
    text,
)
from tests.support.core.engine import COUNTS_STEPS, Engine
from tests.support.core.fake_runner import reference


def sampling(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | changes)


class TestBatching:
    def test_a_prompt_is_computed_in_chunks_of_the_token_budget(self) -> None:
        engine = Engine()
        engine.add(request("a", text(70)))
        sizes = [engine.step().num_tokens for _ in range(3)]
        assert sizes == [32, 32, 6]

    def test_decodes_come_first_and_prefill_fills_the_rest_of_the_budget(self) -> None:
        engine = Engine()
        engine.add(request("a", text(5)))
        engine.step()
        engine.add(request("b", text(60, seed=1), arrival=1.0))
        plan = engine.step()
        assert [(s.num_tokens, s.sample) for s in plan.scheduled] == [(1, True), (31, False)]

    def test_waiting_requests_are_admitted_in_order_of_arrival(self) -> None:
        engine = Engine(Limits(max_num_seqs=1))
        for name, arrival in (("late", 2.0), ("early", 1.0), ("middle", 1.5)):
            engine.add(request(name, text(5), arrival=arrival))
        engine.run()
        assert engine.released == ["early", "middle", "late"]

    def test_answers_do_not_depend_on_the_batch(self) -> None:
        engine = Engine()
        requests = [request(str(i), text(20 + i, seed=i), arrival=i) for i in range(12)]
        for one in requests:
            engine.add(one)
        engine.run()
        for one in requests:
            assert engine.tokens[one.request_id, 0] == reference(one, 8)
        engine.assert_all_free()

    def test_the_runner_is_told_of_a_block_once(self) -> None:
        engine = Engine()
        engine.add(request("a", text(6)))
        engine.run()
        delivered = [b for plan in engine.plans for s in plan.scheduled for b in s.new_block_ids]
        assert len(delivered) == len(set(delivered)) == 4

    def test_a_finished_sequence_is_forgotten_by_the_runner_with_the_next_plan(self) -> None:
        engine = Engine()
        engine.add(request("a", text(6)))
        engine.run()
        assert engine.plans[-1].finished
        assert not engine.plans[-1].scheduled


class TestEnds:
    def test_end_token_of_the_model_stops(self) -> None:
        third = reference(request("a", text(6)), 3)[2]
        engine = Engine(Limits(model=model_info(eos_token_ids=(EOS, third))))
        engine.add(request("a", text(6), sampling=sampling(ignore_eos=False)))
        engine.add(request("b", text(6), sampling=sampling(ignore_eos=True)))
        engine.run()
        assert (engine.reason("a"), engine.reason("b")) == ("stop", "length")
        assert engine.ended["a", 0].stop_token_id is None
        assert (engine.tokens["a", 0][-1], len(engine.tokens["a", 0])) == (third, 3)

    def test_a_stop_token_is_named(self) -> None:
        one = request("a", text(6))
        third = reference(one, 3)[2]
        engine = Engine()
        engine.add(request("a", text(6), sampling=sampling(stop_token_ids=(third,))))
        engine.run()
        assert engine.reason("a") == "stop"
        assert engine.ended["a", 0].stop_token_id == third
        assert len(engine.tokens["a", 0]) == 3

    def test_max_tokens_ends_with_length(self) -> None:
        engine = Engine()
        engine.add(request("a", text(6), sampling=sampling(max_tokens=5)))
        engine.run()
        assert (engine.reason("a"), len(engine.tokens["a", 0])) == ("length", 5)

    def test_the_models_length_ends_with_length(self) -> None:
        engine = Engine(Limits(model=model_info(max_model_len=10)))
        engine.add(request("a", text(6), sampling=sampling(max_tokens=None)))
        engine.run()
        assert (engine.reason("a"), len(engine.tokens["a", 0])) == ("length", 4)

    def test_a_sequence_as_large_as_the_kv_cache_ends_with_length(self) -> None:
        engine = Engine(Limits(num_blocks=4))
        one = request("a", text(14), sampling=sampling(max_tokens=100))
        engine.add(one)
        engine.run()
        assert engine.reason("a") == "length"
        assert engine.tokens["a", 0] == reference(one, 3)
        engine.assert_all_free()


class TestRefusals:
    @pytest.mark.parametrize(
        ("limits", "one", "error", "words"),
        [
            (Limits(num_blocks=2), request("a", text(9)), TooLargeError, "KV cache holds 8"),
            (
                Limits(model=model_info(max_model_len=9)),
                request("a", text(9)),
                TooLargeError,
                "at most 8",
            ),
            (
                Limits(encoder_rows=4),
                request("a", text(9), [feature("big", 1, 5)]),
                TooLargeError,
                "item 0 needs 40 bytes of encoder cache; the limit is 32 bytes",
            ),
            (Limits(), request("a", [3, 1000, 4]), BadRequestError, "token id 1000 at position 1"),
            (Limits(), request("a", [3, -1, 4]), BadRequestError, "token id -1 at position 1"),
            (Limits(), request("a", []), BadRequestError, "at least one token"),
            (
                Limits(),
                request("a", text(9), [feature("x", 1, 4), feature("y", 4, 2)]),
                BadRequestError,
                "items 0 and 1 overlap",
            ),
        ],
    )
    def test_what_can_never_be_served_is_refused_with_the_reason(
        self, limits: Limits, one: object, error: type[Exception], words: str
    ) -> None:
        engine = Engine(limits)
        with pytest.raises(error, match=words):
            engine.add(one)
        engine.assert_all_free()

    def test_an_item_that_ends_after_the_prompt_is_refused(self) -> None:
        one = request("a", text(9), [feature("x", 1, 4)])
        cut = request("a", text(4))
        with pytest.raises(BadRequestError, match="item 0 ends at position 5"):
            make_scheduler(Limits()).add(
                type(cut)("a", cut.scope, cut.prompt, one.features, GREEDY, 0.0), {}, ()
            )

    def test_an_item_with_other_rows_than_its_place_is_refused(self) -> None:
        wrong = {key("x"): items_for([feature("x", 0, 3)])[key("x")]}
        with pytest.raises(BadRequestError, match="takes 4 embed positions"):
            make_scheduler(Limits()).add(request("a", text(9), [feature("x", 1, 4)]), wrong, ())

    def test_a_supplied_item_with_other_rows_ends_the_request_alone(self) -> None:
        engine = Engine()
        at = feature("x", 1, 4)
        engine.add(request("a", text(9), [at]), missing=[at.key])
        engine.add(request("b", text(9), arrival=1.0))
        engine.step()
        engine.scheduler.supply("a", items_for([feature("x", 0, 3)]))
        engine.run()
        assert (engine.reason("a"), engine.reason("b")) == ("error", "length")
        engine.assert_all_free()

    def test_an_unsplittable_item_above_the_token_budget_is_refused(self) -> None:
        engine = Engine(Limits(model=model_info(unsplittable=("image",)), max_num_batched_tokens=8))
        with pytest.raises(TooLargeError, match="9 tokens that must be computed in one step"):
            engine.add(request("a", text(20), [feature("x", 1, 9)]))

    def test_a_token_budget_below_the_largest_unsplittable_item_is_refused_at_start(self) -> None:
        model = model_info(unsplittable=("image",), largest_unsplittable=40)
        with pytest.raises(ConfigError, match="at least 40"):
            make_scheduler(Limits(model=model))

    def test_a_full_queue_is_an_error_that_says_so(self) -> None:
        engine = Engine(Limits(max_queue=2))
        engine.add(request("a", text(5)))
        engine.add(request("b", text(5)))
        with pytest.raises(QueueFullError):
            engine.add(request("c", text(5)))

    def test_a_request_id_in_use_is_refused(self) -> None:
        engine = Engine()
        engine.add(request("a", text(5)))
        with pytest.raises(BadRequestError, match="in use"):
            engine.add(request("a", text(5)))


class TestPrefixCaching:
    def test_a_repeated_prompt_computes_only_what_follows_its_full_blocks(self) -> None:
        engine = Engine()
        engine.add(request("a", text(22)))
        engine.run()
        engine.add(request("b", text(22)))
        engine.step()
        assert engine.plans[-1].scheduled[0].start == 20
        engine.run()
        assert engine.tokens["b", 0] == engine.tokens["a", 0]
        assert engine.reuse_stats["b"].prefix_cached_tokens == 20

    def test_at_least_one_token_is_computed_however_much_is_cached(self) -> None:
        engine = Engine()
        for name in "ab":
            engine.add(request(name, text(24)))
            engine.run()
        assert engine.reuse_stats["b"].prefix_cached_tokens == 20
        assert engine.tokens["b", 0] == engine.tokens["a", 0]

    def test_generated_tokens_are_cached_for_the_next_turn(self) -> None:
        engine = Engine()
        engine.add(request("a", text(22)))
        engine.run()
        engine.add(request("b", text(22) + engine.tokens["a", 0] + text(9, seed=3)))
        engine.run()
        assert engine.reuse_stats["b"].prefix_cached_tokens == 28

    def test_scopes_share_nothing(self) -> None:
        engine = Engine()
        for name, scope in (("a", b"1" * 32), ("b", b"2" * 32)):
            engine.add(request(name, text(22), scope=scope))
            engine.run()
        assert engine.reuse_stats["b"].prefix_cached_tokens == 0

    def test_off_means_that_nothing_is_reused(self) -> None:
        engine = Engine(Limits(prefix_caching=False))
        for name in "ab":
            engine.add(request(name, text(22)))
            engine.run()
        assert engine.reuse_stats["b"].prefix_cached_tokens == 0
        assert engine.scheduler.stats()["prefix_cache_queries_total"] == 0

    def test_reset_forgets_prefixes_and_leaves_running_requests_alone(self) -> None:
        engine = Engine()
        one = request("a", text(22))
        engine.add(one)
        engine.step()
        engine.scheduler.reset_prefix_cache()
        engine.run()
        assert engine.tokens["a", 0] == reference(one, 8)
        engine.add(request("b", text(22) + engine.tokens["a", 0]))
        engine.run()
        assert engine.reuse_stats["b"].prefix_cached_tokens == 0

    def test_queries_and_hits_count_prompt_tokens_once_per_request(self) -> None:
        engine = Engine()
        for name in "ab":
            engine.add(request(name, text(22)))
            engine.run()
        stats = engine.scheduler.stats()
        assert stats["prefix_cache_queries_total"] == stats["prompt_tokens_total"] == 44
        assert stats["prefix_cache_hits_total"] == 20


class TestSamples:
    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_each_sample_gets_its_own_tokens(self, prefix_caching: bool) -> None:
        engine = Engine(Limits(prefix_caching=prefix_caching))
        one = request("a", text(41), [feature("x", 36, 5)], sampling=sampling(n=3))
        engine.add(one)
        engine.run()
        for index in range(3):
            assert engine.tokens["a", index] == reference(one, 8, index)
        assert engine.released == ["a"]
        engine.assert_all_free()

    @COUNTS_STEPS
    def test_siblings_wait_for_the_first_sample_and_start_from_its_blocks(self) -> None:
        engine = Engine()
        engine.add(request("a", text(41), sampling=sampling(n=3)))
        assert [len(engine.step().scheduled) for _ in range(3)] == [1, 1, 3]
        assert engine.runner.computed_tokens == 41 + 1 + 2

    def test_the_next_sample_leads_when_the_first_is_aborted_early(self) -> None:
        engine = Engine()
        one = request("a", text(41), sampling=sampling(n=3))
        engine.add(one)
        engine.step()
        engine.scheduler.abort("a", 0)
        engine.run()
        assert engine.reason("a", 0) == "abort"
        assert engine.tokens["a", 1] == reference(one, 8, 1)
        engine.assert_all_free()

    def test_one_sample_can_end_without_the_others(self) -> None:
        engine = Engine()
        one = request("a", text(9), sampling=sampling(n=2))
        engine.add(one)
        for _ in range(3):
            engine.step()
        engine.scheduler.abort("a", 1)
        engine.run()
        assert engine.tokens["a", 0] == reference(one, 8)
        assert engine.reason("a", 1) == "abort"


class TestPreemption:
    def test_the_latest_arrival_is_preempted_and_all_answers_stay_right(self) -> None:
        engine = Engine(Limits(num_blocks=10))
        requests = [
            request(name, text(12, seed=i), arrival=i, sampling=sampling(max_tokens=20))
            for i, name in enumerate("abc")
        ]
        for one in requests:
            engine.add(one)
        engine.run()
        for one in requests:
            assert engine.tokens[one.request_id, 0] == reference(one, 20)
        assert engine.scheduler.stats()["num_preemptions_total"] > 0
        assert engine.released[0] == "a"
        engine.assert_all_free()

    def test_one_that_would_have_to_ask_for_items_again_is_the_last_victim(self) -> None:
        at = feature("x", 0, 8)
        engine = Engine(Limits(num_blocks=12))
        engine.add(request("seed", text(14), [at], sampling=sampling(max_tokens=1)))
        engine.run()
        lasting = sampling(max_tokens=24)
        engine.add(request("a", text(8, seed=1), arrival=1.0, sampling=lasting))
        engine.add(request("b", text(14), [at], arrival=2.0, sampling=lasting), missing=[at.key])
        engine.run()
        assert engine.scheduler.stats()["num_preemptions_total"] > 0
        assert engine.needs == []
        assert engine.released == ["seed", "b", "a"]

    def test_reuse_stats_keep_what_the_first_admission_found(self) -> None:
        engine = Engine(Limits(num_blocks=10))
        for i, name in enumerate("abc"):
            one = request(name, text(12), arrival=i, sampling=sampling(max_tokens=20))
            engine.add(one)
        engine.run()
        hits = sum(reuse_stats.prefix_cached_tokens for reuse_stats in engine.reuse_stats.values())
        assert engine.scheduler.stats()["prefix_cache_hits_total"] == hits


class TestAborts:
    def test_an_abort_is_taken_in_every_state(self) -> None:
        at = feature("x", 30, 8)
        lasting = sampling(max_tokens=30, n=2)
        for steps in range(12):
            engine = Engine(Limits(num_blocks=24, encoder_rows=8, max_num_batched_tokens=16))
            for i, name in enumerate("abc"):
                one = request(name, text(40, seed=i), [at], arrival=i, sampling=lasting)
                engine.add(one, missing=[at.key] if name == "b" else [])
            for _ in range(steps):
                engine.step()
            for name in "abc":
                engine.scheduler.abort(name)
            engine.run()
            engine.assert_all_free()
            assert sorted(engine.released) == ["a", "b", "c"]

    def test_an_abort_between_plan_and_apply_wins(self) -> None:
        engine = Engine()
        engine.add(request("a", text(9), [feature("x", 2, 3)]))
        plan = engine.scheduler.plan()
        result = engine.runner.execute(plan)
        engine.scheduler.abort("a")
        engine.take(engine.scheduler.update_from_output(plan, result))
        engine.run()
        assert engine.tokens["a", 0] == []
        engine.assert_all_free()

    def test_an_unknown_request_is_ended_already(self) -> None:
        make_scheduler(Limits()).abort("nobody")


class TestFailures:
    def test_a_failed_item_ends_every_request_that_needed_it_and_no_other(self) -> None:
        engine = Engine()
        bad, good = feature("bad", 2, 3), feature("good", 2, 3)
        engine.runner.failing_items.add(bad.key)
        engine.add(request("a", text(9), [bad], arrival=1.0))
        engine.add(request("b", text(10), [bad], arrival=2.0))
        fine = request("c", text(9), [good], arrival=3.0)
        engine.add(fine)
        engine.run()
        for name in "ab":
            assert engine.reason(name) == "error"
            assert error_from_wire(*engine.ended[name, 0].error).message == "the encoder failed"
        assert engine.tokens["c", 0] == reference(fine, 8)
        assert engine.scheduler.stats()["encoder_runs_total"] == 1
        engine.assert_all_free()

    def test_a_failed_item_can_be_tried_again_by_a_later_request(self) -> None:
        engine = Engine()
        at = feature("x", 2, 3)
        engine.runner.failing_items.add(at.key)
        engine.add(request("a", text(9), [at]))
        engine.run()
        engine.runner.failing_items.clear()
        engine.add(request("b", text(9), [at]))
        engine.run()
        assert (engine.reason("a"), engine.reason("b")) == ("error", "length")

    def test_a_failed_sequence_ends_all_samples_of_its_request_and_no_other(self) -> None:
        engine = Engine()
        engine.add(request("a", text(9), sampling=sampling(n=2)))
        fine = request("b", text(9, seed=1), arrival=1.0)
        engine.add(fine)
        for _ in range(3):
            engine.step()
        engine.runner.failing_sequences.add(1)
        engine.run()
        assert engine.reason("a", 0) == engine.reason("a", 1) == "error"
        assert engine.tokens["b", 0] == reference(fine, 8)
        engine.assert_all_free()
