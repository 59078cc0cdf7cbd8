"""Whole servers inside the test's process: real application, renderer, channel, engine and model.

An engine node computes in a thread of its own; nothing is started as a process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from lookonce.cache import slab_pool
from lookonce.cache.identity import UuidBindings
from lookonce.cache.slab_pool import OwnSlabs
from lookonce.cache.slabs import slab_capacity
from lookonce.config import Config, Options, resolve
from lookonce.engine.client.engine_client import EngineClient
from lookonce.engine.process.build import EngineThreads
from lookonce.engine.process.load_engine import load_engine
from lookonce.engine.process.step_loop import StepChannel
from lookonce.engine.process_io import engine_settings
from lookonce.frontend.frontend import RenderOnlyEngine
from lookonce.frontend.metrics import Metrics
from lookonce.render.families.registry import load_family
from lookonce.render.media import external_items
from lookonce.render.media.loader import MediaLoader
from lookonce.render.media.processing import MediaJob, Processed
from lookonce.render.media.resolver import (
    MediaResolver,
    NameBindings,
    RendererDirectory,
    RenderStats,
)
from lookonce.render.prompt.encoder import PromptEncoder, template_sources
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.render.readonly import ReadOnlyBindings, ReadOnlyDirectory, open_readonly
from lookonce.render.renderer import Renderer
from lookonce.server.http.api_keys import KeyRing
from lookonce.server.http.app import RENDER_ROUTES, build_app
from lookonce.server.http.request_guard import RequestGuard
from lookonce.server.services import Services
from lookonce.types.counts import Counts
from tests.support.in_process_link import InProcessHub
from tests.support.model.chats import PoolInProcess
from tests.support.render.counted import counts_of


class CountingPool(PoolInProcess):
    """Remembers its jobs. Puts its items into slabs where there are any."""

    def __init__(self, folder: Path, slabs: OwnSlabs | None) -> None:
        super().__init__(folder)
        self.jobs: list[MediaJob] = []
        self._slabs = slabs

    async def run(self, job: MediaJob) -> Processed:
        self.jobs.append(job)
        made = await super().run(job)
        if self._slabs is None:
            return made
        item = await asyncio.to_thread(self._slabs.place, made.item)
        return Processed(item, made.decode_ms, made.process_ms)


@dataclass
class Node:
    """A server, and a client of it."""

    services: Services
    http: httpx.AsyncClient
    pool: CountingPool | None
    """None for a model of text alone."""
    engine: EngineClient | None = None
    steps: StepChannel | None = None
    """The engine's."""

    async def figures(self) -> dict[str, float]:
        """The engine's, once the step is done in which the runner forgets what has ended."""
        assert self.engine is not None
        assert self.steps is not None
        while self.steps.busy_since is not None or self.steps.num_commands:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return dict(await self.engine.stats())

    async def post(self, path: str, body: object, *, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return await self.http.post(path, json=body, headers=headers)

    async def ok(self, path: str, body: object, *, key: str | None = None) -> Any:
        answer = await self.post(path, body, key=key)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def jobs(self) -> int:
        """Media decoded and processed for the main path."""
        stats = self.services.renderer._resolver.stats  # type: ignore[attr-defined]
        assert stats.decoded == stats.processed
        return stats.processed.total()

    @property
    def counts(self) -> tuple[int, int]:
        """Queries and hits of the processor cache."""
        assert self.engine is not None
        return self.engine.directory.queries, self.engine.directory.hits

    @property
    def memory(self) -> object:
        """All of the processor cache that anything could change: what is listed, in which order,
        pins, expansions known, counters, bindings."""
        assert self.engine is not None
        directory = self.engine.directory
        return (
            list(directory.sizes().items()), directory.num_pins, directory.nbytes, self.counts,
            directory.evictions, list(directory._known._values.items()),
            dict(counts_of(self.services.renderer)), self.engine.sender.resends,
        )  # fmt: skip


class NODES:
    """What all nodes have where a test says nothing else."""

    cache_type = "shm"


@pytest.fixture(params=["shm", "lru"])
def cache_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with both types of processor cache; in slabs even small arrays are shared."""
    monkeypatch.setattr(NODES, "cache_type", request.param)
    monkeypatch.setattr(slab_pool, "LARGE", 1)
    monkeypatch.setattr(external_items, "LARGE", 1)
    return str(request.param)


def make_config(folder: Path, **options: Any) -> Config:
    plain = {
        "kv_cache_gb": 0.02,
        "encoder_cache_gb": 0.05,
        "mm_processor_cache_gb": 0.05,
        "mm_processor_cache_type": NODES.cache_type,
    }
    return resolve(Options(**{"model": str(folder), "served_model_name": "m", **plain, **options}))


@asynccontextmanager
async def engine_node(folder: Path, **options: Any) -> AsyncIterator[Node]:
    """As `lookonce serve`."""
    config = make_config(folder, **options)
    hub, counts = InProcessHub(), Counts()
    client = EngineClient(
        config.channel,
        processor_cache_bytes=config.media.processor_cache_bytes,
        connect=hub.client_link,
        counts=counts,
    )
    with _running_engine(config, hub) as steps:
        slabs = OwnSlabs(client.slabs) if config.media.shared_cache_bytes else None
        bindings = client.sender.uuids
        async with client, _renderer(config, client.directory, bindings, slabs, counts) as main:
            await client.wait_ready()
            renderer, pool = main
            async with (
                open_readonly(
                    renderer, config.media, directory=client.directory, uuids=bindings
                ) as readonly,
                _node(config, pool, client, renderer, readonly, counts) as node,
            ):
                node.steps = steps
                yield node


@asynccontextmanager
async def render_node(folder: Path, **options: Any) -> AsyncIterator[Node]:
    """As `lookonce render`."""
    config = make_config(folder, **options)
    async with (
        _renderer(config, ReadOnlyDirectory(), ReadOnlyBindings()) as (renderer, pool),
        open_readonly(renderer, config.media) as readonly,
        _node(config, pool, None, renderer, readonly) as node,
    ):
        yield node


@asynccontextmanager
async def _node(
    config: Config,
    pool: CountingPool | None,
    engine: EngineClient | None,
    renderer: Any,
    readonly: Any,
    counts: Counts | None = None,
) -> AsyncIterator[Node]:
    services = Services(
        config=config,
        renderer=renderer,
        readonly=readonly,
        engine=engine or RenderOnlyEngine(config.lora),
        metrics=Metrics("m", counts=counts),
        keys=KeyRing.of(config.server),
        guard=RequestGuard.of(config.server),
    )
    app = build_app(services) if engine else build_app(services, RENDER_ROUTES)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        yield Node(services, http, pool, engine)
        assert services.drain.active == 0
        if engine is not None:
            assert engine.directory.num_pins == 0


@contextmanager
def _running_engine(config: Config, hub: InProcessHub) -> Iterator[StepChannel]:
    """A real engine on two threads: step loop and input."""
    settings = engine_settings(config)
    core, preprocessor = load_engine(settings, lambda done, total: None)
    slab_bytes = slab_capacity(config.media.shared_cache_bytes)
    threads = EngineThreads(hub.engine_link(), num_senders=1, max_queue=64, slab_bytes=slab_bytes)
    threads.start_input()
    steps = threading.Thread(target=threads.run_steps, args=(core,))
    steps.start()
    threads.open(preprocessor)
    try:
        yield threads.step_channel
    finally:
        threads.stop()
        steps.join(30)
        core.check_integrity()


@asynccontextmanager
async def _renderer(
    config: Config,
    directory: RendererDirectory,
    uuids: NameBindings | UuidBindings,
    slabs: OwnSlabs | None = None,
    counts: Counts | None = None,
) -> AsyncIterator[tuple[Renderer, CountingPool | None]]:
    """The real renderer, except that it decodes and processes right here."""
    folder = Path(config.model.folder)
    tokenizer = Tokenizer.load(folder)
    if load_family(folder, config.model.dtype) is None:
        yield Renderer(encoder=PromptEncoder(tokenizer, template_sources(folder, tokenizer))), None
        return
    pool, loader = CountingPool(folder, slabs), MediaLoader(config.media)
    resolver = MediaResolver(
        family=pool.family,
        directory=directory,
        uuids=uuids,
        loader=loader,
        pool=pool,
        max_bytes=config.media.max_bytes,
        stats=RenderStats(loader.fetched, counts),
    )
    renderer = Renderer(
        encoder=PromptEncoder(tokenizer, template_sources(folder, tokenizer), pool.family),
        family=pool.family,
        resolver=resolver,
        limits=config.media.limit_per_prompt,
        own_slabs=slabs,
    )
    try:
        yield renderer, pool
    finally:
        await loader.aclose()


def run(scenario: Any) -> None:
    """Runs `async def scenario()` with one torch thread."""
    torch.set_num_threads(1)
    asyncio.run(asyncio.wait_for(scenario, 200))
