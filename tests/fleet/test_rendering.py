"""Front-ends that render answer as the engines themselves do.

Real engines behind one front-end that renders and one that forwards, and one of them alone.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lookonce.fleet.config import RenderedModel
from tests.support.drawing import audio_part, beeps, encoded, image_part, picture, text_part
from tests.support.fleet_frontends import (
    Engine,
    RunningFrontend,
    running_engine,
    running_frontend,
)
from tests.support.live_server import until

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
    "arguments of the processor": chat(
        [image_part(picture(("red", "circle"), side=100)), text_part("What?")],
        mm_processor_kwargs={"max_pixels": 4000, "min_pixels": 3136},
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


def receipt(url: str, body: dict[str, Any]) -> tuple[Any, httpx.Response]:
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=body | {"reuse_receipt": True}, timeout=60
    )
    return answer.json()["reuse_receipt"], answer


def test_a_receipt_says_what_the_engine_did(ways: dict[str, str]) -> None:
    """A new picture and a known one, by each way; `decode_ms` and the like are of the engine."""
    for number, url in enumerate(ways.values()):
        shown = picture(("red", "square"), ("blue", "circle"), side=84 + 12 * number)
        body = chat([image_part(shown), text_part("What is it? " * 20)])
        first, _ = receipt(url, body)
        (item,) = first["items"]
        assert (item["processor"], item["encoder"]) == ("miss", "miss")
        assert item["encode_ms"] > 0
        assert item["process_ms"] > 0
        again, answer = receipt(url, body)
        (item,) = again["items"]
        assert (item["processor"], item["encoder"]) == ("hit", "skipped")
        assert again["prefix_cached_tokens"] > 0
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == again["prefix_cached_tokens"]


def test_a_route_tells_the_exact_number_of_tokens(rendering: RunningFrontend) -> None:
    body = chat([image_part(picture(("green", "square"))), text_part("What is it? " * 20)])
    before = rendered(rendering)
    _, first = receipt(rendering.url, body)
    body["messages"] += [
        {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And now?"},
    ]
    told, again = receipt(rendering.url, body)
    assert rendered(rendering) == before + 2
    assert first.headers["x-lookonce-engine"] == again.headers["x-lookonce-engine"]
    known, total = (
        again.headers["x-lookonce-route"].split("; ")[1].removeprefix("prompt ").split("/")
    )
    assert again.headers["x-lookonce-route"].startswith("known;")
    assert int(total) == told["prompt_tokens"]
    assert abs(int(known) - told["prefix_cached_tokens"]) < 64


def rendered(running: RunningFrontend) -> int:
    """Requests until now."""
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    name = "lookonce_fleet_rendered_total "
    return int(next(line for line in lines if line.startswith(name)).removeprefix(name))


def test_what_needs_an_engine_is_forwarded(rendering: RunningFrontend) -> None:
    before = rendered(rendering)
    for path, body in {
        "/tokenize": {"model": "nano", "prompt": "Hello"},
        "/v1/chat/completions": CHATS["a uuid"],
        "/v1/responses": {"model": "nano", "input": "Hello", "max_output_tokens": 4},
        "/inference/v1/generate": {"token_ids": [72, 73], "sampling_params": {"max_tokens": 2}},
    }.items():
        answer = httpx.post(rendering.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert "x-lookonce-engine" in answer.headers
    bare = chat([{"type": "image_url", "uuid": "it"}])
    assert httpx.post(f"{rendering.url}/v1/chat/completions", json=bare).status_code == 200
    assert rendered(rendering) == before


REFUSED: dict[str, dict[str, Any]] = {
    "no JSON": {},
    "no messages": chat() | {"messages": []},
    "a long answer": chat(max_tokens=1 << 20),
    "a bad schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}
    ),
    "no picture": chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
    "a cut picture": chat(
        [
            text_part("What?"),
            {
                "type": "image_url",
                "image_url": {
                    "url": image_part(picture(("red", "circle")))["image_url"]["url"][:200]
                },
            },
        ]
    ),
    "an unknown name": chat([{"type": "image_url", "image_url": {"url": "lookonce:" + "ab" * 32}}]),
    "an unknown model": chat(model="other"),
    "a closed address": chat(
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_the_engines_own(ways: dict[str, str], name: str, stream: bool) -> None:
    content = json.dumps(REFUSED[name] | {"stream": stream}) if REFUSED[name] else "{"
    headers = {"content-type": "application/json"}
    rendering, _, alone = (
        httpx.post(f"{url}/v1/chat/completions", content=content, headers=headers, timeout=60)
        for url in ways.values()
    )
    assert rendering.status_code == alone.status_code >= 400
    told, expected = rendering.json()["error"], alone.json()["error"]
    if name == "an unknown model":  # a fleet names its models
        told["message"] = expected["message"]
    assert told == expected


def test_openais_client_streams_and_leaves(
    engines: list[Engine], rendering: RunningFrontend
) -> None:
    client = openai.OpenAI(base_url=f"{rendering.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": "Count to a million."}],
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    until(lambda: running_requests(engines) == 0, 60)
    until(lambda: rendering.frontend.active == 0, 60)


def test_a_request_is_aborted_by_its_id(engines: list[Engine], rendering: RunningFrontend) -> None:
    body = chat(max_tokens=2000, ignore_eos=True, stream=True, request_id="mine-1", n=2)
    with httpx.stream(
        "POST", f"{rendering.url}/v1/chat/completions", json=body, timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        aborted = httpx.post(
            f"{rendering.url}/inference/v1/abort_requests", json={"request_ids": ["mine-1"]}
        )
        assert aborted.json() == {"aborted": ["mine-1"]}
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    reasons = [choice["finish_reason"] for event in rest for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["abort", "abort"]
    until(lambda: running_requests(engines) == 0, 60)


def running_requests(engines: list[Engine]) -> float:
    found = [httpx.get(f"{each.server.url}/metrics").text for each in engines]
    lines = [line for text in found for line in text.splitlines()]
    name = "lookonce_num_requests_running"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_tenants_are_apart(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one:key-one:admin\ntwo:key-two\n")
    body = chat([image_part(picture(("red", "circle"))), text_part("Whose? " * 20)])
    with (
        running_engine("a", "--api-key-file", str(keys)) as engine,
        running_frontend([engine.address], RENDERED, keys) as running,
    ):

        def ask(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(
                f"{running.url}/v1/chat/completions",
                json=body | {"reuse_receipt": True},
                headers=headers,
                timeout=60,
            )

        first, again, other = (ask(key) for key in ("key-one", "key-one", "key-two"))
        told = [each.json()["reuse_receipt"] for each in (first, again, other)]
        assert [each["items"][0]["processor"] for each in told] == ["miss", "hit", "miss"]
        assert told[1]["prefix_cached_tokens"] > 0
        assert told[2]["prefix_cached_tokens"] == 0
        assert ask("none").status_code == 401


def test_pictures_by_url_are_fetched_by_the_front_end(tmp_path: Path) -> None:
    (tmp_path / "it.png").write_bytes(encoded(picture(("green", "square"))))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    site = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{site.server_address[1]}/it.png"
    body = chat([{"type": "image_url", "image_url": {"url": url}}, text_part("What?")])
    model = RenderedModel(name="nano", model="nano", options={"allow_private_media": True})
    with (
        running_engine("a", "--allow-private-media") as engine,
        running_frontend([engine.address], [model]) as running,
    ):
        rendered, again = (
            httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
            for _ in range(2)
        )
        assert engine.server.metrics()["media_fetches_total:image"] == 0
        alone = engine.server.post("/v1/chat/completions", body)
        assert same(rendered.json()) == same(again.json()) == same(alone.json())
        assert engine.server.metrics()["media_processed_total:image"] == 1
    site.shutdown()
    site.server_close()


def test_an_engine_that_is_killed_takes_its_own_streams_alone() -> None:
    with running_engine("a") as one, running_engine("b") as two:
        engines = {"a": one, "b": two}
        with running_frontend([one.address, two.address], RENDERED) as running:
            body = chat("Count " * 40, max_tokens=3000, ignore_eos=True)
            with httpx.stream(
                "POST",
                f"{running.url}/v1/chat/completions",
                json=body | {"stream": True},
                timeout=60,
            ) as response:
                lines = response.iter_lines()
                next(lines)
                name = response.headers["x-lookonce-engine"]
                for pid in engines[name].server.pids(b"lookonce"):
                    os.kill(pid, signal.SIGKILL)
                rest = [line for line in lines if line.startswith("data: {")]
            assert json.loads(rest[-1][6:])["error"]["code"] == "engine_dead"
            answer = httpx.post(
                f"{running.url}/v1/chat/completions", json=body | {"max_tokens": 4}, timeout=60
            )
            assert answer.status_code == 200
            assert answer.headers["x-lookonce-engine"] != name
