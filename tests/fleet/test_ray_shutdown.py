"""The end of a real fleet on a local Ray: SIGTERM, while clients ask.

`make test-fleet` runs these; they need ray.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live_server import LiveServer

pytest.importorskip("ray")
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(300)]

STREAM: dict[str, Any] = {
    "model": "nano",
    "prompt": "count",
    "stream": True,
    "max_tokens": 3000,
    "ignore_eos": True,
}


def started(folder: Path, **fields: Any) -> LiveServer:
    file = folder / "fleet.yaml"
    file.write_text(json.dumps({"models": [{"model": "nano"}], **fields}))
    return LiveServer(str(file), command="fleet", env={"RAY_USAGE_STATS_ENABLED": "0"})


def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    fleet = started(tmp_path, drain_timeout=300)
    try:
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{fleet.url}/v1/completions", json=STREAM) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            fleet.process.send_signal(signal.SIGTERM)
            while fleet.get("/ready").status_code == 200:
                time.sleep(0.01)
            fleet.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.HTTPError):
                assert not any('"finish_reason":"length"' in line for line in lines)
        assert fleet.process.wait(30) == 0
    finally:
        fleet.stop()


def test_what_runs_longer_than_the_drain_timeout_of_the_file_is_cut_off(tmp_path: Path) -> None:
    fleet = started(tmp_path, drain_timeout=0.5)
    try:
        with httpx.stream("POST", f"{fleet.url}/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            fleet.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        error, done = rest[-2:]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"
        assert fleet.process.wait(60) == 0
    finally:
        fleet.stop()


def test_sigterm_makes_it_unready_at_once_and_what_runs_ends(tmp_path: Path) -> None:
    fleet = started(tmp_path)
    try:
        with httpx.stream("POST", f"{fleet.url}/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            assert fleet.get("/ready").status_code == 200
            fleet.process.send_signal(signal.SIGTERM)
            asked = time.monotonic()
            while (answer := fleet.get("/ready")).status_code == 200:
                assert time.monotonic() < asked + 5
                time.sleep(0.01)
            assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
            refused = fleet.post("/v1/completions", STREAM)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        (choice,) = json.loads(rest[-2].removeprefix("data: "))["choices"]
        assert choice["finish_reason"] == "length"
        assert fleet.process.wait(60) == 0
    finally:
        fleet.stop()
