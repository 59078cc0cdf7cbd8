"""`--events`: a subscriber of vLLM's wire format knows exactly which blocks the engine holds,
whatever is lost on the way, and likewise encoder outputs and processed items."""

from __future__ import annotations

import math
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.cache.store import Store
from lookonce.config import ENCODER_TOPIC, ENGINE_TOPIC, ITEM_TOPIC, EventsConfig, Options, resolve
from lookonce.engine.process.cache_events import (
    MAX_REPLAYS,
    MAX_SNAPSHOT_CHANGES,
    REPLAY_SHARE,
    SAVED_SECONDS,
    Change,
    Cleared,
    Computed,
    EventPublisher,
    Held,
    Load,
    Removed,
    StepEvents,
    Stored,
    TopicLog,
    WorkShare,
    _Replays,
    to_events,
)
from lookonce.engine.process.zmtp import Client
from lookonce.errors import ConfigError
from lookonce.fleet.subscriber import EngineLoad, PromptComputed, TopicReader
from lookonce.types.lora import LoRAIdentity
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import ScheduledSequence, StepPlan, StepResult
from tests.support.cache_items import item
from tests.support.core.builders import Limits, feature, key, request, text
from tests.support.core.engine import Engine
from tests.support.kv.tiers import DictTier, eventually
from tests.support.kv.world import World

BLOCK = 4
END = (-1).to_bytes(8, "big", signed=True)

# --- vLLM's message definitions ------------------------------------------------------------------
# Fields, their order and their defaults as in vllm/distributed/kv_events.py; the newest releases
# send events as maps, those before as arrays.

