"""`lookonce fleet`: many engines behind one address, on Ray Serve.

When all are ready a line with the URL goes to standard output. SIGHUP reads the file again; SIGTERM
and Ctrl-C drain, and the second time kill.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable
from importlib.util import find_spec
from typing import Any, Protocol, get_type_hints

import msgspec

from lookonce.cli.config_file import as_options, read_yaml, variable_of
from lookonce.cli.options import COMMA_SEPARATED, GROUPS, RENDER_OPTIONS
from lookonce.config import NANO, Options, resolve
from lookonce.errors import ConfigError, UnavailableError
from lookonce.fleet.config import FleetConfig
from lookonce.types.logs import configure_logging, tell

logger = logging.getLogger("lookonce.fleet")

OPTION_KINDS = get_type_hints(Options)
FLEET_KEYS = (
    *("host", "port", "frontends", "frontend_resources", "api_key_file", "address"),
    *("drain_timeout", "forwarded_allow_ips", "log_format", "log_level"),
    "models",
)
GROUP_KEYS = (
    *("name", "model", "engines", "max_engines", "target_wait", "upscale_delay"),
    *("downscale_delay", "cpus", "gpus", "environment", "options", "renders"),
)
OWN_OPTIONS = frozenset(
    {
        *("model", "host", "port", "uds", "events", "api_key", "api_key_file"),
        *("served_model_name", "ssl_certfile", "ssl_keyfile", "root_path", "allowed_origins"),
        *("forwarded_allow_ips", "behind_frontends", "drain_timeout"),
    }
)
"""Of `lookonce serve`; a fleet sets them itself, or does not have them."""


RENDERING_OPTIONS = {*RENDER_OPTIONS, "response_store_gb"} - {"dtype", "lora", "mm_hash_algorithm"}
"""Of `lookonce serve`: what front-ends that render depend on. Engines tell the others."""
ENGINE_OPTIONS = {*GROUPS["connections"], "vllm_metric_names", "log_format", "log_level"}
"""Of these, what engines may have otherwise: no prompt and no answer depends on it."""


def read_fleet(path: str | None, overrides: dict[str, Any]) -> FleetConfig:
    """Of a file, with what the command line says instead. Raises `ConfigError` naming the key."""
    return fleet_of(path or "fleet", {} if path is None else read_yaml(path, "fleet"), overrides)


def fleet_of(where: str, content: dict[str, Any], overrides: dict[str, Any]) -> FleetConfig:
    """Of what stands in a file; `where`: its name, for `ConfigError`."""
    _check_keys(where, content, FLEET_KEYS)
    models = content.get("models")
    if models is None:
        models = [{"model": overrides.get("model") or NANO}]
    elif overrides.get("model") is not None:
        raise ConfigError(f"--model: {where} names its models")
    if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
        raise ConfigError(f"{where}: models is a list of mappings")
    if not models:
        raise ConfigError(f"{where}: models names no model")
    groups = [_group(f"{where}: models[{n}]", each, overrides) for n, each in enumerate(models)]
    _add_adapters(where, groups, overrides.get("lora") or ())
    names = [group["name"] for group in groups]
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: two models have one name")
    fields = {name: content[name] for name in FLEET_KEYS[:-1] if content.get(name) is not None}
    given = {k: v for k, v in overrides.items() if k in FLEET_KEYS and v is not None}
    try:
        config = msgspec.convert({**fields, **given, "groups": groups}, FleetConfig)
    except msgspec.ValidationError as error:
        told = str(error).replace("$.groups[", "models[").replace("`$.", "`")
        raise ConfigError(f"{where}: {told}") from None
    for group in config.groups:
        if group.engines < 1:
            raise ConfigError(f"{where}: {group.name} needs at least 1 engine")
        if group.max_engines is not None and group.max_engines < group.engines:
            raise ConfigError(f"{where}: {group.name} has more engines than max_engines")
        if group.target_wait <= 0:
            raise ConfigError(f"{where}: target_wait of {group.name} is above 0")
    if config.frontends < 1:
        raise ConfigError(f"{where}: frontends is at least 1")
    resolve(config.frontend_options())
    return config


def _group(where: str, given: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    _check_keys(where, given, GROUP_KEYS)
    group = {name: value for name, value in given.items() if value is not None}
    group.setdefault("model", NANO)
    group["name"] = str(group.get("name") or group["model"])
    if overrides.get("engines") is not None:
        group["engines"] = overrides["engines"]
    options = group.get("options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: options is a mapping")
    line: list[str] = []
    renders = group.pop("renders", False)
    if not isinstance(renders, bool):
        raise ConfigError(f"{where}: renders is true or false")
    parsed = as_options(f"{where}.options", options)
    for name, value in parsed.items():
        if name in OWN_OPTIONS:
            raise ConfigError(f"{where}.options: a fleet does not take {name.replace('_', '-')}")
        _check_kind(f"{where}.options", name, value)
        line += _as_arguments(name, value)
    group["options"] = line
    if renders:
        _check_environment(where, group, parsed)
        given = {n: _typed(n, v) for n, v in parsed.items() if n in RENDERING_OPTIONS}
        group["renders"] = given
    return group


def _check_environment(where: str, group: dict[str, Any], options: Collection[str]) -> None:
    """Raises `ConfigError` for a variable by which engines, and they alone, would render."""
    variables = {*os.environ, *(group.get("environment") or ())}
    for name in sorted(RENDERING_OPTIONS - OWN_OPTIONS - ENGINE_OPTIONS - {*options}):
        if variable_of(name) in variables:
            raise ConfigError(
                f"{where}: front-ends that render do not know {variable_of(name)} of the engines'"
                f" environment; set {name.replace('_', '-')} among the model's options"
            )


def _add_adapters(where: str, groups: list[dict[str, Any]], lora: Iterable[str]) -> None:
    """`--lora` of the command line. Engines may be started in another folder, so that paths are
    made absolute."""
    given = [text.partition("=") for text in lora]
    if given and len(groups) > 1:
        raise ConfigError(
            f"--lora: {where} has several models; name adapters among the options of theirs"
        )
    for name, _, path in given:
        groups[0]["options"] += ["--lora", f"{name}={os.path.abspath(path)}" if path else name]


TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


def _check_kind(where: str, name: str, value: str | list[str]) -> None:
    """Before any engine is started: what it would refuse is told by its own log alone."""
    default = getattr(Options(), name)
    if isinstance(default, tuple):
        return
    wanted = "one value"
    try:
        if isinstance(value, list):
            raise ValueError
        if isinstance(default, bool):
            wanted = "true or false"
            if value.lower() not in TRUE + FALSE:
                raise ValueError
        else:
            wanted = "a number"
            msgspec.convert(value, OPTION_KINDS[name], strict=False)
    except ValueError:
        option = name.replace("_", "-")
        raise ConfigError(f"{where}: {option} must be {wanted}, got {value!r:.60}") from None


def _typed(name: str, value: str | list[str]) -> Any:
    """An option that was checked, as in `Options`."""
    default = getattr(Options(), name)
    if isinstance(default, tuple):
        listed = [value] if isinstance(value, str) else value
        if name in COMMA_SEPARATED:
            listed = [*filter(None, ",".join(listed).replace(" ", "").split(","))]
        return listed
    if isinstance(default, bool):
        return str(value).lower() in TRUE
    return msgspec.convert(value, OPTION_KINDS[name], strict=False)


def _as_arguments(name: str, value: str | list[str]) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(getattr(Options(), name), bool):
        text = str(value).lower()
        return [flag if text in TRUE else f"--no-{flag[2:]}"]
    values = value if isinstance(value, list) else [value]
    return [part for each in values for part in (flag, each)]


def _check_keys(where: str, given: dict[Any, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{where}: there is no {str(key)[:60]!r}; there is {', '.join(known)}"
            )


def build(args: dict[str, Any]) -> Any:
    """The Ray Serve application for `serve run lookonce.cli.fleet:build` and for serve's config
    files, KubeRay's too; `args`: the content of a fleet.yaml. Raises `ConfigError`.

    Engines and front-ends listen on their machines' addresses.
    """
    config = fleet_of("args", {"host": "0.0.0.0", "address": "auto", **args}, {})
    from lookonce.fleet.deploy import application

    return application(config)


def run_fleet(path: str | None, overrides: dict[str, Any]) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status. Raises `ConfigError`, and `UnavailableError`
    where the engines do not start."""
    config = read_fleet(path, overrides)
    # Ray leaves out lines that differ in numbers alone: of engines' logs those of other requests.
    # It reads this where it is imported, which looking for `ray.serve` does.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    for module in ("ray.serve", "zmq"):
        if not _is_installed(module):
            raise ConfigError(
                f"a fleet needs {module}, which is not installed: pip install 'lookonce[fleet]'"
            )
    configure_logging("fleet", resolve(config.frontend_options()).logs)
    from lookonce.fleet.deploy import RunningFleet

    try:
        running = RunningFleet(config)
    except RuntimeError as error:  # its engines have said why; Ray's frames do not
        raise UnavailableError(f"the fleet did not start, see above: {error}") from None
    names = ", ".join(f"{g.name} ({g.engines})" for g in config.groups)
    return serve_until_asked(
        running,
        lambda: tell(f"Serving {names} on {running.url}"),
        lambda: _apply_again(running, path, overrides),
    )


