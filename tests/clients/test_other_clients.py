"""LiteLLM and LangChain's OpenAI client, unmodified, against the real server.

`make test-clients` installs them.
"""

from __future__ import annotations

import functools
import operator
import warnings
from typing import Literal

import pydantic
import pytest

from tests.support.drawing import ask, picture

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    openai_of = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

MESSAGES = ask(picture(("red", "circle")), "What shape is red?")
POINT = {
    "title": "point",
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rom"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


# --- LiteLLM ----------------------------------------------------------------------------------


@pytest.fixture
def lite(server):
    def complete(**fields):
        fields = {"messages": ask("Say apple."), **fields}
        return litellm.completion(
            model="openai/nano", api_base=f"{server.url}/v1", api_key="none", **fields
        )

    return complete


def test_litellm_asks_about_a_picture(lite):
    answer = lite(messages=MESSAGES)
    assert answer.choices[0].message.content == "the circle"
    assert answer.usage.total_tokens > answer.usage.completion_tokens > 0


def test_litellm_streams(lite):
    chunks = list(lite(stream=True, stream_options={"include_usage": True}))
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == "apple"


def test_litellm_calls_tools_whole_and_streamed(lite):
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    (call, *_) = lite(**fields, parallel_tool_calls=False).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    chunks = list(lite(**fields, parallel_tool_calls=False, stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.tool_calls[0].function.name == "get_weather"
    assert whole.choices[0].finish_reason == "tool_calls"


def test_litellm_gets_json(lite):
    schema = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    assert lite(response_format=schema).choices[0].message.content.strip().startswith("{")


def test_litellm_s_errors_are_its_own(lite):
    with pytest.raises(litellm.BadRequestError):
        lite(temperature=-1)


def test_litellm_uses_responses(server):
    answer = litellm.responses(
        model="openai/nano", input="Say apple.", api_base=f"{server.url}/v1", api_key="none"
    )
    assert answer.output[0].content[0].text == "apple"


# --- LangChain --------------------------------------------------------------------------------


@pytest.fixture
def lang(server):
    def model(**fields):
        return openai_of.ChatOpenAI(
            model="nano", base_url=f"{server.url}/v1", api_key="none", max_retries=0, **fields
        )

    return model


def test_langchain_asks_about_a_picture(lang):
    answer = lang().invoke(MESSAGES)
    assert answer.content == "the circle"
    assert answer.usage_metadata["total_tokens"] > 0


def test_langchain_streams(lang):
    assert "".join(chunk.content for chunk in lang().stream("Say apple.")) == "apple"


def test_langchain_answers_a_batch(lang):
    answers = lang().batch(["Say apple.", "Say river."])
    assert [answer.content for answer in answers] == ["apple", "river"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(lang, method):
    structured = lang(max_tokens=200).with_structured_output(POINT, method=method)
    assert 0 <= structured.invoke("Say apple.")["x"] <= 9


def test_langchain_binds_tools_and_sends_results_back(lang):
    bound = lang(max_tokens=200).bind_tools([WEATHER], tool_choice="get_weather")
    answer = bound.invoke("What is the weather?")
    (call,) = answer.tool_calls
    assert call["args"]["city"] in ("Bern", "Rom")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    history = [{"role": "user", "content": "What is the weather?"}, answer, result]
    assert lang(max_tokens=20).bind_tools([WEATHER]).invoke(history).response_metadata


def test_langchain_binds_any_tool(lang):
    class Say(pydantic.BaseModel):
        """Say a word."""

        word: Literal["apple", "river"]

    bound = lang(max_tokens=200).bind_tools([WEATHER, Say], tool_choice="any")
    answer = bound.invoke("Say apple.")
    assert answer.tool_calls
    assert {call["name"] for call in answer.tool_calls} <= {"get_weather", "Say"}
    streamed = functools.reduce(operator.add, bound.stream("Say apple."))
    assert {call["name"] for call in streamed.tool_calls} <= {"get_weather", "Say"}
    assert streamed.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_a_plain_pydantic_model(lang, method):
    class Point(pydantic.BaseModel):
        x: int = pydantic.Field(ge=0, le=9)

    structured = lang(max_tokens=200).with_structured_output(Point, method=method)
    assert 0 <= structured.invoke("Say apple.").x <= 9


def test_langchain_uses_responses(lang):
    answer = lang(use_responses_api=True).invoke("Say apple.")
    assert answer.text == "apple"
    streamed = lang(use_responses_api=True).stream("Say apple.")
    assert "".join(chunk.text for chunk in streamed) == "apple"