Hash = bytes | int


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class MapEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class Definitions:
    """One form's decoder."""

    def __init__(self, base: type[msgspec.Struct]) -> None:
        options = {"array_like": base is ArrayEvent, "tag": True}
        fields = [
            ("block_hashes", list[Hash]),
            ("parent_block_hash", Hash | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
        ]
        newer = [("lora_name", str | None), ("extra_keys", list[tuple[Any, ...] | None] | None)]
        if base is ArrayEvent:
            newer = [(name, kind, None) for name, kind in newer]  # type: ignore[misc]
        else:
            newer[1] = (*newer[1], None)  # type: ignore[assignment]
        define: Any = msgspec.defstruct
        self.stored = define("BlockStored", [*fields, *newer], bases=(base,), **options)
        removed = [("block_hashes", list[Hash]), ("medium", str | None)]
        self.removed = define("BlockRemoved", removed, bases=(base,), **options)
        self.cleared = define("AllBlocksCleared", [], bases=(base,), **options)
        events: Any = list[self.stored | self.removed | self.cleared]
        batch = [("ts", float), ("events", events), ("data_parallel_rank", int | None, None)]
        self.batch = define("KVEventBatch", batch, array_like=True)
        self.decoder = msgspec.msgpack.Decoder(self.batch)


DEFINITIONS = {"array": Definitions(ArrayEvent), "map": Definitions(MapEvent)}
OldBlockStored = msgspec.defstruct(
    "BlockStored",
    [
        ("block_hashes", list[Hash]),
        ("parent_block_hash", Hash | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
    ],
    bases=(ArrayEvent,),
    array_like=True,
    tag=True,
)
"""Of the first releases, which knew no medium."""


class Subscriber:
    """Rebuilds the set of one topic. `ask` sends a request to the engine and returns its answers,
    (number, payload) frames."""

    def __init__(self, form: str, ask: Any, *, blocks: bool = True) -> None:
        self.form, self.ask, self.blocks = form, ask, blocks
        self.next = 0
        self.held: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        self.replays = self.snapshots = 0

    def receive(self, number: int, payload: bytes) -> None:
        """One batch, as it came; what is missing before it is asked for."""
        if number < self.next:
            return
        if number > self.next:
            self.catch_up()
        if number == self.next:
            self.apply(payload)
            self.next += 1

    def catch_up(self) -> None:
        self.replays += 1
        batches = self.ask(self.next.to_bytes(8, "big"))
        if batches and batches[0][0] > self.next:
            self.snapshots += 1
            for number, payload in self.ask(b"snapshot"):
                self.apply(payload)
                self.next = number + 1
            batches = []
        for number, payload in batches:
            if number == self.next:
                self.apply(payload)
                self.next += 1

    def apply(self, payload: bytes) -> None:
        if self.blocks:
            self.apply_blocks(payload)
        else:
            self.apply_keys(payload)

    def apply_blocks(self, payload: bytes) -> None:
        known = DEFINITIONS[self.form]
        for event in known.decoder.decode(payload).events:
            if isinstance(event, known.cleared):
                self.held.clear()
            elif isinstance(event, known.removed):
                for each in event.block_hashes:
                    del self.held[each]
            else:
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                assert event.medium == "GPU"
                parent = event.parent_block_hash
                for index, each in enumerate(event.block_hashes):
                    tokens = event.token_ids[index * BLOCK : (index + 1) * BLOCK]
                    assert each not in self.held
                    self.held[each] = (parent, tuple(tokens))
                    parent = each

    def apply_keys(self, payload: bytes) -> None:
        _, events = msgspec.msgpack.decode(payload)
        for event in events:
            kind, *keys = event if self.form == "array" else event.values()
            if kind == "AllKeysCleared":
                self.held.clear()
            elif kind == "KeysHeld":
                self.held |= dict.fromkeys(keys[0], (None, ()))
            else:
                assert kind == "KeysRemoved"
                for each in keys[0]:
                    del self.held[each]


class Published:
    """A scheduler whose events go into logs, as `EventPublisher` does it, and over a network that
    loses batches."""

    def __init__(self, engine: Engine, form: str, max_batches: int) -> None:
        self.engine = engine
        self.logs = {
            "kv": TopicLog("kv", form, BLOCK, max_batches=max_batches),
            ENCODER_TOPIC: TopicLog(ENCODER_TOPIC, form, max_batches=max_batches),
        }
        self.subscribers = {
            topic: Subscriber(form, self.asker(topic), blocks=topic == "kv") for topic in self.logs
        }
        self.loses = False
        self.told: list[Change] = []
        """Of the engine: prompts that were computed, and its load."""
        self.events = StepEvents(self.publish, "kv", engine.scheduler.take_output_changes)
        engine.scheduler.watch(self.events)

    def asker(self, topic: str) -> Any:
        def ask(wanted: bytes) -> list[tuple[int, bytes]]:
            *answers, end = self.logs[topic].answer(wanted)
            assert end == (END, b"")
            return [(int.from_bytes(number, "big"), payload) for number, payload in answers]

        return ask

    def publish(self, topic: str, changes: list[Change]) -> None:
        if topic == ENGINE_TOPIC:
            self.told += changes
            return
        name, number, payload = self.logs[topic].append(changes)
        assert name == topic.encode()
        if not self.loses:
            self.subscribers[topic].receive(int.from_bytes(number, "big"), payload)

    def step(self) -> None:
        self.engine.step()
        self.events.flush()

    def run(self) -> None:
        while self.engine.scheduler.has_work:
            self.step()
        self.events.flush()

    def check(self) -> None:
        """After whatever was lost: exactly what is held, and of each block what it holds."""
        for subscriber in self.subscribers.values():
            subscriber.catch_up()
        state = self.engine.scheduler._state
        blocks = self.subscribers["kv"].held
        assert blocks.keys() == set(state.block_pool._by_hash)
        outputs = self.subscribers[ENCODER_TOPIC].held
        assert outputs.keys() == set(state.encoder_cache._entries)
        assert outputs.keys() == self.engine.runner.outputs.keys()


SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
OPERATION = st.one_of(
    st.tuples(
        st.just("ask"), st.integers(0, 3), st.integers(5, 30), st.sampled_from(["", "a", "b"])
    ),
    st.tuples(st.just("run")),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("reset"), st.sampled_from(["prefix", "encoder"])),
    st.tuples(st.just("lose"), st.booleans()),
)


@given(
    operations=st.lists(OPERATION, min_size=5, max_size=30),
    form=st.sampled_from(["array", "map"]),
    max_batches=st.sampled_from([2, 1000]),
)
@settings(max_examples=60, deadline=None)
def test_a_subscriber_rebuilds_what_is_held_after_any_loss(
    operations: Sequence[tuple[Any, ...]], form: str, max_batches: int
) -> None:
    limits = Limits(num_blocks=12, encoder_rows=8, max_num_seqs=3, max_encoder_tokens=8)
    published = Published(Engine(limits), form, max_batches)
    engine = published.engine
    for number, operation in enumerate(operations):
        match operation:
            case ("ask", seed, length, picture):
                features = [feature(picture, 0, 5)] if picture else []
                tokens = text(length, seed=seed)
                engine.add(request(str(number), tokens, features, sampling=SHORT))
                published.step()
            case ("run",):
                published.run()
            case ("abort", which):
                engine.scheduler.abort(str(which))
            case ("reset", "prefix"):
                engine.scheduler.reset_prefix_cache()
            case ("reset", _):
                engine.scheduler.reset_encoder_cache()
            case ("lose", loses):
                published.loses = loses
        published.events.flush()
    published.run()
    published.check()


def test_blocks_say_their_tokens_parents_and_pictures() -> None:
    published = Published(Engine(Limits()), "array", 1000)
    tokens = text(20, seed=1)
    published.engine.add(request("a", tokens, [feature("p", 5, 3)], sampling=SHORT))
    published.run()
    sequence_tokens = request("b", tokens, [feature("p", 5, 3)]).prompt.data
    expected = np.frombuffer(sequence_tokens, "<i4").tolist() + published.engine.tokens["a", 0]
    held = published.subscribers["kv"].held
    by_parent = {parent: (each, tokens) for each, (parent, tokens) in held.items()}
    chain, parent = [], None
    while parent in by_parent:
        parent, tokens_there = by_parent[parent]
        chain += tokens_there
    assert chain == expected[: len(chain)]
    assert len(chain) == len(held) * BLOCK == 24
    _, payload = published.logs["kv"].replay(1)[0]
    (event,) = DEFINITIONS["array"].decoder.decode(payload).events
    assert event.extra_keys == [None, (key("p").hex(),), None, None, None]


@pytest.mark.parametrize("adapter", [None, LoRAIdentity(b"a" * 32, b"encoder")])
def test_a_computed_prompt_is_told_once_with_its_last_full_block_and_its_items(
    adapter: LoRAIdentity | None,
) -> None:
    """Items by the keys that clients know, also with an adapter that changes their outputs."""
    published = Published(Engine(Limits()), "array", 1000)
    sent = request("1-2-mine", text(20, seed=1), [feature("p", 5, 3)], sampling=SHORT)
    published.engine.add(msgspec.structs.replace(sent, adapter=adapter))
    published.run()
    (computed,) = (each for each in published.told if isinstance(each, Computed))
    assert computed.request_id == "mine"
    assert computed.num_tokens == sent.prompt.shape[0]
    assert computed.items == ((key("p"), 3),)
    held = published.subscribers["kv"].held
    parent, chain = computed.block_hash, 0
    while parent is not None:
        parent, chain = held[parent][0], chain + 1
    assert chain == computed.num_tokens // BLOCK
    (event,) = to_events([computed], 0)
    assert event["type"] == "PromptComputed"
    ends = [at * BLOCK for at in range(1, chain)]
    assert [tokens for _, tokens in computed.earlier] == ends
    hashes = [block for block, _ in computed.earlier] + [computed.block_hash]
    assert [held[block][0] for block in hashes[1:]] == hashes[:-1]


def test_of_a_long_prompt_blocks_are_told_at_even_distances() -> None:
    published = Published(Engine(Limits()), "array", 1000)
    published.engine.add(request("1-2-mine", text(41 * BLOCK, seed=1), [], sampling=SHORT))
    published.run()
    (computed,) = (each for each in published.told if isinstance(each, Computed))
    assert [tokens for _, tokens in computed.earlier] == [3 * n * BLOCK for n in range(1, 14)]


def test_a_load_is_told_at_most_ten_times_a_second_and_when_nothing_is_left() -> None:
    published = Published(Engine(Limits()), "array", 1000)
    events = published.events
    for moment, running in ((5.0, 1), (5.05, 2), (5.11, 3), (5.12, 0), (5.13, 0)):
        events.tell_load(moment, running, waiting=0)
        events.flush()
    loads = [each for each in published.told if isinstance(each, Load)]
    assert [load.running for load in loads] == [1, 3, 0]


def test_a_load_counts_prompts_decodes_and_encoder_runs_apart() -> None:
    load = Load()
    prompt = ScheduledSequence(1, 0, 8, (), (), (), True)
    decode = ScheduledSequence(2, 9, 1, (), (), (), True)
    load.note_step(StepPlan(1, scheduled=(decode, prompt)), StepResult(), 0.5)
    load.note_step(StepPlan(2, scheduled=(decode,)), StepResult(), 0.25)
    encoded = StepResult(encode_seconds={b"a": 0.25, b"b": 0.5})
    load.note_step(StepPlan(3, scheduled=(prompt,)), encoded, 1.0)
    assert (load.prompt_tokens, load.prompt_seconds) == (17, 0.75)
    assert (load.decoded_tokens, load.decode_seconds) == (1, 0.25)
    assert (load.encoder_runs, load.encode_seconds) == (2, 0.75)


def test_blocks_loaded_from_a_tier_are_told_like_computed_ones() -> None:
    tier = DictTier()
    with World(tier) as world:
        world.serve(request("warm", text(30)))
        world.forget_device()
        published = Published(world, "array", 1000)
        step = world.step

        def stepped() -> Any:
            plan = step()
            published.events.flush()
            return plan

        world.step = stepped  # type: ignore[method-assign]
        world.serve(request("again", text(30)))
        assert world.reuse_stats["again"].external_cached_tokens == 28
        published.check()
        parents = [parent for parent, _ in published.subscribers["kv"].held.values()]
        assert parents.count(None) == 1


def test_processed_items_are_told() -> None:
    told: list[tuple[bytes, bool]] = []
    store = Store()
    store.on_change = lambda key, held: told.append((key, held))
    store.open_share("one")
    store.open_share("two")
    store.add("one", b"a", item())
    store.add("two", b"a", item())
    store.open_request("r")
    store.hold_loose("r", b"b", item())
    store.drop("one", b"a")
    assert told == [(b"a", True), (b"b", True)]
    store.release("r")
    store.close_share("two")
    assert told[2:] == [(b"b", False), (b"a", False)]


def test_what_follows_becomes_one_event() -> None:
    tokens = np.arange(4, dtype=np.int32).tobytes()
    changes: list[Change] = [
        Stored(b"1", None, tokens, ()),
        Stored(b"2", b"1", tokens, ()),
        Stored(b"3", b"1", tokens, (b"k",), b"\xaa"),
        Removed(b"1"),
        Removed(b"2"),
        Cleared(),
    ]
    first, other, removed, cleared = to_events(changes, 4)
    assert (first["block_hashes"], first["token_ids"]) == ([b"1", b"2"], [0, 1, 2, 3, 0, 1, 2, 3])
    assert (other["parent_block_hash"], other["extra_keys"]) == (b"1", [("6b",)])
    assert (first["lora_name"], other["lora_name"]) == (None, "aa")
    assert removed["block_hashes"] == [b"1", b"2"]
    assert cleared == {"type": "AllBlocksCleared"}
    keys = to_events([Held(b"1"), Held(b"2"), Removed(b"1")], 0)
    assert [event["type"] for event in keys] == ["KeysHeld", "KeysRemoved"]


@pytest.mark.parametrize("form", ["array", "map"])
def test_each_prompt_and_each_load_of_a_batch_is_told(form: str) -> None:
    """One step may compute the prompts of several requests."""
    told = [Computed(name, 9, bytes(32), ()) for name in ("one", "two")]
    loads = [Load(running=1), Load(running=2)]
    log = TopicLog(ENGINE_TOPIC, form)
    _, _, payload = log.append([*told, *loads])
    reader = TopicReader(ENGINE_TOPIC, lambda _: [(0, payload)])
    changes = reader.begin()
    prompts = [each.request_id for each in changes if isinstance(each, PromptComputed)]
    running = [each.running for each in changes if isinstance(each, EngineLoad)]
    assert (prompts, running) == (["one", "two"], [1, 2])


def test_the_first_releases_of_vllm_read_a_stored_block_too() -> None:
    log = TopicLog("kv", "array", 4)
    log.append([Stored(b"1", None, np.arange(4, dtype=np.int32).tobytes(), (b"k",))])
    ((_, payload),) = log.replay(1)
    _, (event,) = msgspec.msgpack.decode(payload)
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=OldBlockStored)
    assert (old.block_hashes, old.token_ids) == ([b"1"], [0, 1, 2, 3])  # type: ignore[attr-defined]


