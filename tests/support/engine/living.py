"""Whole engines inside the test's process: real threads, scheduler and channel, a fake runner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np

from lookonce.config import (
    ChannelConfig,
    EncoderConfig,
    KVConfig,
    ModelConfig,
    SchedulerConfig,
)
from lookonce.core.block_pool import BlockPool
from lookonce.engine.client.engine_client import EngineClient
from lookonce.engine.process.build import EngineThreads, assemble
from lookonce.engine.process.engine_core import EngineCore, RequestPreprocessor
from lookonce.engine.process.grammar import Compile
from lookonce.engine.process_io import EngineSettings
from lookonce.types.media import Array, Expansion, MediaFeature, ProcessedItem
from lookonce.types.ports import ModelRunner
from lookonce.types.request import RenderedItem, RenderedPrompt, TokenDelta
from lookonce.types.step import StepPlan, StepResult
from tests.support.core.builders import PLACEHOLDER, ROW_BYTES, Limits, key, request
from tests.support.core.fake_runner import FakeRunner, reference
from tests.support.in_process_link import InProcessHub

PATIENCE = 100.0
"""Seconds after which a test that waits has failed."""


class GatedRunner(FakeRunner):
    """A fake runner whose steps can be held up, or made to raise."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.gate = threading.Event()
        """Open: steps run. Closed: a step waits until it opens."""
        self.gate.set()
        self.is_held = False
        """A step waits for the gate."""
        self.num_passing = 0
        """Coming steps that a closed gate does not hold up."""
        self.raising = 0
        """Coming steps that raise, before they have done anything but forgotten."""

    def execute(self, plan: StepPlan) -> StepResult:  # `begin` calls it
        if self.num_passing and not self.gate.is_set():
            self.num_passing -= 1
        else:
            self.is_held = not self.gate.is_set()
            self.gate.wait(PATIENCE)
            self.is_held = False
        if self.raising and plan.scheduled:
            self.raising -= 1
            for seq_id in plan.finished:
                self.known.pop(seq_id, None)
            for new in plan.new:
                self._learn(new)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().execute(plan)


def fake_engine(limits: Limits, runner: ModelRunner) -> tuple[EngineCore, RequestPreprocessor]:
    """As `make_scheduler(limits)`, put together as every engine is."""
    settings = EngineSettings(
        model=ModelConfig("", "fake"),
        scheduler=SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_encoder_tokens=limits.max_encoder_tokens,
            max_queue=limits.max_queue,
            encoder_prefetch=limits.encoder_prefetch,
        ),
        kv=KVConfig(prefix_caching=limits.prefix_caching),
        encoder=EncoderConfig(
            cache_bytes=limits.encoder_rows * ROW_BYTES,
            host_cache_bytes=limits.host_rows * ROW_BYTES,
        ),
        address="",
    )
    pool = BlockPool(limits.num_blocks, limits.block_size)
    return assemble(limits.model, runner, settings, pool)


class LivingEngine:
    """An engine with its two threads. `die` is what `kill -9` looks like from outside."""

    def __init__(
        self,
        hub: InProcessHub,
        limits: Limits | None = None,
        *,
        num_senders: int = 1,
        ready: bool = True,
        slab_bytes: int = 0,
        max_sessions: int = 64,
        max_tenant_sessions: int | None = None,
    ) -> None:
        self.limits = limits if limits is not None else Limits()
        self.runner = GatedRunner(self.limits)
        self.core, self._preprocessor = fake_engine(self.limits, self.runner)
        self._threads = EngineThreads(
            hub.engine_link(),
            num_senders=num_senders,
            max_queue=self.limits.max_queue,
            slab_bytes=slab_bytes,
            max_sessions=max_sessions,
            max_tenant_sessions=max_tenant_sessions,
        )
        self.slabs = self._threads.slabs
        self.receiver_cache = self._threads.receiver_cache
        self.step_channel = self._threads.step_channel
        self._threads.start_input()
        self._steps = threading.Thread(target=self._threads.run_steps, args=(self.core,))
        self._steps.start()
        if ready:
            self.become_ready()

    def become_ready(self, compile_grammar: Compile | None = None) -> None:
        if compile_grammar is not None:
            self._preprocessor.compile_grammar = compile_grammar
        self._threads.open(self._preprocessor)

    def die(self) -> None:
        self._threads.stop()  # after the step that is held up, if one is
        self.runner.gate.set()
        self._steps.join(PATIENCE)

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        self.core.check_integrity()
        self.receiver_cache.check_integrity()
        assert not self.receiver_cache.store.requests
        assert not self.runner.known
        stats = self.core.stats()
        assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
        assert stats["kv_cache_usage_ratio"] == 0


