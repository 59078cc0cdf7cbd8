"""Follows what one engine's caches gain and lose, by its events (`docs/events.md`).

`TopicReader` is the protocol without sockets: it finds out what was lost, asks for it, and gives
the changes in order. `EventSubscriber` is a thread that reads the sockets and hands changes on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from lookonce.config import (
    ENCODER_TOPIC,
    ENGINE_TOPIC,
    ITEM_TOPIC,
    REPLAY_END,
    REPLAY_SNAPSHOT,
    REPLAY_START,
)
from lookonce.errors import ProtocolError
from lookonce.fleet.index import short

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

ANSWER_SECONDS = 5.0
"""How long the answers to one request may take."""
RETRY_SECONDS = 0.5
GATHER_SECONDS = 0.05
"""Batches that come within this time are handed on together: to be woken costs more than a batch,
and what was sent to an engine counts as held there before it says so."""
CHECK_SECONDS = 5.0
"""Between two questions to the engine whether there were other batches: a loss is known by the
batch after it, and none may come."""


class Added(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keys that the engine holds now, as the index lists them."""

    topic: str
    keys: list[int]


class Gone(msgspec.Struct, frozen=True, gc=False, tag=True):
    topic: str
    keys: list[int]


class AllGone(msgspec.Struct, frozen=True, gc=False, tag=True):
    topic: str


class PromptComputed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An engine has computed a request's prompt."""

    request_id: str
    num_tokens: int
    items: list[tuple[bytes, int]]
    """Key and length, in tokens, of its first media items."""
    block_hash: bytes | None = None
    """Of the last full block."""
    earlier_blocks: list[tuple[bytes, int]] | None = None
    """Hashes of some full blocks before it, and the tokens up to the end of each, in order."""


class EngineLoad(msgspec.Struct, frozen=True, gc=False, tag=True):
    """What `engine.process.cache_events.Load` says."""

    running: int
    waiting: int
    prompt_tokens: int
    prompt_seconds: float
    encoder_runs: int
    encode_seconds: float
    decoded_tokens: int
    decode_seconds: float
    tier_tokens: int = 0
    tier_token_seconds: float = 0.0
    tier_outputs: int = 0
    tier_output_seconds: float = 0.0
    decode_steps: int = 0
    machine: int = 0
    cores: int = 0
    threads: int = 0


Change: TypeAlias = Added | Gone | AllGone | PromptComputed | EngineLoad
Ask: TypeAlias = Callable[[bytes], list[tuple[int, bytes]]]
"""Sends a request and returns its answers: (number, batch). Raises `TimeoutError`."""