def test_replay_forgets_by_number_and_by_bytes_and_a_snapshot_is_cut() -> None:
    log = TopicLog("kv", "array", 4, max_bytes=400)
    for number in range(2500):
        log.append([Held(number.to_bytes(32, "big"))])
    kept = log.replay(0)
    assert 1 < len(kept) < 10
    assert [number for number, _ in kept] == list(range(2501 - len(kept), 2501))
    batches = list(log.snapshot())
    assert [number for number, _ in batches] == [2500] * math.ceil(2500 / MAX_SNAPSHOT_CHANGES)
    with pytest.raises(ValueError, match="8 bytes"):
        list(log.answer(b"x"))


def test_a_snapshot_is_shared_by_all_who_asked_before_it_was_taken() -> None:
    log = TopicLog("kv", "array", 4)
    log.append([Held(number.to_bytes(32, "big")) for number in range(1000)])
    asked = time.monotonic()
    one, other = (log.answer(b"snapshot", asked) for _ in range(2))
    made = [next(one)[1], next(one)[1]]
    log.append([Held(b"new")])
    assert [next(other)[1], next(other)[1]] == made
    made += [payload for _, payload in one][:-1]
    shared = [payload for _, payload in other][:-1]
    assert all(a is b for a, b in zip(made[2:], shared, strict=True))
    assert b"new" not in b"".join(made)
    late = [payload for _, payload in log.answer(b"snapshot", time.monotonic())]
    assert b"new" in b"".join(late)


