"""`lookonce fleet`: what stands in its file and on its command line, before Ray is started."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
import yaml

from lookonce.cli import fleet
from lookonce.cli.fleet import fleet_of, read_fleet, run_fleet, serve_until_asked
from lookonce.config import Options, resolve
from lookonce.errors import ConfigError
from lookonce.fleet.config import engine_arguments, listen_options, rendered_models
from lookonce.types.logs import LogConfig

EXAMPLE = Path(__file__).parents[2] / "deploy/kubernetes/fleet/lookonce-fleet.yaml"


def written(folder: Path, text: str) -> str:
    file = folder / "fleet.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_says_what_a_fleet_consists_of(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "port: 9000\nfrontends: 2\nmodels:\n"
        "- {model: nano, engines: 3, options: {max-num-seqs: 4, prefix-caching: false,"
        " kv-tier: ['host:1GB', 'disk:/x:1GB']}}\n"
        "- {model: nano-ear, name: ear, gpus: 0.5}\n",
    )
    config = read_fleet(path, {"port": 9001})
    assert (config.port, config.frontends) == (9001, 2)
    nano, ear = config.groups
    assert (nano.name, nano.engines) == ("nano", 3)
    assert nano.options == (
        *("--max-num-seqs", "4", "--no-prefix-caching"),
        *("--kv-tier", "host:1GB", "--kv-tier", "disk:/x:1GB"),
    )
    assert (ear.name, ear.model, ear.engines, ear.gpus) == ("ear", "nano-ear", 1, 0.5)
    assert read_fleet(path, {"engines": 2}).groups[1].engines == 2


def test_front_ends_render_by_the_options_of_the_engines(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "models:\n- model: nano\n  renders: true\n  options: {max-num-seqs: 4, max-model-len: 99,"
        " allow-private-media: true, closed-schemas: false, dtype: bfloat16,"
        " allowed-media-domains: 'a.org, b.org', limit-mm-per-prompt: {image: 2}}\n"
        "- {model: nano-ear, name: ear}\n",
    )
    nano, ear = read_fleet(path, {}).groups
    assert nano.renders == {
        "max_model_len": 99,
        "allow_private_media": True,
        "closed_schemas": False,
        "allowed_media_domains": ["a.org", "b.org"],
        "limit_mm_per_prompt": "image=2",
    }
    assert ear.renders is None
    (model,) = rendered_models([nano, ear])
    assert (model.name, model.model, model.options) == ("nano", "nano", nano.renders)
    plain = msgspec.structs.replace(nano, renders=None)
    assert plain.of_engines() == nano.of_engines()  # no engine is replaced


def test_front_ends_do_not_render_by_an_environment_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would make other prompts, and fetch from domains that engines may not."""
    group = "{model: nano, renders: true, environment: {LOOKONCE_CHAT_TEMPLATE: x, A: b}"
    with pytest.raises(ConfigError, match=r"models\[0\].*LOOKONCE_CHAT_TEMPLATE.*chat-template"):
        read_fleet(written(tmp_path, f"models: [{group}}}]"), {})
    told = read_fleet(written(tmp_path, f"models: [{group}, options: {{chat-template: y}}}}]"), {})
    assert told.groups[0].renders == {"chat_template": "y"}
    path = written(tmp_path, "models: [{model: nano, renders: true}]")
    monkeypatch.setenv("LOOKONCE_LOG_LEVEL", "debug")
    assert read_fleet(path, {}).groups[0].renders == {}
    monkeypatch.setenv("LOOKONCE_ALLOWED_MEDIA_DOMAINS", "a.org")
    with pytest.raises(ConfigError, match="LOOKONCE_ALLOWED_MEDIA_DOMAINS"):
        read_fleet(path, {})
    assert read_fleet(written(tmp_path, "models: [{model: nano}]"), {}).groups[0].renders is None


