"""`lookonce bench prefetch`: first tokens of prompts whose picture comes late, at 80 % load.

Every prompt is text in several chunks with its pictures in the last one, each picture new. Requests
arrive at random, the same ones at the same times with prefetch and without, in turn. Time is
virtual: a step takes the CPU time it took, arrivals come on that clock, so that other work on the
machine does not count. The load is relative to the throughput without prefetch when all come at
once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from lookonce.bench.kv_subject import (
    PICTURE_ROWS,
    PICTURE_SHAPE,
    BenchEngine,
    load_subject,
    make_folder,
)
from lookonce.bench.report import Report, median, percentile
from lookonce.config import SchedulerConfig
from lookonce.types.media import Array, Expansion, MediaFeature, ProcessedItem
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams

CHUNK = 256
"""Token budget of a step."""
ENCODER_ROWS = 256
"""Encoder rows of a step."""
TEXT_TOKENS, TAIL_TOKENS = 720, 16
"""Before and after the pictures: they are in the third chunk, or in a later one under load."""
MAX_TOKENS = 16
REQUESTS, PAIRS = 32, 5
LOAD = 0.8


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    """Seconds on the virtual clock."""
    request: GenerateRequest
    items: dict[bytes, ProcessedItem]


@dataclass(frozen=True, slots=True)
class Outcome:
    first_tokens: list[float]
    """Seconds from arrival, in order of arrival."""
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


def serve(engine: BenchEngine, arrivals: Sequence[Arrival]) -> Outcome:
    """Step through all of them on the virtual clock."""
    engine.forget_device()
    core, waiting = engine.core, list(reversed(arrivals))
    before = core.stats()["encoder_prefetches_total"]
    first: dict[str, float] = {}
    clock = busy = 0.0
    while waiting or core.has_work:
        if not core.has_work:
            clock = max(clock, waiting[-1].at)
        while waiting and waiting[-1].at <= clock:
            coming = waiting.pop()
            core.add(coming.request, coming.items)
        started = time.thread_time()
        output = core.step()
        seconds = time.thread_time() - started
        clock, busy = clock + seconds, busy + seconds
        for delta in output.deltas if output is not None else ():
            first.setdefault(delta.request_id, clock)
    taken = [first[one.request.request_id] - one.at for one in arrivals]
    return Outcome(taken, busy, core.stats()["encoder_prefetches_total"] - before)


def at_random_times(arrivals: Sequence[Arrival], rate: float, seed: int) -> list[Arrival]:
    """The same requests, `rate` of them per second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(arrivals))
    return [
        Arrival(at, msgspec.structs.replace(one.request, arrival=at), one.items)
        for one, at in zip(arrivals, np.cumsum(gaps).tolist(), strict=True)
    ]


def measure(folder: str, pictures: Sequence[int], requests: int, pairs: int) -> Report:
    """One row per number of pictures in each prompt."""
    loaded = load_subject(folder)
    config = SchedulerConfig(max_num_batched_tokens=CHUNK, max_encoder_tokens=ENCODER_ROWS)
    report = Report(
        "prefetch",
        (
            "pictures", "load", "without p50 ms", "with p50 ms", "ratio p50", "ratio mean",
            "ratio p95", "prefetched",
        ),
    )  # fmt: skip
    with (
        BenchEngine(loaded, scheduler=config) as ahead,
        BenchEngine(loaded, scheduler=replace(config, encoder_prefetch=False)) as plain,
    ):
        for num_pictures in pictures:
            report.add(num_pictures, LOAD, *_row(plain, ahead, num_pictures, requests, pairs))
    report.notes.append(
        f"time to first token of {requests} requests with prefetch over without, medians of "
        f"{pairs} pairs; prefetched: pictures encoded ahead, of {requests} times as many as in "
        "each prompt"
    )
    return report


def _row(
    plain: BenchEngine, ahead: BenchEngine, num_pictures: int, requests: int, pairs: int
) -> tuple[float, ...]:
    def prompts(seed: int) -> list[Arrival]:
        return [late_pictures(n, num_pictures, 0.0, seed) for n in range(requests)]

    for engine in (plain, ahead):
        serve(engine, prompts(0)[:8])  # the first calls allocate what later ones use again
    rate = LOAD * requests / serve(plain, prompts(0)).seconds
    rows = []
    for pair in range(1, pairs + 1):
        coming = at_random_times(prompts(pair), rate, pair)
        order = (plain, ahead) if pair % 2 else (ahead, plain)
        outcomes = {engine: serve(engine, coming) for engine in order}
        rows.append(_compare(outcomes[plain], outcomes[ahead]))
    return tuple(median(column) for column in zip(*rows, strict=True))


def _compare(without: Outcome, ahead: Outcome) -> tuple[float, ...]:
    """Medians in ms, the ratios of median, mean and 95th percentile, and pictures prefetched."""
    a, b = without.first_tokens, ahead.first_tokens
    return (
        1e3 * median(a),
        1e3 * median(b),
        median(b) / median(a),
        sum(b) / sum(a),
        percentile(b, 95) / percentile(a, 95),
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
    report.show()
    if options.json is not None:
        report.write_json(options.json)
    return 0
