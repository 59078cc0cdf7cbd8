"""Thoughts of models that think between markers, on doubles: chats, responses and messages."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from lookonce.frontend.reasoning import choose_reasoning
from tests.support.server.site import events
from tests.support.server.tool_calls import CALL, CLOCK, with_tools

THOUGHT = "<think>\nHm.\n</think>"
HELLO = f"{THOUGHT}\n\nHello!"
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OPENED = "hi\n<think>\n"
"""A prompt whose end opens a thought, and one whose end has an empty one."""
NOT_THINKING = "hi\n<think>\n\n</think>\n\n"


def thinking(site, answer=HELLO):
    site.services.reasoning = choose_reasoning("auto", "…</think>", {})
    site.engine.answer = answer


def joined(chunks, name):
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return [delta[name] for delta in deltas if delta.get(name)]


@pytest.mark.parametrize(
    ("prompt", "answer", "reasoning", "content", "num_tokens"),
    [
        ("hi", HELLO, "Hm.", "Hello!", len(THOUGHT)),
        ("hi", "Hello!", None, "Hello!", 0),
        ("hi", "<think>Hm.", "Hm.", "", 10),
        (OPENED, "Hm.\n</think>\n\nHello!", "Hm.", "Hello!", 12),
        (NOT_THINKING, "Hello!", None, "Hello!", 0),
        (NOT_THINKING, "a <think>b</think>", None, "a <think>b</think>", 0),
    ],
)
def test_a_thought_is_no_content(on_site, prompt, answer, reasoning, content, num_tokens):
    async def scenario(site):
        thinking(site, answer)
        body = (await site.chat(prompt, max_tokens=100)).json()
        message = body["choices"][0]["message"]
        assert message["content"] == content
        assert message.get("reasoning") == message.get("reasoning_content") == reasoning
        details = {"reasoning_tokens": num_tokens}
        assert body["usage"]["completion_tokens_details"] == details
        assert {"<think>", "</think>"} <= set(site.renderer.kept)
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = await site.chat(prompt, max_tokens=100, stream=True, stream_options=options)
        chunks = events(response.text)
        assert "".join(joined(chunks, "content")) == content
        parts = joined(chunks, "reasoning")
        assert parts == joined(chunks, "reasoning_content")
        assert "".join(parts) == (reasoning or "")
        assert not reasoning or len(parts) > 1
        counts = [c["usage"]["completion_tokens_details"]["reasoning_tokens"] for c in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == num_tokens

    on_site(scenario)


@pytest.mark.parametrize("asked", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_thoughts_are_left_out_where_that_is_asked(on_site, asked):
    async def scenario(site):
        thinking(site)
        body = (await site.chat(max_tokens=100, **asked)).json()
        assert body["choices"][0]["message"] == {
            "role": "assistant", "content": "Hello!", "refusal": None
        }  # fmt: skip
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT)
        chunks = events((await site.chat(max_tokens=100, stream=True, **asked)).text)
        assert not joined(chunks, "reasoning")
        assert "".join(joined(chunks, "content")) == "Hello!"
        assert len(chunks) == len("Hello!") + 2

    on_site(scenario)


def test_without_a_format_nothing_is_told_apart_or_counted(on_site):
    async def scenario(site):
        site.engine.answer = HELLO
        body = (await site.chat(max_tokens=100)).json()
        assert body["choices"][0]["message"]["content"] == HELLO
        assert "completion_tokens_details" not in body["usage"]

    on_site(scenario)


def test_a_call_within_a_thought_is_none(on_site):
    async def scenario(site):
        with_tools(site)
        thinking(site, f"<think>Shall I {CALL}?</think>\n{NOW}")
        choice = (await site.chat(tools=[CLOCK], max_tokens=195)).json()["choices"][0]
        assert choice["message"]["reasoning"] == f"Shall I {CALL}?"
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["now"]
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"

    on_site(scenario)


@pytest.mark.parametrize(
    ("prompt", "before"), [("hi", "(\"<think>\""), (OPENED, "thought SPACES"), (NOT_THINKING, "")]
)  # fmt: skip
@pytest.mark.parametrize("form", ["schema", "call"])
def test_a_grammar_begins_after_the_thought(on_site, prompt, before, form):
    async def scenario(site):
        with_tools(site)
        thinking(site)
        schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
        if form == "schema":
            await site.chat(prompt, response_format=schema)
        else:
            await site.chat(prompt, tools=[CLOCK], tool_choice="required")
        grammar = site.engine.samplings[-1].grammar
        assert grammar.before.startswith(f"start: {before}" if before else "")
        assert bool(grammar.before) == bool(before)

    on_site(scenario)


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [("<think>I", "Hm.", "Hello!"), ("Hel", None, "Hm.</think>Hello!")],
)
def test_an_answer_that_was_begun_goes_on_where_it_stood(on_site, begun, reasoning, content):
    async def scenario(site):
        thinking(site, "Hm.</think>Hello!")
        messages = [
            {"role": "user", "content": "<think>"},
            {"role": "assistant", "content": [{"type": "text", "text": begun}]},
        ]
        body = {"messages": messages, "max_tokens": 60, "add_generation_prompt": False}
        body["continue_final_message"] = True
        answer = await site.client.post("/v1/chat/completions", json=body)
        message = answer.json()["choices"][0]["message"]
        assert (message.get("reasoning"), message["content"]) == (reasoning, content)

    on_site(scenario)


# --- /v1/messages -------------------------------------------------------------------------------


def test_a_message_has_thinking_blocks(on_site):
    async def scenario(site):
        thinking(site)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
        blocks = (await site.client.post("/v1/messages", json=body)).json()["content"]
        assert blocks == [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Hello!"},
        ]
        text = (await site.client.post("/v1/messages", json={**body, "stream": True})).text
        assert text.count('"type":"thinking_delta"') == len("Hm.")
        assert text.count("event: content_block_start") == 2
        assert text.count("event: content_block_stop") == 2
        assert "think>" not in text

    on_site(scenario)


# --- OpenAI's client ----------------------------------------------------------------------------


def client_of(site):
    return AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=site.client)


def test_openai_s_client_reads_thoughts_of_chats(on_site):
    async def scenario(site):
        thinking(site)
        asked = {"model": "recital", "messages": [{"role": "user", "content": "hi"}]}
        whole = await client_of(site).chat.completions.create(**asked, max_tokens=100)
        assert whole.choices[0].message.content == "Hello!"
        assert whole.choices[0].message.reasoning_content == "Hm."
        assert whole.usage.completion_tokens_details.reasoning_tokens == len(THOUGHT)
        stream = await client_of(site).chat.completions.create(**asked, max_tokens=100, stream=True)
        told = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(getattr(delta, "reasoning", "") for delta in told) == "Hm."
        assert "".join(delta.content or "" for delta in told) == "Hello!"

    on_site(scenario)


def test_openai_s_client_reads_thoughts_of_responses(on_site):
    async def scenario(site):
        thinking(site)
        asked = {"model": "recital", "input": "hi", "max_output_tokens": 100}
        whole = await client_of(site).responses.create(**asked)
        thought, message = whole.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
        assert message.content[0].text == whole.output_text == "Hello!"
        assert whole.usage.output_tokens_details.reasoning_tokens == len(THOUGHT)
        async with client_of(site).responses.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds.count("response.reasoning_text.delta") == len("Hm.")
        assert final.output[0].content[0].text == "Hm."
        assert final.output_text == "Hello!"
        asked["input"] = [item.model_dump(exclude_none=True) for item in final.output]
        asked["input"].append({"role": "user", "content": "and?"})
        assert (await client_of(site).responses.create(**asked)).output_text == "Hello!"

    on_site(scenario)
