"""Chooses an engine for a request: the one where it costs the fewest seconds.

    price(engine) =   work that waits there: of requests sent from here and not answered yet,
                      without what should be done by now of the one that is first; and of as many
                      others as the engine reports
                  +   where it shares cores with other engines: what it takes from these, and what
                      it takes longer where it has been idle
                  +   encoder runs of media whose outputs are not held there
                  +   processing of media that are not held there in any form
                  +   prompt tokens beyond the longest beginning that was computed there

What another engine holds, and a shared tier (`--encoder-tier`, `--kv-tier`) gives faster than it is
computed, costs what the tier takes: known once any engine has loaded something.

All but what waits and idleness is counted `RECOMPUTED` times, as it also keeps others waiting: a
price is no forecast of the first token. Rates are those that each engine measures at its warm-up
and as it runs; what processing takes is a guess until first tokens tell. Where nothing is reused
all but the first two is equal, so that the least loaded engine is chosen; a picture that everybody
asks about gets a second engine when the queue of the first costs more than encoding it again.

Of engines that share cores no more should compute at a time than there are cores for: more of them
do the same work in the same time, and each first token is later. So what no engine knows goes to
one that is busy or was last, until more waits there than another one would take from it, or until
what is evicted there is missed.

What engines hold is known from their events, and what they are about to hold from what was sent to
them. Keys of media and blocks are exact; which prompt has which blocks is learned from
`PromptComputed`. No I/O, no clock (`route` is told the time): for one thread.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

from blake3 import blake3

from lookonce.config import ENCODER_TOPIC, ENGINE_TOPIC, ITEM_TOPIC
from lookonce.fleet.identity import Identity, Medium
from lookonce.fleet.index import DEFAULT_MAX_ENTRIES, DigestIndex, short
from lookonce.fleet.subscriber import (
    Added,
    AllGone,
    Change,
    EngineLoad,
    Gone,
    PromptComputed,
)
from lookonce.types.lora import adapted_item_key
from lookonce.types.step_costs import StepCosts
from lookonce.types.tenant_lru import TenantLRU

MAX_PROMPT_NODES = 200_000
MAX_ALIASES = 65_536
MAX_LENGTHS = 65_536
MAX_SESSIONS = 65_536
MAX_STORED = 65_536
MAX_UNTOLD_PIECES = 65_536
"""Of an engine's prompts whose answers ended before it told that they were computed."""
UNTOLD_LOADS = 2
"""Loads after which an engine that has not told of an ended request's prompt will not do so: it was
aborted. The first of them may have been on its way already."""
RATE_WEIGHT = 0.3
"""Of a new measurement beside those before."""
MOST_PROCESSING = 3.0
"""Times what processing was taken to cost, that one first token can tell: it may have waited for
something else."""
MOST_PROGRESS = 0.9
"""Share of a request's work until its first token that is taken for done because its time has
passed: an engine that is slower than it was, or has stopped, does not look idle."""
LEAST_PROCESSING = 1e-3
MEGABYTE = 1e6
MIN_LOADS = 4
"""Measurements after which an engine's own rates are used."""
MIN_TOKENS = 32
"""Computed between two loads: fewer say nothing of a rate."""
MIN_PROMPTS = 4
"""Computed between two measurements of what a request takes."""
UNLIKE = 2.0
"""Engines whose rates differ by less are taken for equal."""
RECOMPUTED = 1.5
BESIDE = 0.5
"""Share of the seconds of a token that it adds to a step which decodes others, too; used until
that is measured."""
LEAST_BESIDE = 0.1
"""The least share that is counted: beside what it adds to their steps, a request delays answers by
its prompt."""
MOST_IDLE = 0.003
"""Seconds that a request takes longer at an engine that has done nothing for a long time, and
half of that after `HALF_IDLE` seconds, as `lookonce bench prices` finds it (docs/simulate.md)."""
HALF_IDLE = 0.015
STORED_KEPT = 0.98
"""Weight of the prompts before at a new one, in what an engine has stored and evicted."""
EQUAL_SECONDS = 1e-4
"""Prices that differ by less are equal: the engine with fewer requests is chosen."""
DEFAULT_ANSWER_TOKENS = 64.0
DEFAULT_MEDIA_TOKENS = 256.0
DEFAULT_CHARS_PER_TOKEN = 4.0


@dataclass(slots=True)
class Rates:
    """Seconds that an engine takes for each of these; the defaults are used until it says so."""

    prompt_token: float = 2e-4
    encoder_run: float = 0.05
    decoded_token: float = 2e-3
    beside: float = BESIDE
    """Share of `decoded_token` that one more sequence adds to a step."""
    processing: float = 0.01
    """Of one media item, whatever its size; as the next one a guess until first tokens tell."""
    processing_megabyte: float = 0.02
    """Of each MB of it, as it was sent; a medium whose bytes are not known counts none."""
    tier_output: float | None = None
    """Of an encoder output that a shared tier gives instead; None: none has given any yet."""
    tier_token: float | None = None
    """Of a prompt token whose KV a shared tier gives; None: none has given any yet."""

    def is_slower(self, usual: Rates) -> bool:
        """Whether steps take so much longer than usual that it is no noise. What processing takes
        is what first tokens leave unexplained: it differs by more between equal engines."""
        return (
            self.prompt_token > UNLIKE * usual.prompt_token
            or self.encoder_run > UNLIKE * usual.encoder_run
            or self.decoded_token > UNLIKE * usual.decoded_token
        )


