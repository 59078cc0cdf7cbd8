"""What the HTTP handlers use: draining, running requests, and the frontend."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prometheus_client.core import Metric

from lookonce.config import Config, RequestLogConfig, ServerConfig
from lookonce.errors import (
    BadRequestError,
    DrainingError,
    EngineDeadError,
    LookOnceError,
    ModelNotFoundError,
    NotReadyError,
)
from lookonce.frontend.frontend import Frontend, engine_client, limits_learned, open_frontend
from lookonce.frontend.savings import Savings
from lookonce.render.media.vad import VoiceDetectors
from lookonce.render.prompt.encoder import PromptEncoder
from lookonce.render.readonly import ReadOnlyRenderer, open_readonly
from lookonce.server.api_process_peers import AbortPeers, ProcessState
from lookonce.server.http.api_keys import KeyRing, Principal
from lookonce.server.http.request_guard import RequestGuard
from lookonce.server.http.unknown_fields import UnknownFields
from lookonce.server.rate_limits import NO_LIMITS, RateLimits, RequestUsage
from lookonce.server.realtime_sessions import RealtimeSessions
from lookonce.server.request_log import RequestLog
from lookonce.server.response_store import ResponseStore, open_response_store
from lookonce.server.shared_counts import SharedCounts
from lookonce.types.counts import Counts, Values
from lookonce.types.fair_queue import TenantWeights
from lookonce.types.held_bytes import TenantBytes
from lookonce.types.model import Comparison

if TYPE_CHECKING:
    from lookonce.server.tracing import Tracer

LARGEST_BODIES_HELD = 8
"""How many of the largest bodies the requests of a process may have together, with media that were
fetched for them; where there are several tenants, each may have half of it."""
Abort = Callable[[], Awaitable[None]]
"""Ends one request of this process."""


class Drain:
    """Counts the requests that are served, and refuses new ones once draining has begun."""

    def __init__(self) -> None:
        self.active = 0
        self._begun = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        """Refuse new requests, and tell those that wait for it."""
        self._begun.set()

    async def wait_begun(self) -> None:
        await self._begun.wait()

    def serving(self) -> Self:
        """The block around one request. Raises `DrainingError` while draining."""
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


class RunningRequests:
    """The requests that run in this process: (tenant, request id) → how to abort them.

    Clients may use one id for several requests.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Abort]] = {}

    def note(self, tenant: str, request_id: str, abort: Abort) -> None:
        self._running.setdefault((tenant, request_id), []).append(abort)

    def forget(self, tenant: str, request_id: str, abort: Abort) -> None:
        name = (tenant, request_id)
        self._running[name].remove(abort)
        if not self._running[name]:
            del self._running[name]

    def count_by_tenant(self) -> dict[str, int]:
        """Tenant → requests that run here."""
        counted: Counter[str] = Counter()
        for (tenant, _), aborts in self._running.items():
            counted[tenant] += len(aborts)
        return dict(counted)

    async def abort(self, tenant: str, request_ids: list[str]) -> list[str]:
        """Abort a tenant's requests; answers the ids that were running here."""
        found = [name for name in dict.fromkeys(request_ids) if (tenant, name) in self._running]
        for request_id in found:
            for abort in list(self._running.get((tenant, request_id), ())):
                await abort()
        return found


