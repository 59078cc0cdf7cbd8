"""OpenAI's older fields for tools: `functions` and `function_call`.

They are read as `tools` and `tool_choice`. Messages with such calls are read where all messages are
(`render.prompt.messages`).
"""

from __future__ import annotations

from collections.abc import Sequence

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