@dataclass(slots=True)
class Work:
    """What a request costs at one engine, in seconds."""

    prompt: float = 0.0
    encoding: float = 0.0
    """Encoder runs, and outputs that a tier gives."""
    processing: float = 0.0
    answer: float = 0.0
    known_tokens: int = 0
    num_tokens: int = 0
    num_known: int = 0
    """Media that need no encoder run."""
    num_held_media: int = 0
    """Media that are held in any form: these, and those that were processed there."""
    num_processed: int = 0
    """Media that have to be processed."""
    processed_bytes: int = 0
    """Of these, as far as they are known."""

    @property
    def to_first_token(self) -> float:
        return self.prompt + self.encoding + self.processing

    def knows_more_than(self, other: Work) -> bool:
        """Of the prompt's beginning or of the media; so much that its first token is earlier. That
        may also be earlier because an engine is faster."""
        return self.to_first_token < other.to_first_token - EQUAL_SECONDS and (
            self.known_tokens > other.known_tokens
            or self.num_known > other.num_known
            or self.num_held_media > other.num_held_media
        )


class EngineState:
    """One engine as the router knows it."""

    def __init__(self, name: str, number: int, model: str) -> None:
        self.name, self.number, self.model = name, number, model
        self.adapters: frozenset[str] = frozenset()
        """Names of LoRA adapters that it serves beside the model."""
        self.rates = Rates()
        self._decode_steps = StepCosts()
        self.num_loads = 0
        """Loads that told of work done since the one before."""
        self.accepts = True
        """False: it drains, or is not reachable; it gets no new requests."""
        self.late = False
        """It has been silent for longer than is usual: it gets no new requests where others of its
        model take them, but for those that go on with what it has stored."""
        self.load: EngineLoad | None = None
        self.backlog = 0.0
        """Seconds of what was sent from here and is not done."""
        self.unanswered: dict[int, Route] = {}
        """What was sent from here and has no first token, in the order in which it was sent; by
        the route's `id`."""
        self.first_began = 0.0
        """When the engine could begin with the first of these."""
        self.last_busy = 0.0
        """When a request that was sent from here ended."""
        self.stored_tokens = self.evicted_tokens = 0.0
        """Prompt tokens that it computed for requests from here, and those that were asked for
        again when it had evicted them; older ones count less."""
        self.num_requests = 0
        """Sent from here and not ended."""
        self.most_requests = 0
        """The largest number of these since the last load came."""
        self.others = 0
        """Requests of the last load that were not sent from here."""
        self.expected: Counter[int] = Counter()
        """Keys of encoder outputs that requests on their way there bring."""
        self.untold: dict[str, list[Route]] = {}
        """Id of a request → routes with it that ended before the engine told of the prompt: events
        come later than a short answer ends. The oldest is first."""
        self.num_untold_pieces = 0
        self.num_told = 0
        """Loads that it told of."""

    def serves(self, model: str | None) -> bool:
        return model in (None, self.model) or model in self.adapters

    def note_load(self, load: EngineLoad) -> None:
        self._give_up_untold()
        before, self.load = self.load, load
        self.others = max(0, load.running + load.waiting - self.most_requests)
        self.most_requests = self.num_requests
        if before is None or before.prompt_tokens > load.prompt_tokens:
            before = EngineLoad(0, 0, 0, 0.0, 0, 0.0, 0, 0.0)
        rates, prompt_tokens = self.rates, load.prompt_tokens - before.prompt_tokens
        self.num_loads += prompt_tokens >= MIN_TOKENS
        if prompt_tokens:
            rates.prompt_token = _corrected(
                rates.prompt_token,
                load.prompt_seconds - before.prompt_seconds,
                prompt_tokens,
                first=before.prompt_tokens == 0,
            )
        if decoded_tokens := load.decoded_tokens - before.decoded_tokens:
            rates.decoded_token = _corrected(
                rates.decoded_token,
                load.decode_seconds - before.decode_seconds,
                decoded_tokens,
                first=before.decoded_tokens == 0,
            )
            self._note_decode_steps(
                load.decode_steps - before.decode_steps,
                decoded_tokens,
                load.decode_seconds - before.decode_seconds,
            )
        if encoder_runs := load.encoder_runs - before.encoder_runs:
            rates.encoder_run = _corrected(
                rates.encoder_run,
                load.encode_seconds - before.encode_seconds,
                encoder_runs,
                first=before.encoder_runs == 0,
                least=1,
            )
        if load.tier_outputs:
            rates.tier_output = _of_tier(
                rates.tier_output,
                load.tier_output_seconds - before.tier_output_seconds,
                load.tier_outputs - before.tier_outputs,
            )
        if load.tier_tokens:
            rates.tier_token = _of_tier(
                rates.tier_token,
                load.tier_token_seconds - before.tier_token_seconds,
                load.tier_tokens - before.tier_tokens,
            )

    def note_processing(self, work: Work, seconds: float) -> None:
        """What these media took beside all that the engine did. How much is due to each item and
        how much to its bytes is told apart by normalised least mean squares: a large picture says
        little of small ones."""
        if seconds <= 0:
            return
        rates = self.rates
        count, megabytes = work.num_processed, work.processed_bytes / MEGABYTE
        expected = rates.processing * count + rates.processing_megabyte * megabytes
        wrong = min(seconds, MOST_PROCESSING * expected) - expected
        step = RATE_WEIGHT * wrong / (count * count + megabytes * megabytes)
        rates.processing = max(LEAST_PROCESSING, rates.processing + step * count)
        rates.processing_megabyte = max(0.0, rates.processing_megabyte + step * megabytes)

    def _note_decode_steps(self, steps: int, tokens: int, seconds: float) -> None:
        if steps <= 0 or seconds <= 0:
            return  # an engine of another version tells of no steps
        self._decode_steps.add(steps, tokens, seconds)
        added = self._decode_steps.added()
        if added is not None:
            share = added / self.rates.decoded_token
            self.rates.beside = min(1.0, max(LEAST_BESIDE, share))

    def note_sent(self, route: Route) -> None:
        if not self.unanswered:
            self.first_began = route.sent
        self.unanswered[id(route)] = route

    def note_answered(self, route: Route, now: float) -> None:
        """It has its first token, or will have none. One that was not the first of them says
        nothing of how far that is."""
        if next(iter(self.unanswered), None) == id(route):
            self.first_began = now
        self.unanswered.pop(id(route), None)

    @property
    def machine(self) -> int:
        """Names the cores that it shares with the engines that name the same; 0: none."""
        return 0 if self.load is None else self.load.machine

    def idle_seconds(self, now: float) -> float:
        """How much longer a request takes because it has had nothing to do: the model and the code
        have left the caches of the cores."""
        if self.num_requests or self.others:
            return 0.0
        return MOST_IDLE * (1.0 - HALF_IDLE / (HALF_IDLE + max(0.0, now - self.last_busy)))

    def evicting_seconds(self, work: Work) -> float:
        """What is computed again because this prompt takes its place."""
        if not self.evicted_tokens:
            return 0.0
        return work.prompt * min(1.0, self.evicted_tokens / max(1.0, self.stored_tokens))

    def note_stored(self, num_tokens: int) -> None:
        self.stored_tokens = STORED_KEPT * self.stored_tokens + num_tokens
        self.evicted_tokens *= STORED_KEPT

    def seconds_to_cores(self, beside: Sequence[tuple[float, EngineState]]) -> float:
        """Until those beside leave it as many cores as it computes with. `beside`: the engines that
        share its cores, itself among them, and the work that waits at each; the least first."""
        load = self.load
        if load is None:
            return 0.0
        busy = [each for each in beside if each[0] > 0.0 and each[1] is not self]
        used = sum([each[1].num_threads for each in busy])
        seconds = 0.0
        for waiting, engine in busy:
            if used + self.num_threads <= load.cores:
                break
            seconds = waiting
            used -= engine.num_threads
        return seconds

    @property
    def num_threads(self) -> int:
        """That it computes with."""
        return 0 if self.load is None else self.load.threads

    def waiting_seconds(self, now: float) -> float:
        """Work that waits there: of requests sent by others too, and without what the engine should
        have done by now. It does one request after the other."""
        waiting = self.queued_seconds()
        if self.unanswered and now > self.first_began:
            first = next(iter(self.unanswered.values()))
            most = MOST_PROGRESS * first.work.to_first_token
            waiting -= min(now - self.first_began, most)
        return waiting

    def queued_seconds(self) -> float:
        """As `waiting_seconds`, when none of it has been done."""
        if not self.others:
            return self.backlog
        usual = self.rates.beside * DEFAULT_ANSWER_TOKENS * self.rates.decoded_token
        if self.num_requests:
            usual = self.backlog / self.num_requests
        return self.backlog + self.others * usual

    def await_told(self, request_id: str, route: Route) -> None:
        """A route has ended, and the engine may yet tell of its prompt."""
        route.ended_at = self.num_told
        self.untold.setdefault(request_id, []).append(route)
        self.num_untold_pieces += len(route.identity.pieces)
        while self.num_untold_pieces > MAX_UNTOLD_PIECES:
            _stop_computing(*self.take_untold(next(iter(self.untold))))

    def take_untold(self, request_id: str) -> list[Route]:
        """The routes of this id that have ended; they are awaited no more."""
        routes = self.untold.pop(request_id, [])
        self.num_untold_pieces -= sum(len(route.identity.pieces) for route in routes)
        return routes

    def untold_routes(self) -> list[Route]:
        return [route for named in self.untold.values() for route in named]

    def _give_up_untold(self) -> None:
        """A load has come: what would have been told of by now was not computed."""
        self.num_told += 1
        for request_id, named in list(self.untold.items()):
            late = [r for r in named if self.num_told - r.ended_at >= UNTOLD_LOADS]
            _stop_computing(*late)
            if len(late) == len(named):
                self.take_untold(request_id)


