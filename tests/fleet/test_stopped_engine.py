"""An engine that hangs: its processes are sent SIGSTOP, so the kernel goes on to take connections
that nobody answers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from lookonce.fleet.config import RenderedModel
from tests.support.fleet_frontends import Engine, running_engine, running_frontend
from tests.support.live_server import until

pytestmark = pytest.mark.timeout(300)
GIVEN_UP_SECONDS = 10.0
"""Two probes of 3 s in a row, or a silence of 5 s, and what a busy machine adds."""


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    with running_engine("a") as one, running_engine("b") as two:
        yield {"a": one, "b": two}


@pytest.mark.parametrize("renders", [False, True])
@pytest.mark.parametrize("stopped", [b"lookonce", b"lookonce.engine.process"])
def test_a_stopped_engine_is_given_up_and_taken_back_when_it_continues(
    engines: dict[str, Engine], renders: bool, stopped: bytes
) -> None:
    """All processes of a server, or the one alone that computes."""
    rendered = [RenderedModel(name="nano", model="nano")] if renders else []
    addresses = [engine.address for engine in engines.values()]
    with running_frontend(addresses, rendered) as running, ThreadPoolExecutor(8) as thread:
        body: dict[str, Any] = {"model": "nano", "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": "Count " * 40}]
        long = body | {"stream": True, "max_tokens": 3000, "prompt_cache_key": "one"}
        short = body | {"max_tokens": 4}

        def ask(**fields: Any) -> httpx.Response:
            url = f"{running.url}/v1/chat/completions"
            return httpx.post(url, json=short | fields, timeout=60)

        with httpx.stream(
            "POST", f"{running.url}/v1/chat/completions", json=long, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            name = response.headers["x-lookonce-engine"]
            pids = engines[name].server.pids(stopped)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                waiting = thread.submit(ask, prompt_cache_key="one")  # it is bound to the engine
                rest = [line for line in lines if line.startswith("data: {")]
                answer = waiting.result()
                assert time.monotonic() - began < GIVEN_UP_SECONDS
                assert json.loads(rest[-1][6:])["error"]["code"] == "engine_dead"
                assert answer.status_code == 200
                assert answer.headers["x-lookonce-engine"] != name
                assert ask().headers["x-lookonce-engine"] != name
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        until(lambda: len(running.fleet.ready()) == 2, 60)

        def serves_again() -> bool:
            """Of requests that come together the other engine gets not all."""
            answers = thread.map(lambda _: ask(), range(8))
            return name in [each.headers["x-lookonce-engine"] for each in answers]

        until(serves_again, 60)
