from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.live_server import LiveServer


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """The embedded model, served: one for all tests that leave it whole."""
    with LiveServer() as live:
        yield live
