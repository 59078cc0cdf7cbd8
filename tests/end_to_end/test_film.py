"""Films on a real server, by OpenAI's client: answered like transformers, frame by frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from tests.support.live_server import LiveServer
from tests.support.model.films import (
    encoded_film,
    file_part,
    film_part,
    film_reference,
    frame,
    gif,
    gif_part,
    listed,
)
from tests.support.nodes import engine_node, run
from tests.support.render.bombs import gif_film

NUM_TOKENS = 10
FPS = 4.0


@pytest.fixture(scope="module")
def path(folder):
    return folder("qwen2_5_vl")


@pytest.fixture(scope="module")
def server(path) -> Iterator[LiveServer]:
    options = ("--max-model-len", "1024", "--max-video-decode-seconds", "5")
    with LiveServer(str(path), *options) as live:
        yield live


def asked(model: str, part: dict[str, object]) -> dict[str, Any]:
    content = [{"type": "text", "text": "See: "}, part, {"type": "text", "text": " what is it?"}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "extra_body": {"ignore_eos": True, "reuse_receipt": True},
    }


def ask(server: LiveServer, part: dict[str, object]):
    client = server.client()
    return client.chat.completions.create(**asked(client.models.list().data[0].id, part))


def text_of_transformers(path, numbers: Sequence[int]) -> str:
    model = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    inputs = film_reference(path, "See: ", numbers, " what is it?", FPS)
    with torch.no_grad():
        found = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    tokens = found[0, inputs["input_ids"].shape[1] :]
    return AutoTokenizer.from_pretrained(path).decode(tokens, skip_special_tokens=True)


def test_a_longer_cut_costs_its_new_frames(server, path):
    before = server.metrics()
    first = ask(server, film_part(range(6), FPS))
    assert first.choices[0].message.content == text_of_transformers(path, range(6))
    longer = ask(server, film_part(range(10), FPS))
    assert longer.choices[0].message.content == text_of_transformers(path, range(10))
    moved = ask(server, film_part(range(2, 12), FPS))
    frames = [each.model_extra["reuse_receipt"]["film_frames"] for each in (first, longer, moved)]
    assert frames == [
        {"total": 6, "processed": 6, "encoded": 6},
        {"total": 10, "processed": 4, "encoded": 4},
        {"total": 10, "processed": 2, "encoded": 2},
    ]
    after = server.metrics()
    for name in ("media_decodes_total:video", "media_processed_total:video", "encoder_runs_total"):
        assert after[name] - before.get(name, 0) == 6, name  # pairs of frames


def test_a_longer_cut_costs_its_new_frames_with_times_in_the_prompt(folder):
    """Qwen3-VL's, by OpenAI's client and all routes, in this process."""
    path, answers = folder("qwen3_vl"), []

    async def scenario():
        async with engine_node(path) as node:
            client = openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=node.http
            )
            for count in (2, 4):  # more have smaller frames
                body = asked("m", film_part(range(count), FPS))
                answers.append(await client.chat.completions.create(**body))

    run(scenario())
    for answer, count in zip(answers, (2, 4), strict=True):
        assert answer.choices[0].message.content == text_of_transformers(path, range(count))
    frames = [each.model_extra["reuse_receipt"]["film_frames"] for each in answers]
    assert frames == [
        {"total": 2, "processed": 2, "encoded": 2},
        {"total": 4, "processed": 2, "encoded": 2},
    ]


def test_what_was_sent_is_named(server, path):
    """A film by its uuid; a live one frame by frame, of which only the new ones are sent."""
    alone = {"type": "video_url", "video_url": None, "uuid": "film"}
    whole = ask(server, {**film_part(range(30, 36), FPS), "uuid": "film"})
    named = ask(server, alone)
    assert named.choices[0].message.content == whole.choices[0].message.content

    def sent(number: int) -> dict[str, str]:
        return {"url": listed([frame(number)]), "uuid": f"frame {number}"}

    def live(frames: list[dict[str, str]]) -> dict[str, object]:
        return {"type": "video_url", "video_url": {"url": frames, "fps": FPS}}

    ask(server, live([sent(number) for number in range(40, 46)]))
    known = [{"uuid": f"frame {number}"} for number in range(42, 46)]
    moved = ask(server, live([*known, sent(46), sent(47)]))
    assert moved.choices[0].message.content == text_of_transformers(path, range(42, 48))
    receipt = moved.model_extra["reuse_receipt"]["film_frames"]
    assert receipt == {"total": 6, "processed": 2, "encoded": 2}


def test_a_gif_is_a_film(server):
    first, second = (ask(server, gif_part(gif(range(20, 26)))) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    frames = [each.model_extra["reuse_receipt"]["film_frames"] for each in (first, second)]
    assert [each["processed"] for each in frames] == [frames[0]["total"], 0]


def test_a_film_that_is_dear_as_a_whole_is_refused_by_name(server):
    """Two frames of 100,000, the second of which is drawn over 50,000 others."""
    before = server.metrics()
    part = gif_part(gif_film(100_000))
    message = {"role": "user", "content": [{"type": "text", "text": "See: "}, part]}
    body = {"messages": [message], "max_tokens": 1, "mm_processor_kwargs": {"num_frames": 2}}
    answer = server.post("/v1/chat/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (413, "messages[0].content[1]")
    assert "at most 5 are allowed (--max-video-decode-seconds)" in error["message"]
    after = server.metrics()
    assert after["media_refused_total:estimate"] - before["media_refused_total:estimate"] == 1
    assert after["media_decodes_total:video"] == before["media_decodes_total:video"]


@pytest.mark.skipif(find_spec("av") is None, reason="PyAV is not installed")
def test_a_longer_cut_of_a_file_costs_its_new_frames(server):
    """In the sandbox of a media worker."""
    parts = [file_part(encoded_film(range(count), gop=2)) for count in (16, 24)]
    first, longer, again = (ask(server, part) for part in (*parts, parts[1]))
    frames = [each.model_extra["reuse_receipt"]["film_frames"] for each in (first, longer, again)]
    # At 8 frames a second every fourth one is looked at.
    assert [each["total"] for each in frames] == [4, 6, 6]
    assert [each["processed"] for each in frames] == [4, 2, 0]
    assert [each["encoded"] for each in frames] == [4, 2, 0]


@pytest.mark.parametrize(
    ("part", "status", "message"),
    [
        (file_part(b"nothing"), 422, "no readable film"),
        (gif_part(gif(range(3))[:-50]), 422, "broken or incomplete"),
        ({"type": "video_url", "video_url": {"url": listed([])}}, 400, "frame 0 is empty"),
        (film_part([1] * 800), 413, "800 frames; at most 768"),
        (
            {"type": "video_url", "video_url": {"url": listed([frame(1)[:60]] * 2)}},
            422,
            "broken or incomplete",
        ),
    ],
)
def test_a_bad_film_ends_in_a_clear_error_and_nothing_else(server, part, status, message):
    content = [{"type": "text", "text": "See"}, part]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages[0].content[1]"
    assert ask(server, film_part(range(2), FPS)).choices
