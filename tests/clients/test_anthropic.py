"""Anthropic's Python client, unmodified, against the real server.

`make test-clients` installs it.
"""

from __future__ import annotations

from typing import Literal

import pydantic
import pytest

from tests.support.documents import as_base64, line, pdf
from tests.support.drawing import image_part, picture

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Rom"]}},
        "required": ["city"],
    },
}
APPLE = [{"role": "user", "content": "Say apple."}]


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def red_circle():
    data = image_part(picture(("red", "circle")))["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}


def ask_about(*blocks):
    return [{"role": "user", "content": list(blocks)}]


def test_a_picture_is_asked_about_and_its_second_look_is_read_from_the_cache(client):
    question = {"type": "text", "text": "What shape is red?"}
    system = [{"type": "text", "text": "Be short. " * 20, "cache_control": {"type": "ephemeral"}}]
    fields = {"model": "nano", "max_tokens": 1000, "system": system}
    messages = ask_about(red_circle(), question)
    first = client.messages.create(messages=messages, **fields)
    again = client.messages.create(messages=messages, **fields)
    assert first.content == again.content
    assert (first.type, first.role, first.stop_reason) == ("message", "assistant", "end_turn")
    whole = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert again.usage.cache_read_input_tokens > first.usage.cache_read_input_tokens
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == whole
    counted = client.messages.count_tokens(model="nano", messages=messages, system=system)
    assert counted.input_tokens == whole


def test_a_document_s_pages_are_seen_and_counted(client):
    file = as_base64(pdf(line("page"), line("other")))
    source = {"type": "base64", "media_type": "application/pdf", "data": file}
    document = {"type": "document", "source": source, "title": "a.pdf"}
    messages = ask_about(document, {"type": "text", "text": "What shape is red?"})
    answer = client.messages.create(model="nano", max_tokens=8, messages=messages)
    counted = client.messages.count_tokens(model="nano", messages=messages)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    broken = {**source, "data": as_base64(b"%PDF-1.7")}
    with pytest.raises(anthropic.APIStatusError, match=r"messages\[0\].content\[0\].*broken"):
        client.messages.create(
            model="nano", max_tokens=8, messages=ask_about({**document, "source": broken})
        )


def test_it_sees_the_picture(client):
    question = {"type": "text", "text": "What shape is red?"}
    answer = client.messages.create(
        model="nano", max_tokens=50, messages=ask_about(red_circle(), question)
    )
    assert answer.content[0].text == "the circle"


def test_a_stream_says_the_same(client):
    with client.messages.stream(model="nano", max_tokens=50, messages=APPLE) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert message.content[0].text == "apple"
    assert message.usage.output_tokens > 1
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    for kind in ("content_block_start", "content_block_delta", "content_block_stop"):
        assert kind in kinds


def test_tools_are_called_whole_and_streamed(client):
    fields = {
        "model": "nano", "max_tokens": 200, "messages": APPLE, "tools": [WEATHER],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert call.name == "get_weather"
        assert call.input["city"] in ("Bern", "Rom")


def test_a_plain_pydantic_model_is_parsed(client):
    class Fruit(pydantic.BaseModel):
        name: Literal["apple", "pear"]
        colour: Literal["red", "green"]

    answer = client.messages.parse(
        model="nano", max_tokens=100, messages=APPLE, output_format=Fruit
    )
    assert isinstance(answer.parsed_output, Fruit)
    assert answer._request_id


def test_a_result_is_answered(client):
    call = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
    answer = client.messages.create(
        model="nano", max_tokens=20, tools=[WEATHER],
        messages=[
            *APPLE,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )  # fmt: skip
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_a_stop_sequence_and_the_limit_are_told(client):
    stopped = client.messages.create(
        model="nano", max_tokens=50, messages=APPLE, stop_sequences=["pp"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "pp")
    cut = client.messages.create(model="nano", max_tokens=1, messages=APPLE)
    assert cut.stop_reason == "max_tokens"


def test_errors_are_its_own(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=APPLE)
    document = {"type": "document", "source": {}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="nano", max_tokens=5, messages=ask_about(document))
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0]" in refused.value.body["error"]["message"]