def test_the_example_for_kuberay_is_a_fleet_that_its_service_finds() -> None:
    service, front_door = yaml.safe_load_all(EXAMPLE.read_text())
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    module, _, name = application["import_path"].partition(":")
    assert getattr(import_module(module), name) is fleet.build
    config = fleet_of("args", application["args"], {})
    (group,) = config.groups
    workers = {w["groupName"]: w for w in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    front = workers["frontends"]
    template = front["template"]
    assert template["metadata"]["labels"] == front_door["spec"]["selector"]
    (container,) = template["spec"]["containers"]
    assert container["ports"] == [{"containerPort": config.port, "name": "http"}]
    offered = json.loads(json.loads(front["rayStartParams"]["resources"]))
    assert offered == config.frontend_resources
    assert front["replicas"] >= config.frontends
    assert workers["engines"]["maxReplicas"] == group.max_engines


def test_without_a_file_it_is_one_model() -> None:
    config = read_fleet(None, {"model": "folder", "engines": 4})
    assert [(g.name, g.model, g.engines) for g in config.groups] == [("folder", "folder", 4)]
    assert read_fleet(None, {}).groups[0].name == "nano"


def test_adapters_are_named_on_the_command_line_or_among_a_models_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"lora": ("a=adapters/a", "b=/b")}
    (group,) = read_fleet(None, given).groups
    assert group.options == ("--lora", f"a={tmp_path}/adapters/a", "--lora", "b=/b")
    path = written(
        tmp_path, "models: [{model: nano, options: {lora: [x=/x, y=/y]}}, {model: nano-ear}]\n"
    )
    assert read_fleet(path, {}).groups[0].options == ("--lora", "x=/x", "--lora", "y=/y")
    with pytest.raises(ConfigError, match=r"--lora: .* has several models"):
        read_fleet(path, given)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("modles: []", "'modles'"),
        ("models: 3", "models is a list"),
        ("models: [{model: nano, engine: 2}]", r"models\[0\]: there is no 'engine'"),
        ("models: [{options: {max-nums-seqs: 2}}]", "did you mean max_num_seqs"),
        ("models: [{options: {port: 2}}]", "does not take port"),
        ("models: [{model: nano}, {model: x, name: nano}]", "two models have one name"),
        ("models: [{engines: 0}]", "at least 1 engine"),
        ("models: [{engines: many}]", r"got `str` - at `models\[0\].engines`"),
        ("models: [{engines: 3, max_engines: 2}]", "more engines than max_engines"),
        ("models: [{target_wait: 0}]", "target_wait of nano is above 0"),
        ("models: []", "models names no model"),
        ("models: [{options: {max-num-seqs: x}}]", "max-num-seqs must be a number, got 'x'"),
        ("models: [{options: {max-model-len: 1.5}}]", "max-model-len must be a number"),
        ("models: [{options: {kv-cache-gb: [1, 2]}}]", "kv-cache-gb must be one value"),
        ("models: [{options: {prefix-caching: maybe}}]", "prefix-caching must be true or false"),
        ("models: [{renders: maybe}]", r"models\[0\]: renders is true or false"),
        ("frontends: 0", "frontends is at least 1"),
        ("- x", "not a list of OPTION"),
        ("{", "is not YAML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_fleet(written(tmp_path, text), {})


def test_on_a_network_a_front_end_may_have_all_connections_of_an_engine() -> None:
    """With as many as one address has by default, one tenant's streams kept even the front-end's
    probes from the engine, which then got nobody's requests."""
    listed = listen_options("10.0.0.1", "/folder")
    given = dict(zip(listed[::2], listed[1::2], strict=True))
    assert given["--host"] == "10.0.0.1"
    options = Options(max_connections_per_address=int(given["--max-connections-per-address"]))
    connections = resolve(options).server.connections
    assert connections.max_per_address >= connections.max_connections


def test_engines_believe_front_ends_alone_who_asks() -> None:
    local = listen_options(None, "/folder")
    assert local == ("--uds", "/folder/http", "--forwarded-allow-ips", "unix")
    listed = listen_options("10.0.0.1", "/folder", ["10.0.0.1", "10.0.0.2"])
    named = [value for name, value in itertools.pairwise(listed) if name == local[2]]
    assert named == ["10.0.0.1", "10.0.0.2"]


def test_front_ends_believe_the_proxies_that_the_file_names(tmp_path: Path) -> None:
    config = read_fleet(written(tmp_path, "forwarded_allow_ips: [10.0.0.0/8]\n"), {})
    assert config.forwarded_allow_ips == ("10.0.0.0/8",)
    with pytest.raises(ConfigError, match="--forwarded-allow-ips"):
        read_fleet(written(tmp_path, "forwarded_allow_ips: [proxy.example.org]\n"), {})


@pytest.mark.parametrize("seconds", [0, 7.5, 3600])
def test_its_drain_timeout_is_that_of_front_ends_and_engines(
    tmp_path: Path, seconds: float
) -> None:
    config = read_fleet(written(tmp_path, f"drain_timeout: {seconds}\n"), {})
    assert resolve(config.frontend_options()).server.drain_timeout == seconds
    line = engine_arguments(config, config.groups[0], (), "ipc:///events")
    given = dict(itertools.pairwise(line))
    assert float(given["--drain-timeout"]) == seconds


@pytest.mark.parametrize(
    "text", ["drain_timeout: -1\n", "models: [{model: nano, options: {drain-timeout: 3}}]\n"]
)
def test_a_drain_timeout_that_cannot_be_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="drain-timeout"):
        read_fleet(written(tmp_path, text), {})


