"""`lookonce bench prices`: what a step, a picture, a request take here: the price list that
`lookonce simulate --prices FILE` reads, and `--json FILE` writes.

steps     the engine without a server: decodes side by side, prompts in chunks, cached or not;
          seconds by a least-squares fit without negative prices
tiers     prompts of two lengths that come back from host memory and from a disk
decodes   a server's answers, one and eight at a time, after short and long prompts
cores     fixed work in one process, and in as many as there are cores
requests  a server that is asked one thing after another, at once and with pauses: how much longer
          first tokens take by the pause before them (`idle`); without that, first tokens by the
          prompt's length, what of it is new, and pictures that are known, by a fit; the CPU time of
          its API process for a request and for each token that it streams; what a new picture takes
          beyond that and its encoder run, and that run; how unequal requests of one kind are
          (`spread`)
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.bench_engine import BenchEngine, load_bench_model, prompt_with_pictures
from benchmarks.load_generator import Arrivals, RequestOutcome, run_load
from benchmarks.pictures import data_url, distinct_pictures
from benchmarks.report import Report, machine, median, publish
from benchmarks.running_server import RunningServer, running_server, set_environment
from lookonce.config import NANO_FOLDER
from lookonce.model.loader import LoadedModel
from lookonce.model.native.decoder import MAX_TOKENS
from lookonce.render.media.pool import share_of_workers
from lookonce.simulate.prices import STEP_PRICES, Prices, TierPrices, amounts_of, fit
from lookonce.types.cpu import usable_cores
from lookonce.types.kv import TierSpec
from lookonce.types.ports import ModelRunner
from lookonce.types.step import StepPlan, StepResult

SIDE_BY_SIDE = (1, 2, 4, 8, 16)
PROMPTS = (16, 48, 100, 200, 400, 800)
ANSWER = 48
REPEATS = 3
TIER_LENGTHS, TIER_LOADS, TIER_BYTES = (100, 1500), 12, 256 << 20
CORE_REPEATS, WORK_ROUNDS = 7, 1000
ASKED = 10
"""Requests of each kind to the server in each turn."""
RATES = (None, 4.0, 10.0, 25.0, 60.0)
"""Requests a second of each turn, at random times, of which none waits for another, all kinds among
one another, as a server is asked; None, which is first: kind after kind, each request as soon as
the one before has ended, so that CPU times of each kind are known. So what else the machine does
disturbs some requests of all kinds, not all of one. The longer the pause before a request, the more
caches are cold and cores asleep."""
WARM_UP = 4
"""Requests of each kind that are not counted, before the first that are."""
SPREAD_QUANTILES = 100
IDLE_EDGES = (0.0, 1e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2, 0.16, 0.32, float("inf"))
"""Idle seconds: of the requests between two of them is one point of the price by idle seconds."""
IDLE_LEAST = 8
"""Requests of a point."""
IDLE_ROUNDS = 20
"""In which that price, and the times of kinds without it, are found."""
SHORT_PROMPT = MAX_TOKENS
"""Tokens of a step that the native decoder computes; longer ones are computed in another way."""
DECODE_RATE = 8.0
"""Requests a second whose answers are alone at the server."""
DECODED = {1: 33, 8: 129}
"""Answers side by side → tokens of each whose decode steps are measured. One alone is as long as
answers are, as its first steps are slow after a pause; of several long ones, prompts are few of the
steps."""
ANSWERED = 66
"""Tokens of an answer that tells what streaming takes."""
WORDS = ("circle", "square", "red", "blue", "left", "right", "above", "small", "large")
SIZES = {"512": 512 * 512, "1024": 1024 * 1024}


@dataclass(frozen=True, slots=True)
class Step:
    """What a step computed, in units of `STEP_PRICES`, and what it took."""

    amounts: tuple[float, ...]
    seconds: float


class WatchedRunner:
    """Notes the last plan."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._plan: StepPlan | None = None

    def take_plan(self) -> StepPlan | None:
        """The last plan since the last call."""
        plan, self._plan = self._plan, None
        return plan

    def execute(self, plan: StepPlan) -> StepResult:
        self._plan = plan
        return self._runner.execute(plan)

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._plan = plan
        return self._runner.begin(plan)

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)


