"""Tools on doubles: what the model is told, what its words become, and what is refused."""

from __future__ import annotations

import json

import pytest

from lookonce.frontend.tools.formats import choose_dialect
from tests.support.server.site import events
from tests.support.server.tool_calls import CALL, CLOCK, QWEN, with_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_a_call_is_told_apart_from_words(on_site):
    async def scenario(site):
        with_tools(site, "Let me look.\n" + CALL)
        body = (await site.chat(tools=[WEATHER, CLOCK], max_tokens=150)).json()
        choice = body["choices"][0]
        (call,) = choice["message"].pop("tool_calls")
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me look."
        assert call.pop("id").startswith("call_")
        assert call == {
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
        }
        assert site.renderer.options["tools"] == [WEATHER, CLOCK]
        assert "<tool_call>" in site.renderer.kept

    on_site(scenario)


def test_without_a_call_the_answer_is_as_ever(on_site):
    async def scenario(site):
        with_tools(site, "It is sunny.")
        choice = (await site.chat(tools=[WEATHER])).json()["choices"][0]
        assert choice["message"] == {
            "role": "assistant", "content": "It is sunny.", "refusal": None
        }  # fmt: skip
        assert choice["finish_reason"] == "stop"
        assert site.engine.samplings[-1].grammar is None

    on_site(scenario)


def test_a_stream_tells_the_name_first_and_arguments_as_they_come(on_site):
    async def scenario(site):
        with_tools(site, CALL + "\n" + CALL.replace("Bern", "Rom"))
        response = await site.chat(tools=[WEATHER], stream=True, n=2, max_tokens=195)
        chunks = events(response.text)
        for index in range(2):
            choices = [
                c["choices"][0]
                for c in chunks
                if c["choices"] and c["choices"][0]["index"] == index
            ]
            deltas = [d for c in choices for d in c["delta"].get("tool_calls", [])]
            named = [d for d in deltas if "id" in d]
            assert [(d["index"], d["function"]["name"]) for d in named] == [
                (0, "get_weather"), (1, "get_weather"),
            ]  # fmt: skip
            assert named[0]["id"] != named[1]["id"]
            for number, city in enumerate(["Bern", "Rom"]):
                parts = [d["function"]["arguments"] for d in deltas if d["index"] == number]
                assert json.loads("".join(parts)) == {"city": city}
                assert len(parts) > 5
            assert not any(c["delta"].get("content") for c in choices)
            assert choices[-1]["finish_reason"] == "tool_calls"

    on_site(scenario)


def test_one_call_at_a_time_where_that_is_asked(on_site):
    async def scenario(site):
        with_tools(site, CALL + CALL)
        body = {"tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 195}
        assert len((await site.chat(**body)).json()["choices"][0]["message"]["tool_calls"]) == 1

    on_site(scenario)


def test_an_answer_cut_off_within_a_call_says_length(on_site):
    async def scenario(site):
        with_tools(site)
        choice = (await site.chat(tools=[WEATHER], max_tokens=60)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "B'

    on_site(scenario)


def test_no_tool_is_shown_nor_found_where_none_may_be_called(on_site):
    async def scenario(site):
        with_tools(site)
        body = (await site.chat(tools=[WEATHER], tool_choice="none", max_tokens=150)).json()
        assert body["choices"][0]["message"]["content"] == CALL
        assert "tools" not in site.renderer.options

    on_site(scenario)


def test_mistral_s_ids_have_nine_letters_and_its_marker_is_kept(on_site):
    async def scenario(site):
        template, special = "{{ tools }}[TOOL_CALLS]", ["[TOOL_CALLS]"]
        with_tools(site, '[TOOL_CALLS][{"name": "now", "arguments": {}}]', template, special)
        message = (await site.chat(tools=[CLOCK], max_tokens=99)).json()["choices"][0]["message"]
        assert len(message["tool_calls"][0]["id"]) == 9
        assert "[TOOL_CALLS]" in site.renderer.kept

    on_site(scenario)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_call_that_must_come_is_a_grammar_s_business(on_site, choice):
    async def scenario(site):
        with_tools(site)
        await site.chat(tools=[WEATHER, CLOCK], tool_choice=choice, max_tokens=150)
        grammar = site.engine.samplings[-1].grammar
        assert grammar.source.startswith('call: "<tool_call>"')
        assert "now" in grammar.source
        assert ("get_weather" in grammar.source) == (choice == "required")
        assert site.renderer.options["tools"] == [WEATHER, CLOCK]

    on_site(scenario)


def test_a_form_holds_for_an_answer_that_calls_nothing(on_site):
    async def scenario(site):
        with_tools(site)
        form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
        for choice, held in (("auto", True), ("required", False)):
            body = {"tools": [CLOCK], "tool_choice": choice, "response_format": form}
            assert (await site.chat(**body, max_tokens=150)).status_code == 200
            grammar = site.engine.samplings[-1].grammar
            assert ("integer" in grammar.source) == held
            params = [part.param for part in grammar.parts]
            assert params == ["response_format.json_schema.schema"] * held

    on_site(scenario)


REFUSED = [
    ({"tools": 5}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 5}}]},
     "tools[0].function.parameters"),
    ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
     "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "guided_regex": "[0-9]+"}, "guided_regex"),
    ({"tools": [CLOCK], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"functions": [{"name": "now"}], "tools": [CLOCK]}, "functions"),
    ({"function_call": {"name": "now"}}, "function_call"),
]  # fmt: skip


