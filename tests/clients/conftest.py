from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.live_server import LiveServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """nano as it is; what it answers to tools is a grammar's business."""
    with LiveServer() as live:
        yield live
