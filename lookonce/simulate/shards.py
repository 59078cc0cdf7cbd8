"""Engines of a simulated fleet, in one process or in several.

    front-end and router ──▶ arrivals ──▶ EngineGroup: engines that share a clock
              ▲                                │
              └──── Told, later by a lag ◀─────┘

Nothing that an engine does reaches the front-end sooner than `lag_of` seconds later: a first token
and an end take as long as the price list says, and changes of caches are gathered before they are
handed on. So both may run apart for that long, in windows of time: the front-end's window needs
what engines have done up to a lag before its end, and engines need what the front-end has sent in
the same window. A group in another process (`ProcessShard`) works on a window while the front-end
is in the next ones. What comes out is the same (`tests/simulate/test_shards.py`).
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import msgspec
import numpy as np

from lookonce.errors import UnavailableError
from lookonce.fleet.subscriber import GATHER_SECONDS, Change
from lookonce.simulate.clock import VirtualClock
from lookonce.simulate.engine import EngineSpec, Served, SimulatedEngine
from lookonce.simulate.prices import Prices
from lookonce.simulate.tiers import shared_tiers
from lookonce.simulate.trace import TraceRequest
from lookonce.types.kv import OutputLayout
from lookonce.types.memory import resident_bytes

WINDOWS_AHEAD = 4
"""Of which the lag is made: so many the front-end may be ahead of the engines."""
YOUNG_OBJECTS = 200_000
"""Allocations between two collections of garbage."""
JOIN_SECONDS = 10.0
FINISH = b""
"""In place of a window: let all events happen, and tell the totals."""


def lag_of(prices: Prices) -> float:
    """Seconds after which the front-end learns of anything, at least."""
    return min(prices.first_token * min(prices.spread), GATHER_SECONDS / 4)


class Arrival(NamedTuple):
    """A request reaches an engine."""

    moment: float
    engine: int
    number: int
    request: TraceRequest


class Answered(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """A request's first token has come."""

    number: int
    first_token: float


