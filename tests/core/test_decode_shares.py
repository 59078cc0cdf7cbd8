"""What one tenant's many answers cost each token of another one's few."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.core.decode_shares import (
    CREDIT_SECONDS,
    LINGER_SECONDS,
    MIN_SLICE_TOKENS,
    SHARED_SECONDS,
    SLICE_SECONDS,
    STEP_SECONDS,
    StepTimes,
    row_limits,
)
from lookonce.core.request import Sequence
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import StepPlan
from tests.support.core.builders import Limits, model_info, request, text
from tests.support.core.engine import COUNTS_STEPS, Engine, StepCosts

LIMITS = Limits(num_blocks=1000, max_num_batched_tokens=64, max_num_seqs=40)
MANY, NUM_TOKENS = 32, 80
COSTS = StepCosts(fixed=0.001, decode=0.0005, token=0.0002)


class TimedEngine(Engine):
    def __init__(self, costs: StepCosts = COSTS, limits: Limits = LIMITS) -> None:
        super().__init__(limits, costs)

    def rows(self, first_id: int, end: int) -> int:
        """Of the last plan, sequences with ids in `[first_id, end)`."""
        return sum(first_id <= chunk.seq_id < end for chunk in self.plans[-1].scheduled)

    def run_for(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def seconds_to_end(self, name: str) -> float:
        began = self.now
        while (name, 0) not in self.ended:
            self.step()
        return self.now - began


def answering(tenant: str, name: str, num_tokens: int, n: int = 1) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_tokens, n=n, ignore_eos=True)
    built = request(name, text(8), sampling=sampling)
    return msgspec.structs.replace(built, tenant=tenant)


def prompt(tenant: str, name: str, num_tokens: int) -> GenerateRequest:
    tokens = text(num_tokens, seed=crc32(name.encode()))
    built = request(name, tokens, sampling=SamplingParams(max_tokens=1))
    return msgspec.structs.replace(built, tenant=tenant)


def busy(engine: TimedEngine) -> None:
    """All places but some decode for one tenant."""
    engine.add(answering("many", "many", NUM_TOKENS, n=MANY))
    while len(engine.plans) < 8:
        engine.step()
    assert engine.rows(0, MANY) == MANY


def test_a_tenant_with_one_sequence_waits_twice_as_long_for_each_token_at_most() -> None:
    alone, beside = TimedEngine(), TimedEngine()
    busy(beside)
    for engine in (alone, beside):
        engine.add(answering("one", "first", 10))  # what steps take is measured
        engine.seconds_to_end("first")
        engine.add(answering("one", "second", 50))
    one_step_of_all = COSTS.fixed + COSTS.decode * (MANY + 1)
    most = 2 * alone.seconds_to_end("second") + one_step_of_all
    assert beside.seconds_to_end("second") < most
    beside.run()
    assert all(len(beside.tokens["many", index]) == NUM_TOKENS for index in range(MANY))


def test_a_step_that_only_tells_what_ended_measures_nothing() -> None:
    engine = TimedEngine()
    for number in range(2):  # nothing else was measured before
        for tenant in ("one", "other"):
            engine.add(answering(tenant, f"{tenant}{number}", 1 + 3 * number))
        engine.run()
    assert any(plan.finished and not plan.scheduled for plan in engine.plans)
    assert len(engine.tokens["one1", 0]) == 4


def test_long_prompts_of_another_tenant_delay_an_answer_by_their_share() -> None:
    alone, beside = TimedEngine(), TimedEngine()
    for number in range(20):
        beside.add(prompt("many", f"m{number}", 400))
    for engine in (alone, beside):
        engine.add(answering("one", "first", 10))
        engine.seconds_to_end("first")
        engine.add(answering("one", "second", 50))
    most = 2 * alone.seconds_to_end("second") + 3 * SLICE_SECONDS
    assert beside.seconds_to_end("second") < most
    assert len(beside.released) < 10  # most prompts of the other one wait
    beside.run()
    assert len(beside.released) == 22


@COUNTS_STEPS
def test_a_short_prompt_waits_for_the_rest_of_one_step() -> None:
    engine = TimedEngine()
    for number in range(30):
        engine.add(prompt("many", f"m{number}", 400))
    for number in range(12):
        engine.step()  # it comes in the middle of the other one's prompts
        engine.add(prompt("one", f"o{number}", 20))
        num_plans = len(engine.plans)
        engine.seconds_to_end(f"o{number}")
        assert len(engine.plans) == num_plans + 1
        sizes = {chunk.num_tokens for chunk in engine.plans[-1].scheduled}
        assert 20 in sizes
        assert sum(sizes) <= 20 + 1  # none of the other one's prompts
    engine.run()


def test_a_credit_is_not_saved_up() -> None:
    """A tenant that was away and then asks for much gets its credit once, and half from then on."""
    engine = TimedEngine()
    for number in range(40):
        engine.add(prompt("many", f"m{number}", 400))
    for _ in range(20):
        engine.step()
    for number in range(20):
        engine.add(prompt("one", f"o{number}", 400))
    shares = Counter[str]()
    while "o19" not in engine.released:
        engine.step()
        for chunk in engine.plans[-1].scheduled:
            shares["one" if 40 <= chunk.seq_id < 60 else "many"] += chunk.num_tokens
    credit = CREDIT_SECONDS / COSTS.token
    assert shares["one"] == 20 * 400
    assert abs(shares["many"] - (shares["one"] - credit)) < 0.2 * shares["one"]
    engine.run()


def test_prompts_of_others_go_on_while_the_one_before_them_cannot() -> None:
    """The tenant that has used less waits for KV blocks that the other one's prompts hold."""
    engine = Engine(replace(LIMITS, num_blocks=60), COSTS)
    for number in range(8):
        engine.add(prompt("many", f"m{number}", 200))
    engine.step()
    for number in range(8):
        engine.add(prompt("one", f"o{number}", 200))
    engine.run()
    assert len(engine.released) == 16


