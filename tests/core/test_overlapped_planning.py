"""Planning ahead of results: what clients, caches and counters see is what they would see without.

`test_scheduler_random` runs any workload both ways; here each rule has an example.
"""

from __future__ import annotations

import msgspec
import pytest

from lookonce.core.request import NEVER, Sequence
from lookonce.errors import RequestFailedError
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams, TokenRules
from lookonce.types.step import StepPlan, StepResult
from tests.support.core.builders import Limits, feature, items_for, model_info, request, text
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import reference


class Stored:
    """Digests of KV blocks, in the order in which they were registered."""

    needs_content = False

    def __init__(self) -> None:
        self.hashes: list[bytes] = []
        self.prompts: list[str] = []

    def stored(self, block_hash: bytes, *_: object) -> None:
        self.hashes.append(block_hash)

    def removed(self, block_hash: bytes) -> None:
        self.hashes.remove(block_hash)

    def cleared(self) -> None:
        self.hashes.clear()

    def computed(self, request_id: str, *_: object) -> None:
        self.prompts.append(request_id)


def asked(name: str, length: int, seed: int = 0, **sampling) -> GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
    return request(name, text(length, seed=seed), sampling=SamplingParams(**params))


def run(requests: list[GenerateRequest], limits: Limits, *, overlapped: bool) -> Engine:
    """One request comes with each step."""
    engine, waiting = Engine(limits, overlapped=overlapped), list(requests)
    engine.stored = Stored()  # type: ignore[attr-defined]
    engine.scheduler.watch(engine.stored)  # type: ignore[attr-defined]
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        engine.step()
    return engine


def both(requests: list[GenerateRequest], limits: Limits = Limits()) -> Engine:  # noqa: B008
    """The overlapped engine, which shows what the other one shows."""
    plain, ahead = (run(requests, limits, overlapped=each) for each in (False, True))
    assert plain.num_ahead == 0 < ahead.num_ahead
    assert ahead.tokens == plain.tokens
    assert {n: d.finish_reason for n, d in ahead.ended.items()} == {
        n: d.finish_reason for n, d in plain.ended.items()
    }
    assert sorted(ahead.released) == sorted(plain.released)
    for name in ("generation_tokens_total", "prompt_tokens_total", "encoder_runs_total"):
        assert ahead.scheduler.stats()[name] == plain.scheduler.stats()[name]
    ahead.assert_all_free()
    return ahead


def test_each_step_of_a_batch_that_decodes_is_planned_ahead():
    engine = both([asked(str(n), 9, seed=n, max_tokens=20) for n in range(4)])
    computing = [plan for plan in engine.plans if plan.scheduled]
    assert engine.num_ahead == len(computing) - 1
    for n in range(4):
        assert engine.tokens[str(n), 0] == reference(asked(str(n), 9, seed=n), 20)


def test_a_token_that_ends_a_sequence_by_its_length_is_known_to_before_it_is_sampled():
    engine = both([asked("a", 9, max_tokens=5)])
    assert sum(plan.num_tokens for plan in engine.plans) == 9 + 4, "no row too many"


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_what_is_computed_after_a_stop_token_is_never_seen(at):
    """Neither as a token, nor in a block of the prefix cache, nor in a counter."""
    generated = reference(asked("a", 11), 8)
    limits = Limits(block_size=4)
    stopped = asked("a", 11, stop_token_ids=(generated[at],), max_tokens=8)
    plain, ahead = (run([stopped], limits, overlapped=each) for each in (False, True))
    assert ahead.tokens == plain.tokens == {("a", 0): generated[: at + 1]}
    assert ahead.ended["a", 0].stop_token_id == generated[at]
    assert ahead.stored.hashes == plain.stored.hashes
    assert ahead.stored.prompts == plain.stored.prompts
    stats = [engine.scheduler.stats() for engine in (plain, ahead)]
    steps = [each.pop("engine_steps_total") for each in stats]
    assert stats[0] == stats[1]
    assert steps[1] - steps[0] <= 1
    computed = [sum(plan.num_tokens for plan in engine.plans) for engine in (plain, ahead)]
    assert computed[1] - computed[0] == 1, "one row was computed for none"


def test_prompts_in_chunks_pictures_and_prefix_hits():
    picture = feature("picture", 3, 6)
    prompt = text(40)
    first = request("first", prompt, [picture])
    later = [request(f"later {n}", prompt, [picture]) for n in range(3)]
    engine = both([first, *(asked(str(n), 30, seed=n) for n in range(5)), *later])
    hit = engine.scheduler.stats()["prefix_cache_hits_total"]
    assert hit >= 36
    assert engine.runner.encoded == [picture.key]


def test_samples_of_one_request_share_its_prompt():
    engine = both([asked("a", 21, n=3), asked("b", 9, seed=1, n=2)])
    for index in range(3):
        assert engine.tokens["a", index] == reference(asked("a", 21), 8, index)


def test_a_preempted_sequence_draws_the_token_that_was_under_way_again():
    limits = Limits(num_blocks=12, block_size=4)
    requests = [asked(str(n), 12, seed=n, max_tokens=20) for n in range(3)]
    engine = both(requests, limits)
    assert engine.scheduler.stats()["num_preemptions_total"] > 0
    for n, one in enumerate(requests):
        assert engine.tokens[str(n), 0] == reference(one, 20)