class Ended(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """What has become of a request."""

    number: int
    ended: float
    cached_tokens: int
    external_tokens: int
    encoder_runs: int
    processed: int
    failed: str


class Changed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """What an engine's caches have gained and lost, and its load."""

    engine: int
    changes: list[Change]


Told: TypeAlias = Answered | Ended | Changed


class GroupTotals(NamedTuple):
    """What the engines of a group did."""

    steps: int
    busy: float
    preemptions: int
    encoder_runs: int
    events: int
    resident_bytes: int
    """Memory of the process, when all requests have ended."""


class EngineGroup:
    """Some of a fleet's engines. `tell` gets what they tell and when the front-end learns of it."""

    def __init__(
        self,
        spec: EngineSpec,
        prices: Prices,
        clock: VirtualClock,
        numbers: Sequence[int],
        tell: Callable[[float, Told], None],
        *,
        followed: bool,
    ) -> None:
        """`numbers` of the engines within the fleet; `followed`: somebody wants their events."""
        self._clock, self._tell = clock, tell
        self._lag = lag_of(prices)
        block_bytes = prices.kv_token_bytes * prices.block_size
        piece_bytes = OutputLayout.of_rows(prices.encoder_row_bytes, "uint8").piece_bytes
        shared = shared_tiers(spec.kv_tiers, block_bytes, prices, clock)
        outputs = shared_tiers(spec.encoder_tiers, piece_bytes, prices, clock)
        self.engines = {
            number: SimulatedEngine(
                number,
                spec,
                prices,
                clock,
                on_first=self._on_first,
                on_end=self._on_end,
                publish=self._publish if followed else None,
                shared_tiers=shared,
                shared_outputs=outputs,
            )
            for number in numbers
        }
        self._coming: dict[int, list[Change]] = {}
        """By engine: changes that are being gathered."""

    def take(self, arrival: Arrival) -> None:
        """The request comes at its moment."""
        served = Served(arrival.request, arrival.number)
        engine = self.engines[arrival.engine]
        if arrival.moment <= self._clock.now:
            engine.arrive(served)
        else:
            self._clock.at(arrival.moment, engine.arrive, served)

    def _on_first(self, served: Served) -> None:
        self._tell(served.first_token, Answered(served.number, served.first_token))

    def _on_end(self, served: Served) -> None:
        ended = Ended(
            served.number,
            served.ended,
            served.cached_tokens,
            served.external_tokens,
            served.encoder_runs,
            served.processed,
            served.failed,
        )
        self._tell(served.ended, ended)

    def _publish(self, engine: int, changes: list[Change]) -> None:
        """As a subscriber: what comes within `GATHER_SECONDS` of the first change, less what is on
        its way then, is handed on together."""
        coming = self._coming.get(engine)
        if coming is None:
            self._coming[engine] = list(changes)
            self._clock.after(GATHER_SECONDS - self._lag, self._hand_on, engine)
        else:
            coming += changes

    def _hand_on(self, engine: int) -> None:
        changed = Changed(engine, self._coming.pop(engine))
        self._tell(self._clock.now + self._lag, changed)

    def totals(self) -> GroupTotals:
        steps, busy, preemptions, encoder_runs = 0, 0.0, 0, 0
        for engine in self.engines.values():
            stats = engine.scheduler.stats()
            steps += engine.totals.steps
            busy += engine.totals.busy
            preemptions += int(stats["num_preemptions_total"])
            encoder_runs += int(stats["encoder_runs_total"])
        return GroupTotals(
            steps, busy, preemptions, encoder_runs, self._clock.num_events, resident_bytes()
        )

    def check_integrity(self) -> None:
        """Raise where an engine's caches disagree."""
        for engine in self.engines.values():
            engine.check_integrity()


# --- windows -------------------------------------------------------------------------------------


class Window(NamedTuple):
    """Work for a shard: what arrives before `until`, when it stops."""

    until: float
    arrivals: list[Arrival]


class Report(NamedTuple):
    """What the engines of a shard have told in a window, with the moments at which that reaches
    the front-end."""

    told: list[tuple[float, Told]]
    next_moment: float
    """Of an event of theirs; infinite where there is none."""


class ShardSpec(msgspec.Struct, frozen=True):
    """What another process needs to simulate some engines."""

    spec: EngineSpec
    prices: Prices
    numbers: list[int]
    followed: bool


T = TypeVar("T")


class Shard(Protocol):
    """Engines with a clock of their own."""

    numbers: Sequence[int]
    """Of the engines within the fleet."""

    def begin(self, window: Window) -> None: ...

    def receive(self) -> Report:
        """Of the earliest window of which none was received."""

    def finish(self) -> GroupTotals:
        """Let all events happen. Nothing else may be called any more."""

    def close(self) -> None: ...


class LocalShard:
    """In this process. Works on a window when its report is wanted: first others get theirs."""

    def __init__(
        self, spec: EngineSpec, prices: Prices, numbers: Sequence[int], *, followed: bool
    ) -> None:
        self.numbers = numbers
        self._clock = VirtualClock()
        self._told: list[tuple[float, Told]] = []
        self._windows: deque[Window] = deque()
        self.group = EngineGroup(spec, prices, self._clock, numbers, self._tell, followed=followed)

    def _tell(self, moment: float, told: Told) -> None:
        self._told.append((moment, told))

    def begin(self, window: Window) -> None:
        self._windows.append(window)

    def receive(self) -> Report:
        window = self._windows.popleft()
        for arrival in window.arrivals:
            self._clock.at(arrival.moment, self.group.take, arrival)
        self._clock.run(window.until)
        told, self._told = self._told, []
        return Report(told, self._clock.next_moment)

    def finish(self) -> GroupTotals:
        self._clock.run()
        return self.group.totals()

    def close(self) -> None:
        """Nothing to end."""


class ProcessShard:
    """In a process of its own."""

    def __init__(
        self, spec: EngineSpec, prices: Prices, numbers: Sequence[int], *, followed: bool
    ) -> None:
        self.numbers = numbers
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self._send(ShardSpec(spec, prices, list(numbers), followed))

    def begin(self, window: Window) -> None:
        self._send(window)

    def receive(self) -> Report:
        return self._receive(Report)

    def finish(self) -> GroupTotals:
        self._send_bytes(FINISH)
        return self._receive(GroupTotals)

    def close(self) -> None:
        self._connection.close()
        self._process.join(JOIN_SECONDS)
        if self._process.is_alive():
            self._process.kill()

    def _send(self, message: Any) -> None:
        self._send_bytes(_encode(message))

    def _send_bytes(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise UnavailableError("a process of the simulation has ended") from error

    def _receive(self, kind: type[T]) -> T:
        try:
            return _decode(self._connection.recv_bytes(), kind)
        except (EOFError, OSError) as error:
            raise UnavailableError("a process of the simulation has ended") from error


_encode = msgspec.msgpack.Encoder(enc_hook=lambda array: array.tobytes()).encode
"""Block numbers of requests become bytes."""


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=lambda _, data: np.frombuffer(data, np.uint64))


def _decode(message: bytes, kind: type[T]) -> T:
    decoded: T = _decoder(cast("Any", kind)).decode(message)
    return decoded


def _serve(connection: Connection) -> None:
    """The other process. A thread reads, so that the front-end never waits for a window to end
    before it can send the next one."""
    given = _decode(connection.recv_bytes(), ShardSpec)
    shard = LocalShard(given.spec, given.prices, given.numbers, followed=given.followed)
    windows: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, windows), daemon=True).start()
    with rare_collections():
        while (message := windows.get()) is not None:
            if message == FINISH:
                connection.send_bytes(_encode(shard.finish()))
                return
            shard.begin(_decode(message, Window))
            connection.send_bytes(_encode(shard.receive()))


