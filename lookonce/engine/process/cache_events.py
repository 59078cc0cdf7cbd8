"""Tells other processes, over ZMQ, what the caches of this engine gain and lose (`--events`).

    step thread   blocks, encoder outputs ─┐ one list a step
    input thread  processed items ─────────┴▶ publisher thread ─▶ PUB     topic │ sequence │ batch
                                              clients' thread  ◀─▶         subscriptions
                                              replay thread    ◀─▶ ROUTER  what a subscriber lost

The wire format of KV blocks is vLLM's (`vllm/distributed/kv_events.py`): three frames, of which
the second is the sequence number (8 bytes, big-endian) and the third a msgpack array
`[time, events]`. An event is an array that begins with its name, or a map with the name as `type`.
Each topic counts its own batches; batch 0 clears everything, so that a subscriber which sees it
knows that the engine has started anew.

A subscriber that finds a gap asks the ROUTER socket, by one frame of 8 bytes, for all batches from
that number on; the answers end with the number -1 and an empty payload. Where these begin too late,
it asks for a `snapshot`: batches that clear everything and store what is held now, all with the
number up to which they are true. `start` is answered with the number of the last batch and bytes
that name this start of the engine. A second frame names another topic than that of KV blocks.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from lookonce.config import (
    ENCODER_TOPIC,
    ENGINE_TOPIC,
    ITEM_TOPIC,
    REPLAY_END,
    REPLAY_SNAPSHOT,
    REPLAY_START,
    EventsConfig,
)
from lookonce.engine.process.zmtp import Client, ZmtpServer
from lookonce.errors import ConfigError
from lookonce.types.request import client_request_id
from lookonce.types.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

MAX_REPLAY_BATCHES = 10_000
MAX_REPLAY_BYTES = 64 << 20
"""What is kept of each topic for replay; older batches are forgotten."""
MAX_SNAPSHOT_CHANGES = 250
"""Changes in one batch of a snapshot: it holds the interpreter lock, which the step thread waits
for, for a millisecond or two."""
SHARED_BATCHES = 16
"""Of a snapshot, that are kept for others who asked for it."""
START_BYTES = 16
LOAD_SECONDS = 0.1
"""Least time between two events about the load."""
IDLE_LOAD_SECONDS = 10.0
"""Time between these while there is nothing to do: who has missed one, or waits for a sign of life,
learns what is true."""
MEDIUM = "GPU"
"""What vLLM calls the device, of whatever kind."""
TOLD_ALONE = frozenset({"PromptComputed", "EngineLoad"})
"""Events that say something of their own, each time."""
PRIVATE_TIER = "host"
"""The tier that no other engine can read."""
REPLAY_QUEUED_BYTES = 256 * 1024
"""Of answers, queued for one client that asks; the next ones are made once it has read some."""
MAX_REPLAYS = 64
"""Clients that are answered at a time, of more one of the address that has most loses the rest; and
requests that one client may have sent before the first of them is answered."""
REPLAY_SECONDS = 10.0
"""How long a client that is answered may read nothing; then it loses the rest, and asks again."""
BLOCKED_SECONDS = 0.001
"""Between two tries to send, while all clients that are answered are slow."""
REPLAY_SHARE = 0.2
"""Of the time that answers are made in: all of it is taken from the steps."""
CLIENTS_SHARE = 0.1
"""Of the time, for connections of subscribers."""
SAVED_SECONDS = 0.5
"""Of work, that may be done faster after a time without: a subscriber that comes waits 5 s for its
snapshot, and those that ask without end slow themselves."""


# --- what happened -------------------------------------------------------------------------------


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A KV block was registered; fields as in `types.ports.BlockEvents.stored`."""

    key: bytes
    parent: bytes | None
    tokens: bytes
    items: tuple[bytes, ...]
    adapter: bytes = b""


class Held(msgspec.Struct, frozen=True, gc=False):
    """An encoder output or a processed item is held now."""

    key: bytes


class Removed(msgspec.Struct, frozen=True, gc=False):
    key: bytes


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Nothing is held any more."""


class Computed(msgspec.Struct, frozen=True, gc=False):
    """A prompt was computed; fields as in `types.ports.BlockEvents.computed`."""

    request_id: str
    """The client's."""
    num_tokens: int
    block_hash: bytes | None
    items: tuple[tuple[bytes, int], ...]
    earlier: tuple[tuple[bytes, int], ...] = ()


