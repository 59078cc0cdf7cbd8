from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.live_server import LiveServer


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """nano, served: one server for all tests that do not damage it."""
    with LiveServer() as live:
        yield live