def measure_tier(loaded: LoadedModel, spec: TierSpec) -> TierPrices:
    """What loading prompts of two lengths from a tier takes."""
    amounts, seconds = [], []
    names = [f"kv_tier_{what}:{spec.kind}" for what in ("loaded_bytes_total", "load_seconds_total")]
    with BenchEngine(loaded, spec) as engine:
        for number in range(TIER_LOADS):
            length = TIER_LENGTHS[number % len(TIER_LENGTHS)]
            told = []
            for again in range(2):
                request, items = prompt_with_pictures(
                    f"{spec.kind}{number}.{again}", length, 0, seed=10_000 + number
                )
                before = engine.core.stats()
                engine.run([(request, items)])
                engine.settle()
                after = engine.core.stats()
                engine.forget_device()
                told = [after.get(name, 0.0) - before.get(name, 0.0) for name in names]
            if told[0] > 0 and told[1] > 0:
                amounts.append((1.0, told[0]))
                seconds.append(told[1])
    if not amounts:
        return TierPrices()  # nothing came back
    operation, byte = map(float, fit(np.array(amounts), np.array(seconds)))
    return TierPrices(operation=operation, byte=byte)


def measure_steps(loaded: LoadedModel) -> tuple[list[Step], Prices]:
    """Steps of many kinds, and the sizes of the model as prices."""
    watchers: list[WatchedRunner] = []

    def watched(runner: ModelRunner) -> ModelRunner:
        watchers.append(WatchedRunner(runner))
        return watchers[-1]

    steps: list[Step] = []
    with BenchEngine(loaded, watched=watched) as engine:

        def run(batch: Sequence[tuple[str, int, int]], answer: int, *, keep: bool) -> None:
            for name, num_tokens, seed in batch:
                request, items = prompt_with_pictures(
                    name, num_tokens, 0, seed=seed, max_tokens=answer
                )
                engine.core.add(request, items)
            while engine.core.has_work:
                watchers[-1].take_plan()
                began = time.perf_counter()
                engine.core.step()
                seconds = time.perf_counter() - began
                plan = watchers[-1].take_plan()
                if keep and plan is not None and (plan.scheduled or plan.encode):
                    steps.append(Step(amounts_of(plan, SHORT_PROMPT), seconds))

        numbers = itertools.count()
        for repeat in range(REPEATS + 1):
            keep = repeat > 0  # the first round warms up
            for rows in SIDE_BY_SIDE:
                engine.forget_device()
                batch = [
                    (f"d{next(numbers)}", 32 + 64 * (row % 4), next(numbers)) for row in range(rows)
                ]
                run(batch, ANSWER, keep=keep)
            for length in PROMPTS:
                engine.forget_device()
                seed = next(numbers)
                run([(f"p{next(numbers)}", length, seed)], 2, keep=keep)
                run([(f"c{next(numbers)}", length, seed)], 2, keep=keep)
        info, layout = loaded.info, engine.page_layout
    sizes = Prices(
        kv_token_bytes=layout.block_bytes // layout.block_size,
        encoder_row_bytes=info.encoder_row_bytes,
        block_size=layout.block_size,
        short_prompt=SHORT_PROMPT,
        max_model_len=info.max_model_len,
    )
    return steps, sizes


def without_outliers(steps: Sequence[Step]) -> list[Step]:
    """Of steps that computed the same amounts, those not far beyond the median: in others the
    machine did something else."""
    kinds: dict[tuple[float, ...], list[Step]] = {}
    for step in steps:
        kinds.setdefault(step.amounts, []).append(step)
    return [
        step
        for alike in kinds.values()
        for step in alike
        if step.seconds <= 2.0 * median([each.seconds for each in alike])
    ]


def step_prices(steps: Sequence[Step], sizes: Prices) -> tuple[Prices, float]:
    """The price list of steps, and the median relative error of its steps."""
    kept = without_outliers(steps)
    amounts = np.array([step.amounts for step in kept])
    seconds = np.array([step.seconds for step in kept])
    found = fit(amounts, seconds)
    prices = msgspec.structs.replace(
        sizes, **dict(zip(STEP_PRICES, map(float, found), strict=True))
    )
    errors = np.abs(amounts @ found - seconds) / seconds
    return prices, float(np.median(errors))


