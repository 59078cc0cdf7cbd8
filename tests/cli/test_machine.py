"""What `doctor`, `ps` and `ls` say of a machine."""

from __future__ import annotations

import json
import os
import socket
import sys
import tomllib
from pathlib import Path

import pytest

from lookonce.cli import doctor
from lookonce.cli.model_list import held_model, held_models
from lookonce.cli.ps import _own_processes, _sockets, _tcp_urls, command_of, listening_tcp
from lookonce.config import GIB
from lookonce.types.cpu import X86_64


def states(findings) -> dict[str, str]:
    return {finding.subject: finding.state for finding in findings}


def test_every_finding_that_is_not_ok_says_what_to_do(capsys):
    status = doctor.run_doctor(gpu=False, as_json=True)
    findings = json.loads(capsys.readouterr().out)
    subjects = {finding["subject"] for finding in findings}
    assert {"Python", "torch", "cores", "CPU kernels", "memory", "CUDA"} <= subjects
    assert all(finding["advice"] for finding in findings if finding["state"] != "ok")
    assert status == any(finding["state"] == "bad" for finding in findings)


def test_the_report_counts():
    lines = list(
        doctor.report([doctor.Finding("a", "ok", "x"), doctor.Finding("bc", "slow", "y", "Do z.")])
    )
    assert lines == ["ok    a   x", "slow  bc  y", "          Do z.", "", "0 bad, 1 slow, 1 ok"]


@pytest.mark.parametrize(
    ("quota", "load", "expected"),
    [
        ("max 100000", "0.5 0 0", {"cores": "ok"}),
        ("150000 100000", "1.0 0 0", {"cores": "slow"}),
        ("300000 100000", "1.0 0 0", {"cores": "ok"}),
        ("max 100000", "9.0 0 0", {"cores": "ok", "load": "slow"}),
        ("100000 100000", "1.5 0 0", {"cores": "slow", "load": "slow"}),
    ],
)
def test_cores_are_those_that_a_container_leaves(tmp_path, quota, load, expected):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    (tmp_path / "loadavg").write_text(load + "\n")
    cores = frozenset(range(4))
    assert states(doctor.check_cores(tmp_path, tmp_path, cores)) == expected


@pytest.mark.parametrize(
    ("free", "limit", "state", "said"),
    [
        (16, "max", "ok", "16.0 of 32.0 GiB free"),
        (1, "max", "slow", "1.0 of 32.0"),
        (16, str(4 * GIB), "slow", "may have 4.0 GiB, 3.0 are left"),
    ],
)
def test_memory_is_what_a_container_leaves(tmp_path, free, limit, state, said):
    kib = 1 << 20
    (tmp_path / "meminfo").write_text(f"MemTotal: {32 * kib} kB\nMemAvailable: {free * kib} kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(str(GIB))
    (finding,) = doctor.check_memory(tmp_path, tmp_path)
    assert finding.state == state
    assert said in finding.found


def test_a_cpu_that_no_kernels_are_for_is_slow(monkeypatch):
    monkeypatch.setattr(doctor, "KERNEL_VARIANTS", X86_64)
    findings = list(doctor.check_kernels(frozenset({"sse2"})))
    assert findings[0].found == "this CPU can run none"
    assert states(findings) == {"CPU kernels": "slow", "bf16": "slow"}


def test_few_descriptors_are_slow():
    assert states(doctor.check_limits(1024)) == {"descriptors": "slow"}
    assert states(doctor.check_limits(1 << 20)) == {"descriptors": "ok"}


@pytest.mark.parametrize(
    ("devices", "built", "state"),
    [(0, False, "slow"), (0, True, "slow"), (2, False, "slow"), (2, True, "ok")],
)
def test_a_device_counts_where_torch_can_use_it(monkeypatch, devices, built, state):
    monkeypatch.setattr(doctor, "num_cuda_devices", lambda: devices)
    monkeypatch.setattr(doctor, "torch_has_cuda", lambda: built)
    assert states(doctor.check_cuda()) == {"CUDA": state}
    if state == "slow":
        assert states(doctor.check_gpu()) == {"GPU": "bad"}


# --- ps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/x/bin/python", "/x/bin/lookonce", "serve", "m"], "serve"),
        (["python", "-m", "lookonce.cli.main", "render"], "render"),
        (["python", "-P", "-m", "lookonce.cli.main", "serve"], "serve"),
        (["/x/bin/python", "/x/bin/lookonce", "fleet", "fleet.yaml"], "fleet"),
        (["/x/bin/lookonce", "chat", "serve"], None),
        (["grep", "lookonce"], None),
        (["vim", "lookonce.cli.main", "serve"], None),
        ([""], None),
    ],
)
def test_servers_are_known_by_their_command_line(arguments, command):
    assert command_of(arguments) == command


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  inode\n"
REST = "00000000:00000000 00:00000000 00000000     0        0"


@pytest.mark.skipif(sys.byteorder != "little", reason="the table is of such a machine")
def test_addresses_are_read_as_linux_writes_them():
    rows = [
        f"   0: 0100007F:1F40 00000000:0000 0A {REST} 71 1 0",
        f"   1: 00000000:1F41 00000000:0000 0A {REST} 72 1 0",
        f"   2: 0100007F:1F40 0100007F:C000 01 {REST} 73 1 0",
    ]
    assert listening_tcp(HEAD + "\n".join(rows)) == {"71": "127.0.0.1:8000", "72": "127.0.0.1:8001"}
    six = "00000000000000000000000000000000"
    row = f"   0: {six}:0050 {six}:0000 0A {REST} 74 1 0"
    assert listening_tcp(HEAD + row) == {"74": "[::1]:80"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells it")
def test_the_addresses_of_a_process_are_found():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"http://127.0.0.1:{port}" in list(_tcp_urls(os.getpid(), _sockets(os.getpid())))
    assert os.getpid() in set(_own_processes())


# --- ls -------------------------------------------------------------------------------------------


def test_the_embedded_model_is_listed_first():
    nano = held_models()[0]
    assert (nano.name, nano.state) == ("nano", "served")
    assert nano.media == ("image", "audio")
    assert nano.nbytes > 1e6


@pytest.mark.parametrize(
    ("config", "weights", "state"),
    [
        ('{"model_type": "qwen2"}', True, "served"),
        ('{"model_type": "qwen2"}', False, "no weights"),
        ('{"model_type": "electra"}', True, "not served: "),
        ("{", True, "no readable config.json"),
    ],
)
def test_a_folder_s_files_say_whether_it_is_served(tmp_path, config, weights, state):
    (tmp_path / "config.json").write_text(config)
    if weights:
        (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert state in held_model("m", tmp_path).state


def test_extras_that_are_missing_are_told_with_how_to_install_them(monkeypatch):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    for name, package, _ in doctor.EXTRAS:
        assert any(needed.startswith(package) for needed in extras[name])
    found = {finding.subject: finding for finding in doctor.check_extras()}
    assert {"documents", "film"} <= found.keys()
    assert (found["documents"].state, found["documents"].advice) == ("ok", "")
    monkeypatch.setattr(doctor, "EXTRAS", (("documents", "no-such-package", "reading PDF files"),))
    (missing,) = doctor.check_extras()
    assert (missing.found, missing.advice) == (
        "not reading PDF files", "pip install 'lookonce[documents]'",
    )  # fmt: skip