class QueuePrice:
    """The seconds of work that wait at one engine, from its own events; for autoscaling."""

    def __init__(self) -> None:
        self._load = EngineLoad(0, 0, 0, 0.0, 0, 0.0, 0, 0.0)
        self._busy: float | None = None
        """Seconds of steps at the last measurement."""
        self._num_prompts = 0
        """Computed since then."""
        self._usual = 0.0
        """Seconds that a request takes."""

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case PromptComputed():
                    self._num_prompts += 1
                case EngineLoad():
                    self._note(change)

    def _note(self, load: EngineLoad) -> None:
        self._load = load
        busy = load.prompt_seconds + load.encode_seconds + load.decode_seconds
        if self._busy is None or busy < self._busy:
            self._busy, self._num_prompts = busy, 0
        elif self._num_prompts >= MIN_PROMPTS:
            measured = (busy - self._busy) / self._num_prompts
            weight = RATE_WEIGHT if self._usual else 1.0
            self._usual += weight * (measured - self._usual)
            self._busy, self._num_prompts = busy, 0

    @property
    def seconds(self) -> float:
        """Half of each running request is counted as done."""
        return (self._load.waiting + 0.5 * self._load.running) * self._usual


def engines_wanted(prices: Collection[float], target_wait: float) -> int:
    """So many that each has `target_wait` seconds of the work that waits at all of them."""
    return max(1, math.ceil(sum(prices) / target_wait))


