"""Calls as Qwen3-Coder writes them: whole, without the outer tag, with an unended parameter."""

from __future__ import annotations


def call(**values):
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function=f>\n{''.join(lines)}</function>\n</tool_call>"


ONE = call(count="1")
BARE = ONE.replace("<tool_call>\n", "")
UNENDED = (
    "<tool_call>\n<function=f>\n<parameter=text>\nBern\n"
    "<parameter=count>\n5\n</function>\n</tool_call>"
)
