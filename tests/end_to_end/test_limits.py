"""`--limits` through real servers: exact over processes, and read again by SIGHUP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.live_server import LiveServer, until


def ask(url: str, key: str) -> httpx.Response:
    """On a connection of its own, so that every API process gets some."""
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": "a red", "max_tokens": 1}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def test_limits_hold_over_api_processes_and_are_read_again(tmp_path):
    limits = tmp_path / "limits.yaml"
    limits.write_text("tenants: {few: {tokens_per_minute: 40}}\n")
    keys = ("--api-key", "few:f", "--api-key", "many:m")
    with LiveServer(*keys, "--limits", str(limits), "--api-processes", "2") as live:
        began = time.monotonic()
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda _: ask(live.url, "f"), range(40)))
        statuses = Counter(answer.status_code for answer in answers)
        each = answers[0].json()["usage"]["total_tokens"]
        assert statuses.keys() == {200, 429}
        most = 40 + 40 / 60 * (time.monotonic() - began)
        assert 40 // each <= statuses[200] <= most / each
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["x-ratelimit-limit-tokens"] == "40"
        assert int(refused.headers["retry-after"]) >= 1
        assert all(ask(live.url, "m").status_code == 200 for _ in range(3))
        assert live.metrics()["rate_limited_total:tokens"] == statuses[429]

        limits.write_text("tenants: {few: {tokens_per_minut: 40}}\n")
        os.kill(live.process.pid, signal.SIGHUP)
        until(lambda: "tenants.few.tokens_per_minut: no such limit" in live.log(), 100, live.log)
        limits.write_text("tenants: {few: {}}\n")
        os.kill(live.process.pid, signal.SIGHUP)
        until(lambda: ask(live.url, "f").status_code == 200, 100, live.log)
        deadline = time.monotonic() + 100
        while any(ask(live.url, "f").status_code != 200 for _ in range(8)):
            assert time.monotonic() < deadline, live.log()
        told = "2 API keys, limits (sections of tenants: 1, of keys: 0)"
        assert f"SIGHUP: {told}\n" in live.log()
        assert f"from now on: {told}\n" in live.log()


def test_a_mistake_in_the_file_ends_the_start_with_one_line(tmp_path):
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nweight = 'much'\n")
    command = [sys.executable, "-m", "lookonce.cli.main", "serve", "--limits", str(limits)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "default.weight: expected" in done.stderr
    assert len(done.stderr.splitlines()) == 1
