"""What a fleet consists of; made of `fleet.yaml` and the command line by `cli.fleet`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from lookonce.config import ConnectionConfig, Options


class RenderedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose prompts front-ends render."""

    name: str
    """What clients call it."""
    model: str
    options: dict[str, Any] = {}
    """Those of `config.Options` that prompts and answers depend on."""


class EngineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that serve one model."""

    name: str
    """What clients call the model."""
    model: str
    engines: int = 1
    max_engines: int | None = None
    """With this the number follows the queue's price: `engines` at least, so many at most."""
    target_wait: float = 1.0
    """Seconds of work at each engine that are aimed at then."""
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    """Seconds that the price has to ask for more, or fewer, engines before there are."""
    options: tuple[str, ...] = ()
    """Of `lookonce serve`, as on a command line."""
    cpus: float = 0.0
    gpus: float = 0.0
    """What Ray reserves for one engine."""
    environment: dict[str, str] = {}
    renders: dict[str, Any] | None = None
    """Front-ends render its prompts, by these of `config.Options`; None: engines do."""

    def of_engines(self) -> EngineGroup:
        """What its engines are made of: of groups that differ in nothing else none is replaced."""
        usual = EngineGroup(name="", model="")
        apart = (
            *("engines", "max_engines", "target_wait", "upscale_delay", "downscale_delay"),
            "renders",
        )
        return msgspec.structs.replace(self, **{name: getattr(usual, name) for name in apart})


def rendered_models(groups: Iterable[EngineGroup]) -> list[RenderedModel]:
    return [
        RenderedModel(name=group.name, model=group.model, options=group.renders)
        for group in groups
        if group.renders is not None
    ]


def listen_options(host: str | None, folder: str, peers: Iterable[str] = ()) -> tuple[str, ...]:
    """Where an engine listens, and who may name its clients, as options of `lookonce serve`.
    `host`: None on one machine, where it is a socket in a folder of this user: no other one reaches
    the engine.

    On a network all requests of a front-end come from one address, which may have all connections;
    `peers`: addresses of the machines that front-ends may be on.
    """
    if host is None:
        return "--uds", f"{folder}/http", "--forwarded-allow-ips", "unix"
    most = str(ConnectionConfig().max_connections)
    named = [part for peer in peers for part in ("--forwarded-allow-ips", peer)]
    return "--host", host, "--port", "0", "--max-connections-per-address", most, *named


def engine_arguments(
    config: FleetConfig, group: EngineGroup, listens: Sequence[str], events: str
) -> list[str]:
    """Of `lookonce serve`, for one engine. `listens`: as `listen_options` tells; `events`: of its
    `--events`."""
    keys = ("--api-key-file", config.api_key_file) if config.api_key_file else ()
    return [
        *(group.model, "--served-model-name", group.name),
        *(*listens, "--events", events, *keys),
        *("--behind-frontends", "--drain-timeout", f"{config.drain_timeout:g}"),
        *group.options,
    ]


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All of a fleet. It travels to Ray's workers as plain values."""

    groups: tuple[EngineGroup, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    frontends: int = 1
    """Processes that share the port."""
    frontend_resources: dict[str, float] = {}
    """Ray's custom resources of one front-end: which machines may have any."""
    api_key_file: str | None = None
    """The same path on every machine."""
    address: str | None = None
    """Of a Ray cluster; None: one on this machine, started here."""
    drain_timeout: float = 30.0
    """Seconds that requests have to end at an engine or a front-end that is removed, or where the
    fleet ends. What does not end 10 to 20 s later is killed."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Proxies before the front-ends whose `X-Forwarded-For` tells the client."""
    log_format: str = "text"
    log_level: str = "info"
    """Of the front-ends' lines; engines have options of their own."""

    def frontend_options(self) -> Options:
        """Of `lookonce serve`, as far as a front-end has them."""
        return Options(
            host=self.host,
            port=self.port,
            api_key_file=self.api_key_file,
            forwarded_allow_ips=self.forwarded_allow_ips,
            drain_timeout=self.drain_timeout,
            log_format=self.log_format,
            log_level=self.log_level,
        )
