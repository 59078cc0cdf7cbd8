"""Plan, execute, apply: the outcome is the model's, and a broken step ends only what was in it."""

from __future__ import annotations

import msgspec
import pytest

from lookonce.engine.process.cache_events import Load
from lookonce.engine.process.engine_core import MAX_BROKEN_STEPS, EngineCore
from lookonce.errors import BadRequestError, DeviceLostError
from tests.support.core.builders import Limits, feature, items_for, make_scheduler, request, text
from tests.support.core.fake_runner import reference
from tests.support.engine.living import GatedRunner


class Bench:
    """A core, its runner, and everything it has put out."""

    def __init__(self, limits=None, *, overlapped=False):
        limits = limits or Limits()
        self.runner = GatedRunner(limits)
        self.core = EngineCore(make_scheduler(limits), self.runner, overlapped=overlapped)
        self.deltas, self.accepted, self.needs, self.released = [], [], [], []

    def step(self):
        output = self.core.step()
        if output is None:
            return False
        self.deltas += output.deltas
        self.accepted += output.accepted
        self.needs += output.needs
        self.released += output.released
        return True

    def run(self):
        while self.step():
            self.core.check_integrity()

    def tokens(self, name):
        return [t for d in self.deltas if d.request_id == name for t in d.token_ids]

    def errors(self):
        return {d.request_id: d.error for d in self.deltas if d.error is not None}


@pytest.fixture(params=[False, True], ids=["waits", "overlapped"])
def bench(request):
    return Bench(overlapped=request.param)


def test_an_idle_core_has_nothing_to_do(bench):
    assert bench.core.step() is None
    assert not bench.core.has_work


def test_requests_in_one_batch_get_exactly_their_own_tokens(bench):
    requests = [request(f"r{n}", text(10 + 7 * n, seed=n)) for n in range(5)]
    for one in requests:
        bench.core.add(one, {})
    bench.run()
    for one in requests:
        assert bench.tokens(one.request_id) == reference(one, 8)
    assert sorted(bench.released) == [one.request_id for one in requests]


def test_a_step_that_raises_ends_its_requests_and_no_other(bench):
    bench.core.add(request("broken", text(9)), {})
    bench.core.add(request("broken too", text(9, seed=1)), {})
    bench.step()
    bench.runner.raising = 1
    bench.step()
    later = request("later", text(9, seed=2))
    bench.core.add(later, {})
    bench.run()
    assert set(bench.errors()) == {"broken", "broken too"}
    assert {kind for kind, *_ in bench.errors().values()} == {"RequestFailedError"}
    assert bench.tokens("later") == reference(later, 8)
    assert not bench.runner.known


def test_what_a_failure_says_names_no_address_and_no_path(bench):
    bench.runner.raising = 1
    bench.core.add(request("broken", text(9)), {})
    bench.run()
    [(_, message, *_)] = bench.errors().values()
    assert message == "the model failed on this request (RuntimeError)"


def test_items_of_a_broken_step_are_encoded_again_for_the_next_request(bench):
    image = feature("picture", 2, 4)
    first = request("first", text(9), [image])
    again = request("again", text(9), [image])
    bench.runner.raising = 1
    bench.core.add(first, items_for([image]))
    bench.run()
    bench.core.add(again, items_for([image]))
    bench.run()
    assert set(bench.errors()) == {"first"}
    assert bench.tokens("again") == reference(again, 8)


def test_a_device_that_fails_every_step_is_lost(bench):
    bench.runner.raising = MAX_BROKEN_STEPS
    for number in range(MAX_BROKEN_STEPS - 1):
        bench.core.add(request(f"r{number}", text(9)), {})
        bench.run()
    bench.core.add(request("last", text(9)), {})
    with pytest.raises(RuntimeError, match="CUDA"):
        bench.run()


def test_failures_with_successes_between_are_survived(bench):
    for number in range(2 * MAX_BROKEN_STEPS):
        bench.runner.raising = number % 2
        bench.core.add(request(f"r{number}", text(9)), {})
        bench.run()
    assert len(bench.errors()) == MAX_BROKEN_STEPS


