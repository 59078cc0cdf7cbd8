from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.attacked_server import FIGURES, SMALL_CACHES, AttackedServer, key_options
from tests.support.live_server import LiveServer


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for figure in FIGURES:
        terminalreporter.write_line(figure)


@pytest.fixture(scope="session")
def server() -> Iterator[AttackedServer]:
    """nano, served to two tenants."""
    with LiveServer(*key_options(), *SMALL_CACHES) as live:
        yield AttackedServer(live)
