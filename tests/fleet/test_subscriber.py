"""The router's view of an engine is what the engine holds, whatever is lost on the way."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lookonce.config import ENCODER_TOPIC, ENGINE_TOPIC, ITEM_TOPIC, REPLAY_END, EventsConfig
from lookonce.engine.process.cache_events import (
    Change,
    Cleared,
    Computed,
    EventPublisher,
    Held,
    Load,
    Removed,
    TopicLog,
)
from lookonce.errors import ProtocolError
from lookonce.fleet.identity import Identity
from lookonce.fleet.index import DigestIndex, short
from lookonce.fleet.router import QueuePrice, Router
from lookonce.fleet.subscriber import (
    Added,
    AllGone,
    EngineLoad,
    EventSubscriber,
    Gone,
    PromptComputed,
    TopicReader,
)
from tests.support.live_server import until


def digest(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(24)


class FollowedLog:
    """A topic whose batches may be lost on the way to an index, and which may start anew."""

    def __init__(self, form: str, max_batches: int) -> None:
        self.form, self.max_batches = form, max_batches
        self.index, self.held = DigestIndex(), set[int]()
        self.log = TopicLog("keys", form, max_batches=max_batches)
        self.reader = TopicReader("keys", self.ask)
        self.apply(self.reader.begin())
        self.delayed: list[tuple[bytes, bytes]] = []

    def ask(self, wanted: bytes) -> list[tuple[int, bytes]]:
        *answers, _ = self.log.answer(wanted)
        return [(int.from_bytes(number, "big"), payload) for number, payload in answers]

    def tell(self, changes: list[Change], arrives: bool) -> None:
        _, number, payload = self.log.append(changes)
        if arrives:
            self.apply(self.reader.receive(int.from_bytes(number, "big"), payload))

    def restart(self, arrives: bool = True) -> None:
        self.log = TopicLog("keys", self.form, max_batches=self.max_batches)
        self.held.clear()
        ((number, payload),) = self.log.replay(0)
        if arrives:
            self.apply(self.reader.receive(number, payload))

    def apply(self, changes: Sequence[Any]) -> None:
        for change in changes:
            match change:
                case Added(_, keys):
                    self.index.add(5, keys)
                case Gone(_, keys):
                    self.index.remove(5, keys)
                case AllGone():
                    self.index.drop(5)


STEP = st.tuples(st.sampled_from(["hold", "remove", "clear", "restart"]), st.integers(1, 9))


@given(
    steps=st.lists(st.tuples(STEP, st.booleans()), max_size=40),
    form=st.sampled_from(["array", "map"]),
    max_batches=st.sampled_from([2, 1000]),
)
@settings(max_examples=100)
def test_the_index_is_exact_after_any_loss(
    steps: list[tuple[tuple[str, int], bool]], form: str, max_batches: int
) -> None:
    followed = FollowedLog(form, max_batches)
    for (what, number), arrives in steps:
        match what:
            case "hold":
                followed.held.add(number)
                followed.tell([Held(digest(number))], arrives)
            case "remove":
                followed.held.discard(number)
                followed.tell([Removed(digest(number))], arrives)
            case "clear":
                followed.held.clear()
                followed.tell([Cleared()], arrives)
            case _:
                followed.restart()
    followed.tell([Held(digest(99))], arrives=True)
    assert followed.index.held(5) == followed.held | {99}
    followed.index.check_integrity()


def test_a_load_of_an_older_engine_has_what_it_tells_of() -> None:
    fields = (1, 2, 3, 0.5, 4, 0.25, 5, 0.125, 6, 0.75, 7, 0.875)
    told = msgspec.msgpack.encode([1.0, [["EngineLoad", *fields]]])
    (load,) = TopicReader(ENGINE_TOPIC, lambda _: [(0, told)]).begin()
    assert load == EngineLoad(*fields)
    assert isinstance(load, EngineLoad)
    assert (load.tier_tokens, load.tier_output_seconds, load.decode_steps) == (6, 0.875, 0)
    assert (load.machine, load.cores, load.threads) == (0, 0, 0)


@pytest.mark.parametrize("form", ["array", "map"])
def test_a_load_is_read_as_it_was_told(form: str) -> None:
    log = TopicLog(ENGINE_TOPIC, form)
    told = Load(1, 2, 3, 0.5, 4, 0.25, 5, 0.125, 6, 0.75, 7, 0.875, 8, (1 << 64) - 1, 9, 10)
    log.append([told])
    reader = TopicReader(ENGINE_TOPIC, lambda _: log.replay(0))
    loads = [change for change in reader.begin() if isinstance(change, EngineLoad)]
    assert [msgspec.structs.asdict(load) for load in loads] == [msgspec.structs.asdict(told)]


@given(
    steps=st.lists(st.tuples(STEP, st.booleans()), max_size=40),
    max_batches=st.sampled_from([2, 1000]),
)
@example(
    steps=[
        (("hold", 2), False),
        (("clear", 1), False),
        (("restart", 1), False),
        (("hold", 1), False),
        (("hold", 1), True),
    ],
    max_batches=2,
)
@settings(max_examples=100)
def test_a_check_finds_what_was_lost_last(
    steps: list[tuple[tuple[str, int], bool]], max_batches: int
) -> None:
    """No later batch shows that one is missing; restarts are lost, too."""
    followed = FollowedLog("array", max_batches)
    for (what, number), arrives in steps:
        match what:
            case "hold":
                followed.held.add(number)
                followed.tell([Held(digest(number))], arrives)
            case "remove":
                followed.held.discard(number)
                followed.tell([Removed(digest(number))], arrives)
            case "clear":
                followed.apply(followed.reader.check())
            case _:
                followed.restart(arrives)
    followed.apply(followed.reader.check())
    assert followed.index.held(5) == followed.held
    assert followed.reader.check() == []
    followed.index.check_integrity()


class OlderLog(TopicLog):
    """Does not know the question for the start; `EventPublisher` answers it with the end alone."""

    def answer(self, request: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter([(REPLAY_END, b"")]) if request == b"start" else super().answer(request)


def test_an_engine_that_does_not_name_its_start_is_followed() -> None:
    log = OlderLog("keys", "array", max_batches=4)

    def ask(wanted: bytes) -> list[tuple[int, bytes]]:
        *answers, _ = log.answer(wanted)
        return [(int.from_bytes(number, "big"), payload) for number, payload in answers]

    reader = TopicReader("keys", ask)
    assert reader.begin() == [AllGone("keys")]
    log.append([Held(digest(1))])
    _, number, payload = log.append([Held(digest(2))])
    held = [Added("keys", [1]), Added("keys", [2])]
    assert reader.receive(int.from_bytes(number, "big"), payload) == held
    log.append([Held(digest(3))])
    assert reader.check() == [Added("keys", [3])]
    assert reader.check() == []
    log = OlderLog("keys", "array")
    assert reader.check() == [AllGone("keys")]


def test_an_older_start_is_not_continued_where_a_gap_is_found() -> None:
    """Replaying the new start's batches from the number that is expected would leave out those
    before."""
    followed = FollowedLog("array", 1000)
    followed.tell([Held(digest(7))], arrives=True)
    followed.restart(arrives=False)
    followed.tell([Held(digest(1))], arrives=False)
    followed.tell([Held(digest(2))], arrives=False)
    followed.tell([Held(digest(3))], arrives=True)
    assert followed.index.held(5) == {1, 2, 3}


def test_batches_that_a_snapshot_had_are_left_out() -> None:
    followed = FollowedLog("array", 1000)
    late = [followed.log.append([Held(digest(n))]) for n in (1, 2)]
    followed.log.append([Removed(digest(1))])
    followed.apply(followed.reader.begin())
    for _, number, payload in late:
        assert followed.reader.receive(int.from_bytes(number, "big"), payload) == []
    assert followed.index.held(5) == {2}


numbers = st.integers(-1, 2**40) | st.floats() | st.none() | st.binary(max_size=9)
values = st.recursive(
    numbers | st.text(max_size=4),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=3), each),
    max_leaves=8,
)
kinds = st.sampled_from(["BlockStored", "KeysRemoved", "AllKeysCleared", "PromptComputed", "None"])
events = (
    st.builds(lambda numbers: ["EngineLoad", *numbers], st.lists(numbers, min_size=6, max_size=13))
    | st.builds(lambda kind, fields: [kind, *fields], kinds, st.lists(values, max_size=5))
    | values
)


@given(st.builds(lambda listed: [0.0, listed], st.lists(events, max_size=3)) | values, st.binary())
@example({"a": 1}, b"")
@example([0.0, [["EngineLoad", 0, 0, 64, math.nan, 0, 0.0, 0, 0.0]]], b"")
@settings(max_examples=300)
def test_what_an_engine_tells_is_understood_or_refused(told: Any, noise: bytes) -> None:
    """A rate that is no number would be nobody's least, and no request would find an engine."""
    router = Router()
    engine = router.add_engine("a", "nano", follows=True)
    for payload in (msgspec.msgpack.encode(told), noise):
        reader = TopicReader(ENGINE_TOPIC, lambda _, payload=payload: [(0, payload)])
        with contextlib.suppress(ProtocolError):
            router.apply(engine, reader.begin())
    assert router.route("one", Identity()).engine is engine
    router.check_integrity()