def _rates_of(engines: Sequence[EngineState]) -> dict[int, Rates]:
    """Engine → its rates; those of the fastest, and the means of what processing takes and of
    `beside`, for one that has measured little, or not much worse. What equal engines measure
    differs, at the warm-up and while they share cores, and one that gets no requests would keep
    it."""
    measured = [engine.rates for engine in engines if engine.num_loads >= MIN_LOADS]
    listed = measured or [engine.rates for engine in engines]
    usual = Rates(
        prompt_token=min([rates.prompt_token for rates in listed]),
        encoder_run=min([rates.encoder_run for rates in listed]),
        decoded_token=min([rates.decoded_token for rates in listed]),
        beside=sum([rates.beside for rates in listed]) / len(listed),
        processing=sum([rates.processing for rates in listed]) / len(listed),
        processing_megabyte=sum([rates.processing_megabyte for rates in listed]) / len(listed),
    )
    found = dict.fromkeys([engine.number for engine in engines], usual)
    for engine in engines:
        if engine.num_loads >= MIN_LOADS and engine.rates.is_slower(usual):
            found[engine.number] = engine.rates
    outputs = [e.rates.tier_output for e in engines if e.rates.tier_output is not None]
    tokens = [e.rates.tier_token for e in engines if e.rates.tier_token is not None]
    if not outputs and not tokens:
        return found
    output, token = min(outputs, default=None), min(tokens, default=None)
    return {  # one that has loaded nothing yet can load as others do
        number: replace(
            rates,
            tier_output=output if rates.tier_output is None else rates.tier_output,
            tier_token=token if rates.tier_token is None else rates.tier_token,
        )
        for number, rates in found.items()
    }


def _of_tier(rate: float | None, seconds: float, count: int) -> float | None:
    if count <= 0 or seconds <= 0:
        return rate
    measured = seconds / count
    return measured if rate is None else rate + RATE_WEIGHT * (measured - rate)


def _corrected(rate: float, seconds: float, count: int, *, first: bool, least: int = 0) -> float:
    if count < (1 if first else least or MIN_TOKENS) or seconds <= 0:
        return rate
    measured = seconds / count
    return measured if first else rate + RATE_WEIGHT * (measured - rate)


@dataclass(slots=True)
class Route:
    """Where a request goes, and why; given back to the router as the request goes on."""

    engine: EngineState
    identity: Identity
    work: Work
    reason: str
    """`known`: it knows more of the request than the cheapest other engine, which would have been
    chosen otherwise, and so has its first token earlier. `least_loaded`: it does not; less waits
    there, or it is faster. `session`, `stored`: the request is bound to it. `only`: no other one
    was to be had."""
    price: float
    next_price: float
    """Of the cheapest other engine; infinite where there is none."""
    expected: tuple[int, ...] = ()
    sent: float = 0.0
    """When, as `Router.route` was told."""
    left: float = 0.0
    answered: bool = False
    computed: bool = False
    """The engine has told of its prompt."""
    ended: bool = False
    nodes: Sequence[_Node] = ()
    """Of the prompt's pieces, as long as the engine is about to compute them."""
    ended_at: int = 0
    """`num_told` of its engine then."""

    def why(self) -> str:
        """For the response's header."""
        other = "" if math.isinf(self.next_price) else f" against {self.next_price:.3f}"
        return (
            f"{self.reason}; prompt {self.work.known_tokens}/{self.work.num_tokens};"
            f" media {self.work.num_known}/{len(self.identity.media)};"
            f" {self.price:.3f} s{other}"
        )


def _add_media(
    work: Work,
    engine: EngineState,
    rates: Rates,
    held: Sequence[_HeldMedium],
    num_held: int,
    *,
    repeated: bool,
) -> None:
    """Add what media cost at an engine to the work there. `num_held`: pieces whose tokens are held
    there; `repeated`: some media have one key."""
    number, expected = engine.number, engine.expected
    seen: set[int] = set()
    for piece, key, num_bytes, outputs, items in held:
        if piece < num_held or outputs >> number & 1 or expected.get(key) or key in seen:
            work.num_known += 1
            work.num_held_media += 1
            continue
        processed = items >> number & 1
        work.num_held_media += processed
        if repeated:
            seen.add(key)
        if outputs and rates.tier_output is not None:
            work.encoding += min(rates.tier_output, rates.encoder_run)
            continue
        work.encoding += rates.encoder_run
        if not processed:
            work.processing += rates.processing + rates.processing_megabyte * num_bytes / MEGABYTE
            work.num_processed += 1
            work.processed_bytes += num_bytes


class _HeldMedium(NamedTuple):
    piece: float
    """Its place in the prompt; infinite where that is not known."""
    output: int
    """Key of its encoder output."""
    num_bytes: int
    outputs: int
    """A bit for each engine that holds its encoder output."""
    items: int
    """The same of the processed item."""


