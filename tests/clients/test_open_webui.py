"""Open WebUI, unmodified, has the real server as its OpenAI connection.

It takes 2 GB: `make test-open-webui` installs it in an environment of its own, and names its
command in `OPEN_WEBUI`. These are the calls that its source makes to a connection:
`GET /v1/models`, `POST /v1/chat/completions` (whole and streamed), `POST /v1/responses`, and, where
set up so, `POST /v1/embeddings` and `POST /v1/audio/transcriptions`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import httpx
import pytest

from tests.support.drawing import ask, picture
from tests.support.live_server import LiveServer
from tests.support.programs import running_program

COMMAND = os.environ.get("OPEN_WEBUI", "")
pytestmark = pytest.mark.skipif(not COMMAND, reason="Open WebUI: `make test-open-webui`")

OFFLINE = {
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "ENABLE_VERSION_UPDATE_CHECK": "False",
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "true",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "What it does. " * 20,
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
    for number in range(20)
]
MESSAGES = ask(picture(("red", "circle")), "What shape is red?")


@pytest.fixture(scope="module")
def embedder() -> Iterator[LiveServer]:
    with LiveServer("--pooling", "last") as live:
        yield live


@pytest.fixture(scope="module")
def web(server, embedder, tmp_path_factory) -> Iterator[httpx.Client]:
    """A client of Open WebUI's own API, signed in."""
    folder = tmp_path_factory.mktemp("open-webui")
    env = {
        **OFFLINE,
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "k" * 32,
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URLS": f"{server.url}/v1",
        "OPENAI_API_KEYS": "none",
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": "nano",
        "RAG_OPENAI_API_BASE_URL": f"{embedder.url}/v1",
        "RAG_OPENAI_API_KEY": "none",
        "PYTHONPATH": "",
    }
    line = [COMMAND, "serve", "--host", "127.0.0.1"]
    with (
        running_program(line, folder, ready="/health", env=env) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        signed = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
        client.headers["Authorization"] = f"Bearer {signed.json()['token']}"
        client.get("/api/models").raise_for_status()
        yield client


def test_open_webui_lists_the_model(web):
    (model,) = web.get("/api/models").json()["data"]
    assert model["id"] == "nano"


def test_open_webui_verifies_a_connection(web, server):
    told = web.post("/openai/verify", json={"url": f"{server.url}/v1", "key": "none"})
    assert told.json()["data"][0]["id"] == "nano"


def test_open_webui_asks_about_a_picture(web):
    body = {"model": "nano", "messages": MESSAGES, "stream": False}
    answer = web.post("/api/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "the circle"


def test_open_webui_asks_with_tools(web):
    """Its page sends the names of its own tools with every question."""
    body = {"model": "nano", "messages": MESSAGES, "stream": False, "tools": TOOLS}
    answer = web.post("/api/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "the circle"


def test_open_webui_streams(web):
    body = {"model": "nano", "messages": MESSAGES, "stream": True}
    lines = web.post("/api/chat/completions", json=body).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "the circle"


def test_open_webui_uses_responses(web):
    answer = web.post("/openai/responses", json={"model": "nano", "input": "Say apple."}).json()
    assert answer["output"][0]["content"][0]["text"] == "apple"


def test_open_webui_embeds_a_file_for_search(web, embedder):
    before = embedder.metrics()["pooled_cache_queries_total"]
    kept = web.post("/api/v1/files/", files={"file": ("note.txt", b"apples are red", "text/plain")})
    done = web.get(f"/api/v1/files/{kept.json()['id']}/process/status", params={"stream": True})
    assert '"completed"' in done.text
    assert embedder.metrics()["pooled_cache_queries_total"] > before
