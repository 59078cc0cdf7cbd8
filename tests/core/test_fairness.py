"""Live sessions that compute in every step: all others get what they need within a few steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, feature, model_info, request, text
from tests.support.core.engine import Engine
from tests.support.core.fake_runner import reference
from tests.support.core.feeding import (
    ANSWER,
    ROOMY,
    WHOLE,
    Feed,
    feed,
    feed_until_all_ended,
    longest_wait,
    open_session,
)


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        pytest.param(ROOMY, 31, id="nearly the whole encoder budget"),
        pytest.param(ROOMY, 40, id="more than the encoder budget"),
        pytest.param(replace(ROOMY, max_encoder_tokens=100), 64, id="all room for outputs"),
        pytest.param(replace(ROOMY, model=WHOLE), 32, id="all tokens of a step"),
    ],
)
@pytest.mark.parametrize("num_sessions", [1, 3])
def test_a_large_item_is_computed_beside_sessions_fed_in_every_step(
    limits: Limits, rows: int, num_sessions: int
) -> None:
    engine = Engine(limits)
    sessions = {f"s{number}": Feed(rows=2) for number in range(num_sessions)}
    for name in sessions:
        open_session(engine, name)
    engine.step()
    big = request("big", text(rows + 4), [feature("big", 1, rows)], arrival=1.0)
    engine.add(big)
    engine.add(request("behind", text(4), arrival=2.0))
    feed_until_all_ended(engine, sessions, ["big", "behind"], max_steps=ANSWER * 4)
    assert engine.tokens["big", 0] == reference(big, ANSWER)
    steps_of_the_item = -(-rows // limits.max_num_batched_tokens)
    for seq_id in range(num_sessions):
        assert longest_wait(engine, seq_id) <= steps_of_the_item


def test_a_prompt_is_computed_whole_beside_sessions_that_decode_in_every_step() -> None:
    engine = Engine(replace(ROOMY, model=WHOLE))
    open_session(engine, "talks", turn=1000)
    engine.step()
    engine.add(request("big", text(40), [feature("big", 0, 32)], arrival=1.0))
    feed_until_all_ended(engine, {}, ["big"], max_steps=ANSWER * 2)
    assert longest_wait(engine, 0) <= 1


def test_sessions_that_contend_for_all_room_let_a_newcomer_in() -> None:
    engine = Engine(replace(ROOMY, encoder_rows=24))
    sessions = {name: Feed(rows=24) for name in ("a", "b")}
    for name in sessions:
        open_session(engine, name)
    engine.step()
    for number in range(10):
        feed(engine, "a", sessions["a"], number)
        feed(engine, "b", sessions["b"], number)
    engine.add(request("new", text(4), arrival=1.0))
    feed_until_all_ended(engine, sessions, ["new"], max_steps=ANSWER * 4)
    assert all(longest_wait(engine, seq_id) <= 6 for seq_id in range(2))


def test_all_that_decode_do_so_in_one_step_whatever_max_num_seqs_is() -> None:
    engine = Engine(replace(ROOMY, max_num_seqs=8, max_num_batched_tokens=4))
    engine.add(request("a", text(4), arrival=1.0))
    engine.step()
    for number in range(6):
        open_session(engine, str(number), turn=1000)
    feed_until_all_ended(engine, {}, ["a"], max_steps=ANSWER * 4)


def contended() -> st.SearchStrategy[Limits]:
    """Sizes that one item of `LARGEST` rows takes whole, or nearly."""
    return st.builds(
        Limits,
        num_blocks=st.just(2000),
        block_size=st.just(16),
        encoder_rows=st.sampled_from([8, 9, 13, 64]),
        host_rows=st.sampled_from([0, 0, 13]),
        encoder_prefetch=st.booleans(),
        max_num_batched_tokens=st.sampled_from([8, 11, 32]),
        max_encoder_tokens=st.sampled_from([1, 8, 13]),
        prefix_caching=st.booleans(),
        model=st.sampled_from([(), ("image",), ("image", "audio")]).map(
            lambda whole: model_info(max_model_len=10**6, unsplittable=whole)
        ),
    )


LARGEST = 8
feeds = st.builds(Feed, rows=st.integers(0, LARGEST), tail=st.integers(1, 12))
lengths = st.lists(st.integers(1, LARGEST), max_size=3)


def prompt_of(name: str, rows: list[int], arrival: float) -> GenerateRequest:
    offsets = [sum(rows[:index]) + index for index in range(len(rows))]
    items = [
        feature(f"{name} {index}", offset, length)
        for index, (offset, length) in enumerate(zip(offsets, rows, strict=True))
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    return request(name, text(sum(rows) + len(rows) + 2), items, sampling=sampling, arrival=arrival)


@settings(max_examples=60, deadline=None)
@given(
    limits=contended(),
    fed=st.lists(feeds, min_size=1, max_size=4),
    prompts=st.lists(lengths, min_size=1, max_size=3),
    turn=st.integers(1, 3),
)
def test_all_prompts_are_computed_whatever_sessions_are_given(
    limits: Limits, fed: list[Feed], prompts: list[list[int]], turn: int
) -> None:
    """One gets something within 2 (k + 1) steps beside k sessions, and what others have begun."""
    engine = Engine(limits)
    sessions = {f"s{number}": what for number, what in enumerate(fed)}
    for name in sessions:
        open_session(engine, name, turn)
    engine.step()
    ordinary = [prompt_of(f"p{n}", rows, 1.0 + n) for n, rows in enumerate(prompts)]
    for one in ordinary:
        engine.add(one)
    computed = sum(one.prompt.shape[0] + ANSWER for one in ordinary)
    wait = 2 * (len(fed) + 1) + LARGEST * (len(fed) + len(prompts))
    names = [one.request_id for one in ordinary]
    feed_until_all_ended(engine, sessions, names, max_steps=computed * wait)
    for one in ordinary:
        assert engine.tokens[one.request_id, 0] == reference(one, ANSWER)