# --- the server ----------------------------------------------------------------------------------


def body(content: object, tokens: int) -> bytes:
    """A streamed question for exactly so many tokens."""
    return chat([{"role": "user", "content": content}], tokens)


def chat(messages: Sequence[Mapping[str, object]], tokens: int) -> bytes:
    """A streamed request for exactly so many tokens."""
    return json.dumps(
        {
            "model": "nano",
            "messages": messages,
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def about(url: str, question: str) -> list[dict[str, object]]:
    picture: dict[str, object] = {"type": "image_url", "image_url": {"url": url}}
    return [picture, {"type": "text", "text": question}]


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests that are alike. Each has a number, and is new by it."""

    body: Callable[[int], bytes]
    num_items: int = 0
    item_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What requests of one kind took, asked one after another."""

    first_token: float
    """Median, seconds."""
    api_cpu: float
    """Seconds of the API process for each request of the first turn."""
    engine_cpu: float
    """Seconds of the engine process for each request of the first turn."""
    prompt_tokens: float
    cached_tokens: float
    num_items: int = 0
    item_bytes: float = 0.0
    """Of all its media, encoded."""
    first_tokens: tuple[float, ...] = ()
    """Of each request, seconds."""
    idle: tuple[float, ...] = ()
    """Seconds from the first token of the request before each of `first_tokens`."""
    num_embedded: float = 0.0
    """Items of which the prompt's new tokens have encoder outputs."""

    @property
    def new_tokens(self) -> float:
        return self.prompt_tokens - self.cached_tokens

    @property
    def chunk(self) -> tuple[float, float, float]:
        """What `prompt_token`, `long_prompt_row` and `long_prompt_token` are multiplied with."""
        if self.new_tokens > SHORT_PROMPT:
            return 0.0, 1.0, self.new_tokens
        return self.new_tokens, 0.0, 0.0

    @property
    def pairs(self) -> float:
        """Of a token that is computed and one that it attends to."""
        return self.new_tokens * (self.cached_tokens + (self.new_tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class Alone:
    """A request that came when the server had no other."""

    outcome: RequestOutcome
    idle: float
    """Seconds since all before had their first tokens."""


def ask_in_turns(server: RunningServer, kinds: Sequence[Kind]) -> list[Asked]:
    """`ASKED` requests of each kind at the first of `RATES`, then as many at the next."""
    sent: list[RequestOutcome] = []
    kind_of: dict[int, int] = {}
    cpu = np.zeros((len(kinds), 3))
    for turn, rate in enumerate(RATES):
        numbers = range(turn * (WARM_UP + ASKED), (turn + 1) * (WARM_UP + ASKED))
        made = [[kind.body(number) for number in numbers] for kind in kinds]
        if rate is None:
            for at, bodies in enumerate(made):
                warm_up = run_load(server.url, [], bodies[:WARM_UP], Arrivals(concurrency=1))
                before = server.cpu_seconds()
                result = run_load(server.url, [], bodies[WARM_UP:], Arrivals(concurrency=1))
                cpu[at] = np.subtract(server.cpu_seconds(), before) / ASKED
                sent += [*warm_up.outcomes, *result.outcomes]
                kind_of.update({id(each): at for each in result.outcomes})
            continue
        order = np.random.default_rng(turn).permutation(np.repeat(np.arange(len(kinds)), ASKED))
        left = [iter(bodies[WARM_UP:]) for bodies in made]
        mixed = [next(left[at]) for at in order]
        result = run_load(server.url, [], mixed, Arrivals(concurrency=1, rate=rate, seed=turn))
        sent += result.outcomes
        kind_of.update({id(each): int(at) for each, at in zip(result.outcomes, order, strict=True)})
    alone: list[list[Alone]] = [[] for _ in kinds]
    for each in alone_at_the_server(sent):
        if id(each.outcome) in kind_of:  # the others warmed up
            alone[kind_of[id(each.outcome)]].append(each)
    return [asked_of(*each) for each in zip(kinds, alone, cpu, strict=True)]


def asked_of(kind: Kind, alone: Sequence[Alone], cpu: NDArray[np.float64]) -> Asked:
    """`cpu`: seconds of API process, media workers and engine process for each request."""
    outcomes = [each.outcome for each in alone]
    firsts = [each.first_text for each in outcomes]
    return Asked(
        median(firsts),
        float(cpu[0]),
        float(cpu[2]),
        median([float(each.prompt_tokens) for each in outcomes]),
        median([float(each.cached_tokens) for each in outcomes]),
        kind.num_items,
        kind.item_bytes,
        tuple(firsts),
        tuple([each.idle for each in alone]),
        median([float(num_embedded(each)) for each in outcomes]),
    )


def num_embedded(outcome: RequestOutcome) -> int:
    """Items whose encoder outputs the prompt's new tokens have: those before are in KV blocks."""
    return sum(item.encoder not in ("skipped", "unknown") for item in outcome.items)


def idle_prices(asked: Sequence[Asked]) -> tuple[tuple[float, float], ...]:
    """`Prices.idle`: what first tokens took beyond the median of their kind, by the seconds since
    the first token before them. A request of any kind takes so much longer; a longer pause never
    makes it shorter."""
    kind = np.repeat(np.arange(len(asked)), [len(each.idle) for each in asked])
    seconds = np.array([first for each in asked if each.idle for first in each.first_tokens])
    idle = np.array([pause for each in asked for pause in each.idle])
    found = [(idle >= least) & (idle < most) for least, most in pairwise(IDLE_EDGES)]
    parts = [part for part in found if part.sum() >= IDLE_LEAST]
    if not parts:
        return ()
    at = np.array([np.median(idle[part]) for part in parts])
    longer = np.zeros(len(parts))
    for _ in range(IDLE_ROUNDS):
        alike = seconds - np.interp(idle, at, longer)
        of_kind = {each: np.median(alike[kind == each]) for each in set(kind.tolist())}
        more = seconds - np.array([of_kind[each] for each in kind.tolist()])
        longer = ascending([float(np.median(more[part])) for part in parts])
        longer -= longer[0]
    return tuple(zip(at.tolist(), longer.tolist(), strict=True))


def ascending(values: Sequence[float]) -> NDArray[np.float64]:
    """The numbers nearest to `values`, by least squares, none below the one before it."""
    runs: list[tuple[float, int]] = []  # mean and length
    for value in values:
        mean, length = value, 1
        while runs and runs[-1][0] > mean:
            earlier, count = runs.pop()
            mean = (mean * length + earlier * count) / (length + count)
            length += count
        runs.append((mean, length))
    return np.repeat([mean for mean, _ in runs], [length for _, length in runs])


def at_once(asked: Asked, prices: Prices) -> Asked:
    """What it would have taken without pauses, by `prices.idle`."""
    if not asked.idle:
        return asked
    firsts = tuple(
        [
            max(1e-5, first - prices.of_idle(idle))
            for first, idle in zip(asked.first_tokens, asked.idle, strict=True)
        ]
    )
    return dataclasses.replace(asked, first_token=median(firsts), first_tokens=firsts)


def spread_quantiles(asked: Sequence[Asked]) -> tuple[float, ...]:
    """Quantiles of each request's seconds to the first token over the median of its kind; the
    middle of each of `SPREAD_QUANTILES` equal parts."""
    times = np.array([first / each.first_token for each in asked for first in each.first_tokens])
    middles = (np.arange(SPREAD_QUANTILES) + 0.5) / SPREAD_QUANTILES
    return tuple(np.quantile(times, middles).tolist())


def alone_at_the_server(sent: Sequence[RequestOutcome]) -> list[Alone]:
    """Those answered that were due after all before had ended: the others waited for them. Of the
    first it is not known what was before."""
    found: list[Alone] = []
    first, *following = sorted(sent, key=lambda outcome: outcome.asked)
    ended, had_token = first.ended, first.asked + first.first_text
    for each in following:
        if each.asked >= ended and each.error is None:
            found.append(Alone(each, each.asked - had_token))
        ended = max(ended, each.ended)
        had_token = max(had_token, each.asked + each.first_text)
    return found


def encoding_seconds(server: RunningServer) -> float:
    """Median seconds of an encoder run for a new picture, as receipts say."""
    found = []
    for picture in distinct_pictures(10, "512", "JPEG", first=5_000):
        asked = {
            "model": "nano",
            "messages": [{"role": "user", "content": about(data_url(picture), "is it red?")}],
            "max_tokens": 2,
            "reuse_receipt": True,
        }
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)
        found.append(answer.json()["reuse_receipt"]["items"][0]["encode_ms"] / 1e3)
    return median(found)


def decode_prices(server: RunningServer, prices: Prices) -> Prices:
    """`prices` with those of decodes as a server's clients see them: between two steps it sends
    tokens, and the model finds the CPU's caches cold."""
    amounts, seconds = [], []
    for rows, length in itertools.product(DECODED, (1, 300)):
        tokens = DECODED[rows]
        bodies = [body(f"{rows} {n}, {words(length)}?", tokens) for n in range(24)]
        arrivals = Arrivals(concurrency=rows, rate=DECODE_RATE if rows == 1 else None)
        answered = run_load(server.url, [], bodies, arrivals).answered
        prompt = median([float(each.prompt_tokens) for each in answered])
        amounts.append((1.0, float(rows), rows * (prompt + tokens / 2)))
        seconds.append(median([each.per_token for each in answered if each.per_token]))
    step, row, context = map(float, fit(np.array(amounts), np.array(seconds)))
    return msgspec.structs.replace(
        prices, step=max(1e-5, step), decode_row=row, decode_context=context
    )


@dataclass(frozen=True, slots=True)
class Kinds:
    """What requests of several kinds took at a server."""

    known: tuple[Asked, ...]
    """Without new media: prompts of several lengths, all new or mostly known, with and without
    pictures that are known; the first is short."""
    new: dict[str, Asked]
    """With a new picture each, by its size."""
    answer: Asked
    """As the first of `known`, with an answer of `ANSWERED` tokens instead of 2."""

    @property
    def all(self) -> tuple[Asked, ...]:
        return (*self.known, *self.new.values(), self.answer)

    def at_once(self, prices: Prices) -> Kinds:
        """What they would have taken without pauses, by `prices.idle`."""
        new = {size: at_once(asked, prices) for size, asked in self.new.items()}
        known = tuple([at_once(asked, prices) for asked in self.known])
        return Kinds(known, new, at_once(self.answer, prices))

    def known_like(self, other: Asked) -> Asked:
        """The one of `known` with the most similar number of new tokens."""
        return min(self.known, key=lambda each: abs(each.new_tokens - other.new_tokens))


def words(count: int, first: int = 0) -> str:
    return " ".join(WORDS[(first + n) * 7 % len(WORDS)] for n in range(count))


def conversation(number: int, earlier: int, url: str) -> bytes:
    """The next request of a conversation about a picture that has had `earlier` turns. New in it
    are the last answer and question, or in the first turn the question; the rest is known."""
    messages: list[dict[str, object]] = [{"role": "system", "content": words(75)}]
    question = words(5) if earlier else f"{number}: {words(5)}"
    messages.append({"role": "user", "content": about(url, question)})
    for each in range(earlier):
        answer = words(12, each) if each + 1 < earlier else f"{number}: {words(12)}"
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": words(8, each)})
    return chat(messages, 2)


def ask_kinds(server: RunningServer) -> Kinds:
    """Ask for all kinds of requests that conversations have."""
    num_pictures = len(RATES) * (WARM_UP + ASKED)
    made = {size: distinct_pictures(num_pictures + 1, size, "JPEG", first=10) for size in SIZES}
    urls = {size: [data_url(each) for each in made[size]] for size in SIZES}

    def text(length: int) -> Kind:
        # The length comes first, lest a longer one finds the blocks of a shorter one.
        return Kind(lambda n: body(f"{length}/{n}: {words(length, n)}", 2))

    def continued(tail: int) -> Kind:
        return Kind(lambda n: body(f"{words(300)} {tail}/{n}: {words(tail, n)}", 2))

    def pictured(size: str, make: Callable[[int], bytes]) -> Kind:
        return Kind(make, 1, median([float(len(each)) for each in made[size]]))

    def known(size: str, earlier: int) -> Kind:
        return pictured(size, lambda n: conversation(n, earlier, urls[size][0]))

    def new(size: str) -> Kind:
        return pictured(size, lambda n: conversation(n, 0, urls[size][n + 1]))

    kinds = (
        Kind(lambda n: body(f"{n}: is it red?", 2)),
        *(text(length) for length in (30, 60, 120, 300)),
        *(continued(tail) for tail in (1, 25)),
        *(known("512", earlier) for earlier in (0, 1, 2, 4)),
        *(known("1024", earlier) for earlier in (0, 2)),
    )
    *asked, small, large, answer = ask_in_turns(
        server,
        (*kinds, *map(new, SIZES), Kind(lambda n: body(f"{n}; is it red?", ANSWERED))),
    )
    return Kinds(tuple(asked), dict(zip(SIZES, (small, large), strict=True)), answer)


def request_prices(kinds: Kinds, prices: Prices) -> tuple[Prices, Report]:
    """`prices` with those of requests, prompts and pictures, as a server's clients see them; and
    what first tokens of each kind took beside what they should by these."""
    prices = msgspec.structs.replace(prices, idle=idle_prices(kinds.all))
    kinds = kinds.at_once(prices)
    stream = max(0.0, (kinds.answer.api_cpu - kinds.known[0].api_cpu) / (ANSWERED - 2))
    whole = max(0.0, kinds.known[0].api_cpu - 2 * stream)
    request, end = 0.75 * whole, 0.25 * whole

    def amounts(asked: Asked) -> tuple[float, ...]:
        told = asked.prompt_tokens, float(asked.num_items), asked.item_bytes
        return 1.0, *told, *asked.chunk, asked.pairs, asked.num_embedded

    rows = np.array([amounts(asked) for asked in kinds.known])
    seconds = np.array([asked.first_token for asked in kinds.known])
    found = fit(rows, seconds)
    fixed, request_token, request_item, request_byte = map(float, found[:4])
    prompt_token, long_row, long_token, prompt_pair, embed_item = map(float, found[4:])
    row = min(prices.prompt_row, max(0.0, fixed - request - prices.step))
    encoding = prices.encode_step + prices.encode_item
    small, large = (
        kinds.new[size].first_token - float(np.dot(amounts(kinds.new[size]), found)) - encoding
        for size in SIZES
    )
    pixel = max(0.0, (large - small) / (SIZES["1024"] - SIZES["512"]))
    short, long = kinds.known[0], max(kinds.known, key=lambda each: each.new_tokens)
    picture, plain = kinds.new["512"], kinds.known_like(kinds.new["512"])
    threads = _threads(long.engine_cpu - short.engine_cpu, long.first_token - short.first_token)
    prices = msgspec.structs.replace(
        prices,
        request=request,
        end=end,
        stream_token=stream,
        first_token=max(1e-5, fixed - request - prices.step - row),
        request_token=request_token,
        request_item=request_item,
        request_byte=request_byte,
        prompt_row=row,
        prompt_token=prompt_token,
        prompt_pair=prompt_pair,
        embed_item=embed_item,
        long_prompt_row=row + long_row,
        long_prompt_token=long_token,
        process_item=max(0.0, small - pixel * SIZES["512"]),
        process_pixel=pixel,
        prompt_threads=threads,
        encode_threads=_threads(picture.engine_cpu - plain.engine_cpu, encoding),
        spread=spread_quantiles(kinds.all),
    )
    report = Report(
        "prices, kinds of requests",
        ("prompt tokens", "new ones", "pictures", "embedded", "first token ms", "by prices ms"),
        notes=["first tokens are without what the pause before a request adds"],
    )
    for asked, priced in zip(kinds.known, rows @ found, strict=True):
        told = asked.prompt_tokens, asked.new_tokens, asked.num_items, asked.num_embedded
        report.add(*told, 1e3 * asked.first_token, 1e3 * float(priced))
    return prices, report


def _threads(cpu_seconds: float, seconds: float) -> float:
    """Cores that were busy, at least one and no more than there are."""
    return min(float(usable_cores()), max(1.0, cpu_seconds / max(seconds, 1e-9)))


# --- the machine --------------------------------------------------------------------------------


def measure_cores() -> float:
    """How many times the work of one core all cores do together: cores that a hypervisor makes of
    the threads of one, or that share its memory, are not that many."""
    count = usable_cores()
    context = multiprocessing.get_context("spawn")
    times: dict[int, list[list[float]]] = {1: [], count: []}
    with context.Pool(count) as pool:
        pool.map(work, [0.0] * count)  # all have started
        for _ in range(CORE_REPEATS):
            for busy in times:
                at = time.monotonic() + 0.05
                times[busy].append(pool.map(work, [at] * busy, chunksize=1))
    return cores_of(times[1], times[count])


def cores_of(alone: Sequence[Sequence[float]], together: Sequence[Sequence[float]]) -> float:
    """From seconds of each process in each repetition, of one process and of one a core. In the
    repetition that took least, the machine did the least else."""
    least_alone, least = (
        min(sum(each) / len(each) for each in repetitions) for repetitions in (alone, together)
    )
    count = float(len(together[0]))
    return min(count, max(1.0, count * least_alone / least))


def work(at: float) -> float:
    """Seconds of a fixed amount of work of the kinds that a server has, from the moment `at`:
    Python, and reading weights."""
    weights, row = np.ones((1024, 1024), np.float32), np.ones(1024, np.float32)
    while time.monotonic() < at:
        pass
    began = time.perf_counter()
    for number in range(WORK_ROUNDS):
        row = weights @ row / 1024.0
        sum([each * number for each in range(500)])
    return time.perf_counter() - began


def measure(folder: str, server: RunningServer) -> tuple[Prices, list[Report]]:
    """The price list of the model in `folder`, which `server` serves, and tables of it."""
    loaded = load_bench_model(folder)
    steps, sizes = measure_steps(loaded)
    prices, error = step_prices(steps, sizes)
    with tempfile.TemporaryDirectory() as scratch:
        prices = msgspec.structs.replace(
            prices,
            host=measure_tier(loaded, TierSpec("host", capacity_bytes=TIER_BYTES)),
            disk=measure_tier(loaded, TierSpec("disk", capacity_bytes=TIER_BYTES, path=scratch)),
        )
    prices = msgspec.structs.replace(prices, encode_item=encoding_seconds(server))
    prices = decode_prices(server, prices)
    prices, requests = request_prices(ask_kinds(server), prices)
    workers = share_of_workers()
    prices = msgspec.structs.replace(prices, measured_on=machine(), media_workers=workers)
    prices = msgspec.structs.replace(prices, cores=measure_cores())
    report = Report("prices", ("price", "microseconds"))
    for name, value in msgspec.structs.asdict(prices).items():
        if name == "cores" or name.endswith("threads"):
            report.notes.append(f"{name}: {value:.2f}")
        elif isinstance(value, float):
            report.add(name, 1e6 * value)
        elif isinstance(value, TierPrices):
            report.add(f"{name}, an operation", 1e6 * value.operation)
            report.add(f"{name}, a MiB", 1e6 * value.byte * (1 << 20))
    told = np.quantile(prices.spread, (0.1, 0.9, 0.99))
    report.notes.append("spread: p10 {:.2f}, p90 {:.2f}, p99 {:.2f} of the median".format(*told))
    pauses = [f"{1e3 * idle:.3g}: {1e3 * longer:.2f}" for idle, longer in prices.idle]
    report.notes.append("ms more after so many idle: " + ", ".join(pauses))
    report.notes.append(f"{len(steps)} steps; the median one is {error:.1%} from its price")
    return prices, [report, requests]


def write_prices(prices: Prices, path: Path) -> None:
    """For `read_prices`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(prices), indent=1) + b"\n")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "lookonce bench prices",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the price list")
    options = parser.parse_args(arguments)
    set_environment()
    with running_server() as server:
        prices, reports = measure(str(NANO_FOLDER), server)
    publish(reports, None)
    if options.json is not None:
        write_prices(prices, options.json)
    return 0
