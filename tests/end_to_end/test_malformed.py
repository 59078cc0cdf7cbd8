"""Malformed requests: each gets its status and an error that names the part; others go on."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from tests.support.drawing import ask, encoded, image_part, picture, text_part, wav
from tests.support.live_server import LiveServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PNG = encoded(picture(("red", "circle")))
GOOD = image_part(picture(("red", "circle")))
FIRST = "messages[0].content[0]"


def image_url(url: object, **fields: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def image_of(data: bytes) -> dict[str, object]:
    return image_url("data:image/png;base64," + base64.b64encode(data).decode())


def drawn(kind: str, size: tuple[int, int] = (84, 84)) -> dict[str, object]:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, kind)
    return image_of(buffer.getvalue())


def sound_of(data: bytes, form: str = "wav") -> dict[str, object]:
    audio = {"data": base64.b64encode(data).decode(), "format": form}
    return {"type": "input_audio", "input_audio": audio}


def empty_png(width: int, height: int) -> bytes:
    """A file whose header claims a picture of this size, with almost no pixel data."""

    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(100))
    return PNG[:8] + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


PNG_TEXT = base64.b64encode(PNG).decode()

PARTS = [
    # encoded bytes
    (image_url("data:image/png;base64,"), 400),
    (image_url("data:image/png;base64,%%%"), 400),
    (image_url("data:image/png,abc"), 400),
    (image_of(PNG[:40]), 422),
    (image_of(b"GIF89a"), 422),
    (image_of(b"%PDF-1.4"), 422),
    (drawn("BMP"), 422),
    (drawn("TIFF"), 422),
    (drawn("PNG", (3000, 2)), 422),
    (image_of(empty_png(60_000, 60_000)), 413),
    (image_of(empty_png(0, 0)), 422),
    (image_url("data:image/png;base64," + PNG_TEXT[: len(PNG_TEXT) // 4 * 4 - 3]), 400),
    (sound_of(b"AAAA"), 422),
    (sound_of(wav(np.zeros(0))), 422),
    (sound_of(wav(np.zeros(8000)), "midi"), 400),
    # places
    (image_url("ftp://x/y.png"), 400),
    (image_url("https://"), 400),
    (image_url("http://a b/x"), 400),
    (image_url("file:///etc/passwd"), 403),
    (image_url("http://localhost:1/x"), 403),
    (image_url("http://127.0.0.1/x"), 403),
    (image_url("http://0x7f000001/x"), 403),
    (image_url("http://[::1]/x"), 403),
    (image_url("http://[::ffff:10.0.0.1]/x"), 403),
    (image_url("http://169.254.169.254/latest"), 403),
    (image_url("http://10.0.0.1/x"), 403),
    # shapes of parts
    (image_url(""), 400),
    (image_url(3), 400),
    ({"type": "image_url"}, 400),
    ({"type": "image_url", "image_url": None}, 400),
    ({"type": "image_url", "image_url": []}, 400),
    ({"type": "image_url", "uuid": "never-sent"}, 422),
    ({**GOOD, "uuid": ""}, 400),
    ({**GOOD, "uuid": 3}, 400),
    ({"type": "input_audio"}, 400),
    ({"type": "video_url", "video_url": {"url": "https://x/y"}}, 400),
    ({"type": "smell"}, 400),
    ({}, 400),
    (None, 400),
    (3, 400),
    ({"type": "text"}, 400),
    ({"type": "text", "text": None}, 400),
]


@pytest.mark.parametrize(("part", "status"), PARTS)
def test_a_bad_part_is_named(server, part, status):
    response = server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    error = response.json()["error"]
    assert (response.status_code, error["param"].removesuffix(".text")) == (status, FIRST), error
    assert error["message"].startswith(error["param"])
    assert "0x7f" not in error["message"]
    assert "/" not in error["message"] or "http" in error["message"]


HI = {"messages": ask("hi")}
LOOK = {"messages": ask(GOOD, "hi")}

WIZARD = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wizard"}}}

LARGE_TOOL = {"name": "f", "parameters": {"type": "object", "enum": [0] * 70_000}}
ARGUMENTS = "tool_calls[0].function.arguments"
LARGE_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "[" * 300_000}}],
}
CHOICE = "structured_outputs.choice"
LARGE_CHOICE = ["a" * 200 + str(number) for number in range(9_999)]
IS_EMBED = "features.mm_placeholders.image[0].is_embed"


def many_items(count: int, is_embed: list[bool]) -> dict[str, object]:
    """A rendered prompt of one token and more media, or more of one, than it may have."""
    place = {"offset": 0, "length": max(1, len(is_embed)), "is_embed": is_embed}
    names, places = {"image": ["a" * 64] * count}, {"image": [place] * count}
    return {"token_ids": [5], "features": {"mm_hashes": names, "mm_placeholders": places}}


BODIES = [
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
    (CHAT, {"messages": ask(*[GOOD] * 9)}, "messages"),
    (CHAT, {**LOOK, "mm_processor_kwargs": {"max_pixels": -5}}, "mm_processor_kwargs.max_pixels"),
    (CHAT, {**LOOK, "mm_processor_kwargs": {"nonsense": 1}}, "mm_processor_kwargs.nonsense"),
    (CHAT, {**HI, "mm_processor_kwargs": 3}, "mm_processor_kwargs"),
    (CHAT, {**HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {**HI, "continue_final_message": True}, "continue_final_message"),
    (CHAT, {**HI, "temperature": 1e308}, "temperature"),
    (CHAT, {**HI, "n": 129}, "n"),
    (CHAT, {**HI, "stop": ["a"] * 17}, "stop"),
    (CHAT, {**HI, "min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    (CHAT, {**HI, "max_tokens": 5000}, "max_tokens"),
    (CHAT, {**HI, "cache_salt": 3}, "cache_salt"),
    (CHAT, {**HI, "stop_token_ids": [2**40]}, "stop_token_ids"),
    (CHAT, {**HI, "temperature": True}, "temperature"),
    (CHAT, {**HI, "max_tokens": "5"}, "max_tokens"),
    (CHAT, {**HI, "max_tokens": -1}, "max_tokens"),
    (CHAT, {**HI, "max_tokens": 0}, "max_tokens"),
    (CHAT, {**HI, "n": -1}, "n"),
    (CHAT, {**HI, "top_k": -7}, "top_k"),
    (CHAT, {**HI, "top_p": 2}, "top_p"),
    (CHAT, {**HI, "repetition_penalty": 1e-300}, "repetition_penalty"),
    (CHAT, {**HI, "min_p": -0.5}, "min_p"),
    (CHAT, {**HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {**HI, "seed": 2**80}, "seed"),
    (CHAT, {**HI, "stream": "yes"}, "stream"),
    (CHAT, {**HI, "stop": [3]}, "stop[0]"),
    (CHAT, {**HI, "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {**HI, "logit_bias": {"99999": 1}}, "logit_bias"),
    (CHAT, {**HI, "allowed_token_ids": [1] * 300_000}, "allowed_token_ids"),
    (CHAT, {**HI, "stop_token_ids": [1] * 300_000}, "stop_token_ids"),
    (CHAT, {**HI, "tools": [{"type": "function", "function": LARGE_TOOL}]}, "tools"),
    (CHAT, {**HI, "tools": [{"type": "function", "function": {"name": "f"}}] * 1025}, "tools"),
    (CHAT, {"messages": [*ask("hi"), LARGE_CALL]}, f"messages[1].{ARGUMENTS}"),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 5000}, "input"),
    ("/v1/responses/input_tokens", {"input": [{"content": [{}] * 5000}]}, "input[0].content"),
    ("/v1/conversations", {"items": [{"role": "user", "content": "a"}] * 1001}, "items"),
    ("/inference/v1/generate", many_items(9, []), "features.mm_hashes.image"),
    ("/inference/v1/generate", many_items(1, [True] * 5000), IS_EMBED),
    (COMPLETIONS, {"prompt": [1] * 100_000 + [{}]}, "prompt[100000]"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ask("word " * 9000)}, "messages"),
    (CHAT, {"messages": ask("a b " * 7_500_000)}, "messages"),
    (COMPLETIONS, {"prompt": "a b " * 7_500_000}, "prompt"),
    (CHAT, {**HI, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {**HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {**HI, "response_format": WIZARD}, "response_format.json_schema.schema"),
    (CHAT, {**HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {**HI, "guided_regex": "a" * 2_000_000}, "guided_regex"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": LARGE_CHOICE}}, CHOICE),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": ["a"] * 10_001}}, CHOICE),
    ("/tokenize", {"messages": ask("A " * 50_000)}, "messages"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [5, -1]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[5], [5, 99999]]}, "prompt[1][1]"),
    (COMPLETIONS, {"prompt": [9]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": ["a"] * 300}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [5, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
]


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
def test_blocks_that_no_context_holds_are_refused_before_they_are_read(server, route):
    blocks = [{"type": "wizard"}, *[{"type": "text", "text": "a"}] * 5000]
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}
    response = server.post(route, body)
    assert response.status_code == 400
    assert "messages[0].content: 5001 parts" in response.json()["error"]["message"]


@pytest.mark.parametrize(("route", "body", "param"), BODIES)
def test_a_bad_field_is_named(server, route, body, param):
    response = server.post(route, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


NO_BODIES = [
    (b"", "JSON"),
    (b"hello", "JSON"),
    (b'{"messages":[', "JSON"),
    (b"[]", "object"),
    (b"null", "object"),
    (b"{}", "messages"),
    (b'{"messages":[{"role":"user","content":"\xff\xfe"}]}', "JSON"),
    (b'{"messages":[],"temperature":NaN}', "JSON"),
    (b'{"messages":[],"top_p":Infinity}', "JSON"),
    (b'{"messages":[],"temperature":1e999}', "temperature: a number beyond"),
    (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"chat_template_kwargs":' + b'{"a":' * 3000 + b"1" + b"}" * 3001, "nested too deeply"),
]


@pytest.mark.parametrize(("body", "words"), NO_BODIES)
def test_a_body_that_is_none_is_described(server, body, words):
    response = server.post_bytes(CHAT, body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_request_beside_all_of_them_is_not_disturbed(server):
    """Repeats a streamed request until every bad request was sent; its answer never changes."""
    bodies = [{"messages": [{"role": "user", "content": [part]}]} for part, _ in PARTS]
    bodies += [body for route, body, _ in BODIES if route == CHAT]
    alone = stream(server)
    assert len(alone) > 10
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(lambda: [server.post(CHAT, body).status_code for body in bodies])
        beside = [stream(server)]
        while not sending.done():
            beside.append(stream(server))
    assert {status // 100 for status in sending.result()} == {4}
    assert len(sending.result()) >= 60
    assert all(pieces == alone for pieces in beside)


def stream(server: LiveServer) -> list[str]:
    """The pieces of one greedy answer."""
    chunks = server.client().chat.completions.create(
        model="nano",
        messages=ask(GOOD, "What is in the picture?"),
        temperature=0,
        max_tokens=60,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


ODD_BUT_ALLOWED = [
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "user", "content": "\x00\x01"}]},
    {"messages": ask(drawn("PNG", (1, 1)), "hi")},
    {**HI, "seed": -1, "temperature": 2},
    {**HI, "n": 128},
    {**HI, "cache_salt": "x" * 100_000},
    {**HI, "logit_bias": {"1": -100}},
    {**HI, "temperature": 1e-300, "min_p": 1e-300, "logit_bias": {"1": 1e-300}},
    {**HI, "temperature": 100, "top_p": 1e-300, "presence_penalty": -1e-300},
    {**HI, "temperature": 1.1e-5, "repetition_penalty": 0.01, "frequency_penalty": -2},
    {**HI, "add_generation_prompt": False},
]


@pytest.mark.parametrize("body", ODD_BUT_ALLOWED)
def test_odd_requests_are_answered(server, body):
    response = server.post(CHAT, {**body, "max_tokens": 2})
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == body.get("n", 1)


@pytest.mark.parametrize(
    "text", ["<|IMAGE|>", "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|AUDIO|>" * 3]
)
def test_text_cannot_forge_a_placeholder(server, text):
    for body in ({"messages": ask(text_part(text))}, {"prompt": text}):
        tokens = server.post("/tokenize", body).json()["tokens"]
        assert not {3, 9, 10} & set(tokens)


def test_after_all_this_the_server_is_idle_and_well(server):
    lone_surrogate = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]})
    assert server.post_bytes(CHAT, lone_surrogate.encode()).status_code == 400
    found = server.metrics()
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["kv_cache_usage_ratio"] == 0
    assert server.post(CHAT, LOOK).status_code == 200