def test_missing_items_are_asked_for_once_they_must_be_computed(bench):
    image = feature("picture", 2, 4)
    one = request("r", text(9), [image])
    bench.core.add(one, {}, missing=(image.key,))
    bench.run()
    assert bench.needs == [("r", (image.key,))]
    assert bench.accepted == []
    bench.core.supply("r", items_for([image]))
    bench.run()
    assert bench.accepted == ["r"]
    assert bench.tokens("r") == reference(one, 8)


def test_an_item_that_the_prefix_cache_covers_is_never_asked_for(bench):
    image = feature("picture", 2, 4)
    one, same = request("r", text(20), [image]), request("same", text(20), [image])
    bench.core.add(one, items_for([image]))
    bench.run()
    bench.core.reset_encoder_cache()
    bench.core.add(same, {}, missing=(image.key,))
    bench.run()
    assert bench.needs == []
    assert "same" in bench.accepted
    assert bench.tokens("same") == reference(one, 8)


def test_aborting_ends_a_request_with_abort(bench):
    bench.core.add(request("r", text(9)), {})
    bench.step()
    bench.core.abort("r")
    bench.run()
    assert bench.deltas[-1].finish_reason == "abort"
    assert bench.released == ["r"]
    assert not bench.runner.known


def test_a_request_that_can_never_run_is_refused_at_once(bench):
    with pytest.raises(BadRequestError):
        bench.core.add(request("r", [5000]), {})
    assert not bench.core.has_work


def test_resetting_the_prefix_cache_makes_everything_new_again(bench):
    one = request("r", text(20))
    for name in ("first", "second"):
        bench.core.add(request(name, text(20)), {})
        bench.run()
        bench.core.reset_prefix_cache()
    assert bench.core.stats()["prefix_cache_hits_total"] == 0
    assert bench.tokens("second") == reference(one, 8)


def test_a_step_that_raises_when_it_is_waited_for_ends_those_that_were_in_it():
    bench = Bench(overlapped=True)
    begin, failing = bench.runner.begin, [True]

    def raising(plan):
        finish = begin(plan)

        def finished():
            if failing and plan.scheduled:
                failing.clear()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return finish()

        return finished

    bench.runner.begin = raising
    bench.core.add(request("broken", text(9)), {})
    bench.run()
    later = request("later", text(9, seed=2))
    bench.core.add(later, {})
    bench.run()
    assert set(bench.errors()) == {"broken"}
    assert bench.tokens("broken") == []
    assert bench.tokens("later") == reference(later, 8)
    assert not bench.runner.known


def test_a_device_that_says_it_is_lost_is(bench):
    def lost(plan):
        raise DeviceLostError("a step failed on one of several ranks")

    bench.runner.begin = bench.runner.execute = lost
    bench.core.add(request("r", text(9)), {})
    with pytest.raises(DeviceLostError):
        bench.run()


def test_the_tokens_of_a_step_under_way_are_told_at_the_end():
    bench = Bench(overlapped=True)
    one = request("r", text(9))
    bench.core.add(one, {})
    for _ in range(3):
        bench.step()
    assert bench.core.has_work
    told = [token for delta in bench.core.land().deltas for token in delta.token_ids]
    assert bench.tokens("r") + told == reference(one, 3)
    assert not bench.core.land()


def test_what_a_step_took_is_noted_once_the_device_tells_it(bench):
    """A chunk within a prompt samples nothing, so nobody waits for it: a later result tells."""
    execute, ended = bench.runner.execute, []

    def told_later(plan):
        result = execute(plan)
        ended.append((plan.step_id, 0.25 * plan.num_tokens))
        if not any(chunk.sample for chunk in plan.scheduled):
            return msgspec.structs.replace(result, device_seconds=())
        taken, ended[:] = tuple(ended), []
        return msgspec.structs.replace(result, device_seconds=taken)

    bench.runner.execute = told_later
    bench.core.load = Load()
    bench.core.add(request("a", text(80)), {})  # in three chunks
    bench.run()
    load = bench.core.load
    assert (load.prompt_tokens, load.prompt_seconds) == (80, 20.0)
    assert (load.decoded_tokens, load.decode_seconds, load.decode_steps) == (7, 1.75, 7)