def test_prompts_are_computed_whole_where_one_tenant_is_alone() -> None:
    engine = TimedEngine()
    for number in range(4):
        engine.add(prompt("many", f"m{number}", 640))
    engine.run()
    sizes = [sum(chunk.num_tokens for chunk in plan.scheduled) for plan in engine.plans]
    assert sizes.count(LIMITS.max_num_batched_tokens) >= 39


def test_who_comes_after_a_while_waits_for_no_long_step_of_who_was_alone() -> None:
    """Long steps are for who has the engine for itself."""
    whole = 640
    engine = Engine(replace(LIMITS, num_blocks=4000, max_num_batched_tokens=whole), COSTS)
    numbers = iter(range(100))

    def largest_step(*tenants: str) -> int:
        """Of one prompt after the other."""
        num_plans = len(engine.plans)
        for tenant in tenants:
            engine.add(prompt(tenant, f"{tenant}{next(numbers)}", 5 * whole))
            engine.run()
        return max(sum(c.num_tokens for c in plan.scheduled) for plan in engine.plans[num_plans:])

    assert largest_step("many", "many") == whole
    largest_step("one")
    short = round(STEP_SECONDS / COSTS.token)
    assert largest_step("many", "many") <= short + 1
    engine.now += SHARED_SECONDS
    assert largest_step("many") == whole
    assert largest_step("one", "many") <= short + 1