def test_a_preempted_sequence_that_took_the_old_draw_would_be_found(monkeypatch):
    """The control of the last test: results of steps before the preemption are taken."""
    clear = Sequence.clear_computed

    def forgetful(self: Sequence) -> None:
        known = getattr(self, "known_since", NEVER)
        clear(self)
        self.known_since = known

    monkeypatch.setattr(Sequence, "clear_computed", forgetful)
    limits = Limits(num_blocks=12, block_size=4)
    requests = [asked(str(n), 12, seed=n, max_tokens=20) for n in range(3)]
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError)):
        both(requests, limits)


def test_an_abort_while_a_step_is_under_way_is_the_last_thing_told():
    engine = Engine(overlapped=True)
    for name in ("a", "b"):
        engine.add(asked(name, 9, max_tokens=20))
    for _ in range(4):
        engine.step()
    assert engine.under_way is not None
    before = list(engine.tokens["a", 0])
    engine.scheduler.abort("a")
    engine.run()
    assert engine.tokens["a", 0] == before
    assert engine.reason("a") == "abort"
    assert engine.tokens["b", 0] == reference(asked("b", 9), 20)
    engine.assert_all_free()


def test_an_item_that_fails_ends_its_request_though_the_next_step_was_begun():
    engine = Engine(Limits(max_num_batched_tokens=8), overlapped=True)
    broken, picture = feature("broken", 0, 6), feature("picture", 0, 6)
    engine.runner.failing_items.add(broken.key)
    engine.add(request("bad", text(30), [broken]))
    engine.add(request("good", text(30, seed=1), [picture]))
    engine.run()
    assert engine.reason("bad") == "error"
    assert not engine.tokens["bad", 0]
    good = request("good", text(30, seed=1), [picture])
    assert engine.tokens["good", 0] == reference(good, 8)
    engine.assert_all_free()


RULED = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, token_rules=TokenRules())


@pytest.mark.parametrize("kind", ["rules", "live"])
def test_where_the_host_decides_what_may_come_next_each_result_is_waited_for(kind):
    """As long as such a sequence computes; then steps overlap again."""
    engine = Engine(overlapped=True)
    one = asked("special", 9, seed=1)
    if kind == "rules":
        one = msgspec.structs.replace(one, sampling=RULED)
    engine.scheduler.add(one, items_for(()), live=kind == "live")
    engine.add(asked("plain", 9, max_tokens=30))
    while len(engine.tokens["special", 0]) < 8:
        engine.step()
        assert engine.under_way is None or len(engine.tokens["special", 0]) == 8
    engine.step()
    assert engine.under_way is not None
    engine.scheduler.abort("special")
    engine.run()
    assert engine.tokens["plain", 0] == reference(asked("plain", 9), 30)
    engine.assert_all_free()


def planned_at(requests: list[GenerateRequest], limits: Limits) -> list[int]:
    """Number of the plan that begins the last of the requests, without and with planning ahead."""
    found = []
    for overlapped in (False, True):
        plans = run(requests, limits, overlapped=overlapped).plans
        last = max(new.seq_id for plan in plans for new in plan.new)
        found.append(next(at for at, p in enumerate(plans) if last in [n.seq_id for n in p.new]))
    return found


def test_one_that_got_nothing_goes_first_though_the_prompt_before_it_is_not_known_to_be_computed():
    """A picture that is not cut finds too few tokens beside those that decode."""
    model = model_info(unsplittable=("image",), largest_unsplittable=4)
    limits = Limits(max_num_batched_tokens=6, model=model)
    requests = [asked(str(n), 3, seed=n, max_tokens=30) for n in range(3)]
    seen = request("seen", text(5, seed=9), [feature("picture", 0, 4)])
    plain, ahead = planned_at([*requests, seen], limits)
    assert ahead == plain


def test_a_tenant_that_waits_gets_blocks_though_its_last_prompt_is_not_known_to_be_computed():
    large = [asked(f"large {n}", 20, seed=n, max_tokens=40) for n in range(2)]
    small = [asked(f"small {n}", 4, seed=9 + n, max_tokens=6) for n in range(2)]
    small = [msgspec.structs.replace(each, tenant="other") for each in small]
    plain, ahead = planned_at([*large, *small], Limits(num_blocks=16))
    assert ahead == plain


def test_a_failure_before_a_preemption_ends_nothing():
    """Nor is the alignment of such a step taken: what was preempted is computed again."""
    limits = Limits(num_blocks=12, block_size=4)
    requests = [asked(str(n), 12, seed=n, max_tokens=20) for n in range(3)]
    plans = run(requests, limits, overlapped=True).plans
    preempted, seq_id = next((plan.step_id, plan.finished[0]) for plan in plans if plan.finished)
    engine = Engine(limits, overlapped=True)
    execute, error = engine.runner.execute, RequestFailedError("broken")

    def failing(plan: StepPlan) -> StepResult:
        result = execute(plan)
        if plan.step_id != preempted - 1:
            return result
        assert seq_id in {chunk.seq_id for chunk in plan.scheduled}
        return msgspec.structs.replace(
            result, failed_sequences={seq_id: error}, alignments={seq_id: [7]}
        )

    engine.runner.execute = failing  # type: ignore[method-assign]
    for each in requests:
        engine.add(each)
        engine.step()
    sequence = engine.scheduler._state.queues.sequences[seq_id]
    engine.run()
    assert sequence.request.alignment != [7]
    for n, one in enumerate(requests):
        assert engine.tokens[str(n), 0] == reference(one, 20)
        assert engine.reason(str(n)) == "length"
