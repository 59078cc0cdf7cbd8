"""`lookonce bench events`: what `--events` costs a step that decodes.

Two engines of one random model decode the same batch in turns, one of them with a publisher and a
subscriber, which decodes every batch in a thread of its own.

told        CPU time that the step thread spends in collecting changes and handing them over, less
            that of the stopwatch
a step      wall time of a step with events over one without, medians of the pairs
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.bench_engine import BenchEngine, load_bench_model, prompt_with_pictures
from benchmarks.report import Report, median, percentile, publish
from lookonce.config import EventsConfig
from lookonce.core.scheduler import Scheduler
from lookonce.engine.process.cache_events import EventPublisher, StepEvents
from lookonce.model.loader import LoadedModel
from tests.support.model_folders.make import make_folder

CALIBRATION = 10_000
BATCH, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 192


class StepStopwatch:
    """Adds up the CPU seconds that the step thread spends for `StepEvents`, by step."""

    def __init__(self, events: StepEvents, scheduler: Scheduler) -> None:
        self.seconds: list[float] = []
        self._step = 0.0
        self._overhead = 0.0
        idle = self._timed(lambda: None)
        for _ in range(CALIBRATION):
            idle()
        self._overhead, self._step = self._step / CALIBRATION, 0.0
        update = scheduler._update
        told = self._timed(update._tell_registered)
        update._tell_registered = told  # type: ignore[method-assign]
        for name in ("removed", "cleared"):
            setattr(events, name, self._timed(getattr(events, name)))
        self._flush = self._timed(events.flush)
        events.flush = self._end_step  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> None:
            started = time.thread_time()
            call(*args)
            self._step += time.thread_time() - started - self._overhead

        return timed

    def _end_step(self) -> None:
        self._flush()
        self.seconds.append(self._step)
        self._step = 0.0


class Subscriber:
    """Reads and decodes all batches, as a router does; a context manager."""

    def __init__(self, address: str) -> None:
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.num_events = 0

    def __enter__(self) -> Subscriber:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._context.term()
        self._thread.join()

    def _read(self) -> None:
        try:
            while True:
                _, _, payload = self._socket.recv_multipart()
                self.num_events += len(msgspec.msgpack.decode(payload)[1])
        except self._zmq.ContextTerminated:
            self._socket.close(linger=0)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench events", description=__doc__)
    parser.add_argument("--model", help="folder of a llava model; default: a random one, 8M")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lookonce-bench-") as folder:
        model = options.model or str(make_folder("llava", Path(folder), scale="8m"))
        report = steps_report(load_bench_model(model), Path(folder), options.pairs)
    publish([report], options.json)
    return 0


def steps_report(
    loaded: LoadedModel, folder: Path, pairs: int, new_tokens: int = NEW_TOKENS
) -> Report:
    report = Report(
        "events",
        ("batch", "told us", "told p99 us", "step us without", "step us with", "ratio", "events"),
        notes=[
            f"{BATCH} prompts of {PROMPT_TOKENS} tokens and a picture, {new_tokens} new tokens",
            f"told: means and p99 over all steps; steps: medians of {pairs} pairs",
        ],
    )
    config = EventsConfig(f"ipc://{folder}/pub", f"ipc://{folder}/replay")
    publisher = EventPublisher(config)
    try:
        with (
            Subscriber(config.address) as subscriber,
            BenchEngine(loaded) as plain,
            BenchEngine(loaded) as telling,
        ):
            telling.core.publish(publisher)
            events = telling.core._events
            if events is None:
                raise RuntimeError("the engine publishes nothing")
            _step_seconds(plain, -1, new_tokens)
            _step_seconds(telling, -1, new_tokens)
            rows = []
            for pair in range(pairs):
                order = (plain, telling) if pair % 2 else (telling, plain)
                seconds = {engine: _step_seconds(engine, pair, new_tokens) for engine in order}
                rows.append((seconds[plain], seconds[telling], seconds[telling] / seconds[plain]))
            stopwatch = StepStopwatch(events, telling.core._scheduler)
            _step_seconds(telling, pairs, new_tokens)
            without, with_events, ratio = (median(column) for column in zip(*rows, strict=True))
            told = stopwatch.seconds
            mean = 1e6 * sum(told) / len(told)
            p99 = percentile([1e6 * each for each in told], 99)
            figures = (mean, p99, 1e6 * without, 1e6 * with_events, ratio)
            report.add(BATCH, *figures, subscriber.num_events)
    finally:
        publisher.close()
    return report


def _step_seconds(engine: BenchEngine, turn: int, new_tokens: int) -> float:
    """Wall seconds of a step, prompts included, of a batch of new prompts."""
    batch = [
        prompt_with_pictures(
            f"{turn}-{n}", PROMPT_TOKENS, 1, seed=1000 * (turn + 2) + n, max_tokens=new_tokens
        )
        for n in range(BATCH)
    ]
    before = engine.core.stats()["engine_steps_total"]
    started = time.perf_counter()
    engine.run(batch)
    seconds = time.perf_counter() - started
    return seconds / (engine.core.stats()["engine_steps_total"] - before)
