"""Anthropic's messages: what is refused, by which name, and in which shape."""

from __future__ import annotations

import json

import pytest

from lookonce.errors import EngineDeadError
from lookonce.frontend.tools.formats import choose_dialect
from lookonce.server.routes.anthropic_messages import CountTokensRequest, read_messages

HELLO = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TEXT = {"type": "text", "media_type": "text/plain", "data": "a text"}
URL = {"type": "url", "url": "https://example.org/a.pdf"}
SEEN = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
CALL = 'Well.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def calling(site):
    site.services.tool_dialect = choose_dialect("hermes", "{{ tools }}<tool_call>", {})
    site.engine.answer = CALL


def of(*blocks, role="user"):
    return {**HELLO, "messages": [{"role": role, "content": list(blocks)}]}


BASE64 = {"type": "base64", "media_type": "image/png"}
REFUSED = [
    ({**HELLO, "messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({**HELLO, "messages": [{"role": "user"}]}, "messages[0].content"),
    ({**HELLO, "messages": []}, "messages"),
    ({"messages": HELLO["messages"]}, "max_tokens"),
    (of({"type": "document"}), "messages[0].content[0].source"),
    (of({"type": "document", "source": {"type": "file"}}), "messages[0].content[0].source"),
    (of({"type": "document", "source": {"type": "text"}}), "messages[0].content[0].source.data"),
    (of({"type": "document", "source": TEXT, "title": 5}), "messages[0].content[0].title"),
    (
        of({"type": "document", "source": TEXT, "citations": {"enabled": True}}),
        "messages[0].content[0].citations",
    ),
    (of(SEEN, USE, role="assistant"), "messages[0].content[0]: beside tool_use"),
    (of(USE, {"type": "document", "source": URL}, role="assistant"), "messages[0].content[1]"),
    (of({"type": "text"}), "messages[0].content[0]"),
    (of("text"), "messages[0].content[0]"),
    (of({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source"),
    (of({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (of({**USE, "input": 5}, role="assistant"), "messages[0].content[0].input"),
    (of({"type": "thinking", "thinking": 5}, role="assistant"), "messages[0].content[0].thinking"),
    ({**HELLO, "system": [{"type": "image"}]}, "system[0]"),
    ({**HELLO, "system": [{"type": "image", "source": {"type": "url"}}]}, "system[0]"),
    ({**HELLO, "tools": [{**TOOL, "type": "bash_20250124"}]}, "tools[0].type"),
    ({**HELLO, "tools": [TOOL, TOOL]}, "tools[1].name"),
    ({**HELLO, "tools": [TOOL], "tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({**HELLO, "tool_choice": {"type": "any"}}, "tool_choice"),
    ({**HELLO, "tool_choice": {"type": "tool", "name": "zz"}}, "tool_choice"),
    (of({"type": "text", "text": 5}), "messages[0].content[0].text"),
    (of({"type": "image", "source": 5}), "messages[0].content[0].source"),
    (of({"type": "image", "source": {"type": "url"}}), "messages[0].content[0].source.url"),
    (
        of({"type": "image", "source": {**BASE64, "data": None}}),
        "messages[0].content[0].source.data",
    ),
    (of({"type": "document", "source": {"type": "url", "url": 5}}), "content[0].source.url"),
    (of({"type": "document", "source": {**BASE64, "data": 5}}), "content[0].source.data"),
    ({**HELLO, "temperature": -1}, "temperature"),
    ({**HELLO, "stop_sequences": [""]}, "stop_sequences"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED)
def test_what_cannot_be_is_refused_by_name_in_anthropic_s_shape(on_site, body, named):
    async def scenario(site):
        calling(site)
        answer = await site.client.post("/v1/messages", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert named in answer.json()["error"]["message"]

    on_site(scenario)


def test_who_asks_for_a_receipt_gets_one(on_site):
    async def scenario(site):
        asked = {"X-Reuse-Receipt": "1"}
        whole = await site.client.post("/v1/messages", json=HELLO, headers=asked)
        assert whole.json()["reuse_receipt"]["prompt_tokens"] > 0
        assert "reuse_receipt" not in (await site.client.post("/v1/messages", json=HELLO)).json()
        stream = {**HELLO, "stream": True}
        answer = await site.client.post("/v1/messages", json=stream, headers=asked)
        told = [event for event in stream_events(answer.text) if "reuse_receipt" in event]
        assert [event["type"] for event in told] == ["message_delta"]
        assert told[0]["reuse_receipt"] == whole.json()["reuse_receipt"]

    on_site(scenario)


def stream_events(text):
    return [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if block]


def test_a_salt_divides_the_tenant(on_site):
    async def scenario(site):
        headers = {"Authorization": "Bearer k1"}
        salted = {**HELLO, "cache_salt": "pepper"}
        await site.client.post("/v1/messages", json=salted, headers=headers)
        assert site.engine.prompts[-1].scope == b"acme/pepper"
        refused = await site.client.post(
            "/v1/messages", json={**HELLO, "cache_salt": 5}, headers=headers
        )
        assert refused.status_code == 400
        assert "cache_salt" in refused.json()["error"]["message"]

    on_site(scenario, api_key=("acme:k1",))


def test_a_stream_has_a_block_for_text_and_one_for_each_call(on_site):
    async def scenario(site):
        calling(site)
        body = {**HELLO, "tools": [TOOL]}
        whole = (await site.client.post("/v1/messages", json={**body, "max_tokens": 150})).json()
        assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
        assert (whole["content"][1]["input"], whole["stop_reason"]) == ({"a": 1}, "tool_use")
        answer = await site.client.post(
            "/v1/messages", json={**body, "max_tokens": 150, "stream": True}
        )
        events = stream_events(answer.text)
        blocks = [event["type"] for event in events if event["type"] != "content_block_delta"]
        assert blocks == [
            "message_start",
            "content_block_start", "content_block_stop",
            "content_block_start", "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        partial = [e["delta"].get("partial_json", "") for e in events if "delta" in e]
        assert json.loads("".join(partial)) == {"a": 1}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        usage = events[-2]["usage"]
        assert usage["cache_read_input_tokens"] + usage["input_tokens"] == 2

    on_site(scenario)


def test_results_reach_the_template_as_tool_messages(on_site):
    async def scenario(site):
        seen = []
        render = site.renderer.render_chat

        async def render_chat(messages, **options):
            seen.extend(messages)
            return await render([{"content": "x"}], **options)

        site.renderer.render_chat = render_chat
        result = {"type": "tool_result", "tool_use_id": "t", "content": "sunny"}
        thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
        messages = [
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Well."}, USE]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        body = {**HELLO, "system": "Be short.", "messages": messages}
        assert (await site.client.post("/v1/messages", json=body)).status_code == 200
        assert [message["role"] for message in seen] == ["system", "assistant", "tool", "user"]
        assert seen[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
        assert (seen[1]["content"], seen[2]["content"]) == ("Well.", "sunny")
        thoughts = [message.get("reasoning_content") for message in seen]
        assert thoughts == [None, "Hm.", None, None]

    on_site(scenario)


def test_what_claude_code_puts_into_the_system_prompt_for_billing_is_left_out():
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=5b1e7;"},
        {"type": "text", "text": "Be short."},
    ]
    asked = CountTokensRequest(messages=HELLO["messages"], system=system)
    assert read_messages(asked).messages[0] == {"role": "system", "content": "Be short."}
    asked = CountTokensRequest(messages=HELLO["messages"], system=system[:1])
    assert [each["role"] for each in read_messages(asked).messages] == ["user"]


def test_a_schema_of_output_config_holds_and_errors_name_it(on_site):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    def asking(**format):
        return {**HELLO, "output_config": {"format": {"type": "json_schema", **format}}}

    async def scenario(site):
        answer = await site.client.post("/v1/messages", json=asking(schema=schema))
        assert answer.status_code == 200, answer.text
        assert "x-lookonce-warning" not in answer.headers
        grammar = site.engine.samplings[-1].grammar
        assert json.loads(grammar.source)["properties"] == schema["properties"]
        assert grammar.param == "output_config.format.schema"
        for body, named in (
            (asking(), "output_config.format.schema"),
            (asking(type="grammar", schema=schema), "output_config.format.type"),
        ):
            refused = await site.client.post("/v1/messages", json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"].startswith(named)

    on_site(scenario)


def test_a_forced_call_s_schema_has_this_api_s_name(on_site):
    async def scenario(site):
        calling(site)
        body = {**HELLO, "max_tokens": 150, "tools": [TOOL], "tool_choice": {"type": "any"}}
        assert (await site.client.post("/v1/messages", json=body)).status_code == 200
        (part,) = site.engine.samplings[-1].grammar.parts
        assert part.param == "tools[0].input_schema"

    on_site(scenario)


@pytest.mark.parametrize(
    ("reads", "fields", "variables", "ignored"),
    [
        ("enable_thinking", {"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        ("thinking", {"thinking": {"type": "adaptive"}}, {"thinking": True}, None),
        (
            "thinking",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"thinking": True},
            "thinking.budget_tokens",
        ),
        ("thinking", {"thinking": {"type": "between_tools"}}, None, "thinking.type"),
        ("reasoning_effort", {"thinking": {"type": "disabled"}}, None, "thinking.type"),
        (
            "reasoning_effort",
            {"output_config": {"effort": "low"}},
            {"reasoning_effort": "low"},
            None,
        ),
        ("nothing", {"output_config": {"effort": "low"}}, None, "output_config.effort"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
def test_thinking_and_effort_are_the_template_s_or_named_as_ignored(
    on_site, route, reads, fields, variables, ignored
):
    async def scenario(site):
        site.renderer.template_variables = frozenset({reads})
        asked = dict(HELLO) if route == "/v1/messages" else {"messages": HELLO["messages"]}
        answer = await site.client.post(route, json={**asked, **fields})
        assert answer.status_code == 200, answer.text
        assert site.renderer.options["chat_template_kwargs"] == variables
        warned = None if ignored is None else f"ignored: {ignored}"
        assert answer.headers.get("x-lookonce-warning") == warned

    on_site(scenario)


@pytest.mark.parametrize(
    ("last", "goes_on"),
    [
        ({"role": "assistant", "content": "It is ("}, True),
        ({"role": "assistant", "content": [{"type": "text", "text": "It is ("}]}, True),
        ({"role": "assistant", "content": ""}, False),
        ({"role": "assistant", "content": [{"type": "text", "text": "It"}, USE]}, False),
        ({"role": "user", "content": "And?"}, False),
    ],
)
def test_an_answer_goes_on_from_the_assistant_s_last_message(on_site, last, goes_on):
    async def scenario(site):
        body = {**HELLO, "messages": [*HELLO["messages"], last]}
        answer = await site.client.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        asked = site.renderer.options
        assert asked["continue_final_message"] is goes_on
        assert asked["add_generation_prompt"] is not goes_on

    on_site(scenario)


def test_the_request_s_id_is_where_anthropic_s_clients_look_for_it(on_site):
    async def scenario(site):
        for body in (HELLO, {}):
            answer = await site.client.post("/v1/messages", json=body)
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert "request-id" not in (await site.chat()).headers

    on_site(scenario)


def test_a_failure_amid_a_stream_is_an_event(on_site):
    async def scenario(site):
        site.engine.failure = EngineDeadError("gone")
        answer = await site.client.post("/v1/messages", json={**HELLO, "stream": True})
        last = stream_events(answer.text)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")

    on_site(scenario)


def test_its_key_is_taken_where_anthropic_s_clients_have_it(on_site):
    async def scenario(site):
        for name, status in (("secret", 200), ("other", 401)):
            answer = await site.client.post("/v1/messages", json=HELLO, headers={"x-api-key": name})
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.json()["type"] == "error"

    on_site(scenario, api_key=("a:secret",))


def document(source, **fields):
    return {"type": "document", "source": source, **fields}


def test_documents_become_parts_of_their_message():
    blocks = [
        document(TEXT, title="t.txt", context="Of old."),
        document({"type": "content", "content": [{"type": "text", "text": "in blocks"}]}),
        document(URL, title="a.pdf"),
    ]
    read = read_messages(CountTokensRequest(messages=of(*blocks)["messages"]))
    (message,) = read.messages
    assert message["content"] == [
        {"type": "text", "text": "Of old.\n"},
        {"type": "text", "text": "[t.txt]\n"},
        {"type": "text", "text": "a text\n"},
        {"type": "text", "text": "in blocks"},
        {"type": "file", "file": {"file_url": URL["url"], "filename": "a.pdf"}},
    ]
    assert read.renamed("messages[0].content[4].x") == "messages[0].content[2].x"
    assert read.renamed("messages[0].content[2]") == "messages[0].content[0].source.data"
