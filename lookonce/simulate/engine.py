"""One server on a virtual clock: the real scheduler, caches and connector, and no model.

    arrival ─▶ API process ─▶ media workers ─▶ scheduler ─▶ steps ─▶ first token, end
               request        directory        plan         Prices   update

The API process does one thing at a time, and media workers one item each. Engine, API process and
workers share cores where the price list says how many there are. A request takes longer by what the
price list says of the pause before it, in which no other waited for its first token. A step takes
what it says of its plan, and where it computes prompts, as many times that as their requests'
spread says. Where the scheduler says that steps only decode (`core.decode_runs`), as many as
nothing interrupts are one event.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.cache.directory import Directory
from lookonce.config import SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.request import Request
from lookonce.core.request import Sequence as SchedulerSequence
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerOutput, SchedulerState
from lookonce.engine.process.cache_events import LOAD_SECONDS, Load
from lookonce.errors import RequestError
from lookonce.fleet.subscriber import Change
from lookonce.kv.connector import KVConnector
from lookonce.simulate.clock import VirtualClock
from lookonce.simulate.cores import Cores, Job
from lookonce.simulate.following import FollowedEvents
from lookonce.simulate.prices import Prices
from lookonce.simulate.tiers import (
    SimulatedChain,
    SimulatedOutputs,
    SimulatedPages,
    SimulatedTier,
    SimulatedTransfers,
    own_tiers,
)
from lookonce.simulate.trace import TraceRequest, block_keys, token_ids
from lookonce.types.kv import KVLoadPolicy, OutputLayout, TierSpec
from lookonce.types.media import (
    ITEM_OVERHEAD,
    Array,
    Expansion,
    MediaFeature,
    Modality,
    ProcessedItem,
)
from lookonce.types.model import ModelInfo
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import StepPlan, StepResult

if TYPE_CHECKING:
    from lookonce.kv.chain import TierChain
    from lookonce.types.ports import KVPageCopier

VOCABULARY = 1 << 31
PLACEHOLDER = 0
MAX_SHARE = 0.9
"""Of the API process's time that streaming takes, as far as it delays requests."""
SCOPE = bytes(32)
NO_TOKENS = np.zeros(0, np.int32)


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How one server is configured; as `lookonce serve` names it."""

    kv_cache_bytes: int = 1 << 30
    encoder_cache_bytes: int = 1 << 29
    encoder_cache_host_bytes: int = 0
    processor_cache_bytes: int = 4 << 30
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_queue: int = 1024
    prefix_caching: bool = True
    kv_tiers: tuple[TierSpec, ...] = ()
    kv_load: KVLoadPolicy = "auto"
    encoder_tiers: tuple[TierSpec, ...] = ()
    every_step: bool = False
    """No runs: each step is an event."""
    with_tokens: bool = False
    """No keys of blocks from the trace: prompts have tokens, which the scheduler hashes."""
    requests_before: int = 0
    """How many of each kind another engine has had: with which of `Prices.spread` this one
    begins."""


@dataclass(slots=True)
class Served:
    """One request at an engine; times are of the virtual clock."""

    request: TraceRequest
    number: int
    spread: float = 1.0
    """How many times its prices it takes until its first token."""
    first_token: float = -1.0
    ended: float = -1.0
    cached_tokens: int = 0
    external_tokens: int = 0
    encoder_runs: int = 0
    processed: int = 0
    failed: str = ""
    tokens: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    """Of prompt and answer, where the scheduler hashes them."""
    waits_for: int = 0
    """Media items that are being processed for it."""


@dataclass(slots=True)
class _Run:
    """Steps that only decode, under way."""

    began: float
    num_steps: int
    num_rows: int
    context: int
    job: Job | None = None
    """Where cores are shared."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that computes prompts or tells what has ended, under way."""

    plan: StepPlan
    spread: float
    """How many times its price it takes."""
    seconds: float
    """That it takes."""


@dataclass(slots=True)
class EngineTotals:
    """What one engine did."""

    steps: int = 0
    busy: float = 0.0
    """Seconds of steps."""


