"""Clients for Node.js, unmodified, against the real server: OpenAI's, Vercel's AI SDK, Anthropic's.

They are listed in `node/package.json`; `make test-clients` installs them.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.drawing import encoded, picture

FOLDER = Path(__file__).parent / "node"
CITIES = [{"name": "get_weather", "city": city} for city in ("Bern", "Rom")]
USES = {
    "openai: picture": ["the circle"],
    "openai: stream": ["apple"],
    "openai: parse": [{"x": number} for number in range(10)],
    "openai: tools": CITIES,
    "openai: responses": [["apple", "river"]],
    "ai: picture": ["the circle"],
    "ai: stream": ["apple"],
    "ai: object": [{"x": number} for number in range(10)],
    "ai: tools": CITIES,
    "anthropic: picture": ["the circle"],
    "anthropic: stream": ["apple"],
}
"""What each use may answer."""

pytestmark = pytest.mark.skipif(
    not (FOLDER / "node_modules").is_dir() or shutil.which("node") is None,
    reason="no Node.js, or its clients are not installed: `make test-clients`",
)


@pytest.mark.parametrize("use", USES)
def test_it_is_answered(server, use):
    image = base64.b64encode(encoded(picture(("red", "circle")))).decode()
    line = ["node", "clients.js", use, server.url, image]
    done = subprocess.run(
        line, cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) in USES[use]