def test_a_thread_works_for_its_share_and_at_once_for_what_it_saved() -> None:
    now = 100.0
    share = WorkShare(0.2, 0.5, lambda: now)

    def worked(seconds: float) -> float:
        nonlocal now
        now += seconds
        rest = share.rest(seconds)
        now += rest
        return rest

    assert worked(0.1) == pytest.approx(0.1)  # half of the time while something is saved
    began, work = now, 0.0
    while now < began + 100:
        worked(0.01)
        work += 0.01
    assert 0.2 <= work / (now - began) <= 0.21
    now += 1000
    assert worked(0.4) == pytest.approx(0.4)
    assert worked(0.4) > 0.4


# --- sockets -------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lookonce-events-") as name:  # short: socket paths
        yield Path(name)


def test_a_subscriber_over_zmq(folder: Path) -> None:
    config = EventsConfig(f"ipc://{folder}/pub", f"ipc://{folder}/replay")
    publisher = EventPublisher(config)
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as sub,
        context.socket(zmq.DEALER) as asks,
    ):
        sub.connect(config.address)
        sub.setsockopt(zmq.SUBSCRIBE, ITEM_TOPIC.encode())
        asks.connect(config.replay_address)

        def ask(wanted: bytes, *topic: bytes) -> list[tuple[int, bytes]]:
            asks.send_multipart([b"", wanted, *topic])
            found = []
            while True:
                assert asks.poll(20_000)
                _, number, payload = asks.recv_multipart()
                if not payload:
                    assert number == END
                    return found
                found.append((int.from_bytes(number, "big"), payload))

        subscriber = Subscriber(
            "array", lambda wanted: ask(wanted, ITEM_TOPIC.encode()), blocks=False
        )
        chance, held, count = random.Random(1), set(), 0

        def change() -> None:
            nonlocal count
            gone = chance.choice(sorted(held)) if held and chance.random() < 0.4 else None
            count += 1
            if gone is None:
                held.add(each := count.to_bytes(32, "big"))
                publisher.item_changed(each, True)
            else:
                held.discard(gone)
                publisher.item_changed(gone, False)

        def connected() -> bool:  # what is sent before is lost
            change()
            return bool(sub.poll(10))

        eventually(connected, 20.0)
        for _ in range(200):
            change()
        marker = b"m" * 32
        held.add(marker)
        publisher.item_changed(marker, True)
        while marker not in subscriber.held:
            assert sub.poll(20_000)
            topic, number, payload = sub.recv_multipart()
            assert topic == ITEM_TOPIC.encode()
            if chance.random() < 0.7 or marker in payload:
                subscriber.receive(int.from_bytes(number, "big"), payload)
        assert subscriber.held.keys() == held
        late = Subscriber("array", None, blocks=False)
        for _, payload in ask(b"snapshot", ITEM_TOPIC.encode()):
            late.apply(payload)
        assert late.held.keys() == held
        assert ask(b"nonsense of another size") == []
        assert ask(bytes(8), b"no such topic") == []
        assert ask(bytes(8)) == [], "there is no model yet"
        publisher.open_step_events(4, lambda: ([], []))
        assert [number for number, _ in ask(bytes(8))] == [0]
    publisher.close()


