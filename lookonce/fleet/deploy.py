"""The fleet on Ray Serve, the only module that knows Ray.

Ray is the control plane: it places engines and front-ends, watches them, replaces those that die,
adds and removes them. No request passes it.

    Engine      one replica runs one `lookonce serve`, and tells its addresses as its metadata
    Frontend    one replica serves HTTP on the fleet's port; a handle with `EngineList` as its
                router tells it, whenever that changes, which replicas of Engine there are

APIs of ray 2.60 that are alpha or its own: `RequestRouter.update_replicas`, `RequestRouterConfig`,
`record_replica_metadata`, `DeploymentHandle.broadcast`; `Deployment.options(version=...)`, without
which whatever is deployed anew is replaced, so that another number of engines would replace all
front-ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
import uvloop
from blake3 import blake3
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import FIFOMixin, RequestRouter

from lookonce import __version__
from lookonce.config import resolve
from lookonce.fleet import replicas
from lookonce.fleet.config import (
    EngineGroup,
    FleetConfig,
    RenderedModel,
    engine_arguments,
    listen_options,
    rendered_models,
)
from lookonce.fleet.engine_http import EngineClient, EngineLostError, IdleConnections
from lookonce.fleet.frontend import Frontend
from lookonce.fleet.members import EngineAddress, EngineKeys, Fleet
from lookonce.fleet.router import QueuePrice, Router, engines_wanted
from lookonce.fleet.server import FrontendServer, ListenerOwner, listening, shared_listener
from lookonce.fleet.subscriber import EventSubscriber
from lookonce.ipc.worker_process import die_with_parent
from lookonce.types.logs import configure_logging
from lookonce.types.memory import settle_memory
from lookonce.types.scheduling import prefer_event_loop

logger = logging.getLogger("lookonce.fleet")

APPLICATION = "lookonce"
QUEUE_PRICE = "queue_price_seconds"
LOOK_BACK_SECONDS = 10.0
"""Over which the price is a mean."""
SURGE_PERCENT = 25
"""Of the replicas, rounded up: so many new ones start before old ones stop. Not where engines have
GPUs: there may be none to spare."""
START_SECONDS = 1800.0
"""An engine may load weights for so long."""
KNOWN_SECONDS = 10.0
"""How long a front-end that starts waits for an engine of each model before it serves: one that
takes another's place must not refuse what that one would have served."""
OPENING_SECONDS = 60.0
"""How long it waits for what renders prompts; meanwhile engines would render them."""
HEALTH_SECONDS = 2.0
HEALTH_TIMEOUT = 10.0
"""For an answer of an engine's `/health`: less than Ray waits for `check_health`."""
SILENT_CHECKS = 3
"""So many checks in a row that fail make Ray replace a replica."""
UNHEALTHY_SECONDS = 600.0
"""How long an engine's server may answer that it is unhealthy: it replaces an engine process that
hangs, after twice `--engine-stall-timeout`, and one that has ended, by itself."""
KILL_SECONDS = 20.0
"""After the drain timeout: then Ray kills a replica that has not ended."""
SERVING = re.compile(r"^Serving .* on (?:http://)?(\S+)$")
ENGINE, FRONTEND = "Engine", "Frontend"


# --- which engines there are ---------------------------------------------------------------------


class EngineList(FIFOMixin, RequestRouter):  # type: ignore[misc]  # ray's classes are untyped
    """Notes which replicas there are. Requests that come by the handle go to any of them."""

    def initialize_state(self, **_: Any) -> None:
        pass

    def update_replicas(self, running: list[Any]) -> None:
        super().update_replicas(running)
        told = {each.replica_id.unique_id: dict(each.replica_metadata) for each in running}
        replicas.LISTS.put(str(self._deployment_id), told)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        return [candidate_replicas]


# --- replicas ------------------------------------------------------------------------------------


