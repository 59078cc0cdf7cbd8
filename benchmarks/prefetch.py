"""`lookonce bench prefetch`: first tokens of prompts whose picture comes late, at 80 % load.

Every prompt is text in several chunks, with new pictures in the last one. Requests arrive at random
times, the same with prefetch and without. The clock is virtual: it advances by the CPU time of each
step, and arrivals are times on it. Two engines take turns step by step, so that a disturbance of
the machine hits both, and each pair is of new engines. The load is relative to the throughput
without prefetch when all requests come at once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.bench_engine import (
    PICTURE_ROWS,
    PICTURE_SHAPE,
    BenchEngine,
    load_bench_model,
)
from benchmarks.report import Report, median, percentile, publish
from lookonce.config import SchedulerConfig
from lookonce.model.loader import LoadedModel
from lookonce.types.media import Array, Expansion, MediaFeature, ProcessedItem
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.model_folders.make import make_folder

CHUNK = 64
"""Tokens that one step may compute."""
ENCODER_ROWS = 256
"""Encoder rows that one step may compute."""
TEXT_TOKENS, TAIL_TOKENS = 180, 8
"""Tokens before and after the pictures, which so are in the third chunk, or later under load."""
MAX_TOKENS = 16
REQUESTS, PAIRS = 48, 7
LOAD = 0.8


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    """Seconds on the virtual clock."""
    request: GenerateRequest
    items: dict[bytes, ProcessedItem]


@dataclass(frozen=True, slots=True)
class PrefetchOutcome:
    first_tokens: list[float]
    """Seconds from arrival to first token, in order of arrival."""
    seconds: float
    """CPU seconds of all steps."""
    prefetched: float


def late_pictures(number: int, num_pictures: int, at: float, seed: int) -> Arrival:
    rng = np.random.default_rng((seed, number))
    num_tokens = TEXT_TOKENS + num_pictures * (PICTURE_ROWS + 1) + TAIL_TOKENS
    tokens = rng.integers(20, 300, num_tokens, dtype=np.int32)
    features, items = [], {}
    for index in range(num_pictures):
        offset, key = TEXT_TOKENS + index * (PICTURE_ROWS + 1), rng.bytes(32)
        pixels = rng.standard_normal(PICTURE_SHAPE).astype(np.float32)
        arrays = {"pixel_values": Array("float32", PICTURE_SHAPE, pixels.data)}
        expansion = Expansion(((3, PICTURE_ROWS),), embed_token_id=3)
        items[key] = ProcessedItem("image", arrays, expansion)
        features.append(MediaFeature(key, "image", offset, PICTURE_ROWS, PICTURE_ROWS))
        tokens[offset : offset + PICTURE_ROWS] = 3
    request = GenerateRequest(
        request_id=str(number),
        scope=bytes(32),
        prompt=Array("int32", (num_tokens,), tokens.data),
        features=tuple(features),
        sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
        arrival=at,
    )
    return Arrival(at, request, items)


class VirtualClockEngine:
    """One engine that serves arrivals on a virtual clock."""

    def __init__(self, engine: BenchEngine, arrivals: Sequence[Arrival]) -> None:
        engine.forget_device()
        self._core = engine.core
        self._arrivals = arrivals
        self._waiting = list(reversed(arrivals))
        self._first: dict[str, float] = {}
        self._prefetched_before = self._prefetched
        self.clock = self._busy = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._core.has_work)

    def step(self) -> None:
        if not self._core.has_work:
            self.clock = max(self.clock, self._waiting[-1].at)
        while self._waiting and self._waiting[-1].at <= self.clock:
            coming = self._waiting.pop()
            self._core.add(coming.request, coming.items)
        started = time.thread_time()
        output = self._core.step()
        seconds = time.thread_time() - started
        self.clock, self._busy = self.clock + seconds, self._busy + seconds
        for delta in output.deltas if output is not None else ():
            self._first.setdefault(delta.request_id, self.clock)

    def outcome(self) -> PrefetchOutcome:
        taken = [self._first[one.request.request_id] - one.at for one in self._arrivals]
        return PrefetchOutcome(taken, self._busy, self._prefetched - self._prefetched_before)

    @property
    def _prefetched(self) -> float:
        return self._core.stats()["encoder_prefetches_total"]


def serve(arrivals: Sequence[Arrival], *engines: BenchEngine) -> list[PrefetchOutcome]:
    """Serve the same arrivals with each engine, always stepping the one whose clock is behind."""
    servings = [VirtualClockEngine(engine, arrivals) for engine in engines]
    while working := [one for one in servings if one.has_work]:
        min(working, key=lambda one: one.clock).step()
    return [serving.outcome() for serving in servings]


def at_random_times(arrivals: Sequence[Arrival], rate: float, seed: int) -> list[Arrival]:
    """The same requests, `rate` of them per second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(arrivals))
    return [
        Arrival(at, msgspec.structs.replace(one.request, arrival=at), one.items)
        for one, at in zip(arrivals, np.cumsum(gaps).tolist(), strict=True)
    ]