def test_what_cannot_be_is_refused_by_name(on_site):
    async def scenario(site):
        with_tools(site)
        for body, param in REFUSED:
            response = await site.chat(**body)
            assert response.status_code == 400, body
            assert response.json()["error"]["param"] == param, response.json()

    on_site(scenario)


def test_a_template_without_a_place_for_tools_refuses_them(on_site):
    async def scenario(site):
        with_tools(site, template="{{ messages }}")
        error = (await site.chat(tools=[CLOCK])).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")

    on_site(scenario)


def test_a_format_nobody_knows_refuses_tools_and_says_what_can_be_told(on_site):
    async def scenario(site):
        with_tools(site, template="{{ tools }} something new")
        assert (await site.chat()).status_code == 200
        assert (await site.chat(tools=[CLOCK], tool_choice="none")).status_code == 200
        error = (await site.chat(tools=[CLOCK])).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert "--tool-call-parser" in error["message"]

    on_site(scenario)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN, "hermes"),
        ("{{ tools }} something new", "unknown"),
        (QWEN + "{name}\\n<arg_key>", "unknown"),
        (QWEN + "<function=name><parameter=key>", "qwen3_coder"),
        (QWEN.replace("<", "<seed:") + "<function=name><parameter=key>", "unknown"),
        (QWEN + "<function=name>{", "unknown"),
        ("{{ tools }} <|channel|>commentary ", "harmony"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ('{{ tools }} "parameters": ipython', "llama3"),
    ],
)
def test_the_format_is_read_off_the_template(template, name):
    dialect = choose_dialect("auto", template, {})
    assert dialect is not None
    assert dialect.format.name == name
    assert choose_dialect("mistral", template, {}).format.name == "mistral"


# --- answers ----------------------------------------------------------------------------------


# --- harmony --------------------------------------------------------------------------------------

HARMONY = "{{ tools }}<|start|><|channel|><|message|>"
REASONING = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello!"
HARMONY_CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"


def test_a_chat_has_its_thoughts_beside_what_is_said(on_site):
    async def scenario(site):
        with_tools(site, REASONING + FINAL, HARMONY)
        message = (await site.chat(max_tokens=150)).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Hello!", "Hm.")
        assert "<|channel|>" in site.renderer.kept
        chunks = events((await site.chat(stream=True, max_tokens=150)).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        for field, whole in (("content", "Hello!"), ("reasoning_content", "Hm.")):
            parts = [delta.get(field, "") for delta in deltas]
            assert "".join(parts) == whole
            assert sum(map(bool, parts)) > 1

    on_site(scenario)


def test_a_call_on_its_channel_is_a_tool_call(on_site):
    async def scenario(site):
        with_tools(site, REASONING + HARMONY_CALL + "{}", HARMONY)
        choice = (await site.chat(tools=[CLOCK], max_tokens=190)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert choice["message"]["content"] is None
        assert site.renderer.options["tools"][0]["function"]["description"] == ""

    on_site(scenario)


def test_a_response_says_what_is_said_and_thinks_in_an_item_of_its_own(on_site):
    async def scenario(site):
        with_tools(site, REASONING + FINAL, HARMONY)
        body = {"input": "hi", "max_output_tokens": 150}
        thought, item = (await site.client.post("/v1/responses", json=body)).json()["output"]
        assert thought.pop("id").startswith("rs_")
        assert thought == {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        }
        assert item["content"][0]["text"] == "Hello!"

    on_site(scenario)


def test_channels_are_read_where_the_template_has_no_place_for_tools(on_site):
    async def scenario(site):
        with_tools(site, REASONING + FINAL, "<|channel|><|message|>")
        message = (await site.chat(max_tokens=150)).json()["choices"][0]["message"]
        assert message["content"] == "Hello!"
        error = (await site.chat(tools=[CLOCK])).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")

    on_site(scenario)