class Engine:
    """Runs `lookonce serve` as long as this replica lives."""

    def __init__(self, given: dict[str, Any], fleet: dict[str, Any]) -> None:
        self._group = msgspec.convert(given, EngineGroup)
        config = msgspec.convert(fleet, FleetConfig)
        self._drain_timeout = config.drain_timeout
        self._folder = tempfile.TemporaryDirectory(prefix="lookonce-engine-")
        local = config.address is None
        host = "127.0.0.1" if local else ray.util.get_node_ip_address()
        self._events, self._replay = self._event_addresses(host, local=local)
        events = f"{self._events}?replay={self._replay}"
        peers = () if local else _machines()
        listens = listen_options(None if local else host, self._folder.name, peers)
        line = [
            *(sys.executable, "-m", "lookonce.cli.main", "serve"),
            *engine_arguments(config, self._group, listens, events),
        ]
        self._process = subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._group.environment},
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        http = self._wait_ready()
        self._address = EngineAddress("", self._group.name, http, self._events, self._replay)
        self._client = EngineClient(http, IdleConnections())
        self._healthy, self._num_silent = time.monotonic(), 0
        """When `/health` was last answered by 200; checks since then that had no answer."""
        self._queue_price = QueuePrice()
        self._subscriber: EventSubscriber | None = None

    def _event_addresses(self, host: str, *, local: bool) -> tuple[str, str]:
        if local:
            return f"ipc://{self._folder.name}/events", f"ipc://{self._folder.name}/replay"
        with socket.create_server((host, 0)) as one, socket.create_server((host, 0)) as two:
            ports = one.getsockname()[1], two.getsockname()[1]
        return f"tcp://{host}:{ports[0]}", f"tcp://{host}:{ports[1]}"

    def _wait_ready(self) -> str:
        """`HOST:PORT` of the server, or `unix:PATH`. Raises `RuntimeError` if it does not start."""
        assert self._process.stdout is not None
        late = threading.Timer(START_SECONDS, _kill_session, (self._process.pid,))
        late.start()
        try:
            for text in self._process.stdout:
                if found := SERVING.match(text.strip()):
                    threading.Thread(target=self._process.stdout.read, daemon=True).start()
                    return found[1]
        finally:
            late.cancel()
        self._stop()
        raise RuntimeError(f"the engine of {self._group.name} did not start; see its log")

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where this engine is, for `EngineList`."""
        told: dict[str, Any] = msgspec.to_builtins(self._address)
        return told

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The price of its queue, for `QueuePolicy`; asked for where the group has a
        `max_engines`, and followed from then on."""
        if self._subscriber is None:
            topic = self._address.events_topic
            self._subscriber = EventSubscriber(
                self._events, self._replay, topic, self._queue_price.apply
            )
        return {QUEUE_PRICE: self._queue_price.seconds}

    async def check_health(self) -> None:
        """Raises once the server has ended, where it does not answer, or has not been healthy for
        `UNHEALTHY_SECONDS`; it replaces its own processes by itself. Ray replaces this replica
        after `SILENT_CHECKS` of these in a row."""
        if self._process.poll() is not None:
            raise RuntimeError(f"lookonce serve ended with status {self._process.returncode}")
        status = await self._asked_health()
        if status is None:
            self._num_silent += 1
            if self._num_silent >= SILENT_CHECKS:  # what is stopped ends at no other signal
                _kill_session(self._process.pid)
            raise RuntimeError("lookonce serve does not answer")
        self._num_silent = 0
        if status == 200:
            self._healthy = time.monotonic()
        elif time.monotonic() - self._healthy > UNHEALTHY_SECONDS:
            raise RuntimeError("lookonce serve is unhealthy")

    async def _asked_health(self) -> int | None:
        """The status of the server's `/health`; None where it does not answer."""
        with contextlib.suppress(TimeoutError, EngineLostError):
            async with asyncio.timeout(HEALTH_TIMEOUT):
                status, _, _ = await self._client.ask("GET", "/health")
                return status
        return None

    def pid(self) -> int:
        """Of `lookonce serve`."""
        return self._process.pid

    def __del__(self) -> None:
        """Drain: what is being answered is finished."""
        with contextlib.suppress(AttributeError):
            self._stop()

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._drain_timeout + 10.0)
        except subprocess.TimeoutExpired:
            _kill_session(self._process.pid)
        self._folder.cleanup()


def _kill_session(leader: int) -> None:
    """Kill a process that began a session, and all that are in it."""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def _machines() -> list[str]:
    """Addresses of the cluster's machines that there are now; one that joins later is not among
    them, so that engines name its front-ends as the clients of their requests."""
    return sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})