def test_a_computed_prompt_is_told_after_what_it_left(folder: Path) -> None:
    """Whoever does not know of its blocks yet would take it for evicted."""
    publisher = EventPublisher(EventsConfig(f"ipc://{folder}/pub", f"ipc://{folder}/replay"))
    come: list[bytes] = []
    events = publisher.open_step_events(4, lambda: (come, []))
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.connect(f"ipc://{folder}/pub")
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        while not sub.poll(20):
            publisher.item_changed(b"x" * 32, True)
        for number in range(200):
            come[:] = [number.to_bytes(32, "big")]
            events.tell_load(float(number), number % 2, 0)
            events.computed(f"0-0-{number}", 4, None, (), ())
            events.flush()
        publisher.close()
        held, told = set(), 0
        while told < 200:
            assert sub.poll(20_000)
            topic, _, payload = sub.recv_multipart()
            for kind, first, *_ in msgspec.msgpack.decode(payload)[1]:
                if kind == "KeysHeld" and topic == ENCODER_TOPIC.encode():
                    held.update(first)
                elif kind == "PromptComputed":
                    assert int(first).to_bytes(32, "big") in held
                    told += 1


def test_for_a_client_that_does_not_read_little_is_queued_and_others_are_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    answer = TopicLog.answer

    def counted(log: TopicLog, request: bytes, asked: float) -> Iterator[tuple[bytes, bytes]]:
        nonlocal made
        for each in answer(log, request, asked):
            made += len(each[1])
            yield each

    monkeypatch.setattr(TopicLog, "answer", counted)
    config = EventsConfig(f"ipc://{folder}/pub", f"ipc://{folder}/replay")
    publisher = EventPublisher(config)
    log = publisher._logs[ITEM_TOPIC]
    keys = [Held(number.to_bytes(32, "big")) for number in range(1000)]
    total, last = 0, 0
    while total < 30 << 20:  # far more than sockets hold
        _, number, payload = log.append(keys)
        total, last = total + len(payload), int.from_bytes(number, "big")
    with zmq.Context() as context:
        slow, quick = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        with slow, quick:

            def read(asks: zmq.Socket[bytes]) -> list[int]:
                numbers = []
                while not numbers or numbers[-1] != -1:
                    assert asks.poll(60_000)
                    _, number, _ = asks.recv_multipart()
                    numbers.append(int.from_bytes(number, "big", signed=True))
                return numbers[:-1]

            for asks in (slow, quick):
                asks.setsockopt(zmq.RCVHWM, 1)
                asks.connect(config.replay_address)
            slow.send_multipart([b"", bytes(8), ITEM_TOPIC.encode()])
            eventually(lambda: made > 0, 20.0)
            quick.send_multipart([b"", bytes(8), ITEM_TOPIC.encode()])
            assert read(quick) == list(range(last + 1))
            assert made < 1.8 * total
    publisher.close()


