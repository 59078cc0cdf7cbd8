"""Real servers: a Valkey for each test that asks for one, one LMCache for all; and tiers of every
kind with faults before them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookonce.kv.disk import DiskTier
from lookonce.kv.host import HostTier
from lookonce.kv.objects import ObjectFormat
from lookonce.kv.tier import KVTier
from lookonce.kv.valkey import ValkeyTier
from lookonce.types.kv import TierSpec
from tests.support.kv.tiers import DictTier, FaultyTier
from tests.support.kv.world import LAYOUT
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


@pytest.fixture(params=["fake", "host", "disk", "valkey"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultyTier]:
    """Each line over a dict and over every real tier; faults come from what stands before it."""
    objects = ObjectFormat(bytes(32), LAYOUT)
    inner: KVTier
    match request.param:
        case "fake":
            inner = DictTier()
        case "host":
            inner = HostTier(objects, 1 << 16)
        case "disk":
            inner = DiskTier(objects, str(tmp_path), 1 << 20)
        case _:
            server: ValkeyServer = request.getfixturevalue("valkey")
            inner = ValkeyTier(objects, TierSpec("valkey", path=server.socket))
    yield FaultyTier(name="near", inner=inner)
    inner.close()