def test_a_thread_follows_an_engine_over_zmq() -> None:
    seen: list[Any] = []
    arrived = threading.Condition()

    def on_changes(changes: list[Any]) -> None:
        with arrived:
            seen.extend(changes)
            arrived.notify()

    with tempfile.TemporaryDirectory(prefix="lookonce-fleet-") as folder:
        config = EventsConfig(f"ipc://{Path(folder)}/pub", f"ipc://{Path(folder)}/replay")
        publisher = EventPublisher(config)
        publisher.open_step_events(16, lambda: ([], []))
        publisher.item_changed(digest(1), held=True)
        subscriber = EventSubscriber(
            config.address, config.replay_address, config.topic, on_changes
        )
        try:
            with arrived:
                first = Added(ITEM_TOPIC, [short(digest(1))])
                assert arrived.wait_for(lambda: first in seen, 20)
            # The subscription is made: nothing was published since the snapshots.
            told: list[Change] = [
                Computed("a-b-c", 33, digest(2), ((digest(1), 20),)),
                Load(1, 2, 3, 0.5, 4, 0.25, 5, 0.125),
            ]
            publisher.publish(ENGINE_TOPIC, told)
            publisher.item_changed(digest(1), held=False)
            with arrived:
                last = Gone(ITEM_TOPIC, [short(digest(1))])

                def again() -> bool:  # until the subscription has reached the publisher
                    publisher.publish(ITEM_TOPIC, [Removed(digest(1))])
                    return last in seen

                while not again():
                    arrived.wait(0.1)
                computed = PromptComputed("a-b-c", 33, [(digest(1), 20)], digest(2))
                publisher.publish(ENGINE_TOPIC, told)
                assert arrived.wait_for(lambda: computed in seen, 20)
                assert EngineLoad(1, 2, 3, 0.5, 4, 0.25, 5, 0.125) in seen
        finally:
            subscriber.close()
            publisher.close()


