"""What the scheduler does about media items: encode once, hold what a chunk touches, ask late."""

from __future__ import annotations

import gc
import weakref

import msgspec
import numpy as np
import pytest

from lookonce.types.lora import LoRAIdentity
from lookonce.types.media import Array
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, item_for, model_info, request, text
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import reference

X, Y = feature("x", 4, 8), feature("y", 16, 8)


class TestEncoding:
    def test_one_item_in_many_requests_is_encoded_once(self) -> None:
        engine = Engine(Limits(max_num_batched_tokens=64))
        for i in range(4):
            engine.add(request(str(i), text(20, seed=i), [X], arrival=i))
        engine.run()
        stats = engine.scheduler.stats()
        assert engine.runner.encoded == [X.key]
        assert (stats["encoder_cache_queries_total"], stats["encoder_cache_hits_total"]) == (4, 3)
        assert [engine.reuse_stats[str(i)].encoder for i in range(4)] == [("miss",)] + [
            ("hit",)
        ] * 3

    def test_the_same_item_several_times_in_a_prompt_is_encoded_once(self) -> None:
        engine = Engine()
        again = feature("x", 16, 8)
        one = request("a", text(30), [X, again])
        engine.add(one)
        engine.run()
        assert engine.runner.encoded == [X.key]
        assert engine.reuse_stats["a"].encoder == ("miss", "hit")
        assert engine.tokens["a", 0] == reference(one, 8)

    def test_an_output_stays_cached_after_its_request_ended(self) -> None:
        engine = Engine()
        for seed in range(2):
            engine.add(request(str(seed), text(20, seed=seed), [X]))
            engine.run()
        assert engine.runner.encoded == [X.key]
        assert engine.scheduler.stats()["encoder_cache_bytes"] == 64

    @pytest.mark.parametrize("ends", [True, False], ids=["answered", "aborted"])
    def test_the_items_of_a_request_go_with_it_whenever_garbage_is_collected(
        self, ends: bool
    ) -> None:
        """They are the memory of pictures: slabs, which others wait for, or copies of 25 MB."""
        engine = Engine(Limits(max_num_batched_tokens=8, max_encoder_tokens=8))
        pixels = np.zeros(64, np.uint8)
        kept = weakref.ref(pixels)
        arrays = {"pixel_values": Array("uint8", (64,), pixels.data)}
        items = {X.key: msgspec.structs.replace(item_for(X), arrays=arrays)}
        del pixels, arrays
        gc.disable()
        try:
            engine.scheduler.add(request("a", text(40), [X]), items)
            del items
            engine.step()
            assert kept() is not None
            if not ends:
                engine.scheduler.abort("a")
            engine.run()
            engine.plans.clear()
            assert kept() is None
        finally:
            gc.enable()

    def test_the_encoding_time_goes_to_the_feature_that_caused_it(self) -> None:
        engine = Engine()
        engine.add(request("a", text(30), [X, Y]))
        engine.run()
        assert engine.reuse_stats["a"].encode_ms == (8.0, 8.0)
        engine.add(request("b", text(30, seed=1), [X, Y]))
        engine.run()
        assert engine.reuse_stats["b"].encode_ms == (0.0, 0.0)

    def test_encoder_rows_stay_within_the_budget_of_a_step(self) -> None:
        engine = Engine(Limits(max_encoder_tokens=8))
        engine.add(request("a", text(30), [X, Y]))
        assert [(s.start, s.num_tokens) for s in engine.step().scheduled] == [(0, 16)]
        assert [(s.start, s.num_tokens) for s in engine.step().scheduled] == [(16, 14)]

    def test_an_item_above_the_whole_encoder_budget_runs_alone(self) -> None:
        engine = Engine(Limits(max_encoder_tokens=4))
        one = request("a", text(30), [X, Y])
        engine.add(one)
        engine.run()
        assert [len(plan.encode) for plan in engine.plans][:2] == [1, 1]
        assert engine.tokens["a", 0] == reference(one, 8)

    def test_text_goes_on_while_pictures_wait_for_the_encoder_budget(self) -> None:
        engine = Engine(Limits(max_encoder_tokens=8, max_num_batched_tokens=64))
        for i, name in enumerate("xyz"):
            engine.add(request(name, text(12, seed=i), [feature(name, 0, 8)], arrival=i))
        engine.add(request("text", text(9), arrival=5.0))
        plan = engine.step()
        assert [s.num_tokens for s in plan.scheduled] == [12, 9]

    def test_a_chunk_that_touches_no_embed_position_of_an_item_does_not_encode_it(self) -> None:
        gaps = feature("gaps", 4, 12, is_embed=((0, 2), (10, 12)))
        engine = Engine(Limits(max_num_batched_tokens=8))
        one = request("a", text(20), [gaps])
        engine.add(one)
        engine.run()
        assert engine.tokens["a", 0] == reference(one, 8)
        assert engine.runner.encoded == [gaps.key]

    def test_two_items_that_fill_the_encoder_cache_do_not_deadlock(self) -> None:
        engine = Engine(Limits(encoder_rows=8, max_num_batched_tokens=6))
        requests = [
            request(name, text(40, seed=i), [X, Y], arrival=i) for i, name in enumerate("abc")
        ]
        for one in requests:
            engine.add(one)
        engine.run()
        for one in requests:
            assert engine.tokens[one.request_id, 0] == reference(one, 8)
        engine.assert_all_free()

    def test_an_output_needed_by_a_later_chunk_is_held_until_then(self) -> None:
        engine = Engine(Limits(encoder_rows=8, max_num_batched_tokens=6))
        engine.add(request("a", text(20), [X]))
        engine.step()
        engine.scheduler.reset_encoder_cache()
        engine.run()
        assert engine.runner.encoded == [X.key]
        engine.assert_all_free()

    def test_reset_drops_what_nobody_holds(self) -> None:
        engine = Engine()
        engine.add(request("a", text(20), [X]))
        engine.run()
        engine.scheduler.reset_encoder_cache()
        engine.run()
        assert engine.runner.outputs == {}
        assert engine.scheduler.stats()["encoder_cache_bytes"] == 0


