"""`/v1/responses` on doubles: items in, items and events out, with tools and logprobs."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lookonce.errors import RequestFailedError
from lookonce.frontend.reasoning import ReasoningFormat, ReasoningReader
from lookonce.frontend.responses import TokenEntry
from lookonce.frontend.tools.calls import (
    Function,
    Tool,
    content_of,
    read_tools,
    reader_of,
    tool_calling,
)
from lookonce.frontend.tools.formats import choose_dialect
from lookonce.frontend.tools.harmony import MARKERS
from lookonce.frontend.tools.parser import ContentText
from lookonce.server.routes.responses_api.input import read_input
from lookonce.server.routes.responses_api.route import LogprobsReader
from tests.support.server.harmony import CALL as TO_FUNCTION
from tests.support.server.harmony import FINAL, TEMPLATE, THOUGHT
from tests.support.server.qwen3_coder import BARE, UNENDED
from tests.support.server.site import response_events
from tests.support.server.tool_calls import CALL, with_tools

URL = "/v1/responses"
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


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
            case "reasoning_text.delta":
                items[index]["content"][0]["text"] += data["delta"]
            case "reasoning_text.done":
                assert items[index]["content"][0]["text"] == data["text"]
            case "content_part.done":
                assert items[index]["content"] == [data["part"]]
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
    "a thought": "<think>Hm.</think>",
    "a thought and words": "<think>Hm.</think>\nIt is sunny.",
    "a thought and a call": f"<think>Hm.</think>{CALL}",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_the_events_tell_what_the_response_holds(on_site, answer):
    async def scenario(site):
        with_tools(site, answer)
        site.services.reasoning = ReasoningFormat("<think>", "</think>")
        body = {"input": "hi", "tools": [WEATHER], "max_output_tokens": 195}
        whole = (await site.client.post(URL, json=body)).json()
        response = await site.client.post(URL, json={**body, "stream": True})
        found = response_events(response.text)
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
        found = response_events((await site.client.post(URL, json={**body, "stream": True})).text)
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
            {"type": "reasoning", "id": "rs_2", "summary": [],
             "content": [{"type": "reasoning_text", "text": "Once more."}]},
            {"type": "function_call", "call_id": "c3", "name": "w", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c3",
             "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        ],
        "Be brief.",
    )  # fmt: skip
    roles = ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert [message["role"] for message in read.messages] == roles
    assert [call["id"] for call in read.messages[2]["tool_calls"]] == ["c1", "c2"]
    assert read.messages[2]["content"] == [{"type": "text", "text": "Let me look."}]
    assert read.messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "sun"}
    thoughts = [message.get("reasoning_content") for message in read.messages]
    assert thoughts == [None, None, None, None, "Once more.", None]
    assert read.renamed("messages[2].tool_calls[1].function.name") == "input[3].name"
    assert read.renamed("messages[3].content") == "input[4].output"
    assert read.renamed("messages[5].content[1].text") == "input[8].output[1].text"
    assert read.renamed("messages") == "input"
    assert read.renamed("mm_processor_kwargs") == "mm_processor_kwargs"


def test_a_failure_on_the_way_is_an_event_of_its_own(on_site):
    async def scenario(site):
        site.engine.failure = RequestFailedError("it broke")
        response = await site.client.post(URL, json={"input": "hi", "stream": True})
        found = response_events(response.text)
        assert found[-1][0] == "error"
        assert found[-1][1]["message"] == "it broke"
        assert "[DONE]" not in response.text

    on_site(scenario)


TEMPLATES = {
    "none": None,
    "hermes": "tools <tool_call>",
    "qwen3_coder": "tools <tool_call><function=name><parameter=a>",
    "llama3": "tools",
    "mistral": "tools [TOOL_CALLS]",
    "harmony": "tools " + TEMPLATE,
    "thought": None,
    "thought, then hermes": "tools <tool_call>",
    "opened thought": "tools <tool_call>",
}
TEXTLESS = 7


def reader(kind):
    if "thought" in kind:
        start = "in thought" if kind == "opened thought" else "free"
        after = reader("none" if kind == "thought" else "hermes")
        return ReasoningReader(ReasoningFormat("<think>", "</think>"), start, after)
    if kind == "none":
        return reader_of(None)
    asked = read_tools([Tool(type="function", function=Function(name="now"))], None, None)
    name = "llama3" if kind == "llama3" else "auto"
    return tool_calling(asked, choose_dialect(name, TEMPLATES[kind], {})).reader()


def scored_reader(kind):
    return LogprobsReader(reader(kind), textless={TEXTLESS}, scored=True)


def entry(token):
    return TokenEntry(token.decode(errors="replace"), -0.5, list(token), [])


def read(kind, tokens, pieces):
    """Content and its tokens; `pieces`: of each, how many tokens it has and its text."""
    scored, told, start = scored_reader(kind), [], 0
    for number, (count, text) in enumerate(pieces, 1):
        given = tokens[start : start + count]
        start += count
        ids = [TEXTLESS if token == b"<textless>" else 0 for token in given]
        scored.note(ids, [entry(token) for token in given])
        told += scored.push(text, last=number == len(pieces))
    said = [(each.text, entries) for each, entries in told if isinstance(each, ContentText)]
    assert all(not entries for each, entries in told if not isinstance(each, ContentText))
    return "".join(text for text, _ in said), [bytes(e.bytes) for _, es in said for e in es]


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<think>Hm.</think>", CALL, BARE, UNENDED, THOUGHT, FINAL,
     TO_FUNCTION, *MARKERS, "<tool_call>", "</tool_call>",
     "[TOOL_CALLS]", '{"name": "now", "parameters": {}}', ";", "\n", " ", " to", "words", "ü😀",
     "<", "<tool_", "</", "<|", '{"name":', "}", "now", "[ARGS]{}"]
)  # fmt: skip


KINDS = st.sampled_from(sorted(TEMPLATES))


@settings(max_examples=200, deadline=None)
@given(kind=KINDS, fragments=st.lists(FRAGMENTS, max_size=8), data=st.data())
def test_it_never_matters_how_tokens_and_text_come(kind, fragments, data):
    text = "".join(fragments)
    raw = text.encode()
    places = st.integers(0, len(raw))
    ends = sorted({*data.draw(st.sets(places, max_size=20)), len(raw)})
    tokens = [raw[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    tokens += [b"<textless>"] * data.draw(st.integers(0, 1))
    whole = read(kind, tokens, [(len(tokens), text)])
    pieces, count, said = [], 0, 0
    while count < len(tokens):
        more = data.draw(st.integers(1, len(tokens) - count))
        count += more
        known = len(raw[: sum(map(len, tokens[:count]))].decode(errors="ignore"))
        upto = data.draw(st.integers(min(said, known), known))
        upto = len(text) if count == len(tokens) else max(said, min(upto, len(text)))
        pieces.append((more, text[said:upto]))
        said = upto
    assert read(kind, tokens, pieces or [(0, "")]) == whole


@settings(max_examples=200, deadline=None)
@given(kind=KINDS, fragments=st.lists(FRAGMENTS, max_size=8))
@example(kind="harmony", fragments=[CALL, "<|end|>", " to", "<|end|>"])
def test_the_tokens_of_words_are_their_characters(kind, fragments):
    text = "".join(fragments)
    words, tokens = read(kind, [c.encode() for c in text], [(len(text), text)])
    said = b"".join(tokens).decode()
    if kind == "harmony":  # which puts line breaks between messages
        words, said = words.replace("\n", ""), said.replace("\n", "")
    assert said == words
    plain = reader(kind)
    assert plain is None or content_of(plain.push(text, last=True)).replace("\n", "") == (
        words.replace("\n", "")
    )


def test_each_text_has_its_own_tokens():
    text = f"Hm.{CALL} Yes."
    scored = scored_reader("hermes")
    scored.note([0] * len(text), [entry(c.encode()) for c in text])
    told = scored.push(text, last=True)
    said = [(each.text, entries) for each, entries in told if isinstance(each, ContentText)]
    assert [text for text, _ in said] == ["Hm.", " Yes."]
    assert ["".join(e.token for e in entries) for _, entries in said] == ["Hm.", " Yes."]
    assert len(told) == 3


# --- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "template", "said"),
    [
        (THOUGHT + FINAL, TEMPLATE, ["Hello!"]),
        (THOUGHT, TEMPLATE, [""]),
        (f"Hm. {CALL} < Done.", "{{ tools }}<tool_call>", ["Hm.", " < Done."]),
        ("Tschüß!", "{{ tools }}<tool_call>", ["Tschüß!"]),
    ],
)
@pytest.mark.parametrize("stop", [None, "#" * 9])
def test_a_response_has_the_log_probabilities_of_what_it_says(
    on_site, answer, template, said, stop
):
    async def scenario(site):
        with_tools(site, answer, template)
        tools = [{"type": "function", "name": "get_weather"}]
        body = {"input": "hi", "tools": tools, "top_logprobs": 1, "max_output_tokens": 195}
        body["stop"] = stop
        items = (await site.client.post(URL, json=body)).json()["output"]
        parts = [item["content"][0] for item in items if item["type"] == "message"]
        assert [part["text"] for part in parts] == said
        assert [spelled(part["logprobs"]) for part in parts] == said
        found = response_events((await site.client.post(URL, json={**body, "stream": True})).text)
        deltas = [data for name, data in found if name == "response.output_text.delta"]
        told = [entry for data in deltas for entry in data["logprobs"]]
        done = [data for name, data in found if name == "response.output_text.done"]
        assert [data["logprobs"] for data in done] == [part["logprobs"] for part in parts]
        assert told == [entry for part in parts for entry in part["logprobs"]]

    on_site(scenario)


def spelled(logprobs):
    return b"".join(bytes(entry["bytes"]) for entry in logprobs).decode()
