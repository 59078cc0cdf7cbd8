from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lookonce.config import NANO_FOLDER
from tests.support.live_server import LiveServer


@dataclass(frozen=True)
class JustReady:
    """What a server tells that has become ready and that nobody has asked anything."""

    log: str
    metrics: dict[str, float]
    ready: int
    """The status of `/ready`."""


@pytest.fixture(scope="session")
def new_server() -> Iterator[tuple[LiveServer, JustReady]]:
    with LiveServer() as live:
        yield live, JustReady(live.log(), live.metrics(), live.get("/ready").status_code)


@pytest.fixture(scope="session")
def server(new_server: tuple[LiveServer, JustReady]) -> LiveServer:
    """nano, served: one server for all tests that do not damage it for good."""
    return new_server[0]


@pytest.fixture(scope="session")
def just_ready(new_server: tuple[LiveServer, JustReady]) -> JustReady:
    """What `server` told before its first request."""
    return new_server[1]


WITH_TOOLS = {
    "Tools: {{ tools | length }}": "{{ tools | tojson }}",
    "{{ call['function']['name'] }}": "{{ call['function'] | tojson }}",
}
"""What nano's template says of tools and calls, and what that of `cache_server` says instead."""
CACHE_TYPES = ("shm", "lru") if "SOAK_REQUESTS" in os.environ else ("shm",)


@pytest.fixture(scope="session", params=CACHE_TYPES)
def cache_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """nano with a processor cache, in `make soak` with each type of it; it fetches media from this
    machine and tells of its work under vLLM's names too. A request may have 40 sounds, which are
    more than a step computes. Its template has a place for tools, and its steps are planned ahead.
    Tests ask about media of their own; the last one, in test_unmapping.py, ends it."""
    file: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    template = (NANO_FOLDER / "chat_template.jinja").read_text()
    for plain, whole in WITH_TOOLS.items():
        assert plain in template
        template = template.replace(plain, whole)
    file.write_text(template)
    options = (
        *("--allow-private-media", "--vllm-metric-names"),
        *("--limit-mm-per-prompt", "audio=40", "--max-num-batched-tokens", "512"),
        *("--mm-processor-cache-type", request.param, "--chat-template", str(file)),
        *("--async-scheduling", "on"),
    )
    with LiveServer(*options) as live:
        yield live
