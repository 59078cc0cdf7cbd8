"""What a simulated router follows is what a real one would: events and index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.engine.process import cache_events
from lookonce.engine.process.cache_events import Load, StepEvents
from lookonce.fleet.index import DigestIndex, short
from lookonce.fleet.subscriber import (
    Added,
    AllGone,
    Change,
    EngineLoad,
    Gone,
    PromptComputed,
)
from lookonce.simulate.following import BlockIndex, FollowedEvents, OutputIndex

KEYS = [bytes([number]) * 32 for number in range(1, 9)]
KEY = st.sampled_from(KEYS)
TOPIC = "kv-events"

CALL = st.one_of(
    st.tuples(st.just("stored"), KEY),
    st.tuples(st.just("removed"), KEY),
    st.tuples(st.just("cleared")),
    st.tuples(st.just("computed"), KEY),
    st.tuples(st.just("load"), st.integers(0, 3)),
    st.tuples(st.just("outputs"), st.lists(KEY, max_size=3), st.lists(KEY, max_size=3)),
    st.tuples(st.just("flush")),
)


def drive(calls: list[Any], make: Callable[..., StepEvents], load: Load) -> None:
    """Tell `make`'s events what an engine would."""
    outputs: list[tuple[list[bytes], list[bytes]]] = []
    events = make(lambda: outputs.pop() if outputs else ([], []), load)
    for moment, (name, *arguments) in enumerate(calls):
        match name:
            case "stored":
                events.stored(arguments[0], None, b"", ())
            case "removed":
                events.removed(arguments[0])
            case "cleared":
                events.cleared()
            case "computed":
                told = ((arguments[0], 16),)
                events.computed("0-7-7", 40, arguments[0], told, told)
            case "load":
                load.decoded_tokens += 1
                events.tell_load(float(moment), arguments[0], 1)
            case "outputs":
                outputs[:] = [(arguments[0], arguments[1])]
            case "flush":
                events.flush()
    events.flush()


def as_followed(topic: str, change: cache_events.Change) -> Change:
    """One change, as a subscriber tells it."""
    match change:
        case cache_events.Stored() | cache_events.Held():
            return Added(topic, [short(change.key)])
        case cache_events.Removed():
            return Gone(topic, [short(change.key)])
        case cache_events.Load():
            return EngineLoad(*msgspec.structs.astuple(change))
        case cache_events.Computed():
            items, earlier = list(change.items), list(change.earlier)
            told = change.request_id, change.num_tokens, items, change.block_hash, earlier
            return PromptComputed(*told)
        case _:
            return AllGone(topic)


def one_by_one(changes: list[Change]) -> list[Change]:
    """Changes of several keys as several."""
    found: list[Change] = []
    for change in changes:
        if isinstance(change, Added | Gone):
            found += [type(change)(change.topic, [key]) for key in change.keys]
        else:
            found.append(change)
    return found


@given(st.lists(CALL, max_size=30))
def test_events_are_those_that_an_engine_publishes(calls: list[Any]) -> None:
    published: list[Change] = []
    followed: list[Change] = []

    def publish(topic: str, changes: list[cache_events.Change]) -> None:
        published.extend(as_followed(topic, change) for change in changes)

    drive(
        calls,
        lambda outputs, load: StepEvents(publish, TOPIC, outputs, load, needs_content=False),
        Load(),
    )
    drive(
        calls,
        lambda outputs, load: FollowedEvents(followed.extend, TOPIC, outputs, load),
        Load(),
    )
    assert one_by_one(followed) == published


CHANGE = st.tuples(
    st.sampled_from(["add", "remove", "drop"]),
    st.integers(0, 200),
    st.lists(st.integers(1, 12), max_size=5),
)


@settings(max_examples=50)
@given(st.lists(CHANGE, max_size=40))
def test_indexes_hold_what_the_real_one_holds(changes: list[tuple[str, int, list[int]]]) -> None:
    real, blocks, outputs = DigestIndex(), BlockIndex(), OutputIndex()
    for name, engine, keys in changes:
        for index in (real, blocks, outputs):
            if name == "drop":
                index.drop(engine)
            else:
                getattr(index, name)(engine, keys)
    for index in (blocks, outputs):
        index.check_integrity()
        assert len(index) == sum(real.holders(key) > 0 for key in range(1, 13))
        for key in range(1, 13):
            assert index.holders(key) == real.holders(key)
        for engine in {engine for _, engine, _ in changes}:
            assert index.held(engine) == real.held(engine)
            assert all(index.holds(engine, k) == real.holds(engine, k) for k in range(1, 13))
