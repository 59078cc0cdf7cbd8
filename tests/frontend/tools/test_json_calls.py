"""Tool parsers: what each call format says, and that it never matters how the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.frontend.tools.json_calls import HermesParser, Llama3Parser, MistralParser
from lookonce.frontend.tools.parser import CallArguments, CallStart, ContentText, joined

NAMES = {"get_weather", "add"}
PARSERS = {
    "hermes": HermesParser,
    "llama3": lambda: Llama3Parser(NAMES.__contains__),
    "mistral": MistralParser,
}
WEATHER = '{"name": "get_weather", "arguments": {"city": "Bern", "days": [1, 2]}}'
ADD = '{"arguments":{"a":1},"name":"add"}'
CITY = '{"city": "Bern", "days": [1, 2]}'


def parse(kind, text, cuts=()):
    """Joined deltas of the text, cut at the given places."""
    parser = PARSERS[kind]()
    ends = [*sorted(cuts), len(text)]
    deltas, start = [], 0
    for end in ends:
        deltas += parser.push(text[start:end])
        start = end
    return joined(deltas + parser.finish())


def words_and_calls(kind, text):
    words, calls = "", []
    for delta in parse(kind, text):
        match delta:
            case ContentText(more):
                words += more
            case CallStart(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, more):
                calls[index][1] += more
    return words, [(name, arguments) for name, arguments in calls]


SAYS = [
    ("hermes", "Just words, 1 < 2 <tool>.\n", ("Just words, 1 < 2 <tool>.\n", [])),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", ("", [("get_weather", CITY)])),
    (
        "hermes",
        f"Let me look.\n<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>\n",
        ("Let me look.", [("get_weather", CITY), ("add", '{"a":1}')]),
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    ("hermes", "<tool_call>not json</tool_call>", ("<tool_call>not json</tool_call>", [])),
    ("hermes", '<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', [])),
    ("hermes", '<tool_call>{"name": 5', ('<tool_call>{"name": 5', [])),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>',
        ("", [("add", '{"a": "</tool_call>"}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", [("add", '{"a": 1}')]),
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1', ("", [("add", '{"a": [1')])),
    ("hermes", 'x <tool_call>{"name": "ad', ('x <tool_call>{"name": "ad', [])),
    # Models forget the end marker: neither the next call nor words may vanish for it.
    ("hermes", f"<tool_call>{WEATHER}\n<tool_call>{ADD}</tool_call>",
     ("", [("get_weather", CITY), ("add", '{"a":1}')])),
    ("hermes", f"<tool_call>{ADD}\nSo it is <tool", ("\nSo it is <tool", [("add", '{"a":1}')])),
    ("hermes", f"<tool_call>{ADD}}}\n</tool_call>", ("", [("add", '{"a":1}')])),
    ("hermes", f"<tool_call>{ADD} so\n<tool_call>no",
     (" so\n<tool_call>no", [("add", '{"a":1}')])),
    # Half an end marker, where the answer is cut off, is as little for the reader as a whole one.
    ("hermes", f"<tool_call>{ADD}\n</tool_c", ("", [("add", '{"a":1}')])),
    ("hermes", f"<tool_call>{ADD}\n<", ("", [("add", '{"a":1}')])),
    ("hermes", f"<tool_call>{ADD}\nSo </", ("\nSo", [("add", '{"a":1}')])),
    ("hermes", f"<tool_call>{ADD}\n1 <", ("\n1 <", [("add", '{"a":1}')])),
    ("hermes", "ends with </tool_c", ("ends with </tool_c", [])),
    ("hermes", "ends with <tool_c", ("ends with <tool_c", [])),
    ("llama3", "It is 5 degrees; {no call}.", ("It is 5 degrees; {no call}.", [])),
    ("llama3", WEATHER.replace("arguments", "parameters"), ("", [("get_weather", CITY)])),
    ("llama3", f"<|python_tag|>{WEATHER}; {ADD}",
     ("", [("get_weather", CITY), ("add", '{"a":1}')])),
    ("llama3", f"\n{WEATHER}\n{ADD}", ("", [("get_weather", CITY), ("add", '{"a":1}')])),
    ("llama3", '{"name": "Bob", "age": 5}', ('{"name": "Bob", "age": 5}', [])),
    ("llama3", '{"type": "function", "name": "add", "parameters": {}}', ("", [("add", "{}")])),
    ("llama3", "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    ("llama3", "< 5", ("< 5", [])),
    ("llama3", f"{ADD}; and more", ("; and more", [("add", '{"a":1}')])),
    ("mistral", "ContentText [TOOL] only", ("ContentText [TOOL] only", [])),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {ADD}]",
     ("", [("get_weather", CITY), ("add", '{"a":1}')])),
    ("mistral", f"Sure.[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]add{{}}",
     ("Sure.", [("get_weather", CITY), ("add", "{}")])),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]x1y2z3a4b[ARGS] {"a": 1} done',
     (" done", [("add", '{"a": 1}')])),
    ("mistral", "[TOOL_CALLS]no call\nat all", ("[TOOL_CALLS]no call\nat all", [])),
    ("mistral", "[TOOL_CALLS]add", ("[TOOL_CALLS]add", [])),
    ("mistral", "[TOOL_CALLS][5]", ("[TOOL_CALLS][5]", [])),
    ("mistral", f"[TOOL_CALLS][{ADD}", ("", [("add", '{"a":1}')])),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "meaning"), SAYS)
def test_what_is_said_and_called(kind, text, meaning):
    assert words_and_calls(kind, text) == meaning


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[",
     "]", ",", ";", "\n", " ", WEATHER, ADD, CITY, "get_weather", "add", '{"name":', '"add"', "}",
     "{", ':', '"', "\\", "words", "ü😀", '{"name": "add", "arguments": ', "5", "null", "<tool_"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(PARSERS)),
    fragments=st.lists(FRAGMENTS, max_size=9),
    data=st.data(),
)
def test_it_never_matters_how_the_text_is_cut(kind, fragments, data):
    text = "".join(fragments)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = parse(kind, text)
    assert parse(kind, text, cuts) == whole
    assert parse(kind, text, range(len(text))) == whole
    if not any(isinstance(delta, CallStart) for delta in whole):
        assert "".join(delta.text for delta in whole) == text


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(
    arguments=st.dictionaries(st.text(), ARGUMENTS, max_size=3),
    swapped=st.booleans(),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
def test_any_arguments_arrive_as_they_were_meant(arguments, swapped, indent, ascii_only):
    members = [("name", "add"), ("arguments", arguments)]
    call = json.dumps(
        dict(members[::-1] if swapped else members), indent=indent, ensure_ascii=ascii_only
    )
    texts = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>", "llama3": call,
        "mistral": f"[TOOL_CALLS][{call}]",
    }  # fmt: skip
    for kind, text in texts.items():
        words, calls = words_and_calls(kind, text)
        assert words == ""
        assert [(name, json.loads(given)) for name, given in calls] == [("add", arguments)]


def test_arguments_are_told_while_they_are_written():
    parser = HermesParser()
    parser.push('<tool_call>{"name": "add", ')
    assert parser.push('"arguments": {"a": 1, "b"') == [CallArguments(0, '{"a": 1, "b"')]
    assert parser.push(": 2}") == [CallArguments(0, ": 2}")]
