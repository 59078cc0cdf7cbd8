from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_server import LiveServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices

TEMPLATE = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }} <tool_call><|im_end|>
{% endif %}"""
"""Tells nano of tools, which it has never heard of; what it answers is a grammar's business."""


@pytest.fixture(scope="session")
def server(nano_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """nano with a template that has a place for tools."""
    own = (nano_folder / "chat_template.jinja").read_text()
    file = tmp_path_factory.mktemp("template") / "tools.jinja"
    file.write_text(TEMPLATE + own)
    with LiveServer("--chat-template", str(file)) as live:
        yield live