class Ending(Protocol):
    """What signals do to a fleet (`deploy.RunningFleet`)."""

    def close(self) -> None:
        """Drain it, and return once it has ended."""

    def kill(self) -> None:
        """End it at once."""


class _StopAskedError(BaseException):
    """SIGTERM or Ctrl-C: raised in the main thread, whatever it waits for."""


def serve_until_asked(
    running: Ending, on_serving: Callable[[], None], on_reload: Callable[[], None]
) -> int:
    """Until SIGTERM or Ctrl-C, then drain; the exit status. Asked again, end at once. SIGHUP calls
    `on_reload`, which ends where it is asked to stop meanwhile."""
    reload_asked = threading.Event()

    def stop(number: int, _: object) -> None:
        raise _StopAskedError

    try:
        signal.signal(signal.SIGHUP, lambda *_: reload_asked.set())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        on_serving()
        while True:
            reload_asked.wait()
            reload_asked.clear()
            on_reload()
    except _StopAskedError:
        return 0
    finally:
        try:
            running.close()
        except _StopAskedError:
            for number in (signal.SIGTERM, signal.SIGINT):  # a third one must not leave a half
                signal.signal(number, signal.SIG_IGN)
            logger.warning("asked again: everything is killed")
            running.kill()


def _apply_again(running: Any, path: str | None, overrides: dict[str, Any]) -> None:
    try:
        config = read_fleet(path, overrides)
    except ConfigError as error:
        tell(f"SIGHUP: {error.message}; the fleet stays what it was")
        return
    try:
        running.apply(config)
    except RuntimeError as error:
        tell(f"SIGHUP: {error}; what serves goes on")
        return
    names = ", ".join(f"{g.name} ({g.engines})" for g in config.groups)
    tell(f"Serving {names} on {running.url}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