class TestPrefixHits:
    def test_items_the_prefix_covers_are_skipped_and_never_encoded(self) -> None:
        engine = Engine()
        engine.add(request("a", text(30), [X]))
        engine.run()
        engine.scheduler.reset_encoder_cache()
        engine.add(request("b", text(30), [X]))
        engine.run()
        assert engine.runner.encoded == [X.key]
        assert engine.reuse_stats["b"].encoder == ("skipped",)
        assert engine.tokens["a", 0] == engine.tokens["b", 0]

    def test_another_item_at_the_same_place_is_another_prefix(self) -> None:
        engine = Engine()
        for name in "xy":
            one = request(name, text(30), [feature(name, 4, 8)])
            engine.add(one)
            engine.run()
            assert engine.tokens[name, 0] == reference(one, 8)
        assert engine.reuse_stats["y"].prefix_cached_tokens == 4

    def test_an_item_partly_covered_is_still_encoded_once(self) -> None:
        engine = Engine()
        at = feature("x", 6, 12)
        tail = text(10, seed=9)
        engine.add(request("a", text(18), [at], sampling=SamplingParams(max_tokens=1)))
        engine.run()
        engine.scheduler.reset_encoder_cache()
        one = request("b", text(18) + tail, [at])
        engine.add(one)
        engine.run()
        assert engine.reuse_stats["b"].prefix_cached_tokens == 16
        assert engine.reuse_stats["b"].encoder == ("miss",)
        assert engine.runner.encoded == [at.key, at.key]
        assert engine.tokens["b", 0] == reference(one, 8)


