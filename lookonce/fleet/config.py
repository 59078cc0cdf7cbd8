"""What a fleet consists of; made of `fleet.yaml` and the command line by `cli.fleet`."""

from __future__ import annotations

import msgspec


class EngineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that serve one model."""

    name: str
    """What clients call the model."""
    model: str
    engines: int = 1
    options: tuple[str, ...] = ()
    """Of `lookonce serve`, as on a command line."""
    cpus: float = 0.0
    gpus: float = 0.0
    """What Ray reserves for one engine."""
    environment: dict[str, str] = {}


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All of a fleet. It travels to Ray's workers as plain values."""

    groups: tuple[EngineGroup, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    frontends: int = 1
    """Processes that share the port."""
    api_key_file: str | None = None
    """The same path on every machine."""
    address: str | None = None
    """Of a Ray cluster; None: one on this machine, started here."""
    drain_timeout: float = 30.0
    """Seconds that requests have to end where an engine or a front-end is removed."""
