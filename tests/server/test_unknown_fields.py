"""Fields that no route knows: told to the client, logged once, refused where that is asked for."""

from __future__ import annotations

import logging

import msgspec
import pytest

from lookonce.errors import BadRequestError
from lookonce.frontend.requests import (
    ChatRequest,
    CompletionRequest,
    RefusesUnsupported,
    TokenizeRequest,
)
from lookonce.server.http.body import parse_reporting
from lookonce.server.http.unknown_fields import MAX_LOGGED, UnknownFields
from lookonce.server.routes.generate import GenerateRequest
from lookonce.server.routes.render import RenderChatRequest, RenderCompletionRequest
from lookonce.server.routes.responses_api.input import ResponsesRequest
from tests.support.server.site import events

HEADER = "x-lookonce-warning"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": HELLO,
    "/v1/chat/completions/render": HELLO,
    "/v1/completions": {"prompt": "hi"},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
    "/inference/v1/generate": {"token_ids": [65]},
}
KINDS = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    GenerateRequest,
    RenderChatRequest,
    RenderCompletionRequest,
    ResponsesRequest,
)


@pytest.mark.parametrize("route", BODIES)
def test_an_unknown_field_is_named_in_a_header_and_changes_nothing(on_site, route):
    async def scenario(site):
        plain = await site.client.post(route, json=BODIES[route])
        odd = await site.client.post(route, json={**BODIES[route], "foo_bar": 1})
        assert plain.status_code == odd.status_code == 200
        assert HEADER not in plain.headers
        assert odd.headers[HEADER] == "ignored unknown fields: foo_bar"
        site.renderer.rendered.clear()  # what is rendered for others is not pinned here

    on_site(scenario)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temprature": 0.5}, "temprature (did you mean temperature?)"),
        ({"maxTokens": 5, "topP": 0.5}, "maxTokens (did you mean max_tokens?)"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_u"),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},
            "format.schema",
        ),
        ({"x\r\nset-cookie: a": 1}, "x\\r\\nset-cookie: a"),
        ({"ünknown": 1}, "\\u00fcnknown"),
        ({f"field_{number}": 1 for number in range(50)}, "and 42 more"),
    ],
)
def test_what_was_probably_meant_is_told(on_site, fields, words):
    async def scenario(site):
        response = await site.chat(**fields)
        assert response.status_code == 200
        assert words in response.headers[HEADER]
        assert len(response.headers[HEADER]) < 1500

    on_site(scenario)


PARTS = {
    "text": ({"type": "text", "text": "hi", "txet": 1}, "txet (did you mean text?)"),
    "outer": ({"type": "image_url", "image_url": {"url": "U"}, "uiud": "x"}, "uiud (did you mean"),
    "inner": (
        {"type": "image_url", "image_url": {"url": "U", "detial": "low"}},
        "image_url.detial (did you mean detail?)",
    ),
}


@pytest.mark.parametrize("where", PARTS)
def test_a_misspelt_field_of_a_content_part_is_named_by_its_place(where):
    part, words = PARTS[where]
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    _, unknown = parse_reporting(msgspec.json.encode({"messages": messages}), ChatRequest)
    warning = UnknownFields().judge(unknown, ChatRequest)
    assert f"messages[0].content[1].{words}" in warning


def test_so_is_one_of_a_response_s_part():
    parts = [
        {"type": "input_text", "text": "x", "txt": "y"},
        {"type": "input_image", "image_url": "U", "detial": "low", "detail": "low"},
    ]
    body = {"input": [{"role": "user", "content": parts}, {"role": "user", "content": "hi"}]}
    _, unknown = parse_reporting(msgspec.json.encode(body), ResponsesRequest)
    assert unknown == ["input[0].content[0].txt", "input[0].content[1].detial"]
    assert "did you mean text?" in UnknownFields().judge(unknown, ResponsesRequest)


def test_a_misspelt_field_of_a_tool_is_named_by_its_place():
    function = {"name": "f", "descripton": "?"}
    tools = [{"type": "function", "function": {"name": "g"}}, {"type": "function", "x": 1}]
    body = {**HELLO, "tools": [{"type": "function", "function": function}, *tools]}
    _, unknown = parse_reporting(msgspec.json.encode(body), ChatRequest)
    assert unknown == ["tools[0].function.descripton", "tools[2].x"]
    strict = UnknownFields(strict=True)
    with pytest.raises(BadRequestError) as refused:
        strict.judge(unknown, ChatRequest)
    assert refused.value.param == "tools[0].function.descripton"


def test_fields_that_ask_for_nothing_or_the_usual_are_no_matter(on_site):
    async def scenario(site):
        response = await site.chat(
            foo_bar=None, user="", store=False, metadata={}, service_tier="auto",
            verbosity="medium", reasoning={}, prompt_cache_retention="in_memory",
            stream=True, stream_options={"include_usage": True, "include_obfuscation": False},
        )  # fmt: skip
        assert response.status_code == 200
        assert HEADER not in response.headers

    on_site(scenario)