def test_it_says_how_front_ends_write_their_log(tmp_path: Path) -> None:
    config = read_fleet(written(tmp_path, "log_format: json\nlog_level: warning\n"), {})
    assert resolve(config.frontend_options()).logs == LogConfig("json", "warning")
    with pytest.raises(ConfigError, match="--log-format"):
        read_fleet(written(tmp_path, "log_format: xml\n"), {})


def test_a_model_on_the_command_line_and_in_the_file_is_a_mistake(tmp_path: Path) -> None:
    path = written(tmp_path, "models: [{model: nano-ear}]\n")
    with pytest.raises(ConfigError, match=r"--model: .* names its models"):
        read_fleet(path, {"model": "nano"})
    assert read_fleet(written(tmp_path, "port: 1\n"), {"model": "x"}).groups[0].model == "x"


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_is_installed", lambda module: module != "ray.serve")
    with pytest.raises(ConfigError, match=r"pip install 'lookonce\[fleet\]'"):
        run_fleet(None, {})


class Fleet:
    """Of `deploy.RunningFleet` what signals do to it."""

    def __init__(self, *, drains: bool = True, kills_in: float = 0.0) -> None:
        self._drains, self._kills_in = drains, kills_in
        self.done: list[str] = []

    def close(self) -> None:
        self.done.append("close")
        if not self._drains:
            send(signal.SIGTERM)
            time.sleep(30)

    def kill(self) -> None:
        if self._kills_in:
            send(signal.SIGTERM)
            time.sleep(self._kills_in)
        self.done.append("kill")


def send(number: int, after: float = 0.05) -> None:
    """A signal to this process, soon."""
    threading.Timer(after, os.kill, (os.getpid(), number)).start()


@pytest.fixture
def _signals() -> Iterator[None]:
    """Handlers are what they were once the test has ended."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_sigterm_drains_also_while_a_changed_file_is_being_applied() -> None:
    running = Fleet()
    began = time.monotonic()

    def apply() -> None:
        running.done.append("apply")
        send(signal.SIGTERM)
        time.sleep(30)  # as engines that load weights take

    assert serve_until_asked(running, lambda: send(signal.SIGHUP), apply) == 0
    assert running.done == ["apply", "close"]
    assert time.monotonic() < began + 10


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("kills_in", [0.0, 0.3])
def test_a_second_sigterm_kills_what_drains(kills_in: float) -> None:
    """Also where a third one comes meanwhile."""
    running = Fleet(drains=False, kills_in=kills_in)
    began = time.monotonic()
    assert serve_until_asked(running, lambda: send(signal.SIGTERM), lambda: None) == 0
    assert running.done == ["close", "kill"]
    assert time.monotonic() < began + 10