def test_who_asks_for_little_decodes_alone_and_who_asks_for_much_does_not() -> None:
    engine = TimedEngine()
    busy(engine)
    engine.add(answering("one", "first", 10))  # what steps take is measured
    engine.seconds_to_end("first")
    engine.run_for(LINGER_SECONDS / 5)
    num_plans = len(engine.plans)
    engine.add(answering("one", "short", 8))
    engine.seconds_to_end("short")
    alone = [len(plan.scheduled) == 1 for plan in engine.plans[num_plans:]]
    assert sum(alone) >= 7
    num_plans = len(engine.plans)
    engine.add(answering("one", "long", 150))
    engine.seconds_to_end("long")
    alone = [len(plan.scheduled) == 1 for plan in engine.plans[num_plans:]]
    seconds = sum(alone) * (COSTS.fixed + COSTS.decode)
    assert seconds <= CREDIT_SECONDS + (len(alone) - sum(alone)) * COSTS.decode * MANY


@COUNTS_STEPS
def test_answers_wait_for_a_short_prompt_of_who_asks_for_little() -> None:
    engine = TimedEngine()
    busy(engine)
    engine.add(answering("one", "first", 10))  # what steps take is measured
    engine.seconds_to_end("first")
    for number in range(10):
        engine.run_for(LINGER_SECONDS / 10)
        assert engine.rows(0, MANY)
        engine.add(prompt("one", f"o{number}", 20))
        num_plans = len(engine.plans)
        engine.seconds_to_end(f"o{number}")
        assert len(engine.plans) == num_plans + 1
        assert not engine.rows(0, MANY)
    engine.run()
    assert all(len(engine.tokens["many", index]) == NUM_TOKENS for index in range(MANY))


def test_answers_share_the_time_with_short_prompts_without_end() -> None:
    """Of each such prompt a step's fixed time is the larger part."""
    engine = TimedEngine()
    engine.add(answering("many", "many", 400, n=MANY))
    engine.run_for(0.2)
    engine.add(answering("one", "first", 10))
    engine.seconds_to_end("first")
    engine.add(prompt("one", "long", 60))  # what its tokens take is measured
    engine.seconds_to_end("long")
    began, theirs = engine.now, 0.0
    for number in range(300):
        engine.add(prompt("one", f"o{number}", 3))
        before = engine.now
        engine.step()
        if engine.rows(0, MANY):
            theirs += engine.now - before
    assert theirs >= 0.4 * (engine.now - began - CREDIT_SECONDS)


@COUNTS_STEPS
def test_answers_go_on_beside_a_prompt_that_cannot_be_computed() -> None:
    """It waits for KV blocks that the answers hold."""
    engine = TimedEngine(limits=replace(LIMITS, num_blocks=40))
    engine.add(answering("many", "many", 20, n=MANY))
    engine.run_for(0.05)
    engine.add(answering("one", "first", 2))
    engine.seconds_to_end("first")
    engine.add(prompt("one", "measured", 20))
    engine.seconds_to_end("measured")
    engine.add(prompt("one", "large", 120))
    num_waited = 0
    engine.step()
    while not engine.rows(MANY + 2, MANY + 3):
        assert engine.rows(0, MANY)
        engine.step()
        num_waited += 1
    assert num_waited > 3
    engine.run()


@pytest.mark.parametrize("seed", range(190, 210))
def test_requests_of_three_tenants_beside_each_other_break_no_rule(seed: int) -> None:
    """The runner objects to plans that are wrong, as one that has a sequence twice: an answer that
    was set aside, then preempted, and admitted again."""
    random = Random(seed)
    limits = replace(
        LIMITS,
        num_blocks=random.choice([12, 20, 30, 60]),
        max_num_batched_tokens=random.choice([16, 64]),
        max_num_seqs=random.choice([4, 10, 40]),
    )
    costs = StepCosts(
        fixed=random.choice([0, 0.001, 0.0001]),
        decode=random.choice([0, 0.0005, 0.002]),
        token=random.choice([0.00002, 0.0002]),
    )
    engine = Engine(limits, costs, overlapped=random.random() < 0.5)
    for number in range(250):
        if random.random() < 0.2:
            tenant = random.choice("abc")
            name = f"{tenant}{number}"
            if random.random() < 0.5:
                num_tokens, n = random.randint(1, 30), random.choice([1, 1, 2, 6])
                engine.add(answering(tenant, name, num_tokens, n=n))
            else:
                engine.add(prompt(tenant, name, random.randint(2, 40)))
        if engine.has_work:
            engine.step()
        else:
            engine.now += random.choice([0.001, 0.1, 1])
    engine.run()