class _Process(Protocol):
    """Does so many things at a time, in the order in which they were asked for."""

    def run(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call when it has worked for `seconds` on this."""

    def work(self, seconds: float) -> None:
        """As `run`, where nobody waits for it."""

    @property
    def is_idle(self) -> bool: ...


class _FreeProcess:
    """Its threads have cores of their own, so that it is known at once when each is free."""

    def __init__(self, clock: VirtualClock, threads: int) -> None:
        self._clock = clock
        self._free = [0.0] * threads
        """When each of its threads is free, as a heap."""

    def _end(self, seconds: float) -> float:
        end = max(self._free[0], self._clock.now) + seconds
        heapq.heapreplace(self._free, end)
        return end

    def run(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self._clock.at(self._end(seconds), call, *arguments)

    def work(self, seconds: float) -> None:
        self._end(seconds)

    @property
    def is_idle(self) -> bool:
        return max(self._free) <= self._clock.now


class _SharingProcess:
    """Its threads share cores with others."""

    def __init__(self, cores: Cores, threads: int) -> None:
        self._cores, self._threads, self._free = cores, threads, threads
        self._waiting: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()

    def run(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        if self._free:
            self._free -= 1
            self._cores.run(seconds, self._ended, call, arguments)
        else:
            self._waiting.append((seconds, call, arguments))

    def work(self, seconds: float) -> None:
        self.run(seconds, _nothing)

    @property
    def is_idle(self) -> bool:
        return self._free == self._threads

    def _ended(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self._waiting:
            seconds, *following = self._waiting.popleft()
            self._cores.run(seconds, self._ended, *following)
        else:
            self._free += 1
        call(*arguments)


@lru_cache(maxsize=4096)
def _no_tokens(count: int) -> memoryview:
    return memoryview(bytes(4 * count))


@lru_cache(maxsize=4096)
def _placeholders(count: int) -> NDArray[np.int32]:
    return np.full(count, PLACEHOLDER, np.int32)


def _nothing() -> None:
    """Nobody waits for it."""


class SimulatedEngine:
    """One server. `on_first`, `on_end` are called with each request; `publish` gets the changes of
    its caches, as `--events` would, where anyone follows them."""

    def __init__(
        self,
        number: int,
        spec: EngineSpec,
        prices: Prices,
        clock: VirtualClock,
        *,
        on_first: Callable[[Served], None],
        on_end: Callable[[Served], None],
        publish: Callable[[int, list[Change]], None] | None = None,
        shared_tiers: Sequence[SimulatedTier] = (),
        shared_outputs: Sequence[SimulatedTier] = (),
    ) -> None:
        """`number` within the fleet; `shared_tiers`, `shared_outputs`: those that other engines
        have, too."""
        self.number = number
        self.spec = spec
        self.prices = prices
        self.clock = clock
        self._on_first, self._on_end = on_first, on_end
        block_bytes = prices.kv_token_bytes * prices.block_size
        num_blocks = max(1, spec.kv_cache_bytes // block_bytes)
        self.info = ModelInfo(
            name="simulated",
            model_type="simulated",
            vocab_size=VOCABULARY,
            max_model_len=prices.max_model_len,
            eos_token_ids=(),
            modalities=("image", "audio", "video"),
            dtype="float32",
            encoder_row_bytes=prices.encoder_row_bytes,
        )
        self._state = SchedulerState(
            BlockPool(num_blocks, prices.block_size),
            EncoderCache(
                spec.encoder_cache_bytes, prices.encoder_row_bytes, spec.encoder_cache_host_bytes
            ),
            prefix_caching=spec.prefix_caching,
            clock=clock,
        )
        self.connector: KVConnector | None = None
        if spec.kv_tiers:
            self.connector = self._open_connector(block_bytes, shared_tiers)
        self.scheduler = Scheduler(
            self._state,
            self.info,
            SchedulerConfig(
                max_num_seqs=spec.max_num_seqs,
                max_num_batched_tokens=spec.max_num_batched_tokens,
                max_encoder_tokens=spec.max_num_batched_tokens,
                max_queue=spec.max_queue,
            ),
            self.connector,
            external_outputs=self._open_outputs(shared_outputs),
        )
        self.directory = Directory(spec.processor_cache_bytes)
        self.totals = EngineTotals()
        self.load = Load()
        self._events: FollowedEvents | None = None
        self._next_load = 0.0
        """When the load is told next, if there is anything to tell."""
        if publish is not None:
            self._events = FollowedEvents(
                partial(publish, number),
                "kv-events",
                self.scheduler.take_output_changes,
                self.load,
            )
            self.scheduler.watch(self._events)
        self._ended: list[Request] = []
        """Whose references to their sequences, which refer to them, are still to be cut."""
        self._state.on_end.append(self._ended.append)
        self._served: dict[str, Served] = {}
        self._num_alike = [0, 0]
        """Requests that have come of each kind: whose media are all known, and others."""
        self._num_waiting = 0
        """Requests whose first token has not come out of a step."""
        self._last_first_token = -math.inf
        """When the client had the last first token, or was told that there is none."""
        self._cores = Cores(clock, prices.cores) if prices.cores else None
        self._api = self._open_process(1)
        self._workers = self._open_process(prices.media_workers)
        self._making: dict[bytes, list[tuple[Served, list[bytes]]]] = {}
        """Key of an item that is being processed → the requests that wait for it, with the keys
        that each has pinned."""
        self._plans_all = spec.every_step or bool(spec.encoder_tiers)
        """Also the plans that only tell the runner what has ended."""
        self._busy = False
        self._run: _Run | None = None
        self._version = 0
        """Of the end of the step, or of the steps, under way."""
        self._step: _Step | None = None

    def _open_connector(self, block_bytes: int, shared: Sequence[SimulatedTier]) -> KVConnector:
        own = own_tiers(self.spec.kv_tiers, block_bytes, self.prices, self.clock)
        chain = SimulatedChain([*own, *shared])

        def transfers(
            chain: SimulatedChain, pages: SimulatedPages, tell: Callable[..., None]
        ) -> Any:
            return SimulatedTransfers(
                chain,
                pages,
                tell,
                at=self.clock.after,
                clock=self.clock,
                block_bytes=block_bytes,
            )

        return KVConnector(
            cast("TierChain", chain),
            cast("KVPageCopier", SimulatedPages(self.prices.block_size, block_bytes)),
            policy=self.spec.kv_load,
            wake=self.wake,
            transfers=transfers,
        )

    def _open_outputs(self, shared: Sequence[SimulatedTier]) -> SimulatedOutputs | None:
        if not self.spec.encoder_tiers:
            return None
        layout = OutputLayout.of_rows(self.prices.encoder_row_bytes, "uint8")
        own = own_tiers(self.spec.encoder_tiers, layout.piece_bytes, self.prices, self.clock)
        return SimulatedOutputs(
            SimulatedChain([*own, *shared]),
            layout,
            at=self.clock.after,
            clock=self.clock,
            wake=self.wake,
        )

    # --- the API process ------------------------------------------------------------------------

    def arrive(self, served: Served) -> None:
        """A request's last byte has come."""
        request, prices = served.request, self.prices
        sent = sum([medium.num_bytes for medium in request.media])
        seconds = prices.of_request(request.prompt_tokens, len(request.media), sent)
        served.spread = self._next_spread(request)
        seconds *= served.spread
        seconds /= 1.0 - self._streaming_share()
        if not self._num_waiting:
            seconds += prices.of_idle(self.clock.now - self._last_first_token)
        self._num_waiting += 1
        self._api.run(seconds, self._resolve, served)
        self._note_streaming()

    def _next_spread(self, request: TraceRequest) -> float:
        """How many times its prices the next request of its kind takes. Each kind is counted for
        itself, so that the few whose media are new, which take longest, have nearly the whole
        distribution, too."""
        new = any(medium.key not in self.directory for medium in request.media)
        number = self.spec.requests_before + self._num_alike[new]
        self._num_alike[new] += 1
        return self.prices.spread_of(number, self.number)

    def _open_process(self, threads: int) -> _Process:
        if self._cores is None:
            return _FreeProcess(self.clock, threads)
        return _SharingProcess(self._cores, threads)

    def _streaming_share(self) -> float:
        """Of the API process's time that goes into tokens of the steps under way."""
        decoding = self._state.queues.decoding
        rows = len(decoding)
        if not rows or not self._busy:
            return 0.0
        context = sum([s.num_computed for s in decoding])
        if self._run is not None:  # what its steps have computed is noted at its end
            context += rows * (self._step_under_way(self._run) - 1)
        step = self.prices.of_decodes(rows, context, 1)
        return min(MAX_SHARE, rows * self.prices.stream_token / step)

    def _resolve(self, served: Served) -> None:
        """Find its media, or have them processed."""
        self._note_streaming()
        pinned: list[bytes] = []
        for medium in served.request.media:
            key = medium.key
            if self.directory.lookup(key) is not None:
                pinned.append(key)
                self.directory.count("hit")
                continue
            waiting = self._making.get(key)
            if waiting is None:
                waiting = self._making[key] = []
                seconds = self.prices.of_processing(medium.pixels, medium.length)
                seconds *= served.spread
                self._workers.run(seconds, self._made, key, medium.length)
                served.processed += 1
                self.directory.count("miss")
            else:
                self.directory.count("hit")
            if not waiting or waiting[-1][0] is not served:
                waiting.append((served, pinned))
                served.waits_for += 1
        if not served.waits_for:
            self._submit(served, pinned)

    def _made(self, key: bytes, length: int) -> None:
        nbytes = ITEM_OVERHEAD + length * self.prices.item_token_bytes
        if key not in self.directory:
            self.directory.try_list(key, nbytes, _expansion(length))
        for served, pinned in self._making.pop(key):
            served.waits_for -= 1
            if not served.waits_for:
                self._submit(served, pinned)

    # --- the engine -----------------------------------------------------------------------------

    def _submit(self, served: Served, pinned: Sequence[bytes]) -> None:
        request = served.request
        for key in pinned:
            self.directory.unpin(key)
        features = tuple(
            [MediaFeature(m.key, m.modality, m.offset, m.length, m.length) for m in request.media]
        )
        items = {m.key: _item(m.modality, m.length) for m in request.media}
        request_id = f"0-{served.number}-{served.number}"
        if self.spec.with_tokens:
            served.tokens = token_ids(request)
            prompt = served.tokens[: request.prompt_tokens].data
        else:
            prompt = _no_tokens(request.prompt_tokens)
        generate = GenerateRequest(
            request_id=request_id,
            scope=SCOPE,
            prompt=Array("int32", (request.prompt_tokens,), prompt),
            features=features,
            sampling=_sampling(request.output_tokens),
            arrival=request.arrival,
            tenant=request.tenant,
        )
        if self._run is not None:
            self._interrupt()
        self._served[request_id] = served
        try:
            self.scheduler.add(generate, items)
        except RequestError as error:
            del self._served[request_id]
            self._end(served, error.message)
            return
        if not self.spec.with_tokens:
            self._tell_keys(request_id, request)
        self.wake()

    def _tell_keys(self, request_id: str, request: TraceRequest) -> None:
        """Let the scheduler know the request's blocks by keys that the trace gives."""
        added = self._state.queues.requests.get(request_id)
        if added is not None:
            added.sequences[0].block_hashes = block_keys(request, self.prices.block_size)

    def wake(self) -> None:
        """There may be something for the next step."""
        if self._run is not None:
            self._interrupt()
        elif not self._busy:
            self._busy = True
            self._begin()

    def _begin(self) -> None:
        """Begin the next step, or the next steps; idle where there is none."""
        if not self.spec.every_step:
            num_steps = self.scheduler.decode_runs.longest()
            if num_steps:
                self._begin_run(num_steps)
                return
        plan = None
        if self._plans_all or not self.scheduler.decode_runs.forget_finished():
            plan = self.scheduler.plan()
        while plan is not None and not (plan.scheduled or plan.encode):
            # It only tells the runner what has ended, which takes no time.
            self._take(self.scheduler.update_from_output(plan, StepResult()))
            plan = self.scheduler.plan()
        if plan is None:
            output = self.scheduler.take_output()
            self._busy = False
            self._note_streaming()
            if output:
                self._take(output)
            self._tell_load()
            return
        spread = self._spread_of(plan)
        seconds = spread * self.prices.of_step(plan)
        self._step = _Step(plan, spread, seconds)
        self._version += 1
        self._note_streaming()
        if self._cores is None:
            self.clock.after(seconds, self._end_step, self._version)
        else:
            threads = self.prices.threads_of(plan)
            self._cores.run(seconds, self._end_step, self._version, threads=threads)

    def _spread_of(self, plan: StepPlan) -> float:
        """How many times its price a step takes: the mean over the requests in it that wait for
        their first token; once, where there is none."""
        found = []
        sequences = self._state.queues.sequences
        for entry in plan.scheduled:
            sequence = sequences.get(entry.seq_id)
            served = sequence and self._served[sequence.request.request_id]
            if served and served.first_token < 0:
                found.append(served.spread)
        return sum(found) / len(found) if found else 1.0

    def _note_streaming(self) -> None:
        """What streaming takes of the cores; while the API process has other work, which takes so
        much longer, that is part of this work's time."""
        if self._cores is not None:
            share = self._streaming_share() if self._api.is_idle else 0.0
            self._cores.set_background(share)

    def _begin_run(self, num_steps: int) -> None:
        decoding = self._state.queues.decoding
        context = sum(s.num_computed for s in decoding) + len(decoding)
        run = self._run = _Run(self.clock.now, num_steps, len(decoding), context)
        if self._events is not None:  # the load is told meanwhile
            until = self._next_load - run.began
            run.num_steps = min(num_steps, self._steps_until(run, until))
        self._version += 1
        seconds = self._seconds(run, run.num_steps)
        if self._cores is None:
            self.clock.at(run.began + seconds, self._end_step, self._version)
        else:
            self._note_streaming()
            run.job = self._cores.run(seconds, self._end_step, self._version)

    def _seconds(self, run: _Run, num_steps: int) -> float:
        return self.prices.of_decodes(run.num_rows, run.context, num_steps)

    def _steps_until(self, run: _Run, seconds: float) -> int:
        """The fewest steps of the run, at least one, that take so long."""
        least, most = 1, run.num_steps
        while least < most:
            middle = (least + most) // 2
            if self._seconds(run, middle) >= seconds:
                most = middle
            else:
                least = middle + 1
        return least

    def _step_under_way(self, run: _Run) -> int:
        """Its number within the run, from 1 on."""
        if self._cores is None or run.job is None:
            return self._steps_until(run, self.clock.now - run.began)
        return self._steps_until(run, self._cores.done(run.job))

    def _interrupt(self) -> None:
        """Let the run end with the step under way."""
        run = self._run
        assert run is not None
        num_steps = self._step_under_way(run)
        if num_steps < run.num_steps:
            run.num_steps = num_steps
            seconds = self._seconds(run, num_steps)
            if self._cores is not None and run.job is not None:
                self._cores.resize(run.job, seconds)
                return
            self._version += 1
            self.clock.at(run.began + seconds, self._end_step, self._version)

    def _end_step(self, version: int) -> None:
        if version != self._version:
            return
        if self._run is not None:
            self._end_run(self._run)
        else:
            assert self._step is not None
            step, self._step = self._step, None
            plan, seconds = step.plan, step.seconds
            result = self._result(plan, step.spread)
            self.totals.steps += 1
            self.totals.busy += seconds
            self.load.note_step(plan, result, seconds)
            if self.connector is not None and plan.num_tokens >= 64:
                self.connector.observe_prefill(plan.num_tokens, seconds)
            self._take(self.scheduler.update_from_output(plan, result))
        self._tell_load()
        self._begin()

    def _end_run(self, run: _Run) -> None:
        self._run = None
        seconds = self._seconds(run, run.num_steps)
        self.scheduler.decode_runs.advance(run.num_steps, self._next_tokens)
        self.totals.steps += run.num_steps
        self.totals.busy += seconds
        self.load.decoded_tokens += run.num_steps * run.num_rows
        self.load.decode_seconds += seconds
        self.load.decode_steps += run.num_steps
        output = self.scheduler.take_output()
        if output:
            self._take(output)

    def _next_tokens(self, sequence: SchedulerSequence, count: int) -> NDArray[np.int32]:
        if not self.spec.with_tokens:
            return _placeholders(count)
        at = len(sequence.tokens)
        return self._served[sequence.request.request_id].tokens[at : at + count]

    def _result(self, plan: StepPlan, spread: float) -> StepResult:
        """What the model would have given: the tokens that the trace has."""
        sequences = self._state.queues.sequences
        sampled = []
        for entry in plan.scheduled:
            if entry.sample:
                sequence = sequences.get(entry.seq_id)
                token = PLACEHOLDER
                if sequence is not None and self.spec.with_tokens:
                    token = int(self._next_tokens(sequence, 1)[0])
                sampled.append(token)
        seconds: dict[bytes, float] = {}
        if plan.encode:
            shared = self.prices.encode_step / len(plan.encode)
            for item in plan.encode:
                price = shared + self.prices.of_encoding(item.item.expansion.num_embeds)
                seconds[item.key] = spread * price
        return StepResult(token_ids=tuple(sampled), encode_seconds=seconds)

    def _take(self, output: SchedulerOutput) -> None:
        """What has come out of a step reaches the clients through the API process."""
        for delta in output.deltas:
            stats = delta.reuse_stats
            if stats is not None:
                served = self._served[delta.request_id]
                served.first_token = self.clock.now + self._delivery(served)
                served.cached_tokens = stats.prefix_cached_tokens + stats.external_cached_tokens
                served.external_tokens = stats.external_cached_tokens
                served.encoder_runs = sum(outcome == "miss" for outcome in stats.encoder)
                self._waits_no_more(served.first_token)
                self._on_first(served)
            if delta.finish_reason is not None:
                served = self._served.pop(delta.request_id)
                if self.prices.end:
                    self._api.work(self.prices.end)
                self._end(served, "" if delta.error is None else str(delta.error))
        for request in self._ended:  # so that they need no search for garbage
            request.sequences.clear()
        self._ended.clear()

    def _end(self, served: Served, failed: str) -> None:
        served.ended = self.clock.now + self._delivery(served)
        if served.first_token < 0:
            self._waits_no_more(served.ended)
        served.failed = failed
        served.tokens = NO_TOKENS
        self._on_end(served)

    def _waits_no_more(self, answered: float) -> None:
        """A request has its first token, or will have none; the client knew at `answered`."""
        self._num_waiting -= 1
        self._last_first_token = max(self._last_first_token, answered)

    def _delivery(self, served: Served) -> float:
        """Seconds from the end of a step until the client has the request's token."""
        return self.prices.first_token * served.spread

    def _tell_load(self) -> None:
        events = self._events
        if events is not None:
            queues, now = self._state.queues, self.clock.now
            if now >= self._next_load:
                self._next_load = now + LOAD_SECONDS
            running = queues.num_running_requests
            events.tell_load(now, running, len(queues.requests) - running)
            events.flush()

    def check_integrity(self) -> None:
        """Raise where the caches disagree, or something is left of requests that have ended."""
        self.scheduler.check_integrity()
        self.directory.check_integrity()
        if not self._busy and not self._served:
            assert self._state.block_pool.num_free == self._state.block_pool.num_blocks
            assert not self._num_waiting or not self._api.is_idle or self._making


@lru_cache(maxsize=4096)
def _expansion(length: int) -> Expansion:
    return Expansion(((PLACEHOLDER, length),), PLACEHOLDER)


@lru_cache(maxsize=4096)
def _item(modality: Modality, length: int) -> ProcessedItem:
    """A processed item without arrays, which nothing changes."""
    return ProcessedItem(modality, {}, _expansion(length))


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
