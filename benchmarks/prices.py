"""`lookonce bench prices`: what a step, a picture, a request take here: the price list that
`lookonce simulate --prices FILE` reads, and `--json FILE` writes.

steps     the engine without a server: decodes side by side, prompts in chunks, cached or not;
          seconds by a least-squares fit without negative prices
tiers     prompts of two lengths that come back from host memory and from a disk
requests  a server that is asked one thing after another, with pauses: what its first tokens take
          beyond the step, the CPU time of its API process for a request and for each token that it
          streams, what a new picture takes beyond its encoder run, and that run
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np

from benchmarks.bench_engine import BenchEngine, load_bench_model, prompt_with_pictures
from benchmarks.load_generator import Arrivals, run_load
from benchmarks.pictures import data_url, distinct_pictures
from benchmarks.report import Report, machine, median, publish
from benchmarks.running_server import RunningServer, running_server, set_environment
from lookonce.config import NANO_FOLDER
from lookonce.model.loader import LoadedModel
from lookonce.render.media.pool import share_of_workers
from lookonce.simulate.prices import STEP_PRICES, Prices, TierPrices, amounts_of, fit
from lookonce.types.kv import TierSpec
from lookonce.types.ports import ModelRunner
from lookonce.types.step import StepPlan, StepResult

SIDE_BY_SIDE = (1, 2, 4, 8, 16)
PROMPTS = (16, 48, 100, 200, 400, 800)
ANSWER = 48
REPEATS = 3
TIER_LENGTHS, TIER_LOADS, TIER_BYTES = (100, 1500), 12, 256 << 20
ASKED = 30
"""Requests of each kind to the server."""
RATE = 6.0
"""Requests a second, at random times, of which none waits for another: where one follows the other
at once, as nobody asks, caches are warm and cores awake."""
DECODED_CONTEXT = 70
"""Tokens before one that is decoded in `with_server_steps`, about."""
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
                    steps.append(Step(amounts_of(plan), seconds))

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
    return json.dumps(
        {
            "model": "nano",
            "messages": [{"role": "user", "content": content}],
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
class Asked:
    """One kind of request, asked one after another."""

    first_token: float
    """Median, seconds."""
    api_cpu: float
    """Seconds of the API process for each request."""
    prompt_tokens: float
    cached_tokens: float


def ask(server: RunningServer, warm_up: Sequence[bytes], bodies: Sequence[bytes]) -> Asked:
    run_load(server.url, [], warm_up, Arrivals(concurrency=1))
    before = server.cpu_seconds()[0]
    result = run_load(server.url, [], bodies, Arrivals(concurrency=1, rate=RATE))
    cpu = server.cpu_seconds()[0] - before
    times = [each.first_text for each in result.answered]
    return Asked(
        median(times),
        cpu / len(bodies),
        median([float(each.prompt_tokens) for each in result.answered]),
        median([float(each.cached_tokens) for each in result.answered]),
    )


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


def with_server_steps(server: RunningServer, prices: Prices) -> Prices:
    """`prices` with those of decodes as a server's clients see them: between two steps it sends
    tokens, and the model finds the CPU's caches cold."""
    times = {}
    for rows in (1, 8):
        bodies = [body(f"{rows} {n}, which one?", 33) for n in range(8 + 2 * rows)]
        arrivals = Arrivals(concurrency=rows, rate=RATE if rows == 1 else None)
        result = run_load(server.url, [], bodies, arrivals)
        times[rows] = median([each.per_token for each in result.answered if each.per_token])
    context = prices.decode_context * DECODED_CONTEXT
    row = max(0.0, (times[8] - times[1]) / 7 - context)
    step = max(1e-5, times[1] - row - context)
    return msgspec.structs.replace(prices, step=step, decode_row=row)