class _Keyed(NamedTuple):
    """A medium, and what the caches of engines call it."""

    medium: Medium
    item: int
    output: int
    """Its encoder output; with most adapters as the item."""


def _stop_computing(*routes: Route) -> None:
    """Their engines are not about to compute these prompts, or have done so."""
    for route in routes:
        number = route.engine.number
        for node in route.nodes:
            if left := node.computing.pop(number) - 1:
                node.computing[number] = left
        route.nodes = ()


class NoEngineError(Exception):
    """No engine of this model takes requests."""


@dataclass(slots=True)
class _Node:
    """A beginning of prompts."""

    blocks: dict[int, int | None] = field(default_factory=dict)
    """Engine → key of the first full block after it, of those that the engine told of the last
    prompt with this beginning that it has computed; None where no events tell of blocks."""
    computing: dict[int, int] = field(default_factory=dict)
    """Engine → prompts with this beginning that it is about to compute."""


class Router:
    """Knows the engines of all models and what they hold. For one thread."""

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        self.engines: dict[str, EngineState] = {}
        self.blocks = DigestIndex(max_entries)
        self.outputs = DigestIndex(max_entries)
        self.items = DigestIndex(max_entries)
        self._followed: set[int] = set()
        """Engines that send events: what they do not tell of they do not hold."""
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        self._aliases = TenantLRU[int, bytes](MAX_ALIASES)
        """Alias → key of the item."""
        self._lengths: OrderedDict[int, int] = OrderedDict()
        """Key of a media item → its tokens."""
        self._usual_length: dict[str, float] = {}
        self._sessions = TenantLRU[int, str](MAX_SESSIONS)
        self._stored = TenantLRU[str, str](MAX_STORED)
        self._running: dict[str, list[Route]] = {}
        """Id of a request → the routes with it: clients choose ids, and two may choose the same."""
        self._chars_per_token = DEFAULT_CHARS_PER_TOKEN
        self._now = 0.0
        """The latest time that is known."""
        self.answer_tokens = DEFAULT_ANSWER_TOKENS
        """That an answer usually has."""
        self.routed: Counter[tuple[str, str]] = Counter()
        """(engine, reason) → requests."""

    # --- engines ---------------------------------------------------------------------------------

    def add_engine(self, name: str, model: str, *, follows: bool) -> EngineState:
        """`follows`: its events are read, so that what it holds is known exactly."""
        taken = {engine.number for engine in self.engines.values()}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        engine = self.engines[name] = EngineState(name, number, model)
        if follows:
            self._followed.add(number)
        return engine

    def remove_engine(self, name: str) -> None:
        engine = self.engines.pop(name)
        engine.accepts = False
        self._followed.discard(engine.number)
        self.forget(engine)

    def forget(self, engine: EngineState) -> None:
        """The engine holds nothing any more."""
        for index in (self.blocks, self.outputs, self.items):
            index.drop(engine.number)
        running = [route for named in self._running.values() for route in named]
        _stop_computing(*(route for route in running if route.engine is engine))
        _stop_computing(*engine.untold_routes())
        for node in self._nodes.values():
            node.blocks.pop(engine.number, None)

    def models(self) -> list[str]:
        """What requests may name, adapters too."""
        engines = self.engines.values()
        return sorted({name for engine in engines for name in (engine.model, *engine.adapters)})

    def apply(self, engine: EngineState, changes: Iterable[Change]) -> None:
        """What an engine's events tell, in order. Those of an engine that is gone are ignored."""
        if self.engines.get(engine.name) is not engine:
            return
        for change in changes:
            match change:
                case Added(topic, keys):
                    self._index(topic).add(engine.number, keys)
                case Gone(topic, keys):
                    self._index(topic).remove(engine.number, keys)
                case AllGone(topic) if topic != ENGINE_TOPIC:
                    index = self._index(topic)
                    index.drop(engine.number)
                    if index is self.blocks:
                        _stop_computing(*engine.untold_routes())
                        engine.stored_tokens = engine.evicted_tokens = 0.0
                case PromptComputed():
                    self._note_computed(engine, change)
                case EngineLoad():
                    engine.note_load(change)

    def _index(self, topic: str) -> DigestIndex:
        if topic == ENCODER_TOPIC:
            return self.outputs
        return self.items if topic == ITEM_TOPIC else self.blocks

    def _note_computed(self, engine: EngineState, computed: PromptComputed) -> None:
        """Learn what the request's prompt has become at the engine."""
        running = self._running.get(computed.request_id, ())
        routes = [route for route in running if route.engine is engine]
        routes += engine.take_untold(computed.request_id)
        for route in routes:
            route.computed = True  # none of them is awaited after it has ended
        nodes = [node for route in routes for node in route.nodes]
        _stop_computing(*routes)
        if len(routes) != 1:
            return  # none of ours, or nobody knows whose it is
        self._note_lengths(routes[0].identity, computed)
        self._note_blocks(engine, routes[0].identity, nodes, computed)

    def _note_lengths(self, identity: Identity, computed: PromptComputed) -> None:
        """Learn how many tokens its media and its text have."""
        media_tokens = 0
        if len(computed.items) == len(identity.media):
            for medium, (key, length) in zip(identity.media, computed.items, strict=True):
                media_tokens += length
                exact = short(key)
                if not medium.exact:
                    self._aliases.put(identity.tenant, medium.key, key)
                self._lengths[exact] = length
                self._lengths.move_to_end(exact)
                if len(self._lengths) > MAX_LENGTHS:
                    self._lengths.popitem(last=False)
                usual = self._usual_length.get(medium.modality, length)
                self._usual_length[medium.modality] = usual + RATE_WEIGHT * (length - usual)
        chars = sum(piece.num_chars for piece in identity.pieces)
        text_tokens = computed.num_tokens - media_tokens
        if text_tokens > 0 and chars >= 64:
            ratio = chars / text_tokens
            self._chars_per_token += RATE_WEIGHT * (ratio - self._chars_per_token)

    def _note_blocks(
        self,
        engine: EngineState,
        identity: Identity,
        nodes: Sequence[_Node],
        computed: PromptComputed,
    ) -> None:
        """Learn which blocks the engine has of each beginning of the prompt; `nodes`: of its
        pieces, or none."""
        if computed.block_hash is None:
            for node in nodes:
                node.blocks.pop(engine.number, None)  # too short to be kept
            return
        ends = self._ends(identity, [self._keyed(each, identity) for each in identity.media])
        scale = computed.num_tokens / max(1.0, ends[-1])
        earlier = iter(computed.earlier_blocks or ())
        last = computed.block_hash, math.inf
        block, upto = next(earlier, last)
        for node, end in zip(nodes, ends[1:], strict=False):
            while upto < end * scale:
                block, upto = next(earlier, last)
            node.blocks[engine.number] = short(block)

    # --- requests --------------------------------------------------------------------------------

    def route(
        self,
        request_id: str,
        identity: Identity,
        without: Collection[str] = (),
        *,
        now: float = 0.0,
    ) -> Route:
        """The engine for a request; `without`: names of engines that failed on it; `now`: seconds
        of any clock that never goes back, the same one each time.

        Raises `NoEngineError`. Call `answered` and `ended` with the result.
        """
        self._now = max(now, self._now)
        candidates = [
            engine
            for engine in self.engines.values()
            if engine.accepts and engine.name not in without and engine.serves(identity.model)
        ]
        if not candidates:
            raise NoEngineError
        candidates = self._punctual(identity, candidates)
        stuck = self._stuck(identity, candidates)
        media = [self._keyed(medium, identity) for medium in identity.media]
        knowing = self._knowing(media, candidates)
        ends = self._ends(identity, media)
        known = self._forget_evicted(identity, candidates, ends)
        works = self._works(identity, media, candidates, ends, known)
        sharing = self._sharing_cores()
        prices = [
            (
                self._begins_after(engine, work, sharing) + RECOMPUTED * work.to_first_token,
                engine,
                work,
            )
            for engine, work in zip(candidates, works, strict=True)
        ]
        listed = prices
        if len(knowing) < len(prices):
            listed = [price for price in prices if price[1] in knowing] or prices
        if stuck is not None:
            price, engine, work = next(each for each in prices if each[1] is stuck[0])
            reason = stuck[1]
        else:
            price, engine, work = self._cheapest(listed, identity)
            reason = "known" if len(listed) < len(prices) else "least_loaded"
        others = [each for each in prices if each[1] is not engine]
        next_price = math.inf
        if others:
            next_price, _, next_work = min(others, key=itemgetter(0))
            if reason == "least_loaded" and work.knows_more_than(next_work):
                reason = "known"
        elif stuck is None:
            reason = "only"
        route = Route(engine, identity, work, reason, price, next_price)
        self._begin(request_id, route, media)
        return route

    def _sharing_cores(self) -> dict[int, list[tuple[float, EngineState]]]:
        """Machine → its engines, of all models, where there are several, and the work that waits
        at each; the least first."""
        found: dict[int, list[tuple[float, EngineState]]] = {}
        for engine in self.engines.values():
            if engine.machine and (engine.accepts or engine.num_requests):
                waiting = engine.waiting_seconds(self._now), engine
                found.setdefault(engine.machine, []).append(waiting)
        return {
            machine: sorted(listed, key=itemgetter(0))
            for machine, listed in found.items()
            if len(listed) > 1
        }

    def _begins_after(
        self,
        engine: EngineState,
        work: Work,
        sharing: Mapping[int, Sequence[tuple[float, EngineState]]],
    ) -> float:
        """Seconds of the work that waits at an engine; of one that shares its cores, also those for
        which there is no core (a request takes no more from others there than it needs itself), and
        those by which idleness makes it slower. Both send requests to few engines, so what these
        evict is counted, too."""
        waiting = engine.waiting_seconds(self._now)
        beside = sharing.get(engine.machine)
        if beside is None:
            return waiting
        until = engine.seconds_to_cores(beside) - waiting
        taken = min(max(0.0, until), work.to_first_token) + engine.evicting_seconds(work)
        return waiting + engine.idle_seconds(self._now) + RECOMPUTED * taken

    def _punctual(self, identity: Identity, candidates: list[EngineState]) -> list[EngineState]:
        """Those that are not late, as far as there are any."""
        holder = None
        if identity.stored is not None:
            holder = self.engine_of_stored(identity.tenant, identity.stored)
        return [each for each in candidates if not each.late or each is holder] or candidates

    def _cheapest(
        self, prices: Sequence[tuple[float, EngineState, Work]], identity: Identity
    ) -> tuple[float, EngineState, Work]:
        """Ties go to the engine with fewer requests, then always to the same one for a prompt:
        so several front-ends agree on prompts that none of them has seen."""
        least = min([each[0] for each in prices])
        equal = [each for each in prices if each[0] <= least + EQUAL_SECONDS]
        if len(equal) == 1:
            return equal[0]
        fewest = min(each[1].num_requests for each in equal)
        equal = [each for each in equal if each[1].num_requests == fewest]
        root = identity.pieces[min(2, len(identity.pieces) - 1)].digest if identity.pieces else 0
        return min(
            equal,
            key=lambda each: blake3(each[1].name.encode() + root.to_bytes(8, "little")).digest(),
        )

    def _stuck(
        self, identity: Identity, candidates: Sequence[EngineState]
    ) -> tuple[EngineState, str] | None:
        """The engine that a session, or what is stored, is bound to, and the reason."""
        names = {engine.name: engine for engine in candidates}
        if identity.stored is not None:
            engine = names.get(self._stored.get(identity.tenant, identity.stored) or "")
            if engine is not None:
                return engine, "stored"
        if identity.session is not None:
            engine = names.get(self._sessions.get(identity.tenant, identity.session) or "")
            if engine is not None:
                return engine, "session"
        return None

    def _knowing(
        self, media: Sequence[_Keyed], candidates: Sequence[EngineState]
    ) -> list[EngineState]:
        """Those that know all media which came by name alone, as far as any does."""
        found = list(candidates)
        for medium, key, output in media:
            if medium.bare:
                holders = self.items.holders(key) | self.outputs.holders(output)
                found = [e for e in found if holders >> e.number & 1 or e.expected[output]] or found
        return found

    def _keyed(self, medium: Medium, identity: Identity) -> _Keyed:
        if medium.exact:
            output = medium.key if medium.output is None else medium.output
            return _Keyed(medium, medium.key, output)
        known = self._aliases.get(identity.tenant, medium.key)
        if known is None:
            return _Keyed(medium, medium.key, medium.key)
        digest = identity.encoder_digest
        output = short(adapted_item_key(digest, known) if digest else known)
        return _Keyed(medium, short(known), output)

    def _works(
        self,
        identity: Identity,
        media: Sequence[_Keyed],
        candidates: Sequence[EngineState],
        ends: Sequence[float],
        known: Mapping[int, int],
    ) -> list[Work]:
        """What the request costs at each engine. `ends` are tokens up to the end of each piece,
        `known` is how many of the first pieces an engine has, by its number."""
        total = ends[-1]
        rates = _rates_of(candidates)
        longest = max(known.values())
        places = {piece.medium: at for at, piece in enumerate(identity.pieces)}
        held = [
            _HeldMedium(
                places.get(number, math.inf),
                each.output,
                each.medium.num_bytes,
                self.outputs.holders(each.output),
                self.items.holders(each.item),
            )
            for number, each in enumerate(media)
        ]
        answer = self.answer_tokens
        if identity.max_tokens is not None:
            answer = min(answer, max(0, identity.max_tokens))
        repeated = len({each.output for each in media}) < len(media)
        known_tokens = [round(end) for end in ends]
        works, num_tokens = [], known_tokens[-1]
        for engine in candidates:
            number = engine.number
            of_engine, num_known = rates[number], known[number]
            tier, prompt_token = of_engine.tier_token, of_engine.prompt_token
            num_held = num_known if tier is None or tier >= prompt_token else longest
            prompt = (total - ends[num_held]) * prompt_token
            prompt += (ends[num_held] - ends[num_known]) * (tier or 0.0)
            work = Work(
                prompt,
                answer=answer * of_engine.beside * of_engine.decoded_token,
                known_tokens=known_tokens[num_known],
                num_tokens=num_tokens,
            )
            if held:
                _add_media(work, engine, of_engine, held, num_held, repeated=repeated)
            works.append(work)
        return works

    def _ends(self, identity: Identity, media: Sequence[_Keyed]) -> list[float]:
        """Tokens before the prompt, and up to the end of each of its pieces, as far as is known."""
        ends, total = [0.0], 0.0
        lengths = [self._length(each.medium, each.item) for each in media]
        for piece in identity.pieces:
            if piece.num_tokens is not None:
                total += piece.num_tokens
            elif piece.medium is None:
                total += piece.num_chars / self._chars_per_token
            else:
                total += lengths[piece.medium]
            ends.append(total)
        return ends

    def _forget_evicted(
        self, identity: Identity, candidates: Sequence[EngineState], ends: Sequence[float]
    ) -> dict[int, int]:
        """Forget, and count, what engines have evicted of the prompt. Returns what is left: engine
        → how many of the first pieces it has computed, or is about to compute."""
        evicted: dict[int, int] = {}
        known = dict.fromkeys((engine.number for engine in candidates), 0)
        unknown = set(known)
        for at in range(len(identity.pieces) - 1, -1, -1):
            if not unknown:
                break
            node = self._nodes.get(identity.pieces[at].digest)
            if node is None:
                continue
            for number in unknown & node.blocks.keys():
                block = node.blocks[number]
                if self._is_evicted(block, number):
                    del node.blocks[number]
                    evicted.setdefault(number, at + 1)
                    continue
                known[number] = at + 1
                unknown.discard(number)
            if not node.computing:
                continue
            for number in unknown & node.computing.keys():
                known[number] = at + 1
                unknown.discard(number)
        if evicted:
            for engine in candidates:
                number = engine.number
                lost = max(known[number], evicted.get(number, 0))
                engine.evicted_tokens += ends[lost] - ends[known[number]]
        return known

    def _is_evicted(self, block: int | None, number: int) -> bool:
        if block is None or number not in self._followed:
            return False
        return not self.blocks.holds(number, block)

    def _length(self, medium: Medium, key: int) -> float:
        known = self._lengths.get(key)
        if known is not None:
            return known
        return self._usual_length.get(medium.modality, DEFAULT_MEDIA_TOKENS)

    def _begin(self, request_id: str, route: Route, media: Sequence[_Keyed]) -> None:
        engine, identity = route.engine, route.identity
        route.left = route.work.to_first_token + route.work.answer
        route.sent = self._now
        engine.note_sent(route)
        engine.note_stored(route.work.num_tokens - route.work.known_tokens)
        engine.backlog += route.left
        engine.num_requests += 1
        engine.most_requests = max(engine.most_requests, engine.num_requests)
        route.expected = tuple(each.output for each in media)
        for key in route.expected:
            engine.expected[key] = engine.expected.get(key, 0) + 1
        nodes: list[_Node] = []
        route.nodes = nodes
        for piece in identity.pieces:
            node = self._nodes.get(piece.digest)
            if node is None:
                node = self._nodes[piece.digest] = _Node()
            else:
                self._nodes.move_to_end(piece.digest)
            node.computing[engine.number] = node.computing.get(engine.number, 0) + 1
            nodes.append(node)
        while len(self._nodes) > MAX_PROMPT_NODES:
            self._nodes.popitem(last=False)
        if identity.session is not None:
            self._sessions.put(identity.tenant, identity.session, engine.name)
        self._running.setdefault(request_id, []).append(route)
        self.routed[engine.name, route.reason] += 1

    def answered(self, route: Route, seconds: float) -> None:
        """Its first bytes came after `seconds`."""
        if route.answered or route.ended:
            return
        route.answered = True
        engine, work = route.engine, route.work
        self._now = max(self._now, route.sent + seconds)
        engine.note_answered(route, self._now)
        done = work.to_first_token
        engine.backlog = max(0.0, engine.backlog - done)
        route.left -= done
        if work.num_processed and engine.num_requests == 1:
            # what nothing else explains is processing
            engine.note_processing(work, seconds - work.prompt - work.encoding)

    def ended(
        self, request_id: str, route: Route, *, failed: bool = False, now: float = 0.0
    ) -> None:
        """It is answered, aborted or failed. Of a `failed` one, which may have been refused,
        nothing was computed. `now`: as of `route`."""
        if route.ended:
            return
        route.ended = True
        self._now = max(now, self._now)
        named = self._running[request_id]
        named[:] = [each for each in named if each is not route]
        if not named:
            del self._running[request_id]
        engine = route.engine
        engine.note_answered(route, self._now)
        engine.backlog = max(0.0, engine.backlog - route.left)
        engine.num_requests -= 1
        engine.last_busy = self._now
        if not engine.num_requests:
            engine.backlog = 0.0
        for key in route.expected:
            left = engine.expected.get(key, 0) - 1
            if left > 0:
                engine.expected[key] = left
            else:
                engine.expected.pop(key, None)
        if failed or route.computed or not route.nodes:
            _stop_computing(route)
        elif engine.number in self._followed:
            engine.await_told(request_id, route)
        else:
            for node in route.nodes:
                node.blocks.setdefault(engine.number, None)
            _stop_computing(route)

    def holds_item(self, engine: EngineState, key: int) -> bool:
        """Whether its events said that it holds the processed item."""
        return self.items.holds(engine.number, key)

    def note_answer_tokens(self, num_tokens: int) -> None:
        """An answer has ended and had so many."""
        self.answer_tokens += 0.1 * (num_tokens - self.answer_tokens)

    def bind_stored(self, tenant: str, stored: str, engine: str) -> None:
        """A stored response or conversation of a tenant is at this engine."""
        self._stored.put(tenant, stored, engine)

    def engine_of_stored(self, tenant: str, stored: str) -> EngineState | None:
        """None too where it is gone."""
        return self.engines.get(self._stored.get(tenant, stored) or "")

    def check_integrity(self) -> None:
        for index in (self.blocks, self.outputs, self.items):
            index.check_integrity()
        for bindings in (self._aliases, self._sessions, self._stored):
            bindings.check_integrity()
        running = [route for named in self._running.values() for route in named]
        computing = Counter[tuple[int, int]]()
        for route in running:
            computing.update((id(node), route.engine.number) for node in route.nodes)
        for engine in self.engines.values():
            untold = engine.untold_routes()
            assert all(route.ended and not route.computed for route in untold)
            num_pieces = sum(len(route.identity.pieces) for route in untold)
            assert engine.num_untold_pieces == num_pieces <= MAX_UNTOLD_PIECES
            computing.update((id(node), engine.number) for r in untold for node in r.nodes)
        for node in self._nodes.values():
            counts = {e.number: computing[id(node), e.number] for e in self.engines.values()}
            assert node.computing == {n: count for n, count in counts.items() if count}
        for engine in self.engines.values():
            mine = [route for route in running if route.engine is engine]
            assert engine.num_requests == len(mine), engine.name
            assert math.isclose(engine.backlog, sum(r.left for r in mine), abs_tol=1e-6)
            unanswered = [id(route) for route in mine if not route.answered]
            assert sorted(engine.unanswered) == sorted(unanswered), engine.name
            keys = Counter(key for route in mine for key in route.expected)
            assert engine.expected == keys