def _read(connection: Connection, windows: queue.SimpleQueue[bytes | None]) -> None:
    try:
        while True:
            windows.put(connection.recv_bytes())
    except (EOFError, OSError):
        windows.put(None)


class Windows:
    """Runs the front-end's clock beside shards. `send` is asked for what was sent to each shard
    since it was asked last; `take` gets what engines tell, at its moment."""

    def __init__(
        self,
        clock: VirtualClock,
        shards: Sequence[Shard],
        lag: float,
        take: Callable[[Told], None],
        sent: Callable[[int], list[Arrival]],
    ) -> None:
        self._clock, self._shards = clock, shards
        self._width = lag / WINDOWS_AHEAD
        self._take, self._sent = take, sent
        self._outstanding = 0
        """Windows that all shards have begun and whose reports were not received."""
        self._next_moment = math.inf
        """Of any shard, when its last report came."""

    def run(self, is_done: Callable[[], bool]) -> None:
        number = 0
        while not is_done():
            if self._outstanding == WINDOWS_AHEAD:
                self._receive()
            if self._clock.next_moment > (number + WINDOWS_AHEAD) * self._width:
                number = self._skip(number)
            until = (number + 1) * self._width
            self._clock.run(until)
            for at, shard in enumerate(self._shards):
                shard.begin(Window(until, self._sent(at)))
            self._outstanding += 1
            number += 1
        while self._outstanding:
            self._receive()

    def _skip(self, number: int) -> int:
        """The first window in which anything happens."""
        while self._outstanding:
            self._receive()
        moment = min(self._clock.next_moment, self._next_moment)
        if math.isinf(moment):
            raise RuntimeError("requests were lost: nothing is left to happen")
        return max(number, int(moment / self._width) - 1)

    def _receive(self) -> None:
        self._outstanding -= 1
        self._next_moment = math.inf
        reports = [shard.receive() for shard in reversed(self._shards)]  # our own work first
        for report in reversed(reports):
            self._next_moment = min(self._next_moment, report.next_moment)
            for moment, told in report.told:
                self._clock.at(moment, self._take, told)


@contextmanager
def rare_collections() -> Iterator[None]:
    """What there is stays, and need not be searched for garbage; the rest is, seldom."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
