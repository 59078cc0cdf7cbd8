"""What the HTTP handlers need, passed in: no globals, and every part has a double in the tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from prometheus_client.core import Metric

from lookonce.config import Config
from lookonce.engine.client.engine_client import EngineClient
from lookonce.errors import (
    DrainingError,
    EngineDeadError,
    ModelNotFoundError,
    NotReadyError,
)
from lookonce.frontend.frontend import Frontend, limits_learned, open_frontend
from lookonce.frontend.metrics import Counts
from lookonce.render.readonly import ReadOnlyRenderer, open_readonly
from lookonce.server.api_process_peers import AbortPeers, MetricsPeers, RunningRequests
from lookonce.server.http.auth import KeyRing


class Drain:
    """Counts the requests being served, and refuses new ones once draining has begun."""

    def __init__(self) -> None:
        self.draining = False
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def serving(self) -> Self:
        """To be entered around one request; raises `DrainingError` for one while draining."""
        if self.draining:
            raise DrainingError("the server is shutting down; send the request elsewhere")
        return self

    def __enter__(self) -> None:
        self.active += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.active -= 1
        if self.active == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()


@dataclass(slots=True, kw_only=True)
class Services(Frontend):
    """The frontend, and what belongs to serving it over HTTP."""

    readonly: ReadOnlyRenderer
    """For routes that answer with tokens: it changes nothing that others see."""
    keys: KeyRing
    drain: Drain = field(default_factory=Drain)
    running: RunningRequests = field(default_factory=RunningRequests)
    peers: MetricsPeers | None = None
    """The other API processes of this server, where there are any."""
    abort_peers: AbortPeers | None = None
    rehearsal: ReadOnlyRenderer | None = None
    """Renders the requests that warm up the process; None: nothing is warmed up."""
    warming: bool = False
    """Not ready yet: what the first requests need is still being loaded."""

    async def local_metrics(self) -> list[Metric]:
        """What the API processes count themselves, summed over all of them."""
        if self.peers is None:
            return self.metrics.local_families()
        return await self.peers.families()

    async def abort(self, tenant: str, request_ids: list[str]) -> list[str]:
        """Abort a tenant's requests wherever they run; answers the ids that were running."""
        if self.abort_peers is None:
            return await self.running.abort(tenant, request_ids)
        return await self.abort_peers.abort(tenant, request_ids)

    def require_ready(self) -> None:
        """Raises what keeps the server from generating now."""
        match self.engine.state:
            case "starting":
                raise NotReadyError("the model is still loading")
            case "dead":
                raise EngineDeadError("the engine is not running; it is being restarted")
            case "stuck":
                raise EngineDeadError("the engine does not answer")

    def max_model_len(self) -> int | None:
        """Prompt plus generated tokens of one sequence; None until the engine has told."""
        if self.engine.state == "starting":
            return None
        try:
            return self.engine.model.max_model_len
        except NotReadyError:
            return None

    def require_model(self, name: str | None) -> str:
        """The served model's name; raises `ModelNotFoundError` for any other."""
        served = self.config.model.served_name
        if name is not None and name != served:
            raise ModelNotFoundError(
                f"the model {name[:200]!r} is not served here; {served!r} is", param="model"
            )
        return served


@asynccontextmanager
async def open_services(config: Config, *, index: int = 0) -> AsyncIterator[Services]:
    """Connected to the engine, which may still be loading. Raises `ModelLoadError`.

    `index` is this process's number among the server's API processes.
    """
    client = EngineClient(config.channel, processor_cache_bytes=config.media.processor_cache_bytes)
    folder = Path(config.channel.address.removeprefix("ipc://")).parent
    processes = config.server.api_processes
    running = RunningRequests()
    async with (
        client,
        open_frontend(config, client) as frontend,
        open_readonly(
            frontend.renderer,
            config.media,
            directory=client.directory,
            uuids=client.sender.uuids,
        ) as readonly,
        limits_learned(client, readonly),
        open_readonly(frontend.renderer, config.media) as rehearsal,
    ):
        metrics = frontend.metrics
        metrics.sources.append(lambda: readonly_counts(readonly))
        async with (
            MetricsPeers(folder, index, processes, metrics.local_families) as peers,
            AbortPeers(folder, index, processes, running) as abort_peers,
        ):
            yield Services(
                config=config,
                renderer=frontend.renderer,
                engine=client,
                metrics=metrics,
                defaults=frontend.defaults,
                tool_dialect=frontend.tool_dialect,
                readonly=readonly,
                keys=KeyRing.of(config.server),
                running=running,
                peers=peers,
                abort_peers=abort_peers,
                rehearsal=rehearsal,
            )


def readonly_counts(renderer: ReadOnlyRenderer) -> Counts:
    """What a read-only renderer counts, under names of its own."""
    return {f"readonly_{name}": value for name, value in renderer.counts().items()}