def test_an_engine_that_began_anew_and_is_idle_costs_nothing() -> None:
    """What it told when it started went to nobody: the subscription had not reached it. Scaling
    by queues would keep engines for requests that there are no more."""
    price = QueuePrice()
    with tempfile.TemporaryDirectory(prefix="lookonce-fleet-") as folder:
        config = EventsConfig(f"ipc://{Path(folder)}/pub", f"ipc://{Path(folder)}/replay")
        publisher = EventPublisher(config)
        seconds = itertools.count(1.0)

        def is_busy() -> bool:  # told again until what was told before the snapshot is past
            told: list[Change] = [Computed(str(number), 33, None, ()) for number in range(4)]
            publisher.publish(ENGINE_TOPIC, [*told, Load(2, 0, 100, next(seconds))])
            return price.seconds > 0

        subscriber = EventSubscriber(
            config.address, config.replay_address, config.topic, price.apply, check_seconds=0.1
        )
        try:
            until(is_busy, 20)
            publisher.close()
            publisher = EventPublisher(config)
            publisher.publish(ENGINE_TOPIC, [Load()])
            until(lambda: price.seconds == 0, 20)
        finally:
            subscriber.close()
            publisher.close()


def test_what_comes_while_earlier_changes_are_applied_is_applied_after_them() -> None:
    """Events of all topics wait in one queue meanwhile; none is lost or taken out of turn, also
    where a check has asked for them."""
    seen: list[Any] = []
    applying, go_on = threading.Event(), threading.Event()
    go_on.set()

    def on_changes(changes: list[Any]) -> None:
        applying.set()
        assert go_on.wait(20)
        seen.extend(changes)

    def loads() -> list[int]:
        return [each.prompt_tokens for each in seen if isinstance(each, EngineLoad)]

    with tempfile.TemporaryDirectory(prefix="lookonce-fleet-") as folder:
        config = EventsConfig(f"ipc://{Path(folder)}/pub", f"ipc://{Path(folder)}/replay")
        publisher = EventPublisher(config)
        subscriber = EventSubscriber(
            config.address, config.replay_address, config.topic, on_changes, check_seconds=0.1
        )
        try:
            live = PromptComputed("live", 33, [], None)

            def is_live() -> bool:  # no snapshot has it
                publisher.publish(ENGINE_TOPIC, [Computed("live", 33, None, ())])
                return live in seen

            until(is_live, 20)
            applying.clear()
            go_on.clear()
            publisher.publish(ENGINE_TOPIC, [Load(1, 0, 1)])
            assert applying.wait(20)
            for number in range(1, 200):
                publisher.item_changed(digest(number), held=True)
                publisher.publish(ENCODER_TOPIC, [Held(digest(number))])
                publisher.item_changed(digest(number), held=False)
                publisher.publish(ENGINE_TOPIC, [Load(1, 0, 1 + number)])
                time.sleep(0.001)  # in several batches
            go_on.set()
            until(lambda: loads()[-1:] == [200], 20)
            until(lambda: 199 in keys_of(Gone, ITEM_TOPIC, seen), 20)
            until(lambda: 199 in keys_of(Added, ENCODER_TOPIC, seen), 20)
        finally:
            subscriber.close()
            publisher.close()
    assert loads() == [*range(1, 201)]
    for kind, topic in ((Added, ITEM_TOPIC), (Gone, ITEM_TOPIC), (Added, ENCODER_TOPIC)):
        assert keys_of(kind, topic, seen) == [*range(1, 200)]
    index = DigestIndex()
    for change in seen:
        match change:
            case Added(topic, listed) if topic == ITEM_TOPIC:
                index.add(0, listed)
            case Gone(topic, listed) if topic == ITEM_TOPIC:
                index.remove(0, listed)
    assert index.held(0) == set()


