"""A Valkey server of its own for each test that asks for one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookonce.bench.valkey_server import ValkeyServer


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="lookonce-valkey-") as folder:  # short: socket paths
        server = ValkeyServer(Path(folder))
        yield server
        server.close()
