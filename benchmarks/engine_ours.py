"""Our side of `lookonce bench engine`: an engine process, and its client in this one.

They are the two processes a server has, and talk as there: msgpack over ZMQ on a unix socket. Here
the client's caller turns tokens into text at once, where a server would also write HTTP.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engine_process import MODEL_SECONDS, PROCESS_SECONDS
from lookonce.config import (
    ChannelConfig,
    EncoderConfig,
    KVConfig,
    ModelConfig,
    SchedulerConfig,
)
from lookonce.engine.client.delta_stream import DeltaStream
from lookonce.engine.client.engine_client import EngineClient
from lookonce.engine.process_io import EngineSettings
from lookonce.engine.supervisor.engine_supervisor import EngineSupervisor
from lookonce.render.prompt.detokenizer import Detokenizer
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams

COMMAND = (sys.executable, "-m", "benchmarks.engine_process")
FIRST_TOKEN = 20
"""Ids below may be special tokens."""


class Turn(NamedTuple):
    """CPU seconds of one decode step of the whole batch, on average over a turn."""

    model: float
    """In the text model, its embedding and its head."""
    engine: float
    """In everything else the engine process does."""
    client: float
    """In the client's process."""


class _Clocks(NamedTuple):
    """What was used so far: CPU seconds, and tokens generated."""

    model: float
    engine: float
    client: float
    tokens: float


class Ours:
    """Decodes batches through client, channel, scheduler and runner."""

    def __init__(self, folder: str, client: EngineClient) -> None:
        self._client = client
        self._tokenizer = Tokenizer.load(folder)
        self._count = 0

    async def decode(self, batch: int, prompt_tokens: int, steps: int) -> Turn:
        """Prefill `batch` prompts, then time `steps` decode steps of all of them.

        They would go on: no sequence ends before the clocks are read. As the engine may be some
        steps ahead, each process's time is divided by the steps of its own.
        """
        answers = [self._begin(prompt_tokens) for _ in range(batch)]
        await asyncio.gather(*(answer.read(1) for answer in answers))
        before, read = await self._clocks(), sum(answer.num_tokens for answer in answers)
        await asyncio.gather(*(answer.read(steps) for answer in answers))
        after = await self._clocks()
        read = sum(answer.num_tokens for answer in answers) - read
        for answer in answers:
            await answer.leave()
        await self._client.stats()  # answered once all have ended
        used = _Clocks(*(end - start for start, end in zip(before, after, strict=True)))
        made = used.tokens / batch
        return Turn(used.model / made, used.engine / made, used.client * batch / read)

    async def _clocks(self) -> _Clocks:
        """The engine answers between two steps."""
        stats = await self._client.stats()
        return _Clocks(
            model=stats[MODEL_SECONDS],
            engine=stats[PROCESS_SECONDS] - stats[MODEL_SECONDS],
            client=time.process_time(),
            tokens=stats["generation_tokens_total"],
        )

    def _begin(self, prompt_tokens: int) -> _Answer:
        self._count += 1
        rng = np.random.default_rng(self._count)
        model = self._client.model
        ids = rng.integers(FIRST_TOKEN, model.vocab_size, prompt_tokens).tolist()
        prompt = RenderedPrompt(token_ids=ids, scope=bytes(32))
        endless = model.max_model_len - prompt_tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=endless, ignore_eos=True)
        generation = self._client.generate(prompt, sampling, f"bench-{self._count}")
        return _Answer(generation, Detokenizer(self._tokenizer))


class _Answer:
    """One sequence as its caller reads it: tokens become text at once."""

    def __init__(self, generation: DeltaStream, detokenizer: Detokenizer) -> None:
        self._generation = generation
        self._detokenizer = detokenizer
        self.num_tokens = 0

    async def read(self, num_tokens: int) -> None:
        end = self.num_tokens + num_tokens
        async for delta in self._generation:
            self.num_tokens += len(delta.token_ids)
            self._detokenizer.push(delta.token_ids)
            if self.num_tokens >= end:
                return

    async def leave(self) -> None:
        await self._generation.aclose()


@asynccontextmanager
async def open_ours(folder: str, batch: int) -> AsyncIterator[Ours]:
    """The engine process and a client of it, for batches of up to `batch` sequences."""
    with tempfile.TemporaryDirectory(prefix="lookonce-bench-") as scratch:
        settings = EngineSettings(
            model=ModelConfig(folder=folder, served_name="bench"),
            scheduler=SchedulerConfig(max_num_seqs=batch),
            kv=KVConfig(),
            encoder=EncoderConfig(),
            address=f"ipc://{scratch}/engine",
        )
        channel = ChannelConfig(address=settings.address)
        supervisor = EngineSupervisor(settings, stall_timeout=60.0, command=COMMAND)
        client = EngineClient(channel, processor_cache_bytes=0)
        async with _running(supervisor) as end, client:
            await _unless(end, client.wait_ready())
            yield Ours(folder, client)


@asynccontextmanager
async def _running(supervisor: EngineSupervisor) -> AsyncIterator[asyncio.Task[None]]:
    """The task that runs the engine process; it ends early only with an error."""
    running = asyncio.create_task(supervisor.run())
    try:
        yield running
    finally:
        await supervisor.stop()
        await asyncio.gather(running, return_exceptions=True)


async def _unless(end: asyncio.Task[None], awaited: Coroutine[Any, Any, None]) -> None:
    """Waits for `awaited`; raises why the engine has ended, if that comes first."""
    waiting = asyncio.create_task(awaited)
    await asyncio.wait([end, waiting], return_when=asyncio.FIRST_COMPLETED)
    if end.done():
        waiting.cancel()
        end.result()
