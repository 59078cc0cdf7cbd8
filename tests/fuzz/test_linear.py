"""What a parser does for one more byte does not grow with what it has read."""

from __future__ import annotations

import pytest

from lookonce.frontend.tools.formats import FORMATS
from tests.support.fuzz_targets import SCHEMAS

LONG = {
    "hermes value": ("hermes", '<tool_call>{"name":"f","arguments":{"a":"', "x"),
    "hermes early arguments": ("hermes", '<tool_call>{"arguments":{"a":"', "x"),
    "hermes key": ("hermes", '<tool_call>{"', "x"),
    "hermes brackets": ("hermes", '<tool_call>{"name":"f","arguments":', "["),
    "llama3 objects": ("llama3", "", '{"a":'),
    "mistral list": ("mistral", "[TOOL_CALLS]", "["),
}


@pytest.mark.parametrize("name", LONG)
def test_a_character_late_costs_no_more_copies_than_one_early(name: str) -> None:
    kind, head, repeated = LONG[name]
    copied = [_copied(kind, head + repeated * (length // len(repeated))) for length in (2000, 8000)]
    assert copied[1] <= 6 * copied[0], f"{copied[1]} bytes of new texts after {copied[0]}"


def _copied(kind: str, text: str) -> int:
    """Characters of all texts that an object of the parser holds, added up at every hundredth
    character, if they are other objects than before: what was copied."""
    parser = FORMATS[kind].parser(SCHEMAS)
    known: dict[str, int] = {}
    total = 0
    for number, character in enumerate(text):
        parser.push(character)
        if number % 100:
            continue
        for name, value in _texts(parser):
            if known.get(name) != id(value):
                total += len(value)
            known[name] = id(value)
    return total + len(text)


def _texts(parser: object, prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for name, value in vars(parser).items():
        if isinstance(value, str):
            found.append((prefix + name, value))
        elif type(value).__module__.startswith("lookonce.frontend.tools"):
            found += _texts(value, f"{prefix}{name}.")
    return found