def test_an_answer_that_was_set_aside_takes_no_blocks_of_another_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for one that is free, and where nothing else can be computed, preempts as any."""
    engine = Engine(replace(LIMITS, block_size=16))
    pool = engine.scheduler._planner._state.block_pool
    engine.add(answering("many", "many", 40, n=3))
    for number in range(2):  # they hold more than "many" does: another one would take theirs
        sampling = SamplingParams(max_tokens=14, ignore_eos=True)
        long = request(f"one{number}", text(33, seed=number), sampling=sampling)
        engine.add(msgspec.structs.replace(long, tenant="one"))
    while len(engine.tokens) < 5:
        engine.step()
    set_aside_always(engine, "many", monkeypatch)
    plan = engine.scheduler.plan

    def plan_with_none_free() -> StepPlan | None:
        held = pool.try_allocate(pool.num_free) or []
        try:
            return plan()
        finally:
            pool.release(held)

    monkeypatch.setattr(engine.scheduler, "plan", plan_with_none_free)
    while not {("one0", 0), ("one1", 0)} <= engine.ended.keys():
        engine.step()
        assert not engine.scheduler.stats()["num_preemptions_total"]
    assert ("many", 0) not in engine.ended
    while not engine.scheduler.stats()["num_preemptions_total"]:  # of its own tenant
        engine.step()
    monkeypatch.undo()
    engine.run()
    assert all(len(engine.tokens["many", index]) == 40 for index in range(3))


def set_aside_always(engine: Engine, tenant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All decodes of a tenant are set aside in each step, and no prompt keeps them waiting."""
    shares = engine.scheduler._planner.decode_shares

    def choose(decodes: list[Sequence]) -> list[Sequence]:
        shares.planned_at = engine.now
        shares.set_aside = [s for s in decodes if s.request.tenant == tenant]
        return [s for s in decodes if s.request.tenant != tenant]

    monkeypatch.setattr(shares, "choose", choose)
    monkeypatch.setattr(shares, "beside_prompts", lambda _: shares.set_aside)


def test_answers_go_on_beside_prompts_of_their_tenant_that_nothing_holds_back() -> None:
    """Of models whose prompts are never cut, whatever a tenant has used."""
    model = model_info(unsplittable=("image",))
    engine = TimedEngine(limits=replace(LIMITS, model=model))
    engine.add(answering("many", "many", 400, n=MANY))
    engine.run_for(0.2)
    engine.add(answering("one", "first", 10))
    engine.seconds_to_end("first")
    engine.add(answering("one", "long", 300))
    last, longest = engine.now, 0.0
    for number in range(200):
        if number % 2:
            engine.add(prompt("many", f"m{number}", 60))
        engine.step()
        if engine.rows(0, MANY):
            last = engine.now
        longest = max(longest, engine.now - last)
    assert longest <= CREDIT_SECONDS


def test_what_a_prompt_s_token_takes_is_learned_of_the_shortest_slices() -> None:
    """A slow moment makes slices short, which tell that it is over."""
    engine = TimedEngine(StepCosts(fixed=0.001, decode=0.0005, token=0.002))
    for number in range(100):
        engine.add(prompt("many", f"m{number}", 400))

    def ask(first: int) -> int:
        """Now and then, for a while; the most tokens of a step of the other one's prompts."""
        num_plans = len(engine.plans)
        for number in range(first, first + 10):
            engine.add(prompt("one", f"o{number}", 3))
            engine.run_for(LINGER_SECONDS / 3)
        return max(plan.num_tokens for plan in engine.plans[num_plans:])

    ask(0)
    assert ask(10) <= MIN_SLICE_TOKENS
    engine.costs = StepCosts(fixed=0.001, decode=0.0005, token=0.00004)
    ask(20)
    assert ask(30) >= 22


