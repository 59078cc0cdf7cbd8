"""`/v1/responses` on doubles: items in, items and events out, tools among them."""

from __future__ import annotations

import json

import pytest

from lookonce.errors import RequestFailedError
from lookonce.server.routes.responses_api.input import read_input
from tests.server.test_tools import CALL, with_tools

URL = "/v1/responses"
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


def events(text):
    """(name, data) of every event of a stream, in order and numbered."""
    found = []
    for block in text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert all(data["type"] == name for name, data in found)
    return found


def rebuilt(found):
    """The output items, put together from their events alone."""
    items = {}
    for name, data in found:
        index = data.get("output_index")
        match name.removeprefix("response."):
            case "output_item.added":
                assert index == len(items)
                items[index] = data["item"]
            case "content_part.added":
                items[index]["content"].append(data["part"])
            case "output_text.delta":
                items[index]["content"][0]["text"] += data["delta"]
            case "output_text.done":
                assert items[index]["content"][0]["text"] == data["text"]
            case "function_call_arguments.delta":
                items[index]["arguments"] += data["delta"]
            case "function_call_arguments.done":
                assert items[index]["arguments"] == data["arguments"]
            case "output_item.done":
                assert {**items[index], "status": data["item"]["status"]} == data["item"]
                items[index] = data["item"]
    return list(items.values())


ANSWERS = {
    "words": "It is sunny.",
    "a call": CALL,
    "words, then two calls": "Let me look.\n" + CALL + "\n" + CALL.replace("Bern", "Rom"),
    "nothing": "",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_the_events_tell_what_the_response_holds(on_site, answer):
    async def scenario(site):
        with_tools(site, answer)
        body = {"input": "hi", "tools": [WEATHER], "max_output_tokens": 195}
        whole = (await site.client.post(URL, json=body)).json()
        response = await site.client.post(URL, json={**body, "stream": True})
        found = events(response.text)
        last = found[-1][1]["response"]
        assert found[0][1]["response"]["status"] == "in_progress"
        assert rebuilt(found) == last["output"]
        assert nameless(last["output"]) == nameless(whole["output"])
        assert last["status"] == whole["status"] == "completed"
        assert last["usage"] == whole["usage"]

    on_site(scenario)


@pytest.mark.parametrize("template", ["<tool_call>", "[TOOL_CALLS]"])
@pytest.mark.parametrize("held", [1, 3, 9, 16, 23])
def test_words_and_calls_of_one_piece_are_told_in_their_order(on_site, template, held):
    """What may become a stop string is held back, so the answer's end comes as one piece."""

    async def scenario(site):
        call = CALL if "<" in template else '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}'
        with_tools(site, f"Hm. {call}. Done.", "{{ tools }}" + template)
        body = {"input": "hi", "tools": [WEATHER], "max_output_tokens": 195, "stop": "#" * held}
        whole = (await site.client.post(URL, json=body)).json()
        found = events((await site.client.post(URL, json={**body, "stream": True})).text)
        assert rebuilt(found) == found[-1][1]["response"]["output"]
        assert nameless(found[-1][1]["response"]["output"]) == nameless(whole["output"])
        before, called, after = whole["output"]
        assert before["content"][0]["text"].strip() == "Hm."
        assert called["arguments"] == '{"city": "Bern"}'
        assert after["content"][0]["text"] == ". Done."

    on_site(scenario)


def nameless(items):
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def test_calls_are_items_of_their_own(on_site):
    async def scenario(site):
        with_tools(site, ANSWERS["words, then two calls"])
        body = {"input": "hi", "tools": [WEATHER], "max_output_tokens": 195}
        words, *calls = (await site.client.post(URL, json=body)).json()["output"]
        assert words["content"][0]["text"] == "Let me look."
        assert [json.loads(call["arguments"])["city"] for call in calls] == ["Bern", "Rom"]
        assert {call["type"] for call in calls} == {"function_call"}
        assert len({call["call_id"] for call in calls}) == 2
        asked = {"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}
        assert site.renderer.options["tools"] == [asked]

    on_site(scenario)


def test_items_become_messages():
    read = read_input(
        [
            {"role": "user", "content": "Weather?"},
            {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1",
             "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "w", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "w", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c3", "name": "w", "arguments": "{}"},
        ],
        "Be brief.",
    )  # fmt: skip
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in read.messages] == roles
    assert [call["id"] for call in read.messages[2]["tool_calls"]] == ["c1", "c2"]
    assert read.messages[2]["content"] == [{"type": "text", "text": "Let me look."}]
    assert read.messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "sun"}
    assert read.renamed("messages[3].content[1].text") == "input[4].content[1].text"
    assert read.renamed("messages") == "input"
    assert read.renamed("mm_processor_kwargs") == "mm_processor_kwargs"


def test_a_failure_on_the_way_is_an_event_of_its_own(on_site):
    async def scenario(site):
        site.engine.failure = RequestFailedError("it broke")
        response = await site.client.post(URL, json={"input": "hi", "stream": True})
        found = events(response.text)
        assert found[-1][0] == "error"
        assert found[-1][1]["message"] == "it broke"
        assert "[DONE]" not in response.text

    on_site(scenario)