class Load(msgspec.Struct, gc=False):
    """How many requests there are, and what the steps since the start took."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    """Computed in steps that computed any prompt, and those steps' seconds without encoder runs."""
    prompt_seconds: float = 0.0
    encoder_runs: int = 0
    encode_seconds: float = 0.0
    decoded_tokens: int = 0
    """Computed in steps without any prompt, and their seconds."""
    decode_seconds: float = 0.0
    tier_tokens: int = 0
    """Of KV blocks loaded from tiers that other engines share, and seconds of reading."""
    tier_token_seconds: float = 0.0
    tier_outputs: int = 0
    """Encoder outputs from such tiers, and seconds of reading."""
    tier_output_seconds: float = 0.0
    decode_steps: int = 0
    """Steps without any prompt."""
    machine: int = 0
    """Names the cores that this process may run on, or the control group with which it shares a
    smaller CPU quota: engines that tell the same share them. 0: it computes on none, as with a
    GPU."""
    cores: int = 0
    """How many these are."""
    threads: int = 0
    """With which its longest steps compute."""

    def note_tiers(self, stats: Mapping[str, float]) -> None:
        """Take what tiers gave from the figures of their connectors."""
        self.tier_tokens = int(_of_shared(stats, "kv_tier_loaded_tokens_total"))
        self.tier_token_seconds = _of_shared(stats, "kv_tier_load_seconds_total")
        self.tier_outputs = int(_of_shared(stats, "encoder_tier_outputs_total"))
        self.tier_output_seconds = _of_shared(stats, "encoder_tier_load_seconds_total")

    def note_step(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Add what a step computed, and how long it took."""
        if result.encode_seconds:
            encoding = sum(result.encode_seconds.values())
            self.encoder_runs += len(result.encode_seconds)
            self.encode_seconds += encoding
            seconds = max(0.0, seconds - encoding)
        if plan.scheduled:
            num_tokens = plan.num_tokens
            if num_tokens > len(plan.scheduled):
                self.prompt_tokens += num_tokens
                self.prompt_seconds += seconds
            else:
                self.decoded_tokens += num_tokens
                self.decode_seconds += seconds
                self.decode_steps += 1


def _of_shared(stats: Mapping[str, float], name: str) -> float:
    """The sum over tiers that are not this engine's own memory."""
    labelled = f"{name}:"
    return sum(
        value
        for key, value in stats.items()
        if key.startswith(labelled) and not key.startswith(f"{labelled}{PRIVATE_TIER}")
    )


Change: TypeAlias = Stored | Held | Removed | Cleared | Computed | Load
Event: TypeAlias = dict[str, Any]
"""Field → value, `type` first, in the order of vLLM's definitions."""


class StepEvents:
    """Collects what a step changes; implements `types.ports.BlockEvents`. For the step thread.

    A method costs less than a microsecond; `flush` hands everything over at the end of a step.
    """

    def __init__(
        self,
        publish: Callable[[str, list[Change]], None],
        topic: str,
        take_outputs: Callable[[], tuple[list[bytes], list[bytes]]],
        load: Load | None = None,
        tier_stats: Callable[[], Mapping[str, float]] = dict,
        *,
        needs_content: bool = True,
    ) -> None:
        """`topic` of KV blocks; `take_outputs`: encoder outputs that have come and gone; `load`:
        where steps are counted; `tier_stats`: figures of external tiers."""
        self.needs_content = needs_content
        self._publish = publish
        self._topic = topic
        self._take_outputs = take_outputs
        self._changes: list[Change] = []
        self._requests: list[Change] = []
        self._load = load or Load()
        self._tier_stats = tier_stats
        self._next_load = 0.0

    def stored(
        self,
        block_hash: bytes,
        parent: bytes | None,
        tokens: bytes,
        items: tuple[bytes, ...],
        adapter: bytes = b"",
    ) -> None:
        self._changes.append(Stored(block_hash, parent, tokens, items, adapter))

    def removed(self, block_hash: bytes) -> None:
        self._changes.append(Removed(block_hash))

    def cleared(self) -> None:
        self._changes.append(Cleared())

    def computed(
        self,
        request_id: str,
        num_tokens: int,
        block_hash: bytes | None,
        items: tuple[tuple[bytes, int], ...],
        earlier: tuple[tuple[bytes, int], ...],
    ) -> None:
        self._requests.append(
            Computed(client_request_id(request_id), num_tokens, block_hash, items, earlier)
        )

    def tell_load(self, moment: float, running: int, waiting: int) -> None:
        """Tell the load where it was not told for `LOAD_SECONDS`, or nothing is left to do."""
        load = self._load
        idle = not running and not waiting and load.running + load.waiting > 0
        if moment < self._next_load and not idle:
            return
        self._next_load = moment + LOAD_SECONDS
        load.running, load.waiting = running, waiting
        if stats := self._tier_stats():
            load.note_tiers(stats)
        self._requests.append(msgspec.structs.replace(load))

    def flush(self) -> None:
        if self._changes:
            self._publish(self._topic, self._changes)
            self._changes = []
        come, gone = self._take_outputs()
        if come or gone:
            changes: list[Change] = [Removed(key) for key in gone]
            changes += [Held(key) for key in come]
            self._publish(ENCODER_TOPIC, changes)
        if self._requests:  # after what they computed
            self._publish(ENGINE_TOPIC, self._requests)
            self._requests = []


# --- events --------------------------------------------------------------------------------------


def to_events(changes: Sequence[Change], block_size: int) -> list[Event]:
    """The same in fewer events: blocks that follow each other, keys that go together."""
    events: list[Event] = []
    last: Event = {"type": ""}
    for change in changes:
        event = _event(change, block_size)
        if not _join(last, event):
            events.append(event)
            last = event
    return events


def _event(change: Change, block_size: int) -> Event:
    match change:
        case Stored(key, parent, tokens, items, adapter):
            return {
                "type": "BlockStored",
                "block_hashes": [key],
                "parent_block_hash": parent,
                "token_ids": np.frombuffer(tokens, np.int32).tolist(),
                "block_size": block_size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": adapter.hex() or None,
                "extra_keys": [tuple(item.hex() for item in items) or None],
            }
        case Removed(key) if block_size:
            return {"type": "BlockRemoved", "block_hashes": [key], "medium": MEDIUM}
        case Cleared() if block_size:
            return {"type": "AllBlocksCleared"}
        case Held(key):
            return {"type": "KeysHeld", "keys": [key]}
        case Computed(request_id, num_tokens, block_hash, items, earlier):
            return {
                "type": "PromptComputed",
                "request_id": request_id,
                "num_tokens": num_tokens,
                "items": items,
                "block_hash": block_hash,
                "earlier_blocks": earlier or None,
            }
        case Load():
            return {"type": "EngineLoad"} | msgspec.structs.asdict(change)
        case Removed(key):
            return {"type": "KeysRemoved", "keys": [key]}
        case _:
            return {"type": "AllKeysCleared"}


def _join(last: Event, event: Event) -> bool:
    """Add `event` to the one before it, where both are one."""
    kind = event["type"]
    if kind != last["type"] or kind in TOLD_ALONE:
        return False
    if kind == "BlockStored":
        if event["parent_block_hash"] != last["block_hashes"][-1]:
            return False
        for name in ("block_hashes", "token_ids", "extra_keys"):
            last[name] += event[name]
        return True
    for name in ("block_hashes", "keys"):
        if name in event:
            last[name] += event[name]
    return True


def encode_batch(events: Sequence[Event], form: str, moment: float) -> bytes:
    """`[time, events]` in msgpack, events in one of vLLM's two forms."""
    if form == "array":
        return msgspec.msgpack.encode([moment, [_as_array(event) for event in events]])
    return msgspec.msgpack.encode([moment, events])


def _as_array(event: Event) -> list[Any]:
    """Values in order; trailing ones that say nothing are left out."""
    values = list(event.values())
    if event["type"] == "BlockStored" and not any(event["extra_keys"]):
        values.pop()
    while values[-1] is None:
        values.pop()
    return values


class Snapshot:
    """What is held of one topic at a moment, in batches that are made when they are read first.

    Whoever asked before this moment may read them: most of a snapshot's cost is to make it.
    """

    def __init__(self, number: int, held: Sequence[Change], block_size: int, form: str) -> None:
        """`number` of the last batch that is included."""
        self.moment = time.monotonic()
        self._number, self._held = number, held
        self._block_size, self._form = block_size, form
        self._time = time.time()
        self._made: OrderedDict[int, bytes] = OrderedDict()
        """The batches made last, by the index of their first change."""

    def batches(self) -> Iterator[tuple[int, bytes]]:
        for at in range(0, max(len(self._held), 1), MAX_SNAPSHOT_CHANGES):
            yield self._number, self._batch(at)

    def _batch(self, at: int) -> bytes:
        if at not in self._made:
            changes: list[Change] = [] if at else [Cleared()]
            changes += self._held[at : at + MAX_SNAPSHOT_CHANGES]
            events = to_events(changes, self._block_size)
            self._made[at] = encode_batch(events, self._form, self._time)
            if len(self._made) > SHARED_BATCHES:
                self._made.popitem(last=False)
        return self._made[at]


class TopicLog:
    """One topic: its last batches for replay, and what is held, for snapshots. Thread-safe.

    `append` is called by one thread. `block_size` 0: the topic is not of KV blocks.
    """

    def __init__(
        self,
        topic: str,
        form: str,
        block_size: int = 0,
        *,
        max_batches: int = MAX_REPLAY_BATCHES,
        max_bytes: int = MAX_REPLAY_BYTES,
    ) -> None:
        self.topic = topic.encode()
        self._form = form
        self._block_size = block_size
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._start = os.urandom(START_BYTES)
        """Of no other log: numbers of batches say nothing of who counted them."""
        self._lock = threading.Lock()
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._next = 0
        self._held: dict[bytes, Change] = {}
        """Key → what stored it, in that order: a block comes after its parent."""
        self._latest: Callable[[], Snapshot | None] = lambda: None
        """The last snapshot that was taken, while anybody reads it."""
        self.append([Cleared()])

    def append(self, changes: Sequence[Change]) -> tuple[bytes, bytes, bytes]:
        """Count one more batch; the frames to send."""
        payload = encode_batch(to_events(changes, self._block_size), self._form, time.time())
        with self._lock:
            number = self._next
            self._next += 1
            for change in changes:
                match change:
                    case Stored(key) | Held(key):
                        self._held[key] = change
                    case Removed(key):
                        self._held.pop(key, None)
                    case Cleared():
                        self._held.clear()
                    case Load():
                        self._held[b"load"] = change
            self._batches.append((number, payload))
            self._num_bytes += len(payload)
            while len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes:
                _, forgotten = self._batches.popleft()
                self._num_bytes -= len(forgotten)
        return self.topic, number.to_bytes(8, "big"), payload

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """(number, batch) of all batches from `start` on that are kept."""
        with self._lock:
            return [batch for batch in self._batches if batch[0] >= start]

    def snapshot(self, asked: float = math.inf) -> Iterator[tuple[int, bytes]]:
        """Batches that clear everything and store what is held, each with the number of the last
        batch that they include. Who asked before the last snapshot was taken shares that one.

        `asked`: by `time.monotonic`.
        """
        snapshot = self._latest()
        if snapshot is None or snapshot.moment < asked:
            with self._lock:
                number, held = self._next - 1, list(self._held.values())
            snapshot = Snapshot(number, held, self._block_size, self._form)
            self._latest = weakref.ref(snapshot)
        yield from snapshot.batches()

    def answer(self, request: bytes, asked: float = math.inf) -> Iterator[tuple[bytes, bytes]]:
        """(number, payload) frames that answer a request: `snapshot`, `start`, or a number to
        replay from.

        `asked`: when it came, by `time.monotonic`. Raises `ValueError` for another request.
        """
        batches: Iterator[tuple[int, bytes]]
        if request == REPLAY_SNAPSHOT:
            batches = self.snapshot(asked)
        elif request == REPLAY_START:
            with self._lock:
                batches = iter([(self._next - 1, self._start)])
        elif len(request) == 8:
            batches = iter(self.replay(int.from_bytes(request, "big")))
        else:
            raise ValueError("a request is `snapshot`, `start` or a number of 8 bytes")
        for number, payload in batches:
            yield number.to_bytes(8, "big"), payload
        yield REPLAY_END, b""


# --- sockets -------------------------------------------------------------------------------------


class EventPublisher:
    """The two sockets and their threads. Raises `ConfigError` for an address that cannot be bound.

    `open_step_events` is called once the model's block size is known; until then nothing of KV
    blocks is published.
    """

    def __init__(self, config: EventsConfig) -> None:
        self._config = config
        self._replays, self._replay_share = _Replays(), WorkShare(REPLAY_SHARE, SAVED_SECONDS)
        try:
            self._pub = ZmtpServer(config.address, b"PUB")
        except OSError as error:
            raise ConfigError(f"--events: {config.address}: {_reason(error)}") from error
        try:
            self._router = ZmtpServer(config.replay_address, b"ROUTER", self._receive)
        except OSError as error:
            self._pub.close()
            self._pub.turn(0)
            told = f"--events: {config.replay_address}: {_reason(error)}"
            raise ConfigError(told) from error
        self._queue: queue.SimpleQueue[tuple[str, list[Change]] | None] = queue.SimpleQueue()
        self._logs: dict[str, TopicLog] = {}
        if not config.blocks_only:
            for topic in (ENCODER_TOPIC, ITEM_TOPIC, ENGINE_TOPIC):
                self._logs[topic] = TopicLog(topic, config.form)
        self._threads = [
            threading.Thread(target=self._publish_all, name="events", daemon=True),
            threading.Thread(target=self._answer_all, name="events-replay", daemon=True),
            threading.Thread(target=self._serve_subscribers, name="events-clients", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def open_step_events(
        self,
        block_size: int,
        take_outputs: Callable[[], tuple[list[bytes], list[bytes]]],
        load: Load | None = None,
        tier_stats: Callable[[], Mapping[str, float]] = dict,
    ) -> StepEvents:
        """What the step thread tells of its caches, whose blocks have so many tokens, and of the
        steps counted in `load`. `tier_stats`: figures of external tiers."""
        topic = self._config.topic
        self._logs[topic] = TopicLog(topic, self._config.form, block_size)
        return StepEvents(self.publish, topic, take_outputs, load, tier_stats)

    def item_changed(self, key: bytes, held: bool) -> None:
        """A processed item has come or gone; any thread."""
        self.publish(ITEM_TOPIC, [Held(key) if held else Removed(key)])

    def publish(self, topic: str, changes: list[Change]) -> None:
        """Hand changes over; any thread. Whoever does so must not change the list any more."""
        self._queue.put((topic, changes))

    def close(self) -> None:
        """Send what was handed over, and end the threads."""
        self._queue.put(None)
        self._threads[0].join(timeout=2.0)
        for server in (self._pub, self._router):
            server.close()
        for thread in self._threads[1:]:
            thread.join(timeout=2.0)

    def _publish_all(self) -> None:
        """Until None. What has gathered meanwhile becomes one batch of each topic, that of requests
        last: a prompt whose blocks are not held yet would count as evicted."""
        done = False
        while not done:
            gathered: dict[str, list[Change]] = {}
            handed = self._queue.get()
            while handed is not None:
                topic, changes = handed
                gathered.setdefault(topic, []).extend(changes)
                if self._queue.empty():
                    break
                handed = self._queue.get()
            done = handed is None
            for topic in sorted(gathered, key=lambda each: each == ENGINE_TOPIC):
                if topic in self._logs:
                    self._pub.publish(self._logs[topic].append(gathered[topic]))

    def _serve_subscribers(self) -> None:
        """Until it is closed: connections, subscriptions, and what slow subscribers have not read.
        All of it takes `CLIENTS_SHARE` of the time at most: who is slow, or connects without end,
        waits."""
        share = WorkShare(CLIENTS_SHARE, SAVED_SECONDS)
        began = time.thread_time()
        while self._pub.turn(None):
            last, began = began, time.thread_time()
            time.sleep(share.rest(began - last))

    def _answer_all(self) -> None:
        """Until it is closed. A client that does not read keeps nobody from an answer, and no more
        than `REPLAY_QUEUED_BYTES` and one answer are queued for it."""
        replays, share = self._replays, self._replay_share
        blocked, began = False, time.thread_time()
        while self._router.turn(None if not replays else BLOCKED_SECONDS if blocked else 0):
            blocked = not self._send_one(replays)
            last, began = began, time.thread_time()
            time.sleep(share.rest(began - last))

    def _receive(self, client: Client, frames: list[bytes]) -> None:
        """A request has come."""
        self._replays.add(client.address, client, self._answers(frames, time.monotonic()))

    def _send_one(self, replays: _Replays) -> bool:
        """The next answer to the first client in turn that can take one; whether there was any."""
        for _ in range(len(replays)):
            client, replay = replays.next_turn()
            sent = self._send_next(client, replay)
            if sent is None:
                replays.discard(client)
            elif sent:
                return True
        return False

    def _answers(self, frames: list[bytes], asked: float) -> Iterator[tuple[bytes, bytes]]:
        """`frames`: an empty one, the request, and perhaps a topic. A request that is wrong is
        answered with the end alone."""
        request = frames[1] if len(frames) > 1 else b""
        topic = frames[2].decode(errors="replace") if len(frames) > 2 else self._config.topic
        log = self._logs.get(topic)
        try:
            yield from () if log is None else log.answer(request, asked)
        except ValueError:
            log = None
        if log is None:
            yield REPLAY_END, b""

    def _send_next(self, client: Client, replay: _Replay) -> bool | None:
        """Whether the next answer was sent; None: there is none, or the client lost the rest."""
        if client.is_closed:
            return None
        if replay.next is None:
            replay.go_on()
        if replay.next is None:
            return None
        if client.num_queued > REPLAY_QUEUED_BYTES:
            return False if time.monotonic() - replay.moment < REPLAY_SECONDS else None
        self._router.send(client, (b"", *replay.next))
        replay.next = None
        return True


def _reason(error: OSError) -> str:
    """Why an address cannot be bound; Python says itself that a path is too long."""
    return error.strerror or str(error)


class WorkShare:
    """Lets a thread work for a share of the time, and at once for what it has saved of it; never
    for more than half of the time, so that other threads have the interpreter lock in between."""

    def __init__(
        self, share: float, saved: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`saved`: seconds of work that may be saved at most, and are at the beginning."""
        self._share, self._most, self._clock = share, saved, clock
        self._saved, self._last = saved, clock()

    def rest(self, worked: float) -> float:
        """Seconds to rest after so many of work."""
        last, self._last = self._last, self._clock()
        self._saved = min(self._most, self._saved + (self._last - last) * self._share) - worked
        return worked if self._saved >= 0 else max(worked, -self._saved / self._share)


class _Replays:
    """The clients that are answered, in turns by address, and those of one address in turns."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, OrderedDict[Client, _Replay]] = OrderedDict()
        self._addresses: dict[Client, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, address: str, client: Client, answers: Iterator[tuple[bytes, bytes]]) -> None:
        """One more request. Beyond `MAX_REPLAYS` clients one loses the rest."""
        address = self._addresses.setdefault(client, address)
        self._turns.setdefault(address, OrderedDict()).setdefault(client, _Replay()).add(answers)
        if len(self) > MAX_REPLAYS:
            most = max(self._turns.values(), key=len)
            self.discard(next(iter(most)))

    def next_turn(self) -> tuple[Client, _Replay]:
        address, clients = next(iter(self._turns.items()))
        client, replay = next(iter(clients.items()))
        self._turns.move_to_end(address)
        clients.move_to_end(client)
        return client, replay

    def discard(self, client: Client) -> None:
        address = self._addresses.pop(client)
        clients = self._turns[address]
        del clients[client]
        if not clients:
            del self._turns[address]


class _Replay:
    """Answers to one client, made one at a time."""

    def __init__(self) -> None:
        self._answers: deque[Iterator[tuple[bytes, bytes]]] = deque(maxlen=MAX_REPLAYS)
        """To each of its requests."""
        self.next: tuple[bytes, bytes] | None = None
        self.moment = time.monotonic()
        """Since when `next` waits."""

    def add(self, answers: Iterator[tuple[bytes, bytes]]) -> None:
        self._answers.append(answers)

    def go_on(self) -> None:
        """Make the next answer; None: there is none."""
        self.moment = time.monotonic()
        while self._answers and self.next is None:
            self.next = next(self._answers[0], None)
            if self.next is None:
                self._answers.popleft()