def keys_of(kind: type[Added] | type[Gone], topic: str, seen: list[Any]) -> list[int]:
    """Of all changes of this kind."""
    told = [each for each in seen if isinstance(each, kind) and each.topic == topic]
    return [key for each in told for key in each.keys]


def test_a_topic_that_is_quiet_is_checked_while_others_are_not() -> None:
    """An engine that has much to do tells its load ten times a second."""
    seen: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="lookonce-fleet-") as folder:
        config = EventsConfig(f"ipc://{Path(folder)}/pub", f"ipc://{Path(folder)}/replay")
        publisher = EventPublisher(config)
        log = publisher._logs[ITEM_TOPIC]
        subscriber = EventSubscriber(
            config.address, config.replay_address, config.topic, seen.extend, check_seconds=0.2
        )

        def is_told() -> bool:
            publisher.publish(ENGINE_TOPIC, [Load(1, 0, 1)])
            return Added(ITEM_TOPIC, [short(digest(1))]) in seen

        try:
            until(lambda: AllGone(ITEM_TOPIC) in seen, 20)
            log.append([Held(digest(1))])  # counted, and lost on its way
            until(is_told, 20)
        finally:
            subscriber.close()
            publisher.close()


def test_a_subscriber_that_is_closed_ends_at_once() -> None:
    """Whatever it waits for: its engine does not answer."""
    with tempfile.TemporaryDirectory(prefix="lookonce-fleet-") as folder:
        address, replay = f"ipc://{Path(folder)}/pub", f"ipc://{Path(folder)}/replay"
        subscriber = EventSubscriber(address, replay, "kv-events", lambda changes: None)
        time.sleep(0.1)
        began = time.monotonic()
        subscriber.close()
        assert time.monotonic() - began < 2


def test_a_snapshot_of_what_an_engine_does_empties_no_index() -> None:
    """It begins as all snapshots do; a front-end that starts asks for those of all topics, in any
    order."""
    log = TopicLog(ENGINE_TOPIC, "array")
    *answers, _ = log.answer(b"snapshot")
    payload = answers[0][1]
    reader = TopicReader(ENGINE_TOPIC, lambda _: [(0, payload)])
    router = Router()
    engine = router.add_engine("a", "nano", follows=True)
    router.apply(engine, [Added("kv-events", [1]), Added(ITEM_TOPIC, [2])])
    router.apply(engine, reader.begin())
    assert router.blocks.held(engine.number) == {1}
    assert router.items.held(engine.number) == {2}
