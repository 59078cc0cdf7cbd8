"""Live sessions that are extended before each step, and whoever has to finish beside them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from lookonce.errors import TooLargeError
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import (
    INTERRUPT,
    Limits,
    feature,
    items_for,
    model_info,
    prompt_with,
    request,
    text,
)
from tests.support.core.engine import Engine

ROOMY = Limits(
    num_blocks=1200,
    block_size=16,
    encoder_rows=64,
    max_encoder_tokens=32,
    model=model_info(max_model_len=10**6),
)
WHOLE = model_info(max_model_len=10**6, unsplittable=("image",), largest_unsplittable=32)
ANSWER = 8
"""Tokens that ordinary requests generate."""


@dataclass(frozen=True)
class Feed:
    """What a session is given before each step."""

    rows: int
    """Of its one item; 0: none."""
    tail: int = 1
    """Tokens after it."""


def open_session(engine: Engine, name: str, turn: int = 1) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=turn, ignore_eos=True)
    one = request(name, text(4), sampling=sampling, arrival=0.0)
    engine.scheduler.add(one, {}, live=True)


def feed(engine: Engine, name: str, what: Feed, number: int) -> None:
    items = [feature(f"{name} {number}", 0, what.rows, modality="audio")] if what.rows else []
    tokens = prompt_with(text(what.rows + what.tail, seed=number), items)
    with suppress(TooLargeError):
        engine.scheduler.extend(
            name, np.array(tokens, np.int32), tuple(items), items_for(items), INTERRUPT
        )


def feed_until_all_ended(
    engine: Engine, sessions: dict[str, Feed], names: list[str], *, max_steps: int
) -> int:
    """Steps until the named requests have ended, each session being fed before each of them."""
    for number in range(max_steps):
        if all((name, 0) in engine.ended for name in names):
            return number
        for session, what in sessions.items():
            feed(engine, session, what, number)
        engine.step()
    raise AssertionError(f"after {max_steps} steps some request has not ended")


def longest_wait(engine: Engine, seq_id: int) -> int:
    """The most steps in a row in which a sequence got nothing."""
    waits = [0]
    for plan in engine.plans:
        got = any(entry.seq_id == seq_id for entry in plan.scheduled)
        waits.append(0 if got else waits[-1] + 1)
    return max(waits)


def an_item_that_takes_a_whole_step_beside_a_session() -> None:
    engine = Engine(replace(ROOMY, model=WHOLE))
    open_session(engine, "live")
    engine.step()
    engine.add(request("big", text(40), [feature("big", 0, 32)], arrival=1.0))
    feed_until_all_ended(engine, {"live": Feed(rows=2)}, ["big"], max_steps=ANSWER * 2)


def an_answer_beside_sessions_that_each_take_all_tokens() -> None:
    engine = Engine(ROOMY)
    sessions = {name: Feed(rows=0, tail=40) for name in ("x", "y", "z")}
    for name in sessions:
        open_session(engine, name)
    engine.step()
    engine.add(request("new", text(4), arrival=1.0))
    feed_until_all_ended(engine, sessions, ["new"], max_steps=ANSWER * 4)
    assert all(longest_wait(engine, seq_id) <= 2 * len(sessions) for seq_id in range(3))


def an_item_that_takes_all_room_beside_a_session_that_always_holds_some() -> None:
    """Every step of 32 tokens ends within an item of 30."""
    engine = Engine(replace(ROOMY, max_encoder_tokens=100))
    open_session(engine, "live")
    engine.step()
    feed(engine, "live", Feed(rows=0, tail=16), 0)
    engine.add(request("big", text(70), [feature("big", 1, 64)], arrival=1.0))
    sessions = {"live": Feed(rows=30, tail=2)}
    feed_until_all_ended(engine, sessions, ["big"], max_steps=ANSWER * 4)


def an_item_that_takes_all_room_beside_one_who_holds_some_and_gets_no_tokens() -> None:
    """A session takes all tokens of a step in order of arrival.

    Before it does, the first leaves some to the second: its item must not be cut.
    """
    engine = Engine(replace(ROOMY, max_encoder_tokens=100, model=WHOLE))
    open_session(engine, "live")
    engine.step()
    engine.add(request("big", text(44), [feature("big", 10, 30)], arrival=1.0))
    held = feature("x", 0, 60, modality="audio")
    engine.add(request("holds", text(70), [held], arrival=2.0))
    engine.step()
    sessions = {"live": Feed(rows=0, tail=40)}
    feed_until_all_ended(engine, sessions, ["big", "holds"], max_steps=ANSWER * 6)


def long_prompts_one_after_the_other() -> None:
    engine = Engine(ROOMY)
    for number in range(3):
        engine.add(request(str(number), text(100, seed=number), arrival=number))
    for _ in range(4):
        engine.step()
    assert list(engine.tokens) == [("0", 0)], "100 tokens take 4 steps of 32"