def test_an_error_tells_it_too(on_site):
    async def scenario(site):
        response = await site.chat(temprature=1, n=-1)
        assert response.status_code == 400
        assert "temprature" in response.headers[HEADER]

    on_site(scenario)


@pytest.mark.parametrize("route", BODIES)
def test_with_strict_requests_it_is_refused_by_name(on_site, route):
    async def scenario(site):
        response = await site.client.post(route, json={**BODIES[route], "foo_bar": 1})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("foo_bar", "unknown_parameter")
        assert (await site.client.post(route, json=BODIES[route])).status_code == 200
        site.renderer.rendered.clear()

    on_site(scenario, strict_requests=True)


def test_strict_requests_say_what_was_meant(on_site):
    async def scenario(site):
        response = await site.chat(temprature=0.5)
        assert "did you mean temperature?" in response.json()["error"]["message"]
        assert (await site.chat(user="me", temperature=0.5)).status_code == 200

    on_site(scenario, strict_requests=True)


def test_each_field_is_logged_once_and_not_without_end(caplog):
    fields = UnknownFields()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fields.judge(["temprature"], ChatRequest)
        assert len(caplog.records) == 1
        for number in range(3 * MAX_LOGGED):
            fields.judge([f"field_{number}"], ChatRequest)
    assert len(caplog.records) == MAX_LOGGED


def test_a_field_in_a_list_is_logged_by_its_name_once(caplog):
    fields = UnknownFields()
    with caplog.at_level(logging.WARNING):
        for place in ("messages[0].content[1]", "messages[7].content[12]"):
            fields.judge([f"{place}.video_url.detial"], ChatRequest)
        fields.judge(["messages[0].content[1].sk-secret[1]"], ChatRequest)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "messages[].content[].video_url.detial (did you mean detail?)",
        "(not a field's name)",
    ]


def test_fields_without_effect_are_told_beside_unknown_ones(on_site):
    async def scenario(site):
        told = (await site.chat(store=True, user="me", temprature=1)).headers[HEADER]
        assert told == (
            "ignored unknown fields: temprature (did you mean temperature?); ignored: store, user"
        )

    on_site(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decoded_strictly_equals_what_is_decoded_otherwise(kind):
    body = {
        "messages": [], "prompt": "hi", "token_ids": [1], "input": "hi", "model": "m",
        "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3,
    }  # fmt: skip
    refused = kind.unsupported_fields() if issubclass(kind, RefusesUnsupported) else ()
    known = {f.encode_name for f in msgspec.structs.fields(kind)} - set(refused)
    given = {name: value for name, value in body.items() if name in known}
    strict, nothing = parse_reporting(msgspec.json.encode(given), kind)
    lenient, unknown = parse_reporting(msgspec.json.encode({**given, "foo": 1}), kind)
    assert (nothing, unknown) == ([], ["foo"])
    assert isinstance(strict, kind)
    for name in kind.__struct_fields__:
        one, other = getattr(strict, name), getattr(lenient, name)
        assert one == other or msgspec.structs.asdict(one) == msgspec.structs.asdict(other)


# --- beside it ------------------------------------------------------------------------------------


def test_prompt_embeds_without_a_prompt_are_refused_in_words(on_site):
    async def scenario(site):
        for body in ({"prompt_embeds": "AAAA"}, {"prompt_embeds": "AAAA", "prompt": "x"}):
            error = (await site.client.post("/v1/completions", json=body)).json()["error"]
            assert error["param"] == "prompt_embeds"
            assert "not supported" in error["message"]
        error = (await site.client.post("/v1/completions", json={"prompt_embeds": None})).json()
        assert error["error"]["param"] == "prompt"

    on_site(scenario)


def test_stop_strings_without_text_are_refused(on_site):
    async def scenario(site):
        async def status(**sampling):
            body = {"token_ids": [65], "sampling_params": sampling}
            return await site.client.post("/inference/v1/generate", json=body)

        refused = await status(detokenize=False, stop=["a"])
        assert refused.status_code == 400
        assert "stop_token_ids" in refused.json()["error"]["message"]
        assert (await status(detokenize=False)).status_code == 200
        assert (await status(detokenize=False, stop=[])).status_code == 200
        assert (await status(detokenize=True, stop=["a"])).status_code == 200

    on_site(scenario)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_may_have_the_usage_so_far(on_site, route):
    async def scenario(site):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**BODIES[route], "stream": True, "stream_options": options, "max_tokens": 5}
        chunks = events((await site.client.post(route, json=body)).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == chunks[-1]["usage"]["completion_tokens"] == 5
        assert len(set(counts)) > 2

    on_site(scenario)