class FrontendReplica:
    """Serves the fleet's HTTP, from this replica's process."""

    def __init__(
        self, fleet: dict[str, Any], rendered: list[dict[str, Any]], **handles: Any
    ) -> None:
        """`rendered`: models whose prompts are rendered here; `handles`: one of each group of
        engines."""
        self._config = msgspec.convert(fleet, FleetConfig)
        self._rendered = msgspec.convert(rendered, list[RenderedModel])
        self._handles = handles
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._address = ""
        for handle in handles.values():
            handle._init()  # begins to follow the deployment's replicas
        self._thread = threading.Thread(target=self._run, name="frontend", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        """A thread and an event loop of its own: Ray's work does not delay clients."""
        try:
            prefer_event_loop()
            uvloop.run(self._serve())
        except BaseException as error:
            self._failure = error
            logger.exception("the front-end ended")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        config = self._config
        resolved = resolve(config.frontend_options())
        configure_logging("frontend", resolved.logs)
        server_config = resolved.server
        fleet = Fleet(Router(), EngineKeys(config.api_key_file))
        rendering = None
        if self._rendered:  # what it imports takes 45 MB, which no other replica needs
            from lookonce.fleet.rendering import Rendering

            rendering = Rendering(fleet, self._rendered, server_config)
        frontend = Frontend(fleet, server_config, rendering)
        self._server = FrontendServer(frontend, server_config)
        self._loop = asyncio.get_running_loop()

        def update() -> None:
            fleet.update(
                {
                    name: msgspec.structs.replace(msgspec.convert(told, EngineAddress), name=name)
                    for name, told in replicas.LISTS.all().items()
                    if told
                }
            )

        def on_change() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(update)

        replicas.LISTS.on_change = on_change
        update()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_SECONDS):
                await fleet.wait_served(len(self._handles))
        async with contextlib.AsyncExitStack() as stack:
            if rendering is not None:
                await stack.enter_async_context(rendering)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OPENING_SECONDS):
                        await rendering.wait_opened()
            listener, owner = shared_listener(config.host, config.port)
            stack.enter_context(listener)
            if owner is not None:
                stack.callback(owner.close)
            self._address = "{}:{}".format(*listener.getsockname()[:2])
            settle_memory()
            self._started.set()
            await self._server.serve(sockets=[listener])
        fleet.close()

    async def check_health(self) -> None:
        """Raises once the server has ended, and where its event loop does not turn."""
        if not self._thread.is_alive():
            raise RuntimeError("the front-end's server has ended")
        turned = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(turned), HEALTH_TIMEOUT)
        except TimeoutError:
            raise RuntimeError("the front-end's event loop does not turn") from None

    async def drain(self) -> None:
        """The fleet ends: `FrontendServer.drain`."""
        drained = asyncio.run_coroutine_threadsafe(self._server.drain(), self._loop)
        await asyncio.wrap_future(drained)

    def address(self) -> str:
        """`HOST:PORT` that it listens on."""
        return self._address

    def pid(self) -> int:
        return os.getpid()

    def __del__(self) -> None:
        """Drain."""
        with contextlib.suppress(AttributeError, RuntimeError):
            asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop)
            self._thread.join(self._config.drain_timeout + 10.0)


# --- the application -----------------------------------------------------------------------------