class TopicReader:
    """Reads the batches of one topic in order, whatever was lost. `topic` is named in changes.

    Raises `ProtocolError` for a batch that cannot be read."""

    def __init__(self, topic: str, ask: Ask) -> None:
        self._topic = topic
        self._ask = ask
        self._start: bytes | None = None
        """Names the start of the engine whose batches are read; None: the engine does not tell."""
        self._next: int | None = None
        self._last = -1
        """The number received last."""

    def begin(self) -> list[Change]:
        """Start with what is held now."""
        changes: list[Change] = []
        _, self._start = self._state()  # before the snapshot: a start after that is noticed later
        for number, payload in self._ask(REPLAY_SNAPSHOT):
            changes += self._read(payload)
            self._next = number + 1
        return changes

    def check(self) -> list[Change]:
        """The changes of batches after the last one that was read, for all that came of them."""
        if self._next is None:
            return self.begin()
        last, start = self._state()
        if start is None:  # what an engine of an older version has of that batch is all it tells
            kept = [number for number, _ in self._ask((self._next - 1).to_bytes(8, "big"))]
            if kept[:1] != [self._next - 1]:
                return self.begin()
            last = kept[-1]
        if start != self._start:
            return self.begin()
        return self._replay(last) if last >= self._next else []

    def receive(self, number: int, payload: bytes) -> list[Change]:
        """The changes of one batch, after those of all that were lost before it."""
        anew, self._last = number <= self._last or number == 0, number
        if self._next is None or anew:
            return self.begin()
        if number < self._next:
            return []  # a snapshot had it
        changes = self._catch_up(number) if number > self._next else []
        if number == self._next:
            changes += self._take(payload)
        return changes

    def _state(self) -> tuple[int, bytes | None]:
        """The number of the last batch, and what names the engine's start. An engine of an older
        version does not know the question: (-1, None)."""
        return next(iter(self._ask(REPLAY_START)), (-1, None))

    def _catch_up(self, number: int) -> list[Change]:
        _, start = self._state()
        return self._replay(number - 1) if start == self._start else self.begin()

    def _replay(self, last: int) -> list[Change]:
        """Changes of the batches from the next one up to `last`; of all that is held now, where
        they are forgotten."""
        assert self._next is not None
        changes: list[Change] = []
        for number, payload in self._ask(self._next.to_bytes(8, "big")):
            if number == self._next:
                changes += self._take(payload)
        return changes if self._next > last else self.begin()

    def _take(self, payload: bytes) -> list[Change]:
        """Changes of the next batch."""
        assert self._next is not None
        changes = self._read(payload)
        self._next += 1
        return changes

    def _read(self, payload: bytes) -> list[Change]:
        """Changes of a batch. Raises `ProtocolError`."""
        try:
            return list(self._changes(payload))
        except (msgspec.MsgspecError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise ProtocolError(f"a batch of {self._topic} cannot be read") from error

    def _changes(self, payload: bytes) -> Iterator[Change]:
        """Events are arrays or maps; others than these are left out."""
        for event in msgspec.msgpack.decode(payload)[1]:
            if isinstance(event, dict):
                kind, *fields = event.values()
            else:
                kind, *fields = event
            match kind:
                case "BlockStored" | "KeysHeld":
                    yield Added(self._topic, [short(key) for key in fields[0]])
                case "BlockRemoved" | "KeysRemoved":
                    yield Gone(self._topic, [short(key) for key in fields[0]])
                case "AllBlocksCleared" | "AllKeysCleared":
                    yield AllGone(self._topic)
                case "PromptComputed":
                    yield _converted(fields, PromptComputed)
                case "EngineLoad":
                    load = _converted(fields, EngineLoad)
                    if not all(0 <= value < math.inf for value in msgspec.structs.astuple(load)):
                        raise ValueError("a load has numbers from 0 on")
                    yield load


def _converted(fields: Sequence[Any], kind: type[T]) -> T:
    """Raises `ValidationError` where a field has not its type."""
    return msgspec.convert(dict(zip(kind.__struct_fields__, fields, strict=False)), kind)


class EventSubscriber:
    """A thread that follows one engine's events and calls `on_changes` with them, from itself.

    It asks for all that is held when it starts, and whenever the engine does not answer, again; and
    from time to time, whether it has missed something.
    """

    def __init__(
        self,
        address: str,
        replay_address: str,
        blocks_topic: str,
        on_changes: Callable[[list[Change]], None],
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        """ZMQ endpoints of an engine's `--events`; `check_seconds`: between two questions whether
        something was missed."""
        import zmq  # an optional dependency

        self._check_seconds = check_seconds
        self._zmq = zmq
        self._addresses = address, replay_address
        self._on_changes = on_changes
        self._stopped = threading.Event()
        self._context = zmq.Context()
        self._readers = {
            topic.encode(): TopicReader(topic, self._asking(topic))
            for topic in (blocks_topic, ENCODER_TOPIC, ITEM_TOPIC, ENGINE_TOPIC)
        }
        self._thread = threading.Thread(target=self._run, name="fleet-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; `on_changes` is called no more."""
        self._stopped.set()
        self._context.term()  # ends the thread's wait; returns when it has closed its sockets
        self._thread.join(timeout=ANSWER_SECONDS)

    def _run(self) -> None:
        sub = self._context.socket(self._zmq.SUB)
        sub.setsockopt(self._zmq.LINGER, 0)
        sub.setsockopt(self._zmq.RCVHWM, 100_000)
        try:
            sub.connect(self._addresses[0])
            for topic in self._readers:
                sub.setsockopt(self._zmq.SUBSCRIBE, topic)
            self._follow(sub)
        except self._zmq.ContextTerminated:
            pass  # `close` was called
        finally:
            sub.close()

    def _follow(self, sub: Any) -> None:
        """Until the context ends, which raises `ContextTerminated`."""
        begun: set[bytes] = set()
        checked = time.monotonic()
        while not self._stopped.is_set():
            try:
                for topic in self._readers.keys() - begun:
                    self._hand_over(self._readers[topic].begin())
                    begun.add(topic)
                left = checked + self._check_seconds - time.monotonic()
                if left > 0:
                    if sub.poll(math.ceil(1000 * left)):
                        self._read(sub)
                else:
                    for reader in self._readers.values():
                        self._hand_over(reader.check())
                    checked = time.monotonic()
            except TimeoutError:
                self._stopped.wait(RETRY_SECONDS)
                begun.clear()
            except self._zmq.ContextTerminated:
                raise
            except self._zmq.ZMQError as error:  # this process has no descriptor left
                logger.error("events of %s cannot be asked for: %s", self._addresses[0], error)
                self._stopped.wait(RETRY_SECONDS)
                begun.clear()
            except (ProtocolError, ValueError):  # ValueError: messages of other frames
                logger.exception("events of %s cannot be read", self._addresses[0])
                self._stopped.wait(RETRY_SECONDS)
                begun.clear()

    def _read(self, sub: Any) -> None:
        """What has come and comes within `GATHER_SECONDS`, as one list of changes."""
        self._stopped.wait(GATHER_SECONDS)
        changes: list[Change] = []
        try:
            while not self._stopped.is_set():
                topic, number, payload = sub.recv_multipart(self._zmq.NOBLOCK)
                reader = self._readers.get(topic)
                if reader is not None:
                    changes += reader.receive(int.from_bytes(number, "big"), payload)
        except self._zmq.Again:
            pass
        finally:  # what other topics told is read no second time, whatever one of them has
            self._hand_over(changes)

    def _hand_over(self, changes: list[Change]) -> None:
        if changes and not self._stopped.is_set():
            self._on_changes(changes)

    def _asking(self, topic: str) -> Ask:
        return lambda request: self._answers(request, topic)

    def _answers(self, request: bytes, topic: str) -> list[tuple[int, bytes]]:
        asked = self._context.socket(self._zmq.DEALER)
        try:
            asked.setsockopt(self._zmq.LINGER, 0)
            asked.connect(self._addresses[1])
            asked.send_multipart([b"", request, topic.encode()])
            answers: list[tuple[int, bytes]] = []
            deadline = time.monotonic() + ANSWER_SECONDS
            while (left := deadline - time.monotonic()) > 0:
                if asked.poll(math.ceil(left * 1000)):
                    _, number, payload = asked.recv_multipart()
                    if number == REPLAY_END:
                        return answers
                    answers.append((int.from_bytes(number, "big"), payload))
            raise TimeoutError("the engine does not answer")
        finally:
            asked.close()
