"""`/v1/responses` through the OpenAI client, sync, async and streamed, against the real server."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.support.drawing import image_part, picture

QUESTION = "What shape is red?"
SCHEMA = {
    "type": "json_schema",
    "name": "count",
    "schema": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    },
}


def look(text, colour="red"):
    """A picture and a question, as input items."""
    url = image_part(picture((colour, "circle")))["image_url"]["url"]
    shown = {"type": "input_image", "image_url": url, "detail": "auto"}
    return [{"role": "user", "content": [shown, {"type": "input_text", "text": text}]}]


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def test_a_text_and_a_picture_are_answered(client):
    answer = client.responses.create(model="nano", input="Say apple.")
    assert answer.output_text == "apple"
    assert (answer.object, answer.status, answer.error) == ("response", "completed", None)
    assert answer.id.startswith("resp_")
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    seen = client.responses.create(model="nano", input=look(QUESTION))
    assert seen.output_text == "the circle"
    assert seen.usage.input_tokens_details.model_extra["image_tokens"] == 9
    assert seen.usage.total_tokens == seen.usage.input_tokens + seen.usage.output_tokens
    again = client.responses.create(model="nano", input=look(QUESTION))
    assert again.usage.input_tokens_details.cached_tokens > 0


def test_a_stream_has_every_event_in_its_order(client):
    stream = list(client.responses.create(model="nano", input=look(QUESTION), stream=True))
    kinds = [event.type for event in stream]
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    deltas = [event for event in stream if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", *["response.output_text.delta"] * len(deltas),
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == "the circle"
    created, last = stream[0].response, stream[-1].response
    assert (created.status, created.output) == ("in_progress", [])
    assert created.id == last.id
    assert last.output_text == "the circle"
    assert last.usage.output_tokens > 1


def test_the_client_s_own_stream_helper_follows(client):
    with client.responses.stream(model="nano", input="Say apple.") as stream:
        assert [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "apple"


def test_the_async_client_asks_many_things_at_once(server):
    async def one(client, colour):
        asked = look("What color is the circle?", colour)
        stream = await client.responses.create(model="nano", input=asked, stream=True)
        return [e async for e in stream][-1].response.output_text

    async def all_of_them():
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, c) for c in ("red", "green", "blue")))

    assert asyncio.run(all_of_them()) == ["red", "green", "blue"]


def test_a_conversation_is_items_and_instructions(client):
    first = client.responses.create(model="nano", input=look(QUESTION))
    items = [*look(QUESTION), *first.output, {"role": "user", "content": "What color is it?"}]
    follow = client.responses.create(model="nano", input=items, instructions="Be brief.")
    assert follow.output_text
    assert follow.instructions == "Be brief."


def test_a_schema_holds_whatever_the_temperature(client):
    answer = client.responses.create(
        model="nano", input="Say apple.", text={"format": SCHEMA}, temperature=1.9, top_p=0.99
    )
    assert 0 <= json.loads(answer.output_text)["n"] <= 9
    assert answer.text.format.name == "count"


def test_an_answer_that_is_cut_off_is_incomplete(client):
    answer = client.responses.create(model="nano", input=look(QUESTION), max_output_tokens=1)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *_, last = client.responses.create(
        model="nano", input=look(QUESTION), max_output_tokens=1, stream=True
    )
    assert last.type == "response.incomplete"


def test_logprobs_come_where_they_are_included(client):
    answer = client.responses.create(
        model="nano", input="Say apple.", include=["message.output_text.logprobs"], top_logprobs=2
    )
    logprobs = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs).startswith("apple")
    assert len(logprobs[0].top_logprobs) == 2


REFUSED = [
    (
        {"input": "x", "previous_response_id": "resp_1", "conversation": "conv_1"},
        "previous_response_id",
    ),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": "x", "include": ["file_search_call.results"]}, "include[0]"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function", "name": "f"}]}, None),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": 10**6}, "max_output_tokens"),
    ({"input": "x", "max_tokens": 5}, "max_tokens"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": []}, "input"),
    ({"input": ""}, None),
    ({"input": 5}, "input"),
    ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_what_is_not_served_is_refused_by_name(server, body, param):
    response = server.post("/v1/responses", body)
    if param is None:
        assert response.status_code == 200
    else:
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error


def test_mistakes_are_the_client_s_exceptions(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.responses.create(model="nano", input="x", temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-5", input="x")


def test_controls_that_the_model_has_no_place_for_are_named_and_ignored(server):
    with server.client() as client:
        answer = client.responses.with_raw_response.create(
            model="nano", input="Say apple.", reasoning={"effort": "low"}, text={"verbosity": "low"}
        )
    assert answer.headers["x-lookonce-warning"] == "ignored: reasoning.effort, text.verbosity"
    assert answer.parse().output_text == "apple"


NOT_STORED = [
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "conversation": {"id": "conv_1"}}, "conversation"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
]


@pytest.mark.parametrize(("body", "param"), NOT_STORED)
def test_what_is_not_stored_is_a_404_by_name(server, body, param):
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        response = server.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (404, param)


def test_a_stored_response_is_continued_from_the_cache(client):
    asked = look("What shape is violet?", "violet")
    first = client.responses.create(model="nano", input=asked)
    assert first.store
    follow = {
        "model": "nano",
        "input": "What color is it?",
        "previous_response_id": first.id,
    }
    count = client.responses.input_tokens.count(**follow)
    assert count.object == "response.input_tokens"
    events = list(
        client.responses.create(**follow, stream=True, extra_body={"reuse_receipt": True})
    )
    second = events[-1].response
    by_hand = client.responses.create(
        model="nano",
        input=[*asked, *first.output, {"role": "user", "content": "What color is it?"}],
        store=False,
    )
    assert second.output_text == by_hand.output_text
    assert second.usage.input_tokens == by_hand.usage.input_tokens == count.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    receipt = second.model_extra["reuse_receipt"]
    assert receipt["prefix_cached_tokens"] == second.usage.input_tokens_details.cached_tokens
    assert [each["encoder"] for each in receipt["items"]] != ["encoded"]
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [each.role for each in items] == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**follow)
    third = client.responses.create(
        model="nano",
        input=[{"type": "item_reference", "id": second.output[0].id}, *look(QUESTION)],
        previous_response_id=second.id,
    )
    assert third.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(by_hand.id)


def test_a_conversation_gets_what_is_asked_and_answered(client):
    hello = {"type": "message", "role": "user", "content": "Say apple."}
    conversation = client.conversations.create(items=[hello], metadata={"topic": "fruit"})
    answer = client.responses.create(
        model="nano", input=look(QUESTION), conversation=conversation.id, store=False
    )
    assert answer.conversation.id == conversation.id
    again = client.responses.create(
        model="nano", input="What color is it?", conversation={"id": conversation.id}
    )
    assert again.usage.input_tokens_details.cached_tokens > 0
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [each.role for each in items] == ["user", "user", "assistant", "user", "assistant"]
    assert items[0].content[0].text == "Say apple."
    assert items[2].id == answer.output[0].id
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "fruit"}
    updated = client.conversations.update(conversation.id, metadata={"topic": "shapes"})
    assert updated.metadata == {"topic": "shapes"}
    added = client.conversations.items.create(conversation.id, items=[hello])
    one = client.conversations.items.retrieve(added.data[0].id, conversation_id=conversation.id)
    assert one.content[0].text == "Say apple."
    client.conversations.items.delete(one.id, conversation_id=conversation.id)
    assert len(list(client.conversations.items.list(conversation.id))) == len(items)
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


@pytest.mark.parametrize("limit", ["0", "101", "1e1", "00509", "0050999999999999999999", "٥"])
def test_a_page_has_at_most_a_hundred_items(server, limit):
    for kind in ("responses/resp_1/input_items", "conversations/conv_1/items"):
        response = server.get(f"/v1/{kind}?limit={limit}")
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "limit"


def test_prompt_and_answer_come_as_text_and_tokens_where_asked(client):
    answer = client.responses.create(
        model="nano", input="Say apple.", extra_body={"enable_response_messages": True}
    )
    (prompt,), (said,) = (
        answer.model_extra[name] for name in ("input_messages", "output_messages")
    )
    assert "Say apple." in prompt["message"]
    assert len(prompt["tokens"]) == answer.usage.input_tokens
    assert said["message"] == "apple"