class TestUnsplittable:
    LIMITS = Limits(model=model_info(unsplittable=("image",)), max_num_batched_tokens=16)

    def test_a_chunk_ends_before_an_item_it_would_cut(self) -> None:
        engine = Engine(self.LIMITS)
        one = request("a", text(40), [feature("x", 12, 10)])
        engine.add(one)
        engine.run()
        chunks = [(s.start, s.num_tokens) for p in engine.plans for s in p.scheduled]
        assert chunks[:3] == [(0, 12), (12, 16), (28, 12)]
        assert engine.plans[1].scheduled[0].bidirectional == ((12, 22),)
        assert engine.tokens["a", 0] == reference(one, 8)

    def test_other_modalities_may_be_cut(self) -> None:
        engine = Engine(self.LIMITS)
        engine.add(request("a", text(40), [feature("x", 12, 10, modality="audio")]))
        assert engine.step().num_tokens == 16

    def test_a_prefix_hit_may_end_inside_an_item(self) -> None:
        engine = Engine(self.LIMITS)
        at = feature("x", 6, 12)
        engine.add(request("a", text(18), [at]))
        engine.run()
        one = request("b", text(18) + text(10, seed=9), [at])
        engine.add(one)
        engine.step()
        assert engine.plans[-1].scheduled[0].bidirectional == ((6, 18),)
        engine.run()
        assert engine.tokens["b", 0] == reference(one, 8)

    def test_decodes_cannot_starve_an_item_as_large_as_the_budget(self) -> None:
        engine = Engine(self.LIMITS)
        for i in range(3):
            engine.add(request(str(i), text(5, seed=i), arrival=i))
        big = request("big", text(20), [feature("x", 1, 16)], arrival=5.0)
        engine.add(big)
        for i in range(3, 9):
            engine.add(request(str(i), text(5, seed=i), arrival=10.0 + i))
        engine.run()
        assert engine.released.index("big") < engine.released.index("8")
        assert engine.tokens["big", 0] == reference(big, 8)


