"""The engine process of `lookonce bench engine`: the real one, with a stopwatch around the model.

`python -m benchmarks.engine_process` is started and spoken to like `lookonce.engine.process`. It
adds the CPU time it has used to its stats. Both clocks are read at one place of the step loop,
between two steps, so that a difference covers the same steps of both.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from lookonce.core.block_pool import BlockPool
from lookonce.engine.process.build import assemble
from lookonce.engine.process.cache_events import Load
from lookonce.engine.process.engine_core import EngineCore, RequestPreprocessor
from lookonce.engine.process.load_engine import Progress, attention_of, make_runner
from lookonce.engine.process.main import run_engine
from lookonce.engine.process_io import EngineSettings
from lookonce.model.loader import load_model

_P = ParamSpec("_P")
_R = TypeVar("_R")

MODEL_SECONDS = "bench_model_cpu_seconds"
"""CPU time in the text model, its embedding and its head."""
PROCESS_SECONDS = "bench_process_cpu_seconds"
"""CPU time of all threads of the engine process."""
WALL_SECONDS = "bench_wall_seconds"
"""The engine process's clock."""
SPAN_SECONDS = "bench_span_seconds"
"""From the first operation of each step that only decodes to the end of its last one, on the
device; on a CPU, time of the runner."""
NUM_TOKENS = 65536
"""Of the KV cache; each sequence has room for two blocks at least."""


class Stopwatch:
    """Adds up the CPU seconds that one thread spends inside calls. Calls must not nest."""

    def __init__(self) -> None:
        self.cpu = 0.0

    def around(self, inner: Callable[_P, _R]) -> Callable[_P, _R]:
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            cpu = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.cpu += time.thread_time() - cpu

        return timed

    def figures(self) -> dict[str, float]:
        return {
            MODEL_SECONDS: self.cpu,
            PROCESS_SECONDS: time.process_time(),
            WALL_SECONDS: time.perf_counter(),
        }


def build(settings: EngineSettings, progress: Progress) -> tuple[EngineCore, RequestPreprocessor]:
    """Builds the engine as the engine process does, with the stopwatch and one torch thread."""
    torch.set_num_threads(1)
    loaded = load_model(settings.model, progress)
    watch = Stopwatch()
    backend, block_size = attention_of(loaded, settings.kv)
    num_blocks = max(NUM_TOKENS // block_size, 2 * settings.scheduler.max_num_seqs)
    pool = BlockPool(num_blocks, block_size)
    runner = make_runner(loaded, settings, backend, pool)
    runner.capture()
    runner.logits = watch.around(runner.logits)  # type: ignore[method-assign]
    core, preprocessor = assemble(loaded.info, runner, settings, pool)
    load = core.load = Load()
    core.add_figures = lambda: {**watch.figures(), SPAN_SECONDS: load.decode_seconds}
    gc.collect()
    gc.freeze()
    return core, preprocessor


if __name__ == "__main__":
    run_engine(build)
