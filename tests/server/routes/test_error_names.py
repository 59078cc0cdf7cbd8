"""An error names the field that the client sent, whatever the chat calls it that it becomes."""

from __future__ import annotations

from tests.support.nodes import engine_node, run

NO_CHARACTER = "\ufdd0"
HI = {"role": "user", "content": "hi"}


def call(**fields):
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **fields}


def use(**fields):
    return {"type": "tool_use", "id": "t", "name": "f", "input": {}, **fields}


def said(*blocks, role="assistant"):
    return {"messages": [HI, {"role": role, "content": list(blocks)}]}


def text(words):
    return {"type": "text", "text": words}


TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}

CASES = [
    # a call alone, and one that goes with the assistant's words before it
    ("/v1/responses", {"input": [call(arguments="{")]}, "input[0].arguments"),
    (
        "/v1/responses",
        {"input": [{"role": "assistant", "content": "Well."}, call(), call(arguments="{")]},
        "input[2].arguments",
    ),
    ("/v1/responses", {"input": [call(arguments='{"a": 1e999}')]}, "input[0].arguments.a"),
    ("/v1/responses", {"input": [call(name=NO_CHARACTER)]}, "input[0].name"),
    ("/v1/responses", {"input": [call(call_id=NO_CHARACTER)]}, "input[0].call_id"),
    (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "c", "output": NO_CHARACTER}]},
        "input[0].output",
    ),
    (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": NO_CHARACTER, "output": "x"}]},
        "input[0].call_id",
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "reasoning", "content": [{"text": "Hm."}, {"text": NO_CHARACTER}]},
                {"role": "assistant", "content": "Well."},
            ]
        },
        "input[0].content[1].text",
    ),
    ("/v1/responses", {"input": NO_CHARACTER}, "input"),
    ("/v1/responses", {"input": "hi", "instructions": NO_CHARACTER}, "instructions"),
    ("/v1/messages", said(use(name=NO_CHARACTER)), "messages[1].content[0].name"),
    ("/v1/messages", said(text("Well."), use(id=NO_CHARACTER)), "messages[1].content[1].id"),
    (
        "/v1/messages",
        said(use(), use(input={"a.function": [NO_CHARACTER]})),
        "messages[1].content[1].input.a.function[0]",
    ),
    (
        "/v1/messages",
        said(text("Well."), use(input={"a": [0] * 300_000})),
        "messages[1].content[1].input",
    ),
    ("/v1/messages", said(text("Well."), text(NO_CHARACTER), use()), "messages[1].content[1]"),
    (
        "/v1/messages",
        said({"type": "thinking", "thinking": NO_CHARACTER}, text("Well.")),
        "messages[1].content[0].thinking",
    ),
    (
        "/v1/messages",
        said({"type": "tool_result", "tool_use_id": NO_CHARACTER, "content": "x"}, role="user"),
        "messages[1].content[0].tool_use_id",
    ),
    (
        "/v1/messages",
        said({"type": "tool_result", "tool_use_id": "t", "content": NO_CHARACTER}, role="user"),
        "messages[1].content[0].content",
    ),
    ("/v1/messages", {"messages": [HI], "system": NO_CHARACTER}, "system"),
    (
        "/v1/messages",
        {"messages": [HI], "system": [text("Be brief."), text(NO_CHARACTER)]},
        "system[1].text",
    ),
    ("/v1/chat/completions", {"messages": [HI], **TOOLS}, "tools"),
    (
        "/v1/chat/completions",
        {"messages": [HI], "functions": [{"name": "f"}]},
        "functions",
    ),
]  # fmt: skip


def test_errors_name_what_was_sent(folder):
    """The model's template has no place for tools."""

    async def scenario():
        async with engine_node(folder("llama")) as node:
            for route, body, name in CASES:
                limit = {"max_tokens": 1} if route == "/v1/messages" else {}
                counted = {
                    "/v1/messages": ["/v1/messages/count_tokens"],
                    "/v1/responses": ["/v1/responses/input_tokens"],
                }.get(route, [])
                for path in [route, *counted]:
                    answer = await node.post(path, {**body, **(limit if path == route else {})})
                    error = answer.json()["error"]
                    assert answer.status_code == 400, (body, answer.text)
                    if "param" in error:
                        assert error["param"] == name, (body, error)
                    if len(name) > len("functions"):  # a part, which the message begins with
                        assert error["message"].startswith(f"{name}:"), (body, error)

    run(scenario())
