"""Tools on a real server. nano knows no tools, so only the grammar makes it write calls."""

from __future__ import annotations

import json

import openai
import pytest

from tests.support.drawing import ask

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Bern", "Rom"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now"}}
WILD = {"temperature": 4.0, "max_tokens": 500}


@pytest.fixture(scope="module")
def client(cache_server):
    with cache_server.client() as client:
        yield client


def check_call(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert arguments["city"] in ("Bern", "Rom")
        assert arguments["days"] in (1, 2, 3)
    else:
        assert (call.function.name, arguments) == ("now", {})


def test_calls_that_must_come_come_and_conform(client):
    answer = client.chat.completions.create(
        model="nano", messages=ask("Say apple."), tools=[WEATHER, CLOCK], tool_choice="required",
        n=6, parallel_tool_calls=False, **WILD,
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        check_call(call)
    names = {choice.message.tool_calls[0].function.name for choice in answer.choices}
    assert names <= {"get_weather", "now"}


def test_a_named_function_is_the_one_that_is_called(client):
    for tool in (WEATHER, CLOCK):
        name = {"name": tool["function"]["name"]}
        answer = client.chat.completions.create(
            model="nano", messages=ask("Say apple."), tools=[WEATHER, CLOCK], **WILD,
            tool_choice={"type": "function", "function": name},
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == name["name"]
        check_call(call)


def test_a_streamed_call_is_the_same_call(client):
    fields = {
        "model": "nano", "messages": ask("Say apple."), "tools": [WEATHER], "seed": 5,
        "tool_choice": "required", "parallel_tool_calls": False, **WILD,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls[0].function
    deltas = [
        call
        for chunk in client.chat.completions.create(**fields, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert deltas[0].id
    assert deltas[0].function.name == whole.name
    assert "".join(delta.function.arguments for delta in deltas) == whole.arguments
    assert len(deltas) > 3


def test_a_function_that_is_strict_conforms_if_it_is_called_at_all(client):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = client.chat.completions.create(
        model="nano", messages=ask("Say apple."), tools=[strict], temperature=0
    )
    assert answer.choices[0].message.content
    for call in answer.choices[0].message.tool_calls or []:
        check_call(call)


def test_what_a_tool_returned_goes_into_the_prompt(client, cache_server):
    messages = [
        *ask("Weather?"),
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]  # fmt: skip
    body = {"messages": messages, "tools": [WEATHER]}
    tokens = cache_server.post("/tokenize", body).json()["tokens"]
    text = cache_server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert '"get_weather"' in text.split("<|im_start|>")[1]
    assert '"city": "Bern"' in text
    assert "<|im_start|>tool\nsunny" in text
    assert client.chat.completions.create(model="nano", max_tokens=5, **body).choices


def test_responses_call_tools_too(client):
    tool = {"type": "function", **WEATHER["function"]}
    fields = {
        "model": "nano", "input": "Say apple.", "tools": [tool], "tool_choice": "required",
        "parallel_tool_calls": False, "temperature": 2.0, "max_output_tokens": 500,
    }  # fmt: skip
    (call,) = client.responses.create(**fields).output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Bern", "Rom")
    events = list(client.responses.create(**fields, stream=True))
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert json.loads(done.arguments)["days"] in (1, 2, 3)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "Weather?"}, call, result]
    assert client.responses.create(model="nano", input=items, tools=[tool], max_output_tokens=5).id


def test_a_schema_that_cannot_be_is_refused_by_its_name(client):
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="nano", messages=ask("hi"), tools=[CLOCK, broken], tool_choice="required"
        )
    assert caught.value.param == "tools[1].function.parameters"
