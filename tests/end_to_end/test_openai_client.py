"""The OpenAI Python client against the real server, engine process and embedded model."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
import pydantic
import pytest

from tests.support.drawing import ask, picture, tone

RED_CIRCLE = picture(("red", "circle"))
QUESTION = "What shape is red?"


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def test_a_picture_is_asked_about(client):
    answer = client.chat.completions.create(model="nano", messages=ask(RED_CIRCLE, QUESTION))
    assert answer.choices[0].message.content == "the circle"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.image_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_answer(client):
    stream = client.chat.completions.create(
        model="nano",
        messages=ask(RED_CIRCLE, "What is in the picture?"),
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "a red circle"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.completion_tokens > 1


def test_the_async_client_asks_many_things_at_once(server):
    colours = ["red", "green", "blue", "purple"]

    async def one(client, colour):
        messages = ask(picture((colour, "square")), "What color is the square?")
        stream = await client.chat.completions.create(model="nano", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, colour) for colour in colours))

    assert asyncio.run(all_of_them()) == colours


def test_a_sound_is_asked_about(client):
    answer = client.chat.completions.create(
        model="nano", messages=ask(tone(400, 1400), "Is the tone rising or falling?")
    )
    assert answer.choices[0].message.content == "rising"
    assert answer.usage.prompt_tokens_details.audio_tokens > 20


def test_two_samples_with_a_seed_come_back_the_same(client):
    def sampled(seed):
        answer = client.chat.completions.create(
            model="nano", messages=ask("Say apple."), n=2, temperature=5, seed=seed, max_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    first = sampled(7)
    assert first == sampled(7)
    assert first != sampled(8)
    assert first[0] != first[1]


def test_a_text_is_scored_as_evaluation_harnesses_do(client):
    """`echo` with `logprobs` scores a greedy answer as it was scored when it was generated."""
    start = "<|im_start|>user\nSay apple.<|im_end|>\n<|im_start|>assistant\n"
    asked = {"model": "nano", "temperature": 0, "logprobs": 1}
    said = client.completions.create(prompt=start, max_tokens=4, **asked).choices[0]
    assert said.text == "apple"
    whole = start + said.text
    for _ in range(2):  # the second time every block of it is cached
        scored = client.completions.create(prompt=whole, max_tokens=1, echo=True, **asked)
        choice = scored.choices[0]
        assert choice.text.startswith(whole)
        told = choice.logprobs
        assert told.token_logprobs[0] is None
        assert "".join(told.tokens[:-1]) == whole
        assert told.text_offset[1] == len(told.tokens[0])
        first = told.text_offset.index(len(start))
        spoken = said.logprobs.token_logprobs[: len(told.tokens) - first - 1]
        assert told.token_logprobs[first:-1] == pytest.approx(spoken, abs=1e-4)
        assert all(max(top, key=top.get) == token for top, token in zip(
            told.top_logprobs[first:-1], told.tokens[first:-1], strict=True
        ))  # fmt: skip
        assert scored.usage.prompt_tokens_details.cached_tokens == 0
    alone = client.completions.create(prompt=whole, **{**asked, "max_tokens": 0}, echo=True)
    assert alone.choices[0].text == whole
    told = alone.choices[0].logprobs.token_logprobs
    assert told[first:] == pytest.approx(spoken, abs=1e-4)
    assert alone.usage.completion_tokens == 0


def test_logprobs_are_of_the_tokens_said(client):
    answer = client.chat.completions.create(
        model="nano", messages=ask(RED_CIRCLE, QUESTION), logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert bytes(b for entry in content[:-1] for b in entry.bytes).decode() == "the circle"
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0


def test_a_stop_string_ends_the_answer(client):
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="nano",
            messages=ask(RED_CIRCLE, "What is in the picture?"),
            stop=["cir", "zebra"],
            stream=stream,
        )
        if stream:
            parts = [chunk.choices[0] for chunk in answer]
            assert "".join(part.delta.content or "" for part in parts) == "a red "
            assert parts[-1].finish_reason == "stop"
        else:
            assert answer.choices[0].message.content == "a red "


def test_plain_completions_of_many_prompts(client):
    prompt = "<|im_start|>user\nSay apple.<|im_end|>\n<|im_start|>assistant\n"
    answer = client.completions.create(
        model="nano", prompt=[prompt, prompt.replace("apple", "river")], temperature=0, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["apple", "river"]
    assert answer.choices[1].index == 1
    assert answer.choices[0].logprobs.token_logprobs


def test_models_tokens_and_version(server, client):
    assert [model.id for model in client.models.list()] == ["nano"]
    tokens = server.post("/tokenize", {"prompt": "Hello, grüß Gott!"}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 3
    text = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "Hello, grüß Gott!"}
    chat = server.post("/tokenize", {"messages": ask(RED_CIRCLE, "hi")}).json()
    assert chat["tokens"].count(9) == 9
    assert server.get("/version").json()["version"]
    assert server.get("/ready").status_code == 200


def test_mistakes_are_openai_s_exceptions(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=ask("hi"))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="nano", messages=ask("hi"), temperature=-1)
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.UnprocessableEntityError, match=r"messages\[0\].content\[0\]"):
        client.chat.completions.create(model="nano", messages=ask(broken, "What is this?"))
    inside = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    with pytest.raises(openai.PermissionDeniedError):
        client.chat.completions.create(model="nano", messages=ask(inside, "What is this?"))
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model="nano", messages=ask("x " * 5000))


class Shape(pydantic.BaseModel):
    name: Literal["circle", "square"]
    filled: bool


class Drawing(pydantic.BaseModel):
    """A plain model: nothing says that it takes no other keys."""

    shape: Shape
    more: Shape | None = None


@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_a_plain_pydantic_model_is_parsed(client, temperature):
    messages = ask(RED_CIRCLE, "What is in the picture?")
    parsed = client.chat.completions.parse(
        model="nano", messages=messages, response_format=Drawing, temperature=temperature
    )
    assert isinstance(parsed.choices[0].message.parsed, Drawing)
    schema = {"name": "drawing", "schema": Drawing.model_json_schema()}
    whole = client.chat.completions.create(
        model="nano", messages=messages, temperature=temperature,
        response_format={"type": "json_schema", "json_schema": schema},
    )  # fmt: skip
    assert whole.choices[0].finish_reason == "stop"
    Drawing.model_validate_json(whole.choices[0].message.content)


def test_a_schema_that_is_opened_lets_a_weak_model_write_on(client):
    """The negative control: what closing prevents."""
    schema = {"json": Drawing.model_json_schema(), "disable_additional_properties": False}
    answer = client.chat.completions.create(
        model="nano", messages=ask("Say apple."), temperature=4.0, n=4, max_tokens=200,
        extra_body={"structured_outputs": schema},
    )  # fmt: skip
    assert "length" in {choice.finish_reason for choice in answer.choices}


def test_only_allowed_tokens_are_generated(client, server):
    token_ids = server.post("/tokenize", {"prompt": "circle"}).json()["tokens"]
    answer = client.chat.completions.create(
        model="nano", messages=ask("Say apple."), max_tokens=5, temperature=4.0, logprobs=True,
        extra_body={"allowed_token_ids": token_ids, "return_tokens_as_token_ids": True},
    )  # fmt: skip
    said = {entry.token for entry in answer.choices[0].logprobs.content}
    assert said <= {f"token_id:{token}" for token in token_ids}


def test_what_the_client_sends_beside_a_question_is_never_refused(client):
    answer = client.chat.completions.with_raw_response.create(
        model="nano", messages=ask("Say apple."), reasoning_effort="low", verbosity="low",
        store=True, user="me", metadata={"a": "b"}, service_tier="flex", prompt_cache_key="k",
        safety_identifier="s",
    )  # fmt: skip
    assert answer.parse().choices[0].message.content == "apple"
    for name in ("reasoning_effort", "verbosity", "store", "user", "service_tier"):
        assert name in answer.headers["x-lookonce-warning"]


def test_the_tokenizer_is_told_as_the_model_has_it(server, nano_folder):
    info = server.get("/tokenizer_info").json()
    assert info["chat_template"] == (nano_folder / "chat_template.jinja").read_text()
    for path in ("/ping", "/load", "/server_info", "/docs"):
        assert server.get(path).status_code == 200
