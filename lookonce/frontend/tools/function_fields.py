"""OpenAI's older fields for tools: `functions`, `function_call` and messages with such calls.

They are read as `tools`, `tool_choice` and `tool_calls`, which all templates know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lookonce.frontend.tools.calls import (
    Function,
    NamedChoice,
    NamedFunction,
    RequestedTools,
    Tool,
    ToolChoice,
    ToolFields,
    read_tools,
)

Json = dict[str, Any]
FunctionChoice = str | NamedFunction | None
FUNCTION_FIELDS = ToolFields("functions", "function_call", "")


def read_functions(
    functions: Sequence[Function], choice: FunctionChoice, *, close: bool
) -> RequestedTools | None:
    """At most one of them is called. Raises `BadRequestError` naming the part at fault."""
    tools = [Tool(type="function", function=function) for function in functions]
    tool_choice: ToolChoice
    if isinstance(choice, NamedFunction):
        tool_choice = NamedChoice(type="function", function=choice)
    else:
        tool_choice = choice
    return read_tools(tools, tool_choice, False, close=close, fields=FUNCTION_FIELDS)


def with_tool_calls(messages: Sequence[Json]) -> list[Json]:
    """The same messages; a `function_call` becomes a tool call, and the message of role function
    that follows it a tool's answer. What is not so formed stays as it is."""
    converted: list[Json] = []
    waiting: str | None = None
    for number, message in enumerate(messages):
        call = message.get("function_call")
        if message.get("role") == "assistant" and isinstance(call, Mapping):
            waiting = f"call_{number}"
            kept = {name: value for name, value in message.items() if name != "function_call"}
            function = {"id": waiting, "type": "function", "function": dict(call)}
            converted.append({**kept, "tool_calls": [function]})
        elif message.get("role") == "function" and waiting is not None:
            converted.append({**message, "role": "tool", "tool_call_id": waiting})
            waiting = None
        else:
            converted.append(message)
    return converted