FLOOD = """
import sys, zmq
context, poller = zmq.Context(), zmq.Poller()
for _ in range(30):
    asks = context.socket(zmq.DEALER)
    asks.connect(sys.argv[1])
    poller.register(asks, zmq.POLLIN)
    for _ in range(9):
        asks.send_multipart([b"", b"snapshot", sys.argv[2].encode()])
while True:
    for asks, _ in poller.poll():
        if asks.recv_multipart()[1] == b"\\xff" * 8:
            asks.send_multipart([b"", b"snapshot", sys.argv[2].encode()])
"""


def test_a_flood_of_requests_takes_a_share_of_the_time_and_keeps_nobody_waiting(
    folder: Path,
) -> None:
    """It took all of a core, and with it the interpreter lock from the engine's steps."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    addresses = [f"ipc://{folder}/pub", f"tcp://127.0.0.1:{port}"]
    publisher = EventPublisher(EventsConfig(*addresses))
    log = publisher._logs[ITEM_TOPIC]
    held = [number.to_bytes(32, "big") for number in range(20_000)]
    log.append([Held(each) for each in held])
    clock = time.pthread_getcpuclockid(publisher._threads[1].ident or 0)
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, addresses[1], ITEM_TOPIC])
    try:
        eventually(lambda: time.clock_gettime(clock) > 2 * SAVED_SECONDS, 60.0)
        began, used = time.monotonic(), time.clock_gettime(clock)
        with zmq.Context() as context, context.socket(zmq.DEALER) as asks:
            asks.connect(f"tcp://127.0.0.9:0;127.0.0.1:{port}")
            asks.send_multipart([b"", b"snapshot", ITEM_TOPIC.encode()])
            honest = Subscriber("array", None, blocks=False)
            while asks.poll(20_000):
                _, number, payload = asks.recv_multipart()
                if number == END:
                    break
                honest.apply(payload)
        assert honest.held.keys() == set(held)
        assert time.monotonic() - began < 5.0
        time.sleep(max(0.0, began + 4.0 - time.monotonic()))
        elapsed, used = time.monotonic() - began, time.clock_gettime(clock) - used
        # On a busy machine the flood is held up, and some of its share is saved.
        assert used < 1.5 * REPLAY_SHARE * elapsed + SAVED_SECONDS
    finally:
        flood.kill()
        flood.wait()
        publisher.close()


def test_of_many_clients_those_of_the_address_that_has_most_lose_their_answers() -> None:
    replays = _Replays()
    with socket.socket() as unused:
        honest = Client(unused, "one", 0.0)
        others = [Client(unused, "many", 0.0) for _ in range(MAX_REPLAYS + 9)]
    for client in (honest, *others):
        replays.add(client.address, client, iter([(b"1", b"a")]))
    assert len(replays) == MAX_REPLAYS
    turns = [replays.next_turn()[0] for _ in range(4)]
    assert turns == [honest, others[10], honest, others[11]]


def test_an_address_that_cannot_be_bound_is_an_error_of_one_line(folder: Path) -> None:
    config = EventsConfig(f"ipc://{folder}/pub", f"ipc://{folder}/none/replay")
    with pytest.raises(ConfigError, match=r"--events: .* No such file"):
        EventPublisher(config)
    with pytest.raises(ConfigError, match=r"--events: .* path too long"):
        EventPublisher(EventsConfig(f"ipc://{folder}/{'x' * 200}", f"ipc://{folder}/replay"))


def test_the_option() -> None:
    def parsed(text: str) -> EventsConfig | None:
        return resolve(Options(events=text)).events

    assert resolve(Options()).events is None
    assert parsed("tcp://*:5557") == EventsConfig("tcp://*:5557", "tcp://*:5558")
    assert parsed("ipc:///tmp/x?topic=kv@a&form=map&only=kv&replay=tcp://h:1") == EventsConfig(
        "ipc:///tmp/x", "tcp://h:1", "kv@a", "map", blocks_only=True
    )
    assert parsed("ipc:///tmp/x?topic=") == EventsConfig("ipc:///tmp/x", "ipc:///tmp/x.replay", "")
    for wrong in (
        "5557",
        "tcp://x",
        "tcp://x:y",
        "http://x:1",
        "tcp://x:1?a=b",
        "tcp://x:1?only=x",
        "tcp://*:65536",
        "tcp://*:65535",  # answers would be at the next port
    ):
        with pytest.raises(ConfigError, match="--events: "):
            parsed(wrong)
    for wrong in ("tcp://x:1?form=xml", f"tcp://x:1?topic={ITEM_TOPIC}"):
        with pytest.raises(ConfigError, match="--events"):
            parsed(wrong)
