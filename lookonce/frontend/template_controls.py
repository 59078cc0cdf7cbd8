"""How much a model thinks and says: OpenAI's and Anthropic's fields as template variables.

Each field becomes the variable that the served model's template reads. Where the template reads
none, nothing can be done, and the field is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

EFFORT = "reasoning_effort"
VERBOSITY = "verbosity"
THINKING = "thinking"
SWITCHES = ("enable_thinking", "thinking")
"""Variables that turn thinking on or off: Qwen3 and its kin; DeepSeek V3.1, Granite."""
USUAL = {VERBOSITY: "medium"}
"""Values that ask for what happens anyway."""
WORD = re.compile("[a-z]{1,16}")


def template_controls(
    asked: Mapping[str, Any], known: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """The template's variables, and the names of fields that are ignored.

    `asked`: `reasoning_effort` and `verbosity`, by the name that the request has for each (as
    `reasoning.effort`), and `thinking.type`, whether the model thinks; None asks for nothing. Of
    two that set one variable the later counts. `known`: the variables that the template reads.
    """
    variables: dict[str, Any] = {}
    ignored = []
    for name, value in asked.items():
        control = _control(name)
        if value is None or value == USUAL.get(control):
            continue
        found = _variables(control, value, known)
        variables |= found
        if not found:
            ignored.append(name)
    return variables, ignored


def _control(name: str) -> str:
    """Of a field's name."""
    if "effort" in name:
        return EFFORT
    return THINKING if name.startswith(THINKING) else VERBOSITY


def _variables(control: str, value: Any, known: Collection[str]) -> dict[str, Any]:
    if control == THINKING:
        thinks = isinstance(value, bool)
        return {name: value for name in SWITCHES if name in known} if thinks else {}
    if not isinstance(value, str) or not WORD.fullmatch(value):
        return {}  # it would be written into the prompt
    if control in known:
        return {control: value}
    if control == EFFORT:
        return {name: value != "none" for name in SWITCHES if name in known}
    return {}
