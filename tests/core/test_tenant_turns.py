"""Prompts of several tenants: each gets its share of what is computed, in its own order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.core.scheduler import MAX_SHARES
from lookonce.core.scheduler_state import QUANTUM
from lookonce.errors import QueueFullError
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import INTERRUPT, Limits, request, text
from tests.support.core.engine import COUNTS_STEPS, Engine

STEP = 64
LIMITS = Limits(num_blocks=4000, max_num_batched_tokens=STEP, max_num_seqs=8)


def of(
    tenant: str, name: str, num_tokens: int, arrival: float, weight: float = 1.0
) -> GenerateRequest:
    """A prompt of its own, with an answer of one token."""
    tokens = text(num_tokens, seed=crc32(name.encode()))
    built = request(name, tokens, sampling=SamplingParams(max_tokens=1), arrival=arrival)
    return msgspec.structs.replace(built, tenant=tenant, weight=weight)


def first_token_steps(engine: Engine) -> dict[str, int]:
    """The step in which each request's prompt was computed to its end."""
    done: dict[str, int] = {}
    step = 0
    while engine.scheduler.has_work:
        engine.step()
        step += 1
        for name, _ in engine.ended:
            done.setdefault(name, step)
    return done


def test_a_small_prompt_does_not_wait_for_another_tenants_long_one() -> None:
    engine = Engine(LIMITS)
    engine.add(of("long", "book", 40 * STEP, 0.0))
    engine.step()
    engine.add(of("small", "line", 10, 1.0))
    done = first_token_steps(engine)
    assert done["line"] <= 2 + QUANTUM // STEP
    assert done["book"] > 30


def test_nor_for_many_that_arrived_before() -> None:
    engine = Engine(LIMITS)
    for number in range(50):
        engine.add(of("many", f"m{number}", STEP, float(number)))
    engine.add(of("one", "one", STEP, 100.0))
    done = first_token_steps(engine)
    assert done["one"] <= 2 + QUANTUM // STEP
    assert [done[f"m{number}"] for number in range(50)] == sorted(
        done[f"m{number}"] for number in range(50)
    )


def answering(
    tenant: str, name: str, num_tokens: int, arrival: float, n: int = 1
) -> GenerateRequest:
    """A short prompt, with `n` answers of so many tokens."""
    sampling = SamplingParams(max_tokens=num_tokens, n=n, ignore_eos=True)
    return msgspec.structs.replace(of(tenant, name, 10, arrival), sampling=sampling)