def test_the_sequences_of_the_other_tenant_take_turns() -> None:
    engine = TimedEngine()
    busy(engine)
    engine.add(answering("one", "one", 200))
    before = [len(engine.tokens["many", index]) for index in range(MANY)]
    engine.seconds_to_end("one")
    gained = [len(engine.tokens["many", i]) - before[i] for i in range(MANY)]
    assert min(gained) > 0
    assert max(gained) - min(gained) <= 2


def test_nobody_is_limited_where_more_sequences_take_no_longer() -> None:
    engine = TimedEngine(StepCosts(fixed=0.01))
    busy(engine)
    engine.add(answering("one", "one", 50))
    engine.seconds_to_end("one")
    limited = [p for p in engine.plans[8:] if len(p.scheduled) < MANY]
    assert len(limited) <= 2  # until that was measured


def test_a_step_that_the_device_has_not_ended_tells_no_cost() -> None:
    """The result of a chunk that samples nothing is there at once on an accelerator."""

    def prompt_cost(device_seconds: tuple[tuple[int, float], ...]) -> float:
        engine = TimedEngine(StepCosts())
        engine.add(prompt("one", "one", 100))
        engine.add(prompt("other", "other", 100))
        plan = engine.scheduler.plan()
        assert plan is not None
        result = engine.runner.execute(plan)
        told = msgspec.structs.replace(result, device_seconds=device_seconds)
        engine.scheduler.update(plan, told)
        return engine.scheduler._planner.decode_shares._times.prompt_token

    assert prompt_cost(((1, 0.64),)) == pytest.approx(0.01)
    assert prompt_cost(()) == 0.0


def test_a_step_s_cost_is_noted_when_a_later_one_tells_it() -> None:
    engine = TimedEngine(StepCosts())
    engine.add(prompt("one", "one", 100))
    engine.add(prompt("other", "other", 100))
    shares = engine.scheduler._planner.decode_shares
    for told in ((), ((1, 0.64), (2, 0.64))):
        plan = engine.scheduler.plan()
        assert plan is not None
        result = engine.runner.execute(plan)
        assert shares._times.prompt_token == 0.0
        engine.scheduler.update(plan, msgspec.structs.replace(result, device_seconds=told))
    assert shares._times.prompt_token > 0.0
    assert not shares._untimed


def test_a_tenant_that_is_alone_again_is_not_limited() -> None:
    engine = TimedEngine()
    busy(engine)
    engine.add(answering("one", "one", 20))
    engine.seconds_to_end("one")
    assert engine.rows(0, MANY) < MANY
    until = engine.now + LINGER_SECONDS
    while engine.now <= until:
        engine.step()
    engine.step()
    assert engine.rows(0, MANY) == MANY


def test_steps_of_one_size_and_of_prompts_tell_what_any_step_takes() -> None:
    """Beside endless prompts all decode steps may be of one size, while each prompt's step takes
    mostly what any step does."""
    times = StepTimes()
    for _ in range(50):
        times.note(2, 0.022)
        times.note_prompt(8, 0, 0.028)
    assert times.fixed == pytest.approx(0.02, rel=0.01)
    assert times.prompt_token == pytest.approx(0.001, rel=0.01)
    assert times.seconds(1) == pytest.approx(0.021, rel=0.01)


def test_steps_of_many_that_cost_more_than_prompts_tokens_make_no_slice_longer() -> None:
    times = StepTimes()
    for _ in range(50):
        times.note(64, 0.020 + 64 * 0.001)
        times.note_prompt(40, 0, 0.020 + 40 * 0.0005)
    assert times.fixed == 0.0


