"""How much a model thinks and says: OpenAI's fields as variables of the chat template.

Each field becomes the variable that the served model's template reads. Where the template reads
none, nothing can be done, and the field is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

EFFORT = "reasoning_effort"
VERBOSITY = "verbosity"
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
    `reasoning.effort`); None asks for nothing. `known`: the variables that the template reads.
    """
    variables: dict[str, Any] = {}
    ignored = []
    for name, value in asked.items():
        control = EFFORT if "effort" in name else VERBOSITY
        if value is None or value == USUAL.get(control):
            continue
        found = _variables(control, value, known)
        variables |= found
        if not found:
            ignored.append(name)
    return variables, ignored


def _variables(control: str, value: Any, known: Collection[str]) -> dict[str, Any]:
    if not isinstance(value, str) or not WORD.fullmatch(value):
        return {}  # it would be written into the prompt
    if control in known:
        return {control: value}
    if control == EFFORT:
        return {name: value != "none" for name in SWITCHES if name in known}
    return {}
