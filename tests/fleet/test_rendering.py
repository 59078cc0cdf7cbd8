"""Front-ends that render answer as the engines themselves do: real engines, one rendering front-end,
one that forwards, and one of the engines asked directly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lookonce.fleet.config import RenderedModel
from tests.support.drawing import audio_part, beeps, image_part, picture, text_part
from tests.support.fleet_frontends import (
    Engine,
    RunningFrontend,
    running_engine,
    running_frontend,
)

pytestmark = pytest.mark.timeout(300)
RENDERED = [RenderedModel(name="nano", model="nano")]
WAYS = ("rendering", "forwarding", "engine")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
        },
    },
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    with running_engine("a") as one, running_engine("b") as two:
        yield [one, two]


@pytest.fixture(scope="module")
def rendering(engines: list[Engine]) -> Iterator[RunningFrontend]:
    with running_frontend([each.address for each in engines], RENDERED) as running:
        yield running


@pytest.fixture(scope="module")
def ways(engines: list[Engine], rendering: RunningFrontend) -> Iterator[dict[str, str]]:
    """Way → URL."""
    with running_frontend([each.address for each in engines]) as plain:
        urls = (rendering.url, plain.url, engines[0].server.url)
        yield dict(zip(WAYS, urls, strict=True))


def chat(content: Any = "What is this?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    fields = {"max_tokens": 12, "temperature": 0, "seed": 7} | fields
    return {"model": "nano", "messages": messages, **fields}


DIFFERENT = ("id", "created", "request_id", "created_at", "call_id")


def same(value: Any) -> Any:
    """Without what differs between equal requests: ids, clocks, and what was found in caches."""
    if isinstance(value, dict):
        kept = {k: same(v) for k, v in value.items() if k not in DIFFERENT and k != "cached_tokens"}
        return {k: v for k, v in kept.items() if k != "cache_read_input_tokens"}
    if isinstance(value, list):
        return [same(each) for each in value]
    if isinstance(value, float):
        return round(value, 3)  # steps of other batches add in another order
    return value


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def joined(found: list[Any]) -> Any:
    """The text, calls and reasons of a streamed chat, however its tokens came in chunks."""
    told: dict[int, dict[str, Any]] = {}
    for event in found:
        for choice in event["choices"]:
            sample = told.setdefault(choice["index"], {"text": "", "calls": "", "logprobs": []})
            delta = choice["delta"]
            sample["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                sample["calls"] += call["function"].get("name") or ""
                sample["calls"] += call["function"].get("arguments") or ""
            sample["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            if choice.get("finish_reason"):
                sample["end"] = choice["finish_reason"], choice.get("stop_reason")
    return same([told[index] for index in sorted(told)])


CHATS = {
    "plain": chat(),
    "n": chat(n=2, temperature=1.0),
    "logprobs": chat(logprobs=True, top_logprobs=3),
    "logprobs of no others": chat(logprobs=True),
    "prompt logprobs": chat(prompt_logprobs=2),
    "format": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    ),
    "tools": chat(tools=[WEATHER], tool_choice="required", max_tokens=60),
    "a stop string": chat("Count.", stop=["e"], max_tokens=40),
    "a stop string of two samples": chat("Count.", stop=["e"], max_tokens=40, n=2, temperature=1.0),
    "a stop token": chat(stop_token_ids=list(range(400)), max_tokens=40),
    "a bias": chat(logit_bias={"65": 5}),
    "no limit": {k: v for k, v in chat(stop=["a"]).items() if k != "max_tokens"},
    "a picture": chat([image_part(picture(("red", "circle"))), text_part("What is this?")]),
    "a sound": chat([audio_part(beeps(2)), text_part("What is it?")]),
    "several media": chat(
        [
            audio_part(beeps(1)),
            text_part("and"),
            image_part(picture(("blue", "square"))),
            image_part(picture(("red", "circle"))),
        ]
    ),
    "a salt": chat(
        [image_part(picture(("red", "circle"))), text_part("What?")], cache_salt="apart"
    ),
    "a uuid": chat([{**image_part(picture(("green", "circle"))), "uuid": "it"}]),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_answered_alike(ways: dict[str, str], name: str) -> None:
    answers = [
        httpx.post(f"{url}/v1/chat/completions", json=CHATS[name], timeout=60)
        for url in ways.values()
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200], answers[0].text
    rendered, forwarded, alone = (same(answer.json()) for answer in answers)
    assert rendered == forwarded == alone


@pytest.mark.parametrize("name", [name for name in CHATS if name != "prompt logprobs"])
def test_a_streamed_chat_is_answered_alike(ways: dict[str, str], name: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answers = [
        httpx.post(f"{url}/v1/chat/completions", json=CHATS[name] | options, timeout=60)
        for url in ways.values()
    ]
    found = [events(answer) for answer in answers]
    rendered, forwarded, alone = map(joined, found)
    assert rendered == forwarded == alone
    rendered, forwarded, alone = (same(each[-1]["usage"]) for each in found)
    assert rendered == forwarded == alone


COMPLETIONS: dict[str, dict[str, Any]] = {
    "a text": {"prompt": "Once upon"},
    "texts": {"prompt": ["Once", "upon", "a"], "n": 2},
    "token ids": {"prompt": [72, 73, 74]},
    "echo": {"prompt": "Once upon", "echo": True, "logprobs": 2},
    "stop": {"prompt": "Once upon", "stop": "e", "max_tokens": 40},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_is_answered_alike(ways: dict[str, str], name: str) -> None:
    body = {"model": "nano", "max_tokens": 8, "temperature": 0} | COMPLETIONS[name]
    answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=60) for url in ways.values()]
    assert answers[0].status_code == 200, answers[0].text
    rendered, forwarded, alone = (same(answer.json()) for answer in answers)
    assert rendered == forwarded == alone


@pytest.mark.parametrize("stream", [False, True])
def test_messages_and_responses_are_answered_alike(ways: dict[str, str], stream: bool) -> None:
    asked = {"model": "nano", "max_tokens": 12, "temperature": 0, "stream": stream}
    response = {"model": "nano", "max_output_tokens": 12, "temperature": 0, "input": "Hello"}
    for path, body in (
        ("/v1/messages", asked | {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", response | {"store": False, "stream": stream}),
    ):
        answers = [httpx.post(url + path, json=body, timeout=60) for url in ways.values()]
        assert answers[0].status_code == 200, answers[0].text
        assert "x-lookonce-engine" in answers[0].headers
        if stream:
            told = [same(events(answer)[-1]) for answer in answers]
        else:
            told = [same(answer.json()) for answer in answers]
        assert told[0] == told[1] == told[2]


def test_what_is_stored_is_forwarded(rendering: RunningFrontend) -> None:
    client = openai.OpenAI(base_url=f"{rendering.url}/v1", api_key="none")
    first = client.responses.create(model="nano", input="Hello", max_output_tokens=8)
    again = client.responses.create(
        model="nano", input="And?", max_output_tokens=8, previous_response_id=first.id
    )
    assert again.previous_response_id == first.id
    assert client.responses.retrieve(first.id).id == first.id