@dataclass(slots=True, kw_only=True)
class Services(Frontend):
    """The frontend, and what HTTP adds to it. Handlers find it as `request.app.state.services`."""

    readonly: ReadOnlyRenderer
    """Renders for routes that answer with tokens; it changes no cache, directory or counter."""
    keys: KeyRing
    guard: RequestGuard = field(default_factory=RequestGuard)
    drain: Drain = field(default_factory=Drain)
    running: RunningRequests = field(default_factory=RunningRequests)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    realtime: RealtimeSessions = field(default_factory=RealtimeSessions)
    responses: ResponseStore | None = None
    """Stored responses and conversations; None: nothing is stored."""
    savings: Savings = field(default_factory=Savings)
    held_bytes: TenantBytes = field(init=False)
    """Bodies and fetched media of the requests that are being served."""
    rates: RateLimits | None = None
    """Limits of tenants and keys; None: there are none."""
    shared_counts: SharedCounts | None = None
    """What all API processes of this server count; None: this one counts for itself."""
    abort_peers: AbortPeers | None = None
    warmup_renderer: ReadOnlyRenderer | None = None
    """Renders the requests that warm up the process; None: nothing is warmed up."""
    index: int = 0
    """0-based number of this API process."""
    request_log: RequestLog | None = None
    """None: requests are not logged."""
    tracer: Tracer | None = None
    """None: no request is traced."""
    warming: bool = False
    """The warm-up has not ended: `/ready` says no."""

    def __post_init__(self) -> None:
        most = LARGEST_BODIES_HELD * self.config.media.max_body_bytes
        self.held_bytes = TenantBytes(most, lambda: self.keys.are_of_several)

    async def local_metrics(self) -> list[Metric]:
        """The metrics that API processes count, summed over all of them."""
        return self.metrics.families(await self.summed_counts())

    async def summed_counts(self) -> dict[str, Values]:
        """What all API processes count, by name."""
        if self.shared_counts is None:
            return self.metrics.counts.read()
        return await asyncio.to_thread(self.shared_counts.sums)

    async def engine_stats(self) -> dict[str, float]:
        """What the engine counts; nothing where it is dead."""
        try:
            return await self.engine.stats()
        except LookOnceError:
            return {}

    async def abort(self, tenant: str, request_ids: list[str]) -> list[str]:
        """Abort a tenant's requests in whatever API process they run; the ids that were running."""
        if self.abort_peers is None:
            return await self.running.abort(tenant, request_ids)
        return await self.abort_peers.abort(tenant, request_ids)

    def admit(self, principal: Principal) -> RequestUsage:
        """Count a request. Raises `RateLimitedError`."""
        if self.rates is None:
            return NO_LIMITS
        return self.rates.admit(principal.tenant, principal.key)

    def own_state(self) -> ProcessState:
        """What this API process does now, and saved today."""
        day, saved = self.savings.today()
        return ProcessState(
            index=self.index,
            pid=os.getpid(),
            serving=self.drain.active,
            draining=self.drain.draining,
            tenants=self.running.count_by_tenant(),
            day=day,
            saved=saved,
        )

    async def process_states(self) -> list[ProcessState]:
        """Of every API process that answers."""
        others = [] if self.abort_peers is None else await self.abort_peers.states()
        return sorted([self.own_state(), *others], key=lambda state: state.index)

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
        """Most tokens of a sequence, prompt included; None until the engine is ready."""
        if self.engine.state == "starting":
            return None
        try:
            return self.engine.model.max_model_len
        except NotReadyError:
            return None

    def comparison(self) -> Comparison | None:
        """Of the model with transformers, at load; None until the engine is ready, and for a model
        with a family of its own."""
        try:
            return self.engine.model.comparison
        except NotReadyError:
            return None

    def require_model(self, name: str | None) -> str:
        """The name of what is served under `name`: the model, also where that is left out, or an
        adapter. Raises `ModelNotFoundError`, and `NotReadyError` where the engine has yet to tell
        its adapters."""
        served = self.config.model.served_name
        if name and name != served and self.engine.adapters.get(name) is None:
            if self.config.lora is not None and self.engine.state == "starting":
                raise NotReadyError("the model and its adapters are still loading")
            adapters = self.engine.adapters.names()
            raise ModelNotFoundError(
                f"the model {name[:200]!r} is not served here; "
                + (f"{served!r} is" if not adapters else f"{served!r} and its adapters are"),
                param="model",
            )
        return name or served

    def require_base_model(self, name: str | None) -> str:
        """As `require_model`, for what adapters are not served for. Raises `BadRequestError` for an
        adapter."""
        if name and self.engine.adapters.get(name) is not None:
            raise BadRequestError(
                f"{name!r} is an adapter; this route serves the model without adapters",
                param="model",
            )
        return self.require_model(name)


@contextmanager
def open_rates(
    config: ServerConfig, folder: Path, index: int, weights: TenantWeights, counts: Counts
) -> Iterator[RateLimits | None]:
    """The limits of this API process, of which the others in `folder` know; None without any."""
    if config.limits is None:
        yield None
        return
    rates = RateLimits(
        config.limits,
        folder / "limits",
        num_processes=config.api_processes,
        index=index,
        weights=weights,
        counts=counts,
    )
    with closing(rates):
        yield rates


@contextmanager
def open_request_log(config: RequestLogConfig | None) -> Iterator[RequestLog | None]:
    """The log of this API process; None without `--request-log`."""
    if config is None:
        yield None
        return
    with RequestLog(config) as log:
        yield log


@asynccontextmanager
async def open_services(
    config: Config,
    *,
    index: int = 0,
    restarted: bool = False,
    fork_server: Path | None = None,
    encoder: PromptEncoder | None = None,
) -> AsyncIterator[Services]:
    """Connected to the engine, which may still be loading. Raises `ModelLoadError`.

    `index` is this process's number among the server's API processes. One that is `restarted` does
    not wait for its first media worker, which takes as long as all else together. `encoder` is the
    model's, if it is loaded already.
    """
    folder = Path(config.channel.address).parent
    running = RunningRequests()
    weights = TenantWeights()
    with (
        SharedCounts(folder, index) as shared,
        open_rates(config.server, folder, index, weights, shared.counts) as rates,
        open_request_log(config.server.request_log) as request_log,
    ):
        counts = shared.counts
        client = engine_client(config, counts)
        async with (
            client,
            open_frontend(
                config,
                client,
                counts,
                wait_for_worker=not restarted,
                fork_server=fork_server,
                encoder=encoder,
                weights=weights,
            ) as frontend,
            open_readonly(
                frontend.renderer,
                config.media,
                directory=client.directory,
                uuids=client.sender.uuids,
                counts=counts,
            ) as readonly,
            limits_learned(client, readonly),
            open_readonly(frontend.renderer, config.media, reads_headers=False) as warmup_renderer,
            AbortPeers(folder, index, config.server.api_processes, running.abort) as abort_peers,
            VoiceDetectors() as detectors,
            open_response_store(config.server.responses, folder, weights) as responses,
        ):
            services = Services(
                config=config,
                index=index,
                renderer=frontend.renderer,
                engine=client,
                metrics=frontend.metrics,
                defaults=frontend.defaults,
                tool_dialect=frontend.tool_dialect,
                reasoning=frontend.reasoning,
                weights=frontend.weights,
                readonly=readonly,
                keys=KeyRing.of(config.server),
                guard=RequestGuard.of(config.server),
                running=running,
                unknown_fields=UnknownFields(strict=config.server.strict_requests),
                realtime=RealtimeSessions(config.server.sessions, counts, detectors),
                responses=responses,
                rates=rates,
                shared_counts=shared,
                abort_peers=abort_peers,
                warmup_renderer=warmup_renderer,
                request_log=request_log,
            )
            abort_peers.describe = services.own_state
            yield services
