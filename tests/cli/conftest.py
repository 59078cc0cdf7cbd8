"""What commands that run in the test's process leave behind is undone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("lookonce")
    before = (root.level, list(root.handlers), own.level)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    own.setLevel(before[2])