def application(config: FleetConfig) -> Any:
    """The Ray Serve application; also for `serve run` and KubeRay.

    Replicas are replaced where the version of their deployment differs: a digest of all that they
    were made of, but for their number.
    """
    fleet = msgspec.to_builtins(msgspec.structs.replace(config, groups=(), frontends=1))
    shared = [fleet, _key_file_digest(config.api_key_file), __version__]
    common: dict[str, Any] = {
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_timeout_s": config.drain_timeout + KILL_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    handles = {}
    for group in config.groups:
        name = _deployment_name(group)
        deployment = serve.deployment(
            name=name,
            **_number_of(group),
            max_surge_percent=SURGE_PERCENT if not group.gpus else 0,
            ray_actor_options={"num_cpus": group.cpus, "num_gpus": group.gpus},
            request_router_config=RequestRouterConfig(request_router_class=EngineList),
            **common,
        )(Engine)
        made = msgspec.to_builtins(group.of_engines())
        # Ray asks a replica for its price only if there was a policy when it started.
        deployment = _with_version(deployment, [made, group.max_engines is not None, *shared])
        handles[name] = deployment.bind(made, fleet)
    frontend = serve.deployment(
        name=FRONTEND,
        num_replicas=config.frontends,
        max_surge_percent=SURGE_PERCENT,
        ray_actor_options={"num_cpus": 0, "resources": config.frontend_resources},
        **common,
    )(FrontendReplica)
    rendered = msgspec.to_builtins(rendered_models(config.groups))
    made = [sorted(handles), rendered, *shared]
    return _with_version(frontend, made).bind(fleet, rendered, **handles)


def _number_of(group: EngineGroup) -> dict[str, Any]:
    if group.max_engines is None:
        return {"num_replicas": group.engines}
    policy = AutoscalingPolicy(
        policy_function="lookonce.fleet.deploy:QueuePolicy",
        policy_kwargs={"target_wait": group.target_wait},
    )
    scaling = AutoscalingConfig(
        min_replicas=group.engines,
        max_replicas=group.max_engines,
        initial_replicas=group.engines,
        upscale_delay_s=group.upscale_delay,
        downscale_delay_s=group.downscale_delay,
        look_back_period_s=LOOK_BACK_SECONDS,
        metrics_interval_s=1.0,
        policy=policy,
    )
    return {"autoscaling_config": scaling}


class QueuePolicy:
    """Ray's autoscaling by the price of the engines' queues."""

    def __init__(self, target_wait: float) -> None:
        self._target_wait = target_wait

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        told = (context.aggregated_metrics or {}).get(QUEUE_PRICE, {})
        if not told:
            return context.target_num_replicas, {}
        return engines_wanted(list(told.values()), self._target_wait), {}


def _deployment_name(group: EngineGroup) -> str:
    digest = blake3(group.name.encode()).hexdigest(4)
    return f"{ENGINE}-{re.sub('[^A-Za-z0-9]+', '-', group.name)}-{digest}"


def _with_version(deployment: Any, made: list[Any]) -> Any:
    digest = blake3(msgspec.json.encode(made, order="deterministic")).hexdigest()
    return deployment.options(version=digest, _internal=True)


def _key_file_digest(path: str | None) -> str | None:
    """Of what stands in the file: other keys make other front-ends and engines."""
    return None if path is None else blake3(Path(path).read_bytes()).hexdigest()


class RunningFleet:
    """A fleet on a local Ray that starts with it, or on a cluster."""

    def __init__(self, config: FleetConfig) -> None:
        self._local = config.address is None
        self._owner: ListenerOwner | None = None
        if self._local:
            self._owner = ListenerOwner(listening(config.host, config.port))
            config = msgspec.structs.replace(config, port=self._owner.port)
        self.config = config
        os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "1")
        ray.init(
            address=config.address,
            namespace="lookonce",
            include_dashboard=False if self._local else None,
            log_to_driver=True,
            logging_level=logging.WARNING,
            ignore_reinit_error=True,
        )
        serve.start(proxy_location="Disabled")
        self.apply(config)

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self.config.port}"

    def apply(self, config: FleetConfig) -> None:
        """Make the fleet what `config` says, and wait until it is: numbers are changed by adding
        and draining, other changes by replacing one replica after the other."""
        self.config = msgspec.structs.replace(config, port=self.config.port)
        self._frontends = serve.run(application(self.config), name=APPLICATION, route_prefix=None)

    def close(self) -> None:
        """Drain everything and end it: front-ends first, whose requests may yet go to engines."""
        if self._owner is not None:
            self._owner.close()
        try:
            drained = self._frontends.broadcast("drain")
            drained.results(timeout_s=self.config.drain_timeout + 10.0, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("front-ends end without draining: %s", error)
        with contextlib.suppress(RayError, RayServeException):
            serve.delete(APPLICATION, _blocking=False)  # it would give up after 60 s
            self._wait_deleted()
        if self._local:
            serve.shutdown()
        ray.shutdown()

    def kill(self) -> None:
        """End at once: what is being answered is cut off. On a cluster Ray drains by itself."""
        if not self._local:
            with contextlib.suppress(RayError, RayServeException):
                serve.delete(APPLICATION, _blocking=False)
        ray.shutdown()

    def _wait_deleted(self) -> None:
        """Until all replicas have ended; Ray kills those that take too long."""
        deadline = time.monotonic() + self.config.drain_timeout + KILL_SECONDS + 10.0
        while APPLICATION in serve.status().applications and time.monotonic() < deadline:
            time.sleep(0.1)
