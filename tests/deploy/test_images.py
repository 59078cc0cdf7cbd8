"""Images, Kubernetes, systemd: what can be told without a container engine or a cluster."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml

from lookonce.cli.main import app
from lookonce.config import Options
from lookonce.launch import DRAIN_GRACE
from lookonce.server.http.app import OPEN_PATHS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile*"))
BASE = DEPLOY / "kubernetes" / "base"
POD = yaml.safe_load((BASE / "deployment.yaml").read_text())["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
UNIT = (DEPLOY / "lookonce.service").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
JAEGER_LISTENS = (
    "ADMIN_HTTP_HOST_PORT",
    "COLLECTOR_GRPC_SERVER_HOST_PORT",
    "COLLECTOR_HTTP_SERVER_HOST_PORT",
    "COLLECTOR_OTLP_GRPC_HOST_PORT",
    "COLLECTOR_OTLP_HTTP_HOST_PORT",
    "HTTP_SERVER_HOST_PORT",
    "QUERY_GRPC_SERVER_HOST_PORT",
    "QUERY_HTTP_SERVER_HOST_PORT",
)
"""Of jaeger-all-in-one: by default each is a port of every address of the host."""
DRAIN_SECONDS = 30 + DRAIN_GRACE


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Instruction and arguments, lines that go on joined."""
    text = re.sub(r"(?m)^#.*\n", "", dockerfile.read_text()).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request) -> list[tuple[str, str]]:
    return instructions(request.param)


def test_there_is_an_image_for_cpus_and_one_for_gpus():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.cuda"]


def test_an_image_runs_as_a_user_that_is_not_root_and_says_whether_it_is_healthy(dockerfile):
    last = dict(dockerfile)
    assert last["USER"] == "10001:10001" == f"{POD['securityContext']['runAsUser']}:10001"
    command = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(command[-1], "HEALTHCHECK", "exec")
    assert "/health" in command[-1]
    assert "/health" in OPEN_PATHS
    assert json.loads(last["CMD"]) == ["serve"]
    assert not re.search("shm|ipc", str(dockerfile))


def test_an_image_copies_what_the_build_needs_and_is_let_have(dockerfile):
    ignored = [line for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    wanted = [
        path
        for name, arguments in dockerfile
        if name == "COPY" and "--from" not in arguments
        for path in arguments.split()[:-1]
    ]
    assert "lookonce" in wanted
    for path in wanted:
        assert (ROOT / path).exists()
        assert any(fnmatch.fnmatch(path, line[1:]) for line in ignored)


def test_an_image_sets_options_that_there_are_and_the_torch_of_make(dockerfile):
    named = set(re.findall(r"\bLOOKONCE_([A-Z_]+)=", str(dockerfile)))
    assert named <= {name.upper() for name in Options.__dataclass_fields__}
    (pinned,) = set(re.findall(r"torch==[\d.]+", str(dockerfile)))
    assert pinned in (ROOT / "Makefile").read_text()


def test_starting_being_ready_and_being_alive_are_told_apart():
    startup, ready, alive = (
        CONTAINER[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")
    )
    assert startup["httpGet"] == ready["httpGet"] == {"path": "/ready", "port": "http"}
    assert alive["httpGet"] == {"path": "/health", "port": "http"}
    assert {"/ready", "/health"} <= set(OPEN_PATHS)
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    # An engine that hangs is restarted by the server, after twice the time until /health says so.
    assert alive["periodSeconds"] * alive["failureThreshold"] > 2 * Options().engine_stall_timeout


def test_a_pod_may_drain_and_runs_without_rights():
    assert POD["terminationGracePeriodSeconds"] > DRAIN_SECONDS + 5
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert CONTAINER["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["volumes"]}


def test_options_of_the_pod_are_options(monkeypatch):
    seen: list[Options] = []
    monkeypatch.setattr("lookonce.cli.serve.run_server", lambda options: seen.append(options) or 0)
    command, *arguments = CONTAINER["args"]
    at = arguments.index("--config") + 1
    arguments[at] = str(BASE / Path(arguments[at]).name)
    app([command, *arguments], standalone_mode=False)
    assert (seen[0].host, seen[0].port) == ("0.0.0.0", CONTAINER["ports"][0]["containerPort"])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "cuda"])
def test_kustomize_renders(folder):
    done = subprocess.run(
        ["kubectl", "kustomize", str(BASE.parent / folder)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kinds = {part["kind"]: part for part in yaml.safe_load_all(done.stdout)}
    assert set(kinds) == {"ConfigMap", "Deployment", "PersistentVolumeClaim", "Service"}
    pod = kinds["Deployment"]["spec"]["template"]
    assert kinds["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (folder == "cuda")


def test_the_unit_waits_for_ready_drains_and_reloads():
    settings = dict(re.findall(r"(?m)^(\w+)=(.*)$", UNIT))
    assert (settings["Type"], settings["KillMode"]) == ("notify", "mixed")
    assert int(settings["TimeoutStopSec"]) > DRAIN_SECONDS
    assert settings["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_the_unit_reads_the_keys_of_now_when_it_reloads():
    """systemd fills `CREDENTIALS_DIRECTORY` when a service starts, and not again."""
    lines = re.findall(r"(?m)^(Exec\w+)=(.*)$", UNIT)
    (start,) = (command for kind, command in lines if kind == "ExecStart")
    keys = start.split("--api-key-file ")[1].split()[0]
    assert "CREDENTIALS_DIRECTORY" not in keys
    copies = [kind for kind, command in lines if f"/etc/lookonce/keys {keys}" in command]
    assert copies == ["ExecStartPre", "ExecReload"]
    assert [kind for kind, _ in lines].index("ExecReload") < [c for _, c in lines].index(
        "/bin/kill -HUP $MAINPID"
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path):
    unit = tmp_path / "lookonce.service"
    unit.write_text(UNIT.replace("/opt/lookonce/bin/lookonce", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "lookonce.service" in line] == []


def test_services_of_compose_are_for_this_machine_alone():
    assert {"lookonce", "valkey", "prometheus", "grafana"} <= set(COMPOSE)
    assert "127.0.0.1" in COMPOSE["valkey"]["command"]
    jaeger = COMPOSE["jaeger"]["environment"]
    assert {name: jaeger[name].split(":") for name in JAEGER_LISTENS} == {
        name: ["127.0.0.1", jaeger[name].split(":")[1]] for name in JAEGER_LISTENS
    }
    grafana = COMPOSE["grafana"]["environment"]  # by default "admin" has the password "admin"
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert grafana["GF_AUTH_BASIC_ENABLED"] == "false"
    server = COMPOSE["lookonce"]
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    assert server["environment"]["LOOKONCE_HOST"] == "127.0.0.1"
    names = {name.removeprefix("LOOKONCE_").lower() for name in server["environment"]}
    assert names <= set(Options.__dataclass_fields__)
    assert float(server["stop_grace_period"].rstrip("s")) > DRAIN_SECONDS


def test_the_list_of_licences_names_everything_that_is_required():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "licences.py")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    rows = dict(re.findall(r"(?m)^\| ([a-z0-9-]+) \| \S+ \| (.+) \|$", done.stdout))
    stated = [line for line in requires("lookonce") or () if "extra ==" not in line]
    needed = {re.split(r"[^\w-]", line)[0].lower().replace("_", "-") for line in stated}
    assert "torch" in needed
    assert needed <= set(rows)
    assert rows["lookonce"] == "Apache-2.0"
    assert "not stated" not in rows.values()
