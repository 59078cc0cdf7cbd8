from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.live_server import LiveServer


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """nano, served: one server for all tests that do not damage it."""
    with LiveServer() as live:
        yield live


@pytest.fixture(scope="session", params=["shm", "lru"])
def cache_server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """nano with each type of processor cache; it fetches media from this machine and tells of its
    work under vLLM's names too. Tests ask about media of their own."""
    cache = ("--mm-processor-cache-type", request.param)
    with LiveServer("--allow-private-media", "--vllm-metric-names", *cache) as live:
        yield live
