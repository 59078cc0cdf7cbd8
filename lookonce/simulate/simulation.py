"""A fleet on a virtual clock: requests of a trace, a router, and simulated servers.

    trace ─▶ router ─▶ SimulatedEngine ─▶ Outcome
               ▲  events, loads  │
               └─────────────────┘

`price` is the fleet's own router (`fleet.router`) with its index, fed with the engines' events and
loads as late as a real one gets them. The others are what it is compared with.
"""

from __future__ import annotations

import gc
import random
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.engine.process import cache_events
from lookonce.errors import ConfigError
from lookonce.fleet.identity import PIECE_TOKENS, Identity, Medium, Piece
from lookonce.fleet.index import short
from lookonce.fleet.router import EngineState, Route, Router
from lookonce.fleet.subscriber import (
    GATHER_SECONDS,
    Added,
    AllGone,
    Change,
    EngineLoad,
    Gone,
    PromptComputed,
)
from lookonce.simulate.engine import EngineSpec, Served, SimulatedEngine, VirtualClock
from lookonce.simulate.prices import Prices
from lookonce.simulate.tiers import shared_tiers
from lookonce.simulate.trace import TraceRequest, number_of
from lookonce.types.kv import OutputLayout

MODEL = "simulated"
CHARS_PER_TOKEN = 4
RING_POINTS = 64
"""Of each engine, for consistent hashing."""
YOUNG_OBJECTS = 200_000
"""Allocations between two collections of garbage."""
MOST_COMPARED = 64
"""Engines of which the router compares all."""
KNOWING_COMPARED, IDLE_COMPARED = 8, 4
"""Of more engines: those that know most of a request, and those with the least to do."""
_SPREAD = 0x9E3779B97F4A7C15
_MASK = 0xFFFF_FFFF_FFFF_FFFF


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated."""

    engines: int = 1
    router: str = "price"
    engine: EngineSpec = EngineSpec()
    seed: int = 0


class FleetRouter(Protocol):
    """Chooses an engine for each request."""

    def choose(self, served: Served) -> SimulatedEngine: ...

    def answered(self, served: Served) -> None: ...

    def ended(self, served: Served) -> None: ...


class LargeFleetRouter(Router):
    """The router, where comparing all engines for each request would take too long."""

    def route_among(
        self, request_id: str, identity: Identity, among: Sequence[EngineState]
    ) -> Route:
        """As `route`, but only these engines are compared."""
        everyone, self.engines = self.engines, {engine.name: engine for engine in among}
        try:
            return self.route(request_id, identity)
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

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self._clock = clock
        self.router = LargeFleetRouter()
        self._engines: dict[str, SimulatedEngine] = {}
        self._states: list[EngineState] = []
        """By number."""
        self._waiting: NDArray[np.float64] = np.zeros(0)
        """Seconds of work at each engine, by its number."""
        self._coming: dict[str, list[Change]] = {}
        """By engine: events that its subscriber has not handed on."""

    def add(self, engine: SimulatedEngine) -> None:
        self._engines[engine.name] = engine
        state = self.router.add_engine(engine.name, MODEL, follows=True)
        assert state.number == len(self._states)
        self._states.append(state)
        self._waiting = np.zeros(len(self._states))

    def choose(self, served: Served) -> SimulatedEngine:
        identity = identity_of(served.request)
        among = None
        if len(self._states) > MOST_COMPARED:
            among = self._likely(identity)
        name = str(served.number)
        if among is None:
            served.route = self.router.route(name, identity)
        else:
            served.route = self.router.route_among(name, identity, among)
        self._note_waiting(served.route.engine)
        return self._engines[served.route.engine.name]

    def _likely(self, identity: Identity) -> list[EngineState]:
        """The engines that know most of the request and have the least to do, and those that have
        the least to do at all."""
        found: dict[int, None] = {}
        for numbers in self.router.engines_that_know(identity):
            left = KNOWING_COMPARED - len(found)
            if len(numbers) > left:
                listed = np.fromiter(numbers, np.intp, len(numbers))
                order = np.argpartition(self._waiting[listed], left - 1)[:left]
                numbers = listed[order].tolist()
            found.update(dict.fromkeys(numbers))
            if len(found) >= KNOWING_COMPARED:
                break
        idle = np.argpartition(self._waiting, IDLE_COMPARED)[:IDLE_COMPARED]
        found.update(dict.fromkeys(idle.tolist()))
        return [self._states[number] for number in found]

    def _note_waiting(self, state: EngineState) -> None:
        self._waiting[state.number] = state.waiting_seconds()

    def answered(self, served: Served) -> None:
        self.router.answered(served.route, self._clock.now - served.arrival)
        self._note_waiting(served.route.engine)

    def ended(self, served: Served) -> None:
        failed = bool(served.failed)
        self.router.ended(str(served.number), served.route, failed=failed)
        if not failed:
            self.router.note_answer_tokens(served.request.output_tokens)
        self._note_waiting(served.route.engine)

    def publish(self, engine: SimulatedEngine, topic: str, changes: list[Any]) -> None:
        """What an engine's events tell; handed on together after `GATHER_SECONDS`."""
        coming = self._coming.get(engine.name)
        if coming is None:
            coming = self._coming[engine.name] = []
            self._clock.after(GATHER_SECONDS, self._apply, engine.name)
        for change in changes:
            _append(coming, topic, change)

    def _apply(self, name: str) -> None:
        self.router.apply(self.router.engines[name], self._coming.pop(name))


