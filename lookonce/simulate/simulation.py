"""A fleet on a virtual clock: requests of a trace, a router, and simulated servers.

    trace ─▶ router ─▶ SimulatedEngine ─▶ Outcome
               ▲  events, loads  │
               └─────────────────┘

`price` is the fleet's own router (`fleet.router`) with its index, fed with the engines' events and
loads as late as a real one gets them. The others are what it is compared with.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.errors import ConfigError
from lookonce.fleet.identity import PIECE_TOKENS, Identity, Medium, Piece
from lookonce.fleet.index import short
from lookonce.fleet.router import EngineState, Route, Router
from lookonce.fleet.subscriber import Change
from lookonce.simulate.clock import VirtualClock
from lookonce.simulate.engine import EngineSpec, SimulatedEngine
from lookonce.simulate.following import BlockIndex, OutputIndex
from lookonce.simulate.prices import Prices
from lookonce.simulate.shards import (
    Answered,
    Arrival,
    Changed,
    Ended,
    EngineGroup,
    GroupTotals,
    LocalShard,
    ProcessShard,
    Shard,
    Told,
    Windows,
    lag_of,
    rare_collections,
)
from lookonce.simulate.tiers import SHARED
from lookonce.simulate.trace import TraceRequest, number_of

MODEL = "simulated"
CHARS_PER_TOKEN = 4
RING_POINTS = 64
"""Of each engine, for consistent hashing."""
FRONT_END_SHARE = 0.3
"""Of a simulation's work: traces and routing, which the first process does."""
MOST_COMPARED = 64
"""Engines of which the router compares all."""
KNOWING_COMPARED, IDLE_COMPARED = 8, 4
"""Of more engines: those that know most of a request, and those with the least to do."""
FEW_ENGINES = 64
"""So many are put in order sooner than they are found among all."""
_SPREAD = 0x9E3779B97F4A7C15
_MASK = 0xFFFF_FFFF_FFFF_FFFF


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated."""

    engines: int = 1
    router: str = "price"
    engine: EngineSpec = EngineSpec()
    seed: int = 0
    processes: int = 1
    """That simulate it. What comes out does not depend on them, but for `events`, and but for the
    order of what reaches the front-end from two of them in the same instant."""


@dataclass(slots=True)
class EngineHandle:
    """An engine as the front-end knows it."""

    name: str
    number: int
    num_requests: int = 0
    """Sent there and not ended."""


@dataclass(slots=True)
class Sent:
    """One request as the front-end knows it; times are of the virtual clock."""

    request: TraceRequest
    number: int
    engine: EngineHandle
    route: Any = None
    first_token: float = -1.0
    ended: float = -1.0
    cached_tokens: int = 0
    external_tokens: int = 0
    encoder_runs: int = 0
    processed: int = 0
    failed: str = ""

    @property
    def arrival(self) -> float:
        return self.request.arrival


class FleetRouter(Protocol):
    """Chooses an engine for each request."""

    followed: bool
    """Whether it wants the engines' events."""

    def add(self, engine: EngineHandle) -> None: ...

    def choose(self, request: TraceRequest, number: int) -> tuple[EngineHandle, Any]:
        """The engine, and what the router wants to see again with the request."""

    def answered(self, sent: Sent) -> None: ...

    def ended(self, sent: Sent) -> None: ...

    def apply(self, engine: int, changes: Sequence[Change]) -> None:
        """What the events of an engine tell."""


