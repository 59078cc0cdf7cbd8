"""Whom an engine's audit names, where requests come through a front-end."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.support.fleet_frontends import running_engine, running_frontend
from tests.support.live_server import LiveServer, until

pytestmark = pytest.mark.timeout(120)


def refused_clients(server: LiveServer) -> list[tuple[str, str]]:
    """Tenant and address of each refusal that the engine wrote."""
    lines = [json.loads(line) for line in server.output if line.startswith("{")]
    return [(each["tenant"], each["client"]) for each in lines if each.get("event") == "refused"]


def refused(url: str, address: str, **headers: str) -> None:
    """Ask from an address of this machine what engines refuse."""
    body = {"model": "nano", "prompt": 7}
    headers["authorization"] = "Bearer secret"
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
        answer = client.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 400


def test_it_names_the_client_that_asked_the_front_end_and_believes_nobody_else(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("team:secret\n")
    options = ("--log-format", "json", "--api-key-file", str(keys))
    with (
        running_engine("a", *options, "--forwarded-allow-ips", "127.0.0.1") as engine,
        running_frontend([engine.address], keys=keys) as running,
    ):
        forged = {"x-forwarded-for": "6.6.6.6"}
        refused(running.url, "127.0.0.2", **forged)
        refused(engine.server.url, "127.0.0.3", **forged)
        until(lambda: len(refused_clients(engine.server)) == 2, 30)
        assert refused_clients(engine.server) == [("team", "127.0.0.2"), ("team", "127.0.0.3")]
