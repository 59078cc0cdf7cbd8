"""`--drain-timeout`: how long requests have to end after SIGTERM."""

from __future__ import annotations

import json
import signal

import httpx

from tests.support.live_server import LiveServer


def test_what_runs_longer_is_cut_off() -> None:
    body = {"model": "nano", "prompt": "x", "stream": True, "max_tokens": 3000, "ignore_eos": True}
    with (
        LiveServer("--drain-timeout", "0.2") as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"