class LargeFleetRouter(Router):
    """The router, where comparing all engines for each request would take too long."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.outputs, self.items = BlockIndex(), OutputIndex(), OutputIndex()

    def route_among(
        self, request_id: str, identity: Identity, among: Sequence[EngineState], now: float
    ) -> Route:
        """As `route`, but only these engines are compared."""
        everyone, self.engines = self.engines, {engine.name: engine for engine in among}
        try:
            return self.route(request_id, identity, now=now)
        finally:
            self.engines = everyone

    def engines_that_know(self, identity: Identity) -> Iterator[Collection[int]]:
        """Numbers of engines that have computed, or are about to compute, beginnings of the prompt,
        the longest first; then of those that hold its media."""
        for piece in reversed(identity.pieces):
            node = self._nodes.get(piece.digest)
            if node is not None:
                yield node.blocks.keys()
        for medium in identity.media:
            holders = self.outputs.holders(medium.key) | self.items.holders(medium.key)
            numbers = []
            while holders:
                lowest = holders & -holders
                numbers.append(lowest.bit_length() - 1)
                holders ^= lowest
            yield numbers


class PriceRouter:
    """The fleet's own router, and what a front-end tells it."""

    followed = True

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self._clock = clock
        self.router = LargeFleetRouter()
        self._engines: list[EngineHandle] = []
        self._states: list[EngineState] = []
        """By number."""
        self._waiting: list[float] = []
        """Seconds of work at each engine, by its number."""
        self._idlest_first: list[tuple[float, int]] = []
        """These seconds and the engine's number, in order; of equal ones the lower number first."""

    def add(self, engine: EngineHandle) -> None:
        self._engines.append(engine)
        state = self.router.add_engine(engine.name, MODEL, follows=True)
        assert state.number == len(self._states) == engine.number
        self._states.append(state)
        self._waiting.append(0.0)
        insort(self._idlest_first, (0.0, engine.number))

    def choose(self, request: TraceRequest, number: int) -> tuple[EngineHandle, Any]:
        identity = identity_of(request)
        if len(self._states) > MOST_COMPARED:
            among = self._likely(identity)
            route = self.router.route_among(str(number), identity, among, self._clock.now)
        else:
            route = self.router.route(str(number), identity, now=self._clock.now)
        self._note_waiting(route.engine)
        return self._engines[route.engine.number], route

    def _likely(self, identity: Identity) -> list[EngineState]:
        """The engines that know most of the request and have the least to do, and those that have
        the least to do at all."""
        found: dict[int, None] = {}
        for numbers in self.router.engines_that_know(identity):
            left = KNOWING_COMPARED - len(found)
            if len(numbers) > left:
                numbers = self._idlest(numbers, left)
            found.update(dict.fromkeys(numbers))
            if len(found) >= KNOWING_COMPARED:
                break
        found.update(dict.fromkeys([each[1] for each in self._idlest_first[:IDLE_COMPARED]]))
        return [self._states[number] for number in found]

    def _idlest(self, numbers: Collection[int], count: int) -> list[int]:
        """Of these engines `count` with the least to do, in order."""
        if len(numbers) <= FEW_ENGINES:
            waiting = self._waiting
            return [each[1] for each in sorted([(waiting[n], n) for n in numbers])[:count]]
        wanted = set(numbers) if isinstance(numbers, list) else numbers
        found = []
        for _, number in self._idlest_first:
            if number in wanted:
                found.append(number)
                if len(found) == count:
                    break
        return found

    def _note_waiting(self, state: EngineState) -> None:
        number, seconds = state.number, state.queued_seconds()
        before, self._waiting[number] = self._waiting[number], seconds
        if seconds != before:
            ordered = self._idlest_first
            del ordered[bisect_left(ordered, (before, number))]
            insort(ordered, (seconds, number))

    def answered(self, sent: Sent) -> None:
        self.router.answered(sent.route, self._clock.now - sent.arrival)
        self._note_waiting(sent.route.engine)

    def ended(self, sent: Sent) -> None:
        failed = bool(sent.failed)
        now = self._clock.now
        self.router.ended(str(sent.number), sent.route, failed=failed, now=now)
        if not failed:
            self.router.note_answer_tokens(sent.request.output_tokens)
        self._note_waiting(sent.route.engine)

    def apply(self, engine: int, changes: Sequence[Change]) -> None:
        self.router.apply(self._states[engine], changes)

    def check_integrity(self) -> None:
        """Raise where what is kept of engines disagrees."""
        self.router.check_integrity()
        assert self._idlest_first == sorted((s, n) for n, s in enumerate(self._waiting))


