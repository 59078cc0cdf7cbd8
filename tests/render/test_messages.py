"""OpenAI's messages are converted for templates; errors name the part at fault."""

from __future__ import annotations

import json

import pytest

from lookonce.errors import BadRequestError
from lookonce.render.prompt import messages as messages_module
from lookonce.render.prompt.messages import read_messages

PICTURE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def read(*messages, modalities=("image", "audio"), limits=None):
    chosen = {"image": 2, "audio": 1} if limits is None else limits
    return read_messages(messages, modalities=modalities, limits=chosen)


def user(*content):
    return {"role": "user", "content": list(content)}


def text(said):
    return {"type": "text", "text": said}


def test_texts_stay_texts_and_media_parts_keep_only_their_modality():
    chat = read({"role": "system", "content": "Be brief."}, user(PICTURE, text("What?"), SOUND))
    assert chat.conversation == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, text("What?"), {"type": "audio"}]},
    ]
    assert [(s.modality, s.param) for s in chat.sources] == [
        ("image", "messages[1].content[0]"),
        ("audio", "messages[1].content[2]"),
    ]


def test_fields_without_a_value_are_left_out_and_others_kept():
    message = {"role": "assistant", "content": "x", "refusal": None, "reasoning_content": "y"}
    assert read(message).conversation == [
        {"role": "assistant", "content": "x", "reasoning_content": "y"}
    ]


def test_earlier_thoughts_have_the_names_that_templates_read():
    call = {"function": {"name": "f", "arguments": {}}}
    (said, called, asked) = read(
        {"role": "assistant", "content": "x", "reasoning": "y"},
        {"role": "assistant", "tool_calls": [call], "reasoning": "y", "reasoning_content": "z"},
        {"role": "user", "content": "x", "reasoning": "y"},
    ).conversation
    assert said == {
        "role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "y"
    }  # fmt: skip
    assert (called["reasoning_content"], called["thinking"]) == ("z", "z")
    assert "reasoning_content" not in asked


def test_a_refusal_in_the_place_of_content_is_what_was_said():
    messages = [{"role": "assistant", "content": None, "refusal": "I cannot."}]
    (message,) = read_messages(messages, (), {}).conversation
    assert message == {"role": "assistant", "content": "I cannot."}


def test_arguments_of_tool_calls_become_objects():
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"id": "3", "type": "function", "function": {"name": "h", "arguments": {"b": 2}}},
    ]
    chat = read({"role": "assistant", "content": None, "tool_calls": calls})
    assert "content" not in chat.conversation[0]
    arguments = [call["function"]["arguments"] for call in chat.conversation[0]["tool_calls"]]
    assert arguments == [{"a": [1]}, {}, {"b": 2}]


def called(arguments):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("given", [json.dumps, lambda value: value])
def test_arguments_of_all_calls_together_have_so_many_values(monkeypatch, given):
    """As a text they are JSON within JSON: their commas may be escaped. As an object they are what
    a template writes."""
    monkeypatch.setattr(messages_module, "MAX_ARGUMENT_VALUES", 100)
    half = [called(given([0] * 50))]
    old = {"role": "assistant", "function_call": called(given([0] * 50))["function"]}
    assert read({"role": "assistant", "tool_calls": half}, old)
    more = {"role": "assistant", "tool_calls": [called("{}"), called(given([0, 0]))]}
    with pytest.raises(BadRequestError, match="commas") as caught:
        read({"role": "assistant", "tool_calls": half}, old, more)
    assert caught.value.param == "messages[2].tool_calls[0].function.arguments"


UNREADABLE = [
    ("[" * 990 + "]" * 990, "", "nested too deeply"),
    ('{"a": [1, %s]}' % ("9" * 4301), ".a[1]", "a number of more than 4300 digits"),
    ('{"a": [1, -%s]}' % ("9" * 4301), ".a[1]", "a number of more than 4300 digits"),
    ('{"a": {"b": 1e400}}', ".a.b", "a number beyond 1.8e+308"),
    ('{"a": ', "", "not valid JSON"),
]


