"""Structured outputs of a real server: the answer conforms to its grammar."""

from __future__ import annotations

import asyncio
import json
import re

import openai
import pytest

from tests.support.drawing import ask, picture

WILD = {"temperature": 5.0, "max_tokens": 120}
"""A temperature at which nano writes arbitrary text."""
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "shape": {"enum": ["circle", "square"]},
    },
    "required": ["x", "shape"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def answers(client, n=6, **fields):
    extra = {key: fields.pop(key) for key in list(fields) if key == "structured_outputs"}
    answer = client.chat.completions.create(
        model="nano", messages=ask("Say apple."), n=n, extra_body=extra, **{**WILD, **fields}
    )
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    return [choice.message.content for choice in answer.choices]


def test_a_choice_a_regex_and_a_schema_always_hold(client):
    choices = ["zebra", "yak", "a red circle"]
    assert set(answers(client, structured_outputs={"choice": choices})) <= set(choices)
    for text in answers(client, structured_outputs={"regex": r"[0-9]{3}-[a-c]{2}"}):
        assert re.fullmatch(r"\d{3}-[abc]{2}", text)
    for text in answers(client, response_format=SCHEMA):
        point = json.loads(text)
        assert 0 <= point["x"] <= 99
        assert point["shape"] in ("circle", "square")


def test_without_a_form_they_do_not_hold(client):
    """The negative control: without a grammar nano writes neither numbers nor JSON."""
    free = client.chat.completions.create(model="nano", messages=ask("Say apple."), n=6, **WILD)
    for choice in free.choices:
        assert not re.fullmatch(r"\d{3}-[abc]{2}", choice.message.content)
        with pytest.raises(ValueError, match=r".*"):
            json.loads(choice.message.content)


def test_what_the_model_knows_decides_among_what_is_allowed(client):
    """A grammar only removes tokens: the picture still decides among the others."""
    for colour in ("red", "blue"):
        answer = client.chat.completions.create(
            model="nano",
            messages=ask(picture((colour, "square")), "What color is the square?"),
            extra_body={"structured_outputs": {"choice": ["red", "green", "blue"]}},
            logprobs=True,
        )
        assert answer.choices[0].message.content == colour
        spelled = answer.choices[0].logprobs.content
        assert "".join(entry.token for entry in spelled).startswith(colour)


def test_a_stream_with_a_stop_string_conforms_up_to_it(client):
    stream = client.chat.completions.create(
        model="nano", messages=ask("Say apple."), response_format=SCHEMA, stop=['"shape"'],
        stream=True, **WILD,
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert re.fullmatch(r'\{\s*"x"\s*:\s*\d+\s*,\s*', text)


def test_the_same_seed_says_the_same_and_the_prefix_is_reused(client):
    def one():
        return client.chat.completions.create(
            model="nano", messages=ask("Say apple. " * 40), response_format=SCHEMA, seed=3, **WILD
        )

    first, second = one(), one()
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_many_at_once_each_keep_to_their_own(server):
    async def one(client, number):
        answer = await client.chat.completions.create(
            model="nano", messages=ask(f"Say apple {number}."), **WILD,
            extra_body={"guided_regex": f"{number}[xyz]{{{number + 1}}}"},
        )  # fmt: skip
        return re.fullmatch(rf"{number}[xyz]{{{number + 1}}}", answer.choices[0].message.content)

    async def all_of_them():
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, number) for number in range(12)))

    assert all(asyncio.run(all_of_them()))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"type": "wrong"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"guided_regex": "a(?=b)"}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
         "response_format.json_schema.schema"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_is_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="nano", messages=ask("hi"), extra_body=fields)
    assert caught.value.param == param