class World:
    """A hub with an engine that can be replaced, and clients on one event loop."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        num_senders: int = 1,
        slab_bytes: int = 0,
        max_sessions: int = 64,
        max_tenant_sessions: int | None = None,
    ) -> None:
        self._max_sessions = (max_sessions, max_tenant_sessions)
        self.hub = InProcessHub()
        self._slab_bytes = slab_bytes
        self._limits = limits
        self._num_senders = num_senders
        self.engine = self.new_engine()

    def new_engine(self, *, ready: bool = True) -> LivingEngine:
        self.engine = LivingEngine(
            self.hub,
            self._limits,
            num_senders=self._num_senders,
            ready=ready,
            slab_bytes=self._slab_bytes,
            max_sessions=self._max_sessions[0],
            max_tenant_sessions=self._max_sessions[1],
        )
        return self.engine

    def client(
        self,
        *,
        cache_bytes: int = 1 << 20,
        max_bytes_in_flight: int = 1 << 20,
    ) -> EngineClient:
        return EngineClient(
            ChannelConfig("", PATIENCE, max_bytes_in_flight),
            processor_cache_bytes=cache_bytes,
            connect=self.hub.client_link,
        )

    def run(self, scenario: Callable[[EngineClient], object]) -> None:
        """`scenario` with a ready client; afterwards the engine must be empty."""

        async def whole() -> None:
            async with asyncio.timeout(2 * PATIENCE), self.client() as client:
                await client.wait_ready()
                await scenario(client)  # type: ignore[misc]
                await self.quiet(client)
                self.engine.check_empty()
                assert client.directory.num_pins == 0
                assert client.directory.sizes() == dict(
                    self.engine.receiver_cache.store.share(client.sender.sender_id)
                )

        try:
            asyncio.run(whole())
        finally:
            self.engine.die()

    async def quiet_steps(self) -> None:
        """Returns once the step loop has nothing to compute."""
        channel = self.engine.step_channel
        await until(lambda: channel.busy_since is None and not channel.num_commands)

    async def quiet(self, client: EngineClient) -> None:
        """Returns once the engine has nothing to do, and has told the runner everything."""
        store = self.engine.receiver_cache.store
        while True:
            stats = await client.stats()
            if not store.requests and not self.engine.runner.known:
                assert stats["num_requests_running"] == 0
                return
            await asyncio.sleep(0.01)


def item(rows: int, nbytes: int = 5000) -> ProcessedItem:
    """An item of `rows` embed tokens, large enough for a frame of its own."""
    pixels = np.zeros(nbytes, dtype=np.uint8)
    expansion = Expansion(((PLACEHOLDER, rows),), PLACEHOLDER)
    return ProcessedItem("image", {"pixels": Array("uint8", (nbytes,), pixels.data)}, expansion)


def rendered(
    tokens: list[int], *parts: RenderedItem, offsets: tuple[int, ...] = ()
) -> RenderedPrompt:
    """A prompt with `parts` placed at `offsets`."""
    features = tuple(
        MediaFeature(part.key, "image", offset, part.expansion.length, part.expansion.num_embeds)
        for part, offset in zip(parts, offsets, strict=True)
    )
    wire = request("r", tokens, features)
    token_ids = np.frombuffer(wire.prompt.data, dtype="<i4").tolist()
    return RenderedPrompt(token_ids, features, list(parts), scope=b"s" * 32)


def part(name: str, rows: int = 4, *, held: bool = False, recoverable: bool = True) -> RenderedItem:
    """A picture; `held`: rendering found it in the directory, so its arrays do not travel."""
    made = item(rows)

    async def recover() -> ProcessedItem:
        await asyncio.sleep(0)
        return item(rows)

    return RenderedItem(
        key=key(name),
        media_hash=key(name),
        modality="image",
        expansion=made.expansion,
        item=None if held else made,
        recover=recover if recoverable else None,
    )


def expected(prompt: RenderedPrompt, num_tokens: int, sample_index: int = 0) -> list[int]:
    """What any correct engine generates for the prompt."""
    wire = request("r", prompt.token_ids, prompt.features)
    return reference(wire, num_tokens, sample_index)


def tokens_of(deltas: list[TokenDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


async def until(condition: Callable[[], object]) -> None:
    """Returns once `condition` holds."""
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.005)