@COUNTS_STEPS
@pytest.mark.parametrize("n", [1, 8], ids=["requests", "samples"])
def test_nor_for_long_answers_that_have_all_places(n: int) -> None:
    engine = Engine(LIMITS)
    for number in range(16 // n):
        engine.add(answering("many", f"m{number}", 300, float(number), n))
    for _ in range(20):
        engine.step()
    for number in range(3):
        engine.add(answering("one", f"one{number}", 5, 100.0 + number))
    done = first_token_steps(engine)
    assert max(done[f"one{number}"] for number in range(3)) <= 12
    assert min(step for name, step in done.items() if name.startswith("m")) > 200


def test_two_tenants_do_not_take_places_from_each_other_in_turn() -> None:
    engine = Engine(LIMITS)
    for number in range(12):
        engine.add(answering("a", f"a{number}", 60, float(number)))
    for _ in range(5):
        engine.step()
    for number in range(12):
        engine.add(answering("b", f"b{number}", 60, 100.0 + number))
    engine.step()
    for _ in range(8):
        engine.step()
    assert engine.scheduler.num_running == LIMITS.max_num_seqs
    assert engine.scheduler.num_waiting_of("a") == 6
    assert engine.scheduler.num_waiting_of("b") == 10
    assert engine.scheduler.stats()["num_preemptions_total"] == 2
    assert len(first_token_steps(engine)) == 24
    assert engine.scheduler.stats()["num_preemptions_total"] <= 12


FEW_BLOCKS = replace(LIMITS, num_blocks=120)
"""Fewer than eight long answers need."""


@COUNTS_STEPS
def test_nor_for_long_answers_that_have_all_blocks() -> None:
    engine = Engine(FEW_BLOCKS)
    for number in range(6):
        engine.add(answering("many", f"m{number}", 300, float(number)))
    while engine.scheduler.stats()["kv_cache_usage_ratio"] < 0.9:
        engine.step()
    for number in range(3):
        engine.add(of("one", f"one{number}", 60, 100.0 + number))
    done = first_token_steps(engine)
    assert done["one0"] < done["one1"] < done["one2"] <= 8  # not when one of the others ends
    assert min(step for name, step in done.items() if name.startswith("m")) > 60
    engine.assert_all_free()


def test_an_answer_that_grows_takes_no_blocks_from_a_tenant_with_fewer() -> None:
    engine = Engine(FEW_BLOCKS)
    for number in range(6):
        engine.add(answering("many", f"m{number}", 300, float(number)))
    engine.add(answering("one", "one", 100, 100.0))  # the latest arrival
    done = first_token_steps(engine)
    assert engine.scheduler.stats()["num_preemptions_total"] > 0
    assert done["one"] <= 102
    engine.assert_all_free()


def test_the_earliest_of_a_tenant_keeps_its_blocks() -> None:
    """However many short ones of another tenant come, a request that needs most blocks ends."""
    engine = Engine(FEW_BLOCKS)
    engine.add(answering("large", "large", 400, 0.0))
    for _ in range(300):
        engine.step()
    for number in range(30):
        engine.add(answering("small", f"s{number}", 40, 100.0 + number))
    done = first_token_steps(engine)
    assert done["large"] <= 110
    engine.assert_all_free()


def test_two_tenants_do_not_take_blocks_from_each_other_in_turn() -> None:
    engine = Engine(replace(FEW_BLOCKS, prefix_caching=False))
    for number in range(6):
        for tenant in "ab":
            engine.add(answering(tenant, f"{tenant}{number}", 150, float(number)))
    assert len(first_token_steps(engine)) == 12
    assert engine.scheduler.stats()["num_preemptions_total"] <= 40
    engine.assert_all_free()


def test_what_a_session_was_charged_for_is_not_charged_again_at_its_end() -> None:
    engine = Engine(LIMITS)
    engine.scheduler.add(of("a", "session", 4, 0.0), {}, live=True)
    while engine.scheduler.has_work:
        engine.step()
    for _ in range(20):  # while "a" is alone it costs nothing
        engine.scheduler.extend("session", np.asarray(text(STEP), np.int32), (), {}, INTERRUPT)
        while engine.scheduler.has_work:
            engine.step()
    for number in range(4):
        engine.add(of("a", f"a{number}", 2 * QUANTUM, 1.0 + number))
        engine.add(of("b", f"b{number}", 2 * QUANTUM, 1.5 + number))
    engine.step()
    engine.scheduler.abort("session")
    done = first_token_steps(engine)
    assert done["a0"] < done["b1"]


PROMPTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 10 * STEP)), min_size=1, max_size=40
).map(lambda prompts: sorted(prompts, key=lambda prompt: prompt[0]))
"""Those of one tenant all arrive before those of the next."""
WEIGHTS = st.fixed_dictionaries({tenant: st.sampled_from([1.0, 2.0, 4.0]) for tenant in "abc"})


@settings(deadline=None, max_examples=60)
@given(PROMPTS, WEIGHTS)
def test_tenants_that_wait_get_their_shares_and_every_tenants_order_is_kept(prompts, weights):
    """Within a quantum and the largest chunk, as long as all of them wait."""
    engine = Engine(LIMITS)
    left = Counter()
    names: dict[str, list[str]] = {tenant: [] for tenant in "abc"}
    tenant_of: dict[int, str] = {}
    for number, (tenant, num_tokens) in enumerate(prompts):
        engine.add(of(tenant, f"{number}", num_tokens, float(number), weights[tenant]))
        left[tenant] += num_tokens
        names[tenant].append(f"{number}")
        tenant_of[number] = tenant
    waiting = set(left)
    computed = Counter()
    while engine.scheduler.has_work:
        plan = engine.step()
        for entry in plan.scheduled if plan else ():
            tenant = tenant_of[entry.seq_id]
            computed[tenant] += entry.num_tokens
            left[tenant] -= entry.num_tokens
        if any(left[tenant] <= 0 for tenant in waiting):
            break
        shares = [computed[tenant] / weights[tenant] for tenant in waiting]
        assert max(shares) - min(shares) <= 2 * (QUANTUM + STEP)
    engine.run()
    engine.assert_all_free()
    for own in names.values():
        ended = [name for name, _ in engine.ended if name in own]
        assert ended == own


def test_one_tenant_cannot_close_the_queue_to_others() -> None:
    engine = Engine(replace(LIMITS, max_queue=5))
    for number in range(5):
        engine.add(of("flood", f"f{number}", 4, float(number)))
    with pytest.raises(QueueFullError):
        engine.add(of("flood", "too many", 4, 9.0))
    for tenant in range(MAX_SHARES - 1):
        for number in range(5):
            engine.add(of(f"t{tenant}", f"t{tenant}-{number}", 4, 10.0))
    with pytest.raises(QueueFullError):
        engine.add(of("late", "none left", 4, 99.0))
    engine.run()
    engine.assert_all_free()
