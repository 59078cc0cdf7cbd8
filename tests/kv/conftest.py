"""Real servers: a Valkey for each test that asks for one, one LMCache for all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kv_servers import LMCacheServer, ValkeyServer


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="lookonce-valkey-") as folder:  # short: socket paths
        server = ValkeyServer(Path(folder))
        yield server
        server.close()


@pytest.fixture(scope="session")
def lmcache() -> Iterator[LMCacheServer]:
    """Shared by all tests, so each uses a namespace or prompts of its own."""
    with tempfile.TemporaryDirectory(prefix="lookonce-lmcache-") as folder:
        server = LMCacheServer(Path(folder))
        yield server
        server.close()
