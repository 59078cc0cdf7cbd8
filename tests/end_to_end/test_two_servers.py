"""A render server and an engine's server as two programs, and the examples that talk to them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.drawing import (
    audio_part,
    beeps,
    encoded,
    image_part,
    picture,
    text_part,
    tone,
)
from tests.support.live_server import LiveServer

EXAMPLES = Path(__file__).parents[2] / "examples"
CONTENTS = [
    [image_part(picture(("red", "circle"), ("blue", "square"))), text_part("What is this?")],
    [audio_part(tone(400, 800)), text_part("What do you hear?")],
    [audio_part(beeps(2)), image_part(picture(("green", "triangle"))), text_part("What is both?")],
]


@pytest.fixture(scope="module")
def renderer() -> Iterator[LiveServer]:
    with LiveServer(command="render") as live:
        yield live


def example(name: str, *arguments: object) -> list[str]:
    """The lines that the example prints."""
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("content", CONTENTS)
def test_what_one_renders_the_other_answers_as_it_answers_the_chat(server, renderer, content):
    message = {"role": "user", "content": content}
    chat = {"messages": [message], "temperature": 0, "max_tokens": 12, "logprobs": True}
    body = renderer.post("/v1/chat/completions/render", chat).json()
    answer = server.post("/inference/v1/generate", {**body, "cache_salt": "apart"}).json()
    whole = server.post("/v1/chat/completions", chat).json()
    told, expected = (
        [token["token"] for token in each["choices"][0]["logprobs"]["content"]]
        for each in (answer, whole)
    )
    assert told == expected
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_render_server_has_no_engine(renderer):
    assert renderer.engine_pid() is None
    assert renderer.get("/ready").json() == {"status": "ready"}
    assert renderer.post("/v1/chat/completions", {}).status_code == 404
    assert renderer.post("/inference/v1/generate", {}).status_code == 404
    assert renderer.metrics()["readonly_media_decodes_total:image"] >= 0


def test_example_render_then_generate(server, renderer, tmp_path):
    (tmp_path / "picture.png").write_bytes(encoded(picture(("purple", "square"))))
    lines = example(
        "render_then_generate.py", "What is in the picture?", "--image", tmp_path / "picture.png",
        "--render", renderer.url, "--engine", server.url,
    )  # fmt: skip
    assert lines[0].startswith("a purple square")
    media, base64_length, _ = map(int, re.findall(r"\d+", lines[1].replace("base64", "")))
    assert media < base64_length + 400


def test_example_external_frontend(server, nano_folder, tmp_path):
    """Without keys and `--allow-injection` clients' names are kept apart from real media hashes."""
    (tmp_path / "picture.png").write_bytes(encoded(picture(("orange", "circle"))))
    before = server.metrics()
    lines = example(
        "external_frontend.py", nano_folder, tmp_path / "picture.png", "What is in the picture?",
        "What color is the circle?", "--server", server.url,
    )  # fmt: skip
    assert lines[0] == "picture.png: stored"
    assert lines[1] == "What is in the picture? an orange circle"
    assert lines[2].startswith("  processor injected")
    assert lines[3] == "What color is the circle? orange"
    after = server.metrics()
    for name in ("media_decodes_total:image", "media_processed_total:image"):
        assert after[name] == before[name]
    assert after["mm_cache_queries_total"] - before["mm_cache_queries_total"] == 3
    assert after["mm_cache_hits_total"] - before["mm_cache_hits_total"] == 2


def test_ready_comes_after_warm_up_and_nothing_tells_of_it(just_ready):
    """A server that has just become ready: caches empty, counters at zero, warmed up."""
    for warmed in ("text", "image", "audio", "/v1/chat/completions", "/tokenize"):
        assert re.search(rf"warmed up {warmed}\b.* in [0-9.]+ s", just_ready.log), just_ready.log
    counted = {
        name: value
        for name, value in just_ready.metrics.items()
        if ("_total" in name or "_bytes" in name or name.endswith("_count"))
        and "mm_slab" not in name  # slabs stay leased, so that their memory is warm
    }
    assert len(counted) > 20
    assert {name: value for name, value in counted.items() if value} == {}
    assert just_ready.ready == 200