def test_what_steps_take_is_known_between_sizes_and_beyond() -> None:
    times = StepTimes()
    assert times.seconds(10) == 0.0
    times.note(10, 0.1)
    assert (times.fixed, times.seconds(20)) == (0.0, pytest.approx(0.2))
    for count in (1, 10, 2, 40) * 20:
        times.note(count, 0.02 + 0.001 * count)
    assert times.fixed == pytest.approx(0.02)
    for count in (1, 5, 30, 80):
        assert times.seconds(count) == pytest.approx(0.02 + 0.001 * count)
        assert times.most_sequences(0.02 + 0.001 * count) == pytest.approx(count)


def test_steps_of_the_usual_size_do_not_hide_what_short_ones_take() -> None:
    times = StepTimes()
    for count in (1, 2, 3):
        times.note(count, 0.0003 + 0.0001 * count)
    for number in range(500):
        times.note(40 + number % 7, 0.0026)
    for count in (1, 2, 3):
        assert times.seconds(count) == pytest.approx(0.0003 + 0.0001 * count)


def test_short_steps_stay_short_where_the_longest_ones_gain_least_by_being_cut() -> None:
    """As on a CPU: 13 sequences take nearly as long as 64."""
    times = StepTimes()
    for count, seconds in ((1, 0.0002), (3, 0.0004), (13, 0.002), (64, 0.0026)):
        times.note(count, seconds)
    limits = row_limits({"many": (64, 1.0), "one": (1, 1.0)}, times)
    assert times.seconds(limits["many"] + 1) <= 2 * times.seconds(1) + 1e-9
    assert times.seconds(limits["many"] + 2) > 2 * times.seconds(1)


def test_an_interrupted_step_changes_nothing() -> None:
    times = StepTimes()
    for count in (1, 10, 2, 40) * 5:
        times.note(count, 0.02 + 0.001 * count)
    times.note(2, 1.0)
    assert times.seconds(2) == pytest.approx(0.022)


def test_prompts_that_seem_to_cost_nothing_fit_a_step_in_a_finite_number() -> None:
    """Their cost came to the least number that there is, and the tokens that fit a step to
    infinity, of which there is no integer."""
    times = StepTimes()
    times.note_prompt(64, 0, 0.01)
    for _ in range(5000):
        times.note_prompt(64, 0, 0.0)
    assert int(SLICE_SECONDS / times.prompt_token) > 0


def test_short_steps_of_a_slower_time_are_forgotten() -> None:
    times = StepTimes()
    for count in (1, 2):
        times.note(count, 0.1)
    times.note(40, 0.01)
    times.note(1, 0.002)
    assert times.seconds(1) == pytest.approx(0.002)
    assert times.seconds(40) == pytest.approx(0.01)


def linear(fixed: float, each: float) -> StepTimes:
    times = StepTimes()
    for count in (1, 10, 100):
        times.note(count, fixed + each * count)
    return times


TENANTS = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.integers(1, 64), st.sampled_from([0.5, 1.0, 3.0]))
)


@given(TENANTS, st.floats(0, 10), st.floats(0, 1))
def test_limits_keep_to_what_everyone_may_expect(tenants, fixed, each):
    limits = row_limits(tenants, linear(fixed, each))
    rows = {t: min(count, limits.get(t, count)) for t, (count, _) in tenants.items()}
    assert all(limit >= 1 for limit in limits.values())
    if not limits:
        return
    total = sum(weight for _, weight in tenants.values())
    seconds = fixed + each * sum(rows.values())
    for count, weight in tenants.values():
        may = total / weight * (fixed + each * count)
        assert seconds <= (may + each * len(tenants)) * (1 + 1e-6)
    used = {t: rows[t] / tenants[t][1] for t in tenants}
    left_over = len(tenants) - 1  # sequences, where the share of each other one is rounded
    for limited in limits:  # no other has more for its weight, but for these
        own = left_over / tenants[limited][1] + 1e-9
        assert all(used[limited] >= used[t] - left_over / tenants[t][1] - own for t in tenants)
