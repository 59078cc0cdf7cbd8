"""The real services: a renderer and an engine client made from the configuration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from lookonce.config import Config
from lookonce.engine.client.engine_client import EngineClient
from lookonce.frontend.abort_peers import AbortPeers, RunningRequests
from lookonce.frontend.auth import KeyRing
from lookonce.frontend.metrics import Counts, Metrics
from lookonce.frontend.metrics_peers import Peers
from lookonce.frontend.sampling_params import read_defaults
from lookonce.frontend.services import Services
from lookonce.frontend.tools.formats import ToolDialect, choose_dialect
from lookonce.render.readonly import open_readonly
from lookonce.render.renderer import Renderer, open_renderer


@asynccontextmanager
async def open_services(config: Config, *, index: int = 0) -> AsyncIterator[Services]:
    """Connected to the engine, which may still be loading. Raises `ModelLoadError`.

    `index` is this process's number among the server's API processes.
    """
    client = EngineClient(config.channel, processor_cache_bytes=config.media.processor_cache_bytes)
    async with client, open_renderer(
        config.model,
        config.media,
        directory=client.directory,
        uuids=client.sender.uuids,
        chat_template=config.server.chat_template,
    ) as renderer, open_readonly(
        renderer, config.media, directory=client.directory, uuids=client.sender.uuids
    ) as readonly, open_readonly(renderer, config.media) as rehearsal:  # fmt: skip
        metrics = Metrics(config.model.served_name, config.server.vllm_metric_names)
        metrics.sources += [
            renderer.counts,
            lambda: aside(readonly.counts()),
            lambda: _cache_counts(client),
        ]
        folder = Path(config.channel.address.removeprefix("ipc://")).parent
        processes = config.server.api_processes
        running = RunningRequests()
        learning = asyncio.create_task(_learn_limits(client, renderer, readonly))
        try:
            async with (
                Peers(folder, index, processes, metrics.local_families) as peers,
                AbortPeers(folder, index, processes, running) as abort_peers,
            ):
                yield Services(
                    config=config,
                    renderer=renderer,
                    readonly=readonly,
                    engine=client,
                    metrics=metrics,
                    keys=KeyRing.of(config.server),
                    defaults=read_defaults(config.model.folder),
                    peers=peers,
                    running=running,
                    abort_peers=abort_peers,
                    tool_dialect=dialect_of(config, renderer),
                    rehearsal=rehearsal,
                )
        finally:
            learning.cancel()


async def _learn_limits(client: EngineClient, *renderers: Renderer) -> None:
    """What only the engine knows lets the renderers refuse early."""
    await client.wait_ready()
    for renderer in renderers:
        renderer.max_model_len = client.model.max_model_len
        renderer.vocab_size = client.model.vocab_size


def dialect_of(config: Config, renderer: Renderer) -> ToolDialect | None:
    """How the served model writes tool calls."""
    return choose_dialect(
        config.server.tool_call_parser, renderer.tools_template, renderer.special_tokens
    )


def aside(counts: Counts) -> Counts:
    """Work of the read-only path, under names of its own."""
    return {f"readonly_{name}": value for name, value in counts.items()}


def _cache_counts(client: EngineClient) -> Counts:
    directory = client.directory
    return {
        "mm_cache_queries_total": directory.queries,
        "mm_cache_hits_total": directory.hits,
        "mm_cache_evictions_total": directory.evictions,
        "mm_cache_bytes": directory.nbytes,
        "mm_cache_resends_total": client.sender.resends,
        "mm_cache_asks_total": client.sender.asks,
    }
