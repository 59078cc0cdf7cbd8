"""Whom an engine's audit names, where requests come through a front-end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lookonce.fleet.config import RenderedModel
from tests.support.fleet_frontends import (
    Engine,
    RunningFrontend,
    running_engine,
    running_frontend,
)
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


def audited(server: LiveServer) -> list[tuple[str, int]]:
    """Route and status of each refusal that the engine wrote."""
    lines = [json.loads(line) for line in server.output if line.startswith("{")]
    return [(e["route"], e["status"]) for e in lines if e.get("event") == "refused"]


def own_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str | None, str | None]]:
    """Status, code and tenant of each refusal that a front-end in this process wrote."""
    told = [line.__dict__ for line in caplog.records if line.name == "lookonce.audit"]
    return [(e["status"], e["code"], e["tenant"]) for e in told if e["event"] == "refused"]


@contextmanager
def two_engines(folder: Path) -> Iterator[tuple[Engine, Engine, RunningFrontend]]:
    """Behind a front-end, with the key `secret` of the tenant team."""
    keys = folder / "keys"
    keys.write_text("team:secret\n")
    options = ("--log-format", "json", "--api-key-file", str(keys), "--behind-frontends")
    options += ("--forwarded-allow-ips", "127.0.0.1")
    with (
        running_engine("a", *options) as one,
        running_engine("b", *options) as two,
        running_frontend([one.address, two.address], keys=keys) as running,
    ):
        yield one, two, running


def test_only_what_the_client_got_is_told_where_several_engines_are_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lookonce.audit")
    headers = {"authorization": "Bearer secret"}
    with (
        two_engines(tmp_path) as (one, two, running),
        httpx.Client(base_url=running.url, headers=headers, timeout=60) as client,
    ):
        # Each is asked: a response, and a picture of a uuid, may be where nobody looked.
        assert client.get("/v1/responses/resp_1").status_code == 404
        picture = {"type": "image_url", "image_url": None, "uuid": "unknown"}
        body = {"model": "nano", "messages": [{"role": "user", "content": [picture]}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 422
        assert client.post("/reset_mm_cache").status_code == 403
        # One engine alone has the last word.
        assert (
            client.post("/v1/completions", json={"model": "nano", "prompt": 7}).status_code == 400
        )
        until(lambda: len(audited(one.server) + audited(two.server)) == 1, 30)
        assert audited(one.server) + audited(two.server) == [("POST /v1/completions", 400)]
        # Nobody else may say so.
        forged = headers | {"x-lookonce-audited": "*"}
        wrong = {"model": "nano", "prompt": 7}
        answer = client.post("/v1/completions", json=wrong, headers=forged)
        assert answer.status_code == 400
        until(lambda: len(audited(one.server) + audited(two.server)) == 2, 30)
    assert own_lines(caplog) == [
        (404, "not_found", "team"),
        (422, "media_not_cached", "team"),
        (403, "forbidden", "team"),
    ]


def test_models_are_refused_in_one_line_beside_an_engine_that_hangs_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lookonce.audit")
    with two_engines(tmp_path) as (hanging, other, running):
        wrong = {"authorization": "Bearer other"}
        os.kill(hanging.server.process.pid, signal.SIGSTOP)
        try:
            asked = httpx.get(f"{running.url}/v1/models", headers=wrong, timeout=60)
        finally:
            os.kill(hanging.server.process.pid, signal.SIGCONT)
        assert asked.status_code == 401
        own = {"authorization": "Bearer secret"}
        body = {"model": "nano", "prompt": 7}
        httpx.post(f"{hanging.server.url}/v1/completions", json=body, headers=own, timeout=60)
        until(lambda: ("POST /v1/completions", 400) in audited(hanging.server), 30)
        # It was sent the first request before, and has read it by now.
        assert audited(hanging.server) + audited(other.server) == [("POST /v1/completions", 400)]
    assert own_lines(caplog) == [(401, "invalid_api_key", None)]


def test_an_engine_behind_other_proxies_audits_all_that_it_refuses() -> None:
    options = ("--log-format", "json", "--forwarded-allow-ips", "127.0.0.1")
    with running_engine("a", *options) as engine:
        headers = {"x-lookonce-audited": "*"}
        body = {"model": "nano", "prompt": 7}
        httpx.post(f"{engine.server.url}/v1/completions", json=body, headers=headers)
        until(lambda: audited(engine.server), 30)


def test_a_rendered_request_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lookonce.audit")
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: {requests_per_second: 0.0001}\n")
    options = ("--log-format", "json", "--behind-frontends", "--forwarded-allow-ips", "127.0.0.1")
    rendered = [RenderedModel(name="nano", model="nano")]
    with (
        running_engine("a", *options, "--limits", str(limits)) as engine,
        running_frontend([engine.address], rendered) as running,
    ):
        body = {"model": "nano", "prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 429
        until(lambda: own_lines(caplog), 30)
        assert "POST /inference/v1/generate" not in dict(audited(engine.server))
    assert [status for status, *_ in own_lines(caplog)] == [429]
