"""The engine in one process: every thread and message of the real one, where a clock sees them all.

The input thread, the step thread and the client's event loop run side by side, and talk over ZMQ
on a unix socket as across processes. CPU time of the process then holds everything but HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from lookonce.config import (
    ChannelConfig,
    EncoderConfig,
    KVConfig,
    ModelConfig,
    SchedulerConfig,
)
from lookonce.core.blocks import BlockPool
from lookonce.engine.build import assemble
from lookonce.engine.client import EngineClient
from lookonce.engine.core import EngineCore
from lookonce.engine.generation import Generation
from lookonce.engine.hosting import open_reception
from lookonce.engine.judge import Judge
from lookonce.engine.reception import Reception
from lookonce.engine.settings import EngineSettings
from lookonce.engine.step_loop import StepLoop, Stop
from lookonce.model.attention.select import resolve_block_size, select_backend
from lookonce.model.loader import load_model
from lookonce.model.runner import Runner
from lookonce.render.detokenize import Detokenizer
from lookonce.render.tokenizer import Tokenizer
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams

_P = ParamSpec("_P")
_R = TypeVar("_R")

NUM_BLOCKS = 4096
FIRST_TOKEN = 20
"""Ids below may be special tokens."""


class Turn(NamedTuple):
    """CPU seconds of one decode step, on average over a turn."""

    model: float
    """In the text model, its embedding and its head."""
    own: float
    """In everything else."""


class _Stopwatch:
    """Adds up the CPU seconds of one thread spent inside calls, which must not nest."""

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


class Ours:
    """Decodes batches through client, channel, scheduler and runner."""

    def __init__(self, folder: str, client: EngineClient, model: _Stopwatch) -> None:
        self._client = client
        self._tokenizer = Tokenizer.load(folder)
        self._model = model
        self._count = 0

    async def decode(self, batch: int, prompt_tokens: int, steps: int) -> Turn:
        """Prefill `batch` prompts, then time `steps` decode steps of all of them."""
        generations = [self._submit(prompt_tokens, steps) for _ in range(batch)]
        await asyncio.gather(*(anext(generation) for generation in generations))
        cpu, model = time.process_time(), self._model.cpu
        read = await asyncio.gather(*(self._read(generation) for generation in generations))
        model = self._model.cpu - model
        cpu = time.process_time() - cpu
        return Turn(model / min(read), (cpu - model) / min(read))

    def _submit(self, prompt_tokens: int, steps: int) -> Generation:
        self._count += 1
        rng = np.random.default_rng(self._count)
        ids = rng.integers(FIRST_TOKEN, self._client.model.vocab_size, prompt_tokens).tolist()
        prompt = RenderedPrompt(token_ids=ids, scope=bytes(32))
        sampling = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
        return self._client.generate(prompt, sampling, f"bench-{self._count}")

    async def _read(self, generation: Generation) -> int:
        """Turns the rest into text; returns how many tokens that were."""
        detokenizer = Detokenizer(self._tokenizer)
        count = 0
        async for delta in generation:
            count += len(delta.token_ids)
            detokenizer.push(delta.token_ids)
        return count


@asynccontextmanager
async def open_ours(folder: str, batch: int) -> AsyncIterator[Ours]:
    """The engine's threads and a client, for batches of up to `batch` sequences."""
    with tempfile.TemporaryDirectory(prefix="lookonce-bench-") as scratch:
        settings = EngineSettings(
            model=ModelConfig(folder=folder, served_name="bench"),
            scheduler=SchedulerConfig(max_num_seqs=batch),
            kv=KVConfig(prefix_caching=False),
            encoder=EncoderConfig(),
            address=f"ipc://{scratch}/engine",
        )
        model = _Stopwatch()
        core, judge = _build(settings, model)
        channel = ChannelConfig(address=settings.address)
        with _Threads(settings, core, judge):
            async with EngineClient(channel, processor_cache_bytes=0) as client:
                await client.wait_ready()
                gc.collect()
                gc.freeze()  # as the engine process does once the model is loaded
                yield Ours(folder, client, model)


def _build(settings: EngineSettings, model: _Stopwatch) -> tuple[EngineCore, Judge]:
    loaded = load_model(settings.model)
    for module in (loaded.family.lm_head, loaded.family.embed_tokens):
        module.forward = model.around(module.forward)
    backend = select_backend(loaded.device, loaded.family.attention_features(loaded.dtype))
    block_size = resolve_block_size(backend, settings.kv.block_size)
    runner = Runner(
        loaded,
        num_blocks=NUM_BLOCKS,
        block_size=block_size,
        backend=backend,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
    )
    runner.decoder = model.around(runner.decoder)
    return assemble(loaded.info, runner, settings, BlockPool(NUM_BLOCKS, block_size))


class _Threads:
    """The engine process's input thread and main thread."""

    def __init__(self, settings: EngineSettings, core: EngineCore, judge: Judge) -> None:
        self._reception: Reception = open_reception(settings)
        self._reception.open_doors(judge)
        self._input = threading.Thread(target=self._reception.run, daemon=True)
        loop = StepLoop(core, self._reception.exchange)
        self._steps = threading.Thread(target=loop.run, daemon=True)

    def __enter__(self) -> None:
        self._input.start()
        self._steps.start()

    def __exit__(self, *_: object) -> None:
        self._reception.exchange.command(Stop())
        self._steps.join()
        self._reception.stop()
        self._input.join()