class TestMissingItems:
    def test_a_request_with_all_items_is_accepted_at_once(self) -> None:
        engine = Engine()
        engine.add(request("a", text(20), [X]))
        assert engine.scheduler.take_output().accepted == ["a"]

    def test_a_missing_item_is_asked_for_and_the_others_go_on(self) -> None:
        engine = Engine()
        one = request("a", text(20), [X], arrival=1.0)
        engine.add(one, missing=[X.key])
        other = request("b", text(20, seed=1), arrival=2.0)
        engine.add(other)
        engine.run()
        assert engine.needs == [("a", (X.key,))]
        assert engine.released == ["b"]
        assert not engine.scheduler.has_work
        engine.supply(one)
        engine.run()
        assert engine.accepted == ["b", "a"]
        assert engine.tokens["a", 0] == reference(one, 8)
        engine.assert_all_free()

    def test_with_an_adapter_of_the_encoder_an_item_is_asked_for_by_its_own_key(self) -> None:
        """It is processed once for all adapters, and encoded for each that changes the encoder."""
        engine = Engine()
        engine.add(request("plain", text(20), [X]))
        engine.run()
        kept = LoRAIdentity(b"k" * 32)
        same = msgspec.structs.replace(request("kept", text(20, seed=1), [X]), adapter=kept)
        engine.add(same, missing=[X.key])
        engine.run()
        assert engine.needs == []
        adapted = LoRAIdentity(b"a" * 32, b"e" * 32)
        one = msgspec.structs.replace(request("a", text(20, seed=2), [X]), adapter=adapted)
        engine.add(one, missing=[X.key])
        engine.run()
        assert engine.needs == [("a", (X.key,))]
        engine.supply(one)
        engine.run()
        assert engine.tokens["a", 0] == reference(one, 8)
        assert len(set(engine.runner.encoded)) == 2
        engine.assert_all_free()

    def test_all_that_is_missing_is_asked_for_at_once_and_each_key_once(self) -> None:
        engine = Engine()
        features = [X, Y, feature("x", 30, 8)]
        engine.add(request("a", text(40), features), missing=[X.key, Y.key])
        engine.run()
        assert engine.needs == [("a", (X.key, Y.key))]

    def test_an_item_whose_output_is_held_is_not_asked_for(self) -> None:
        engine = Engine()
        engine.add(request("a", text(20), [X]))
        engine.run()
        one = request("b", text(20, seed=1), [X])
        engine.add(one, missing=[X.key])
        engine.run()
        assert engine.needs == []
        assert engine.accepted == ["a", "b"]
        assert engine.tokens["b", 0] == reference(one, 8)

    def test_an_item_the_prefix_covers_is_not_asked_for(self) -> None:
        engine = Engine()
        engine.add(request("a", text(30), [X]))
        engine.run()
        engine.scheduler.reset_encoder_cache()
        engine.add(request("b", text(30), [X]), missing=[X.key])
        engine.step()
        assert (engine.needs, engine.accepted) == ([], ["a", "b"])

    def test_not_accepted_while_an_output_that_may_leave_is_still_needed(self) -> None:
        """The output it counts on is evicted before its chunk: then it is asked for after all."""
        late = feature("late", 40, 8)
        engine = Engine(Limits(encoder_rows=8, max_num_batched_tokens=16))
        engine.add(request("seed", text(60, seed=7), [late]))
        engine.run()
        one = request("a", text(60), [late], arrival=1.0)
        engine.add(one, missing=[late.key])
        engine.step()
        assert "a" not in engine.accepted
        engine.scheduler.reset_encoder_cache()
        engine.run()
        assert engine.needs == [("a", (late.key,))]
        engine.supply(one)
        engine.run()
        assert engine.tokens["a", 0] == reference(one, 8)
        assert engine.runner.encoded == [late.key, late.key]

    HOST = Limits(
        encoder_rows=8,
        host_rows=8,
        max_num_batched_tokens=8,
        prefix_caching=False,
        encoder_prefetch=False,
    )
    """One output on the device, one on the host, and the item is in the prompt's second chunk."""

    def counting_on_the_host(self, engine: Engine) -> GenerateRequest:
        """A request without its item, whose output left the device for the host."""
        late = feature("late", 8, 8)
        engine.add(request("seed", text(20, seed=7), [late]))
        engine.run()
        engine.add(request("other", text(20, seed=8), [feature("other", 8, 8)]))
        engine.run()
        assert list(engine.runner.copies) == [late.key]
        assert late.key not in engine.runner.outputs
        one = request("a", text(20), [late], arrival=1.0)
        engine.add(one, missing=[late.key])
        return one

    def test_an_item_whose_output_is_on_the_host_is_not_asked_for(self) -> None:
        engine = Engine(self.HOST)
        one = self.counting_on_the_host(engine)
        engine.run()
        assert engine.needs == []
        assert engine.tokens["a", 0] == reference(one, 8)
        assert len(engine.runner.encoded) == 2
        engine.assert_all_free()

    def test_a_copy_that_leaves_between_admission_and_use_is_asked_for_after_all(self) -> None:
        engine = Engine(self.HOST)
        one = self.counting_on_the_host(engine)
        assert engine.step().num_tokens == 8
        engine.scheduler.reset_encoder_cache()
        engine.run()
        assert "a" not in engine.accepted
        assert engine.needs == [("a", (one.features[0].key,))]
        engine.supply(one)
        engine.run()
        assert engine.tokens["a", 0] == reference(one, 8)
        engine.assert_all_free()

    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_what_further_samples_compute_again_is_asked_for_even_when_held(
        self, prefix_caching: bool
    ) -> None:
        at = feature("x", 16, 5)
        engine = Engine(Limits(prefix_caching=prefix_caching))
        engine.add(request("seed", text(21, seed=4), [at]))
        engine.run()
        params = SamplingParams(n=2, max_tokens=3)
        engine.add(request("a", text(21), [at], sampling=params), missing=[at.key])
        engine.run()
        assert engine.needs == [("a", (at.key,))]

    def test_samples_that_wait_for_the_same_item_ask_once(self) -> None:
        """Both lose their blocks, and meanwhile the output that they had shared has left."""
        at = feature("x", 0, 8)
        engine = Engine(Limits(num_blocks=7))
        engine.add(request("seed", text(10), [at], sampling=SamplingParams(max_tokens=1)))
        engine.run()
        params = SamplingParams(n=3, max_tokens=12, ignore_eos=True)
        one = request("a", text(10), [at], sampling=params)
        engine.add(one, missing=[at.key])
        for _ in range(40):
            engine.step()
            engine.scheduler.reset_prefix_cache()
            engine.scheduler.reset_encoder_cache()
        assert engine.needs == [("a", (at.key,))]
        engine.supply(one)
        engine.run()
        for index in range(3):
            assert engine.tokens["a", index] == reference(one, 12, index)

    def test_supply_for_an_ended_request_is_ignored(self) -> None:
        engine = Engine()
        one = request("a", text(20), [X])
        engine.add(one, missing=[X.key])
        engine.step()
        engine.scheduler.abort("a")
        engine.supply(one)
        engine.run()
        assert engine.reason("a") == "abort"
        engine.assert_all_free()