def request_prices(server: RunningServer, prices: Prices) -> Prices:
    """`prices` with those of requests and pictures."""
    words = " ".join(["circle square red blue left"] * 60)

    def step_of(asked: Asked, pictures: int = 0) -> float:
        new = asked.prompt_tokens - asked.cached_tokens
        pairs = new * (asked.cached_tokens + (new + 1) / 2)
        seconds = prices.step + prices.prompt_row + prices.prompt_token * new
        seconds += prices.prompt_pair * pairs
        return seconds + pictures * (prices.encode_step + prices.encode_item)

    def kind(make: Callable[[int], bytes]) -> Asked:
        return ask(server, [make(n) for n in range(8)], [make(n) for n in range(8, 8 + ASKED)])

    prices = msgspec.structs.replace(prices, encode_item=encoding_seconds(server))
    short = kind(lambda n: body(f"{n}: is it red?", 2))
    answer = kind(lambda n: body(f"{n}; is it red?", 66))
    long = kind(lambda n: body(f"{n}: {words}", 2))
    pictures = {
        size: [data_url(each) for each in distinct_pictures(ASKED + 9, size, "JPEG", first=10)]
        for size in SIZES
    }
    prices = with_server_steps(server, prices)
    known = kind(lambda n: body(about(pictures["512"][0], f"{n}, is it red?"), 2))
    new = {
        size: kind(lambda n, urls=urls: body(about(urls[n + 1], "is it red?"), 2))  # type: ignore[misc]
        for size, urls in pictures.items()
    }
    stream = max(0.0, (answer.api_cpu - short.api_cpu) / 64)
    at_once = max(0.0, short.api_cpu - 2 * stream)
    request, end = 0.75 * at_once, 0.25 * at_once
    first_token = max(1e-5, short.first_token - request - step_of(short))
    long_rest = long.first_token - first_token - request - step_of(long)
    token = max(0.0, long_rest / (long.prompt_tokens - short.prompt_tokens))
    known_bytes = len(pictures["512"][0]) * 3 // 4
    known_rest = known.first_token - first_token - request - step_of(known)
    known_rest -= token * known.prompt_tokens
    rests = {}
    for size, asked in new.items():
        rest = asked.first_token - first_token - request - step_of(asked, pictures=1)
        sent = median([float(len(url)) for url in pictures[size]]) * 3 / 4
        rests[size] = rest - token * asked.prompt_tokens - max(0.0, known_rest) * sent / known_bytes
    small, large = rests["512"], rests["1024"]
    pixel = max(0.0, (large - small) / (SIZES["1024"] - SIZES["512"]))
    return msgspec.structs.replace(
        prices,
        request=request,
        end=end,
        stream_token=stream,
        first_token=first_token,
        request_token=token,
        request_byte=max(0.0, known_rest) / known_bytes,
        process_item=max(0.0, small - pixel * SIZES["512"]),
        process_pixel=pixel,
    )


def measure(folder: str, server: RunningServer) -> tuple[Prices, Report]:
    """The price list of the model in `folder`, which `server` serves, and a table of it."""
    loaded = load_bench_model(folder)
    steps, sizes = measure_steps(loaded)
    prices, error = step_prices(steps, sizes)
    with tempfile.TemporaryDirectory() as scratch:
        prices = msgspec.structs.replace(
            prices,
            host=measure_tier(loaded, TierSpec("host", capacity_bytes=TIER_BYTES)),
            disk=measure_tier(loaded, TierSpec("disk", capacity_bytes=TIER_BYTES, path=scratch)),
        )
    prices = request_prices(server, prices)
    workers = share_of_workers()
    prices = msgspec.structs.replace(prices, measured_on=machine(), media_workers=workers)
    prices = msgspec.structs.replace(prices, cores=float(len(os.sched_getaffinity(0))))
    report = Report("prices", ("price", "microseconds"))
    for name, value in msgspec.structs.asdict(prices).items():
        if isinstance(value, float):
            report.add(name, 1e6 * value)
        elif isinstance(value, TierPrices):
            report.add(f"{name}, an operation", 1e6 * value.operation)
            report.add(f"{name}, a MiB", 1e6 * value.byte * (1 << 20))
    report.notes.append(f"{len(steps)} steps; the median one is {error:.1%} from its price")
    return prices, report


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
        prices, report = measure(str(NANO_FOLDER), server)
    publish([report], None)
    if options.json is not None:
        written = msgspec.json.format(msgspec.json.encode(prices), indent=1)
        options.json.write_bytes(written + b"\n")
    return 0