@pytest.mark.parametrize(("arguments", "place", "why"), UNREADABLE)
def test_why_arguments_are_not_read_is_true(arguments, place, why):
    with pytest.raises(BadRequestError) as caught:
        read({"role": "assistant", "tool_calls": [called(arguments)]})
    param = f"messages[0].tool_calls[0].function.arguments{place}"
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: {why}")


def test_numbers_of_4300_digits_are_read():
    digits = "9" * 4300
    message = read({"role": "assistant", "tool_calls": [called(f"[{digits}]")]}).conversation[0]
    assert message["tool_calls"][0]["function"]["arguments"] == [int(digits)]


def test_arguments_have_no_more_values_than_the_context_can_hold():
    calls = [{"type": "function", "function": {"name": "f", "arguments": json.dumps([0] * 41)}}]
    message = {"role": "assistant", "tool_calls": calls}
    assert read_messages([message], (), {}, 10, longest_token=5)
    with pytest.raises(BadRequestError, match="more than 40 commas") as caught:
        read_messages([message], (), {}, 10, longest_token=4)
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_a_function_call_becomes_a_tool_call_and_what_follows_its_answer():
    (_, called, answered, alone) = read(
        user(text("hi")),
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "[1]"}},
        {"role": "function", "name": "f", "content": "sunny"},
        {"role": "function", "name": "f", "content": "again"},
    ).conversation
    (call,) = called["tool_calls"]
    assert call == {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": [1]}}
    assert "function_call" not in called
    assert answered == {
        "role": "tool", "name": "f", "tool_call_id": "call_1", "content": "sunny"
    }  # fmt: skip
    assert alone["role"] == "function"


def test_the_request_s_own_objects_are_not_changed():
    message = user(PICTURE, text("x"))
    read(message)
    assert message == user(PICTURE, text("x"))


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}


def old_call(**function):
    return {"role": "assistant", "function_call": function}


WRONG = [
    ((), "messages"),
    (("hello",), "messages[0]"),
    (({"content": "x"},), "messages[0].role"),
    (({"role": "wizard", "content": "x"},), "messages[0].role"),
    (({"role": ["user"], "content": "x"},), "messages[0].role"),
    (({"role": "user"},), "messages[0].content"),
    (({"role": "assistant", "content": None},), "messages[0].content"),
    (({"role": "user", "content": 3},), "messages[0].content"),
    ((user(text("x")), user(text("x"), 7)), "messages[1].content[1]"),
    ((user({"type": "text", "text": 1}),), "messages[0].content[0].text"),
    ((user({"type": "hologram"}),), "messages[0].content[0]"),
    ((user({"type": "video_url", "video_url": {"url": "https://x/"}}),), "messages[0].content[0]"),
    ((user({"text": "no type"}),), "messages[0].content[0]"),
    ((CALL,), "messages[0].tool_calls[0].function.arguments"),
    (({"role": "assistant", "tool_calls": [1]},), "messages[0].tool_calls[0]"),
    (({"role": "assistant", "tool_calls": 1},), "messages[0].tool_calls"),
    ((old_call(name="f", arguments="{"),), "messages[0].function_call.arguments"),
    ((old_call(arguments="{}"),), "messages[0].function_call.name"),
    ((old_call(name="f\ufdd0"),), "messages[0].function_call.name"),
    (({"role": "assistant", "function_call": "f"},), "messages[0].function_call"),
    (({**old_call(name="f"), "tool_calls": [{"function": {"name": "f"}}]},), "messages[0]"),
    ((user(PICTURE, PICTURE, PICTURE),), "messages"),
    ((user(SOUND), user(SOUND)), "messages"),
]


@pytest.mark.parametrize(("messages", "param"), WRONG)
def test_what_is_wrong_is_named(messages, param):
    with pytest.raises(BadRequestError) as caught:
        read(*messages)
    assert caught.value.param == param


def test_the_limit_is_told():
    with pytest.raises(BadRequestError, match="3 parts of type image, 2 are allowed"):
        read(user(PICTURE, PICTURE), user(PICTURE))


def test_media_the_model_does_not_take_is_refused_by_part():
    with pytest.raises(BadRequestError, match="takes no audio") as caught:
        read(user(text("x"), SOUND), modalities=("image",))
    assert caught.value.param == "messages[0].content[1]"