def measure(folder: str, pictures: Sequence[int], requests: int, pairs: int) -> Report:
    """One row per number of pictures in each prompt."""
    loaded = load_bench_model(folder)
    config = SchedulerConfig(max_num_batched_tokens=CHUNK, max_encoder_tokens=ENCODER_ROWS)
    ratios = ("ratio mean", "from", "to", "ratio p50", "ratio p95")
    report = Report(
        "prefetch",
        ("pictures", "without p50 ms", "with p50 ms", *ratios, "CPU", "prefetched"),
    )
    for num_pictures in pictures:
        rows = [
            _pair(loaded, config, num_pictures, requests, number) for number in range(1, pairs + 1)
        ]
        first, second, mean, *rest = (median(column) for column in zip(*rows, strict=True))
        means = [row[2] for row in rows]
        spread = percentile(means, 25), percentile(means, 75)
        report.add(num_pictures, first, second, mean, *spread, *rest)
    report.notes += [
        f"time to first token of {requests} requests at {LOAD:.0%} load, with prefetch over "
        f"without: medians of {pairs} pairs, and the middle half of their means (from, to)",
        f"CPU: time of all steps, with over without; prefetched: pictures encoded ahead, of "
        f"{requests} times as many as in each prompt",
    ]
    return report


def _pair(
    loaded: LoadedModel, config: SchedulerConfig, num_pictures: int, requests: int, number: int
) -> tuple[float, ...]:
    """Compare two new engines: the place of its memory gives each engine a speed of its own."""

    def prompts(seed: int) -> list[Arrival]:
        return [late_pictures(n, num_pictures, 0.0, seed) for n in range(requests)]

    with ExitStack() as stack:
        order = (False, True) if number % 2 else (True, False)
        engines = {
            prefetch: stack.enter_context(
                BenchEngine(loaded, scheduler=replace(config, encoder_prefetch=prefetch))
            )
            for prefetch in order
        }
        both = engines[False], engines[True]
        serve(prompts(0)[:8], *both)  # the first steps allocate memory that later ones reuse
        rate = LOAD * requests / serve(prompts(0), *both)[0].seconds
        return _compare(*serve(at_random_times(prompts(number), rate, number), *both))


def _compare(without: PrefetchOutcome, ahead: PrefetchOutcome) -> tuple[float, ...]:
    """Medians in ms, the ratios of mean, median, 95th percentile and CPU, pictures prefetched."""
    a, b = without.first_tokens, ahead.first_tokens
    return (
        1e3 * median(a),
        1e3 * median(b),
        sum(b) / sum(a),
        median(b) / median(a),
        percentile(b, 95) / percentile(a, 95),
        ahead.seconds / without.seconds,
        ahead.prefetched,
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench prefetch", description=__doc__)
    parser.add_argument("--model", help="a LLaVA folder; default: random weights, 8 million")
    parser.add_argument("--pictures", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_folder("llava", Path(folder), scale="8m"))
        report = measure(model, options.pictures, options.requests, options.pairs)
    publish([report], options.json)
    return 0