def _append(changes: list[Change], topic: str, change: cache_events.Change) -> None:
    """As a subscriber would get it; keys that come or go together are one change."""
    last = changes[-1] if changes else None
    if isinstance(change, cache_events.Stored | cache_events.Held):
        if isinstance(last, Added) and last.topic == topic:
            last.keys.append(short(change.key))
        else:
            changes.append(Added(topic, [short(change.key)]))
    elif isinstance(change, cache_events.Removed):
        if isinstance(last, Gone) and last.topic == topic:
            last.keys.append(short(change.key))
        else:
            changes.append(Gone(topic, [short(change.key)]))
    elif isinstance(change, cache_events.Load):
        changes.append(EngineLoad(*msgspec.structs.astuple(change)))
    elif isinstance(change, cache_events.Computed):
        told = change.request_id, change.num_tokens, list(change.items), change.block_hash
        changes.append(PromptComputed(*told))
    else:
        changes.append(AllGone(topic))


def identity_of(request: TraceRequest) -> Identity:
    """What the front-end would see in the request's body: pieces of text of about
    `PIECE_TOKENS` tokens, and media."""
    blocks, size = request.blocks, request.block_tokens
    pieces: list[Piece] = []

    def cut(end: int, num_tokens: int, medium: int | None) -> None:
        digest = (int(blocks[(end - 1) // size]) ^ (end * _SPREAD)) & _MASK or 1
        chars = num_tokens * CHARS_PER_TOKEN if medium is None else 0
        pieces.append(Piece(digest, chars, medium))

    def say(start: int, end: int) -> None:
        while start < end:
            stop = min(end, start + PIECE_TOKENS)
            cut(stop, stop - start, None)
            start = stop

    at = 0
    for number, medium in enumerate(request.media):
        say(at, medium.offset)
        at = medium.offset + medium.length
        cut(at, medium.length, number)
    say(at, request.prompt_tokens)
    media = tuple(Medium(m.modality, short(m.key), True) for m in request.media)
    return Identity(MODEL, media, tuple(pieces), request.output_tokens)


class _Plain:
    """A router that keeps nothing of requests."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self.engines: list[SimulatedEngine] = []
        self.random = random.Random(seed)

    def add(self, engine: SimulatedEngine) -> None:
        self.engines.append(engine)

    def answered(self, served: Served) -> None:
        """Nothing to learn."""

    def ended(self, served: Served) -> None:
        """Nothing to learn."""


class RoundRobin(_Plain):
    """One engine after the other."""

    def choose(self, served: Served) -> SimulatedEngine:
        return self.engines[served.number % len(self.engines)]


class PowerOfTwo(_Plain):
    """Of two engines at random the one with fewer requests: Ray Serve's default."""

    def choose(self, served: Served) -> SimulatedEngine:
        two = self.random.sample(self.engines, min(2, len(self.engines)))
        return min(two, key=lambda engine: engine.num_requests)


class LeastLoaded(_Plain):
    """The engine with the fewest requests."""

    def choose(self, served: Served) -> SimulatedEngine:
        return min(self.engines, key=lambda engine: engine.num_requests)


class ConsistentHash(_Plain):
    """By the first picture, or by the prompt's beginning where it has none."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        super().__init__(clock, seed)
        self._ring: list[tuple[int, int]] = []

    def add(self, engine: SimulatedEngine) -> None:
        number = len(self.engines)
        super().add(engine)
        points = (number_of("ring", number, point) for point in range(RING_POINTS))
        self._ring = sorted([*self._ring, *((point, number) for point in points)])

    def choose(self, served: Served) -> SimulatedEngine:
        request = served.request
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
        on_end: Callable[[Served], None] = lambda served: None,
    ) -> None:
        """Raises `ConfigError` for a router that there is not."""
        if spec.router not in ROUTERS:
            raise ConfigError(f"there is no router {spec.router!r}; there are {', '.join(ROUTERS)}")
        self.spec, self.prices = spec, prices
        self.clock = VirtualClock()
        self._told = on_end
        router = ROUTERS[spec.router](self.clock, spec.seed)
        self.router: FleetRouter = router
        block_bytes = prices.kv_token_bytes * prices.block_size
        shared = shared_tiers(spec.engine.kv_tiers, block_bytes, prices, self.clock)
        piece_bytes = OutputLayout.of_rows(prices.encoder_row_bytes, "uint8").piece_bytes
        outputs = shared_tiers(spec.engine.encoder_tiers, piece_bytes, prices, self.clock)
        self.engines = [
            SimulatedEngine(
                f"engine-{number}",
                spec.engine,
                prices,
                self.clock,
                on_first=self.router.answered,
                on_end=self._on_end,
                publish=getattr(router, "publish", None) if spec.engines > 1 else None,
                shared_tiers=shared,
                shared_outputs=outputs,
            )
            for number in range(spec.engines)
        ]
        for engine in self.engines:
            router.add(engine)
        self._requests: Iterator[TraceRequest] = iter(())
        self.num_arrived = self.num_ended = 0
        self._figures = Outcome(spec=spec, first_token=np.zeros(0), per_token=np.zeros(0))
        self._first: list[float] = []
        self._per_token: list[float] = []
        self._last_end = 0.0
        self._media: set[bytes] = set()
        self._by_engine: dict[str, int] = dict.fromkeys((e.name for e in self.engines), 0)

    def run(self, requests: Iterable[TraceRequest]) -> Outcome:
        """Serve all requests, which are in order of their arrivals."""
        self._requests = iter(requests)
        self._next_arrival()
        thresholds = gc.get_threshold()
        gc.freeze()  # the trace and the engines stay: they need not be searched
        gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
        try:
            self.clock.run()
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
        return self._outcome()

    def _next_arrival(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            served = Served(request, self.num_arrived, request.arrival)
            self.num_arrived += 1
            self.clock.at(request.arrival, self._arrive, served)

    def _arrive(self, served: Served) -> None:
        self._next_arrival()
        self._media.update(medium.key for medium in served.request.media)
        engine = self.router.choose(served)
        self._by_engine[engine.name] += 1
        if len(self.engines) > 1:
            self.clock.after(self.prices.route, engine.arrive, served)
        else:
            engine.arrive(served)

    def _on_end(self, served: Served) -> None:
        self.router.ended(served)
        self.num_ended += 1
        self._last_end = max(self._last_end, served.ended)
        request, found = served.request, self._figures
        found.requests += 1
        found.processed += served.processed
        found.media += len(request.media)
        if served.failed:
            found.failed += 1
        else:
            self._first.append(served.first_token - served.arrival)
            if request.output_tokens > 1:
                rest = served.ended - served.first_token
                self._per_token.append(rest / (request.output_tokens - 1))
            found.prompt_tokens += request.prompt_tokens
            found.output_tokens += request.output_tokens
            found.cached_tokens += served.cached_tokens
            found.external_tokens += served.external_tokens
        self._told(served)

    def _outcome(self) -> Outcome:
        found = self._figures
        found.first_token = np.array(self._first)
        found.per_token = np.array(self._per_token)
        found.seconds = self._last_end
        found.distinct_media = len(self._media)
        found.events = self.clock.num_events
        for engine in self.engines:
            stats = engine.scheduler.stats()
            found.steps += engine.totals.steps
            found.preemptions += int(stats["num_preemptions_total"])
            found.encoder_runs += int(stats["encoder_runs_total"])
        busy = sum(engine.totals.busy for engine in self.engines)
        found.busy = busy / (len(self.engines) * max(self._last_end, 1e-9))
        most = max(self._by_engine.values(), default=0)
        found.most_requests = most * len(self.engines) / max(1, found.requests)
        return found

    def check_integrity(self) -> None:
        """Raise where a request was lost, or an engine's caches disagree."""
        assert self.num_arrived == self.num_ended == self._figures.requests
        for engine in self.engines:
            engine.check_integrity()
        if isinstance(self.router, PriceRouter):
            self.router.router.check_integrity()