def identity_of(request: TraceRequest) -> Identity:
    """What the front-end would see in the request's body: pieces of text of about
    `PIECE_TOKENS` tokens, and media."""
    size = request.block_tokens
    cuts: list[tuple[int, int, int | None]] = []
    """(end, characters, number of the medium) of each piece."""
    at = 0
    for number, medium in enumerate(request.media):
        cuts += _text(at, medium.offset)
        at = medium.offset + medium.length
        cuts.append((at, 0, number))
    cuts += _text(at, request.prompt_tokens)
    blocks: list[int] = request.blocks.tolist()
    pieces = [
        Piece((blocks[(end - 1) // size] ^ (end * _SPREAD)) & _MASK or 1, chars, medium)
        for end, chars, medium in cuts
    ]
    media = tuple(
        [Medium(m.modality, short(m.key), True, num_bytes=m.num_bytes) for m in request.media]
    )
    return Identity(MODEL, media, tuple(pieces), request.output_tokens)


def _text(start: int, end: int) -> list[tuple[int, int, None]]:
    """The pieces of a stretch of text, as `identity_of` cuts it."""
    stops = [*range(start + PIECE_TOKENS, end, PIECE_TOKENS), end] if start < end else []
    found: list[tuple[int, int, None]] = []
    for stop in stops:
        found.append((stop, (stop - start) * CHARS_PER_TOKEN, None))
        start = stop
    return found


class _Plain:
    """A router that keeps nothing of requests."""

    followed = False

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self.engines: list[EngineHandle] = []
        self.random = random.Random(seed)

    def add(self, engine: EngineHandle) -> None:
        self.engines.append(engine)

    def choose(self, request: TraceRequest, number: int) -> tuple[EngineHandle, Any]:
        return self.engine_for(request, number), None

    def engine_for(self, request: TraceRequest, number: int) -> EngineHandle:
        raise NotImplementedError

    def answered(self, sent: Sent) -> None:
        """Nothing to learn."""

    def ended(self, sent: Sent) -> None:
        """Nothing to learn."""

    def apply(self, engine: int, changes: Sequence[Change]) -> None:
        """Nothing to learn."""


class RoundRobin(_Plain):
    """One engine after the other."""

    def engine_for(self, request: TraceRequest, number: int) -> EngineHandle:
        return self.engines[number % len(self.engines)]


class PowerOfTwo(_Plain):
    """Of two engines at random the one with fewer requests: Ray Serve's default."""

    def engine_for(self, request: TraceRequest, number: int) -> EngineHandle:
        two = self.random.sample(self.engines, min(2, len(self.engines)))
        return min(two, key=lambda engine: engine.num_requests)


class LeastLoaded(_Plain):
    """The engine with the fewest requests."""

    def engine_for(self, request: TraceRequest, number: int) -> EngineHandle:
        return min(self.engines, key=lambda engine: engine.num_requests)


class ConsistentHash(_Plain):
    """By the first picture, or by the prompt's beginning where it has none."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        super().__init__(clock, seed)
        self._ring: list[tuple[int, int]] = []

    def add(self, engine: EngineHandle) -> None:
        number = len(self.engines)
        super().add(engine)
        points = (number_of("ring", number, point) for point in range(RING_POINTS))
        self._ring = sorted([*self._ring, *((point, number) for point in points)])

    def engine_for(self, request: TraceRequest, number: int) -> EngineHandle:
        if request.media:
            place = number_of(request.media[0].key.hex())
        else:
            last = min(PIECE_TOKENS, request.prompt_tokens) - 1
            place = number_of(int(request.blocks[last // request.block_tokens]))
        at = bisect_left(self._ring, (place, 0)) % len(self._ring)
        return self.engines[self._ring[at][1]]


ROUTERS: dict[str, Callable[[VirtualClock, int], Any]] = {
    "price": PriceRouter,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "least_loaded": LeastLoaded,
    "consistent_hash": ConsistentHash,
}


class Outcome(msgspec.Struct, kw_only=True):
    """What a simulation found."""

    spec: FleetSpec
    requests: int = 0
    failed: int = 0
    seconds: float = 0.0
    """From the first arrival to the last end."""
    first_token: NDArray[np.float64]
    """Seconds of each request that was answered."""
    per_token: NDArray[np.float64]
    """Seconds of each token after the first, of each answer that has several."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    output_tokens: int = 0
    media: int = 0
    processed: int = 0
    encoder_runs: int = 0
    distinct_media: int = 0
    steps: int = 0
    preemptions: int = 0
    busy: float = 0.0
    """Mean share of the time in which an engine computes."""
    most_requests: float = 0.0
    """Share of all requests that the engine with most of them got, times the engines."""
    events: int = 0
    resident_bytes: tuple[int, ...] = ()
    """Memory of each process that simulates, when all requests have ended."""

    def figures(self) -> dict[str, float | int | None]:
        """Name → value; times in seconds, shares of 1. None where there is nothing to tell of."""
        return {
            "requests": self.requests,
            "failed": self.failed,
            "seconds": self.seconds,
            "first_token_p50": percentile(self.first_token, 50),
            "first_token_p90": percentile(self.first_token, 90),
            "first_token_p99": percentile(self.first_token, 99),
            "per_token_p50": percentile(self.per_token, 50),
            "per_token_p99": percentile(self.per_token, 99),
            "prompt_tokens": self.prompt_tokens,
            "prefix_hit_rate": _share(self.cached_tokens, self.prompt_tokens),
            "external_hit_rate": _share(self.external_tokens, self.prompt_tokens),
            "processor_hit_rate": _share(self.media - self.processed, self.media),
            "encoder_runs": self.encoder_runs,
            "encoder_runs_per_medium": _share(self.encoder_runs, self.distinct_media),
            "output_tokens_per_second": _share(self.output_tokens, self.seconds),
            "busy": self.busy,
            "imbalance": self.most_requests,
            "preemptions": self.preemptions,
            "steps": self.steps,
            "events": self.events,
        }


def percentile(values: NDArray[np.float64], percent: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not len(values):
        return None
    rank = min(len(values) - 1, max(0, round(percent / 100 * len(values) + 0.5) - 1))
    return float(np.partition(values, rank)[rank])


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class Simulation:
    """One run. Requests come as their trace says, whatever became of earlier ones."""

    def __init__(
        self,
        spec: FleetSpec,
        prices: Prices,
        on_end: Callable[[Sent], None] = lambda sent: None,
    ) -> None:
        """Raises `ConfigError` as `check_spec` does."""
        check_spec(spec, prices)
        self.spec, self.prices = spec, prices
        self.clock = VirtualClock()
        self._told = on_end
        self.router: FleetRouter = ROUTERS[spec.router](self.clock, spec.seed)
        self._handles = [EngineHandle(f"engine-{n}", n) for n in range(spec.engines)]
        for handle in self._handles:
            self.router.add(handle)
        self._requests: Iterator[TraceRequest] = iter(())
        self._open: dict[int, Sent] = {}
        """By number: requests that have not ended."""
        self.num_arrived = self.num_ended = 0
        self._ended_trace = False
        self._figures = Outcome(spec=spec, first_token=np.zeros(0), per_token=np.zeros(0))
        self._first, self._per_token = array("d"), array("d")
        self._last_end = 0.0
        self._media: set[bytes] = set()
        self._by_engine = [0] * spec.engines
        self._followed = self.router.followed and spec.engines > 1
        self._group: EngineGroup | None = None
        self._arrivals: list[list[Arrival]] = []
        """By shard: sent in this window."""
        self._shard_of: list[int] = []
        """By engine."""
        if spec.processes == 1:
            self._group = EngineGroup(
                spec.engine,
                prices,
                self.clock,
                range(spec.engines),
                lambda moment, told: self.clock.at(moment, self._take, told),
                followed=self._followed,
            )

    @property
    def engines(self) -> list[SimulatedEngine]:
        """Where one process simulates them."""
        return [] if self._group is None else list(self._group.engines.values())

    def run(self, requests: Iterable[TraceRequest]) -> Outcome:
        """Serve all requests, which are in order of their arrivals. Raises `UnavailableError` where
        another process of the simulation ends."""
        if self._group is not None:
            self._begin(requests)
            with rare_collections():
                self.clock.run()
            return self._outcome([self._group.totals()])
        shards = self._open_shards()
        try:
            return self.run_in_shards(requests, shards)
        finally:
            for shard in shards:
                shard.close()

    def _open_shards(self) -> list[Shard]:
        """The first process has fewer engines, as it also makes the trace and routes."""
        numbers = shares(self.spec.engines, self.spec.processes)
        given = self.spec.engine, self.prices
        shards: list[Shard] = []
        try:
            for each in numbers[1:]:
                shards.append(ProcessShard(*given, each, followed=self._followed))  # noqa: PERF401
            shards.append(LocalShard(*given, numbers[0], followed=self._followed))
        except BaseException:
            for shard in shards:  # those that were started must not stay
                shard.close()
            raise
        return shards

    def run_in_shards(self, requests: Iterable[TraceRequest], shards: Sequence[Shard]) -> Outcome:
        """As `run`; the last shard works when the others have begun."""
        self._shard_of = [0] * self.spec.engines
        for at, shard in enumerate(shards):
            for number in shard.numbers:
                self._shard_of[number] = at
        self._arrivals = [[] for _ in shards]
        windows = Windows(self.clock, shards, lag_of(self.prices), self._take, self._take_arrivals)
        self._begin(requests)
        with rare_collections():
            windows.run(lambda: self._ended_trace and not self._open)
        return self._outcome([shard.finish() for shard in shards])

    def _take_arrivals(self, shard: int) -> list[Arrival]:
        arrivals, self._arrivals[shard] = self._arrivals[shard], []
        return arrivals

    def _begin(self, requests: Iterable[TraceRequest]) -> None:
        self._requests = iter(requests)
        self._next_arrival()

    def _next_arrival(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._ended_trace = True
        else:
            self.clock.at(request.arrival, self._arrive, request)

    def _arrive(self, request: TraceRequest) -> None:
        number, self.num_arrived = self.num_arrived, self.num_arrived + 1
        self._media.update([medium.key for medium in request.media])
        engine, route = self.router.choose(request, number)
        engine.num_requests += 1
        self._by_engine[engine.number] += 1
        self._open[number] = Sent(request, number, engine, route)
        moment = self.clock.now + (self.prices.route if len(self._handles) > 1 else 0.0)
        arrival = Arrival(moment, engine.number, number, request)
        if self._group is not None:
            self._group.take(arrival)
        else:
            self._arrivals[self._shard_of[engine.number]].append(arrival)
        self._next_arrival()

    def _take(self, told: Told) -> None:
        """What engines tell has come."""
        match told:
            case Changed():
                self.router.apply(told.engine, told.changes)
            case Answered():
                sent = self._open[told.number]
                sent.first_token = told.first_token
                self.router.answered(sent)
            case Ended():
                sent = self._open.pop(told.number)
                sent.ended, sent.failed = told.ended, told.failed
                sent.cached_tokens, sent.external_tokens = told.cached_tokens, told.external_tokens
                sent.encoder_runs, sent.processed = told.encoder_runs, told.processed
                self._end(sent)

    def _end(self, sent: Sent) -> None:
        sent.engine.num_requests -= 1
        self.router.ended(sent)
        self.num_ended += 1
        self._last_end = max(self._last_end, sent.ended)
        request, found = sent.request, self._figures
        found.requests += 1
        found.processed += sent.processed
        found.media += len(request.media)
        if sent.failed:
            found.failed += 1
        else:
            self._first.append(sent.first_token - sent.arrival)
            if request.output_tokens > 1:
                rest = sent.ended - sent.first_token
                self._per_token.append(rest / (request.output_tokens - 1))
            found.prompt_tokens += request.prompt_tokens
            found.output_tokens += request.output_tokens
            found.cached_tokens += sent.cached_tokens
            found.external_tokens += sent.external_tokens
        self._told(sent)

    def _outcome(self, totals: Sequence[GroupTotals]) -> Outcome:
        found = self._figures
        found.first_token = np.array(self._first)
        found.per_token = np.array(self._per_token)
        found.seconds = self._last_end
        found.distinct_media = len(self._media)
        found.events = sum(each.events for each in totals)
        found.resident_bytes = tuple(each.resident_bytes for each in totals)
        found.steps = sum(each.steps for each in totals)
        found.preemptions = sum(each.preemptions for each in totals)
        found.encoder_runs = sum(each.encoder_runs for each in totals)
        busy = sum(each.busy for each in totals)
        found.busy = busy / (len(self._handles) * max(self._last_end, 1e-9))
        most = max(self._by_engine, default=0)
        found.most_requests = most * len(self._handles) / max(1, found.requests)
        return found

    def check_integrity(self) -> None:
        """Raise where a request was lost, or an engine's caches disagree."""
        assert self.num_arrived == self.num_ended == self._figures.requests
        assert all(handle.num_requests == 0 for handle in self._handles)
        if self._group is not None:
            self._group.check_integrity()
        if isinstance(self.router, PriceRouter):
            self.router.check_integrity()


def shares(engines: int, processes: int) -> list[list[int]]:
    """Numbers of the engines of each process, of which the first has more to do than others. Those
    of each are spread over all: of equal engines the router takes the lower numbers."""
    first = max(0.0, (1.0 / processes - FRONT_END_SHARE) / (1.0 - FRONT_END_SHARE))
    of_first = round(engines * first)
    own = [number * engines // of_first for number in range(of_first)]
    rest = sorted(set(range(engines)) - set(own))
    return [own, *(rest[n :: processes - 1] for n in range(processes - 1))]


def check_spec(spec: FleetSpec, prices: Prices) -> None:
    """Raises `ConfigError` for a router that there is not, and for more than one process where
    engines share a tier, or the front-end learns of first tokens at once."""
    if spec.router not in ROUTERS:
        raise ConfigError(f"there is no router {spec.router!r}; there are {', '.join(ROUTERS)}")
    if spec.processes == 1:
        return
    tiers = (*spec.engine.kv_tiers, *spec.engine.encoder_tiers)
    shared = next((tier for tier in tiers if tier.kind in SHARED), None)
    if shared is not None:
        raise ConfigError(
            f"engines share the tier {shared.kind}: one process simulates them all, not"
            f" {spec.processes}"
        )
    if not prices.first_token:
        raise ConfigError(
            "a first token that takes no time (first_token of the price list) is simulated by one"
            f" process, not {spec.processes}"
        )
