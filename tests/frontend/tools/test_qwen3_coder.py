"""Qwen3-Coder's calls: values without quotes become what the schema says, however they are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.frontend.tools.calls import Function, Tool, content_of, read_tools, tool_calling
from lookonce.frontend.tools.formats import choose_dialect
from lookonce.frontend.tools.parser import CallArguments, CallStart, joined
from lookonce.frontend.tools.qwen3_coder import Qwen3CoderParser
from lookonce.types.sampling import SamplingParams
from tests.support.server.qwen3_coder import BARE, ONE, UNENDED, call

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "list": {"$ref": "#/$defs/L"},
    "maybe": {"type": ["string", "null"]},
    "loop": {"$ref": "#/properties/loop"},
    "kind": {"enum": ["a", "b"]},
    "map": {"type": "object"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"L": {"type": "array"}}}
ASKED = read_tools(
    [Tool(type="function", function=Function(name=name, parameters=SCHEMA)) for name in ("f", "g")],
    None,
    None,
)


def parse(text, cuts=()):
    parser = Qwen3CoderParser(ASKED.schemas)
    deltas, start = [], 0
    for end in [*sorted(cuts), len(text)]:
        deltas += parser.push(text[start:end])
        start = end
    return joined(deltas + parser.finish())


def read(text):
    told = (reader := usable().reader()).push(text, last=True)
    return content_of(told), [
        (each.function.name, each.function.arguments) for each in reader.calls
    ]


def usable(choice=None):
    asked = read_tools(
        [Tool(type="function", function=Function(name="f", parameters=SCHEMA))], choice, None
    )
    return tool_calling(
        asked, choose_dialect("auto", "tools <tool_call><function=name><parameter=a>", {})
    )


VALUES = [
    ({"text": "Bern"}, {"text": "Bern"}),
    ({"text": "5"}, {"text": "5"}),
    ({"text": '\n  "a"\n<b>\\ \n'}, {"text": '\n  "a"\n<b>\\ \n'}),
    ({"text": ""}, {"text": ""}),
    ({"text": "x", "count": "5"}, {"text": "x", "count": 5}),
    ({"count": "many"}, {"count": "many"}),
    ({"flag": "True"}, {"flag": True}),
    ({"flag": "null"}, {"flag": None}),
    ({"list": '[1, {"a": "</b>"}]'}, {"list": [1, {"a": "</b>"}]}),
    ({"maybe": "null"}, {"maybe": None}),
    ({"maybe": "5"}, {"maybe": "5"}),
    ({"kind": "a"}, {"kind": "a"}),
    ({"loop": "NaN"}, {"loop": "NaN"}),
    ({"other": "{}"}, {"other": "{}"}),
    ({"map": "{'a': True, 'ü': [None, (1, 2.5)]}"}, {"map": {"a": True, "ü": [None, [1, 2.5]]}}),
    ({"list": "[1, 'it\\'s']"}, {"list": [1, "it's"]}),
    ({"list": "['\\ud800']"}, {"list": ["\ud800"]}),
    ({"map": "{1, 2}"}, {"map": "{1, 2}"}),
    ({"map": "{'a': b}"}, {"map": "{'a': b}"}),
    ({"list": "['a', 1e999]"}, {"list": "['a', 1e999]"}),
    ({"list": "[" * 5000}, {"list": "[" * 5000}),
    ({"text": "{'a': True}"}, {"text": "{'a': True}"}),
    ({}, {}),
]


@pytest.mark.parametrize(("values", "meaning"), VALUES)
def test_values_become_what_the_schema_says(values, meaning):
    words, ((name, arguments),) = read(call(**values))
    assert (words, name, json.loads(arguments)) == ("", "f", meaning)


COUNTED = ("f", '{"count": 1}')
SAYS = [
    ("Just <words> <function", ("Just <words> <function", [])),
    (f"I look.\n{ONE}\n{ONE}", ("I look.", [COUNTED, COUNTED])),
    (BARE, ("", [COUNTED])),
    (f"{ONE.removesuffix('</tool_call>')}{ONE}", ("", [COUNTED, COUNTED])),
    (f"{ONE.removesuffix('</tool_call>')}So", ("\nSo", [COUNTED])),
    (ONE.replace("</function>\n", "") + " Done", (" Done", [COUNTED])),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", [("f", '{"a": 1}')])),
    ("<tool_call>\n<functor=f>", ("<tool_call>\n<functor=f>", [])),
    ("<tool_call>\n<function=f\n", ("<tool_call>\n<function=f\n", [])),
    ("<tool_call>\n<func", ("<tool_call>\n<func", [])),
    (call(text="Bern")[:50], ("", [("f", '{"text": "Bern')])),
    # Models forget the end of a value: what comes next is none of it.
    (UNENDED, ("", [("f", '{"text": "Bern", "count": 5}')])),
    (UNENDED.replace("text", "count"), ("", [("f", '{"count": "Bern", "count": 5}')])),
    (UNENDED.replace("count", "text"), ("", [("f", '{"text": "Bern", "text": "5"}')])),
    (UNENDED + ONE, ("", [("f", '{"text": "Bern", "count": 5}'), COUNTED])),
    (call(text="a <parameter=b> </function>\n</functio"),
     ("", [("f", '{"text": "a <parameter=b> </function>\\n</functio"}')])),
    # The text ends within a call, with all values complete.
    (ONE[: ONE.index("\n</function>")], ("", [COUNTED])),
    (ONE[: ONE.index("unction>")], ("", [COUNTED])),
    ("<tool_call>\n<function=f>", ("", [("f", "{}")])),
    ("<tool_call>\n<function=f>\n<parameter=te", ("", [("f", "{}")])),
    (UNENDED[: UNENDED.index("unt>")], ("", [("f", '{"text": "Bern"}')])),
    # Half an end marker is as little for the reader as a whole one.
    (ONE[:-1], ("", [COUNTED])),
    (ONE.removesuffix("/tool_call>"), ("", [COUNTED])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "meaning"), SAYS)
def test_what_is_said_and_called(text, meaning):
    assert read(text) == meaning


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=text>",
     "<parameter=count>", "<parameter=", "</parameter>", "\n", " ", "5", "words", '"', "{", "</par",
     ">", ONE, BARE, UNENDED, "\n<parameter=count>", "\n</function>", "\n</fun",
     '{"name": "g", "arguments": {}}', "ü😀", "<func", "\\"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=9), data=st.data())
def test_it_never_matters_how_the_text_is_cut(fragments, data):
    text = "".join(fragments)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = parse(text)
    assert parse(text, cuts) == whole
    assert parse(text, range(len(text))) == whole
    if not any(isinstance(delta, CallStart) for delta in whole):
        assert "".join(delta.text for delta in whole) == text


@settings(max_examples=100, deadline=None)
@given(
    values=st.dictionaries(st.sampled_from(sorted(PROPERTIES)), st.text("a5{'[ü", max_size=5)),
    ended=st.booleans(),
    data=st.data(),
)
def test_a_call_cut_off_outside_of_values_has_proper_arguments(values, ended, data):
    text = call(**values)
    if not ended:
        text = text.replace("\n</parameter>", "")
    whole = json.loads(read(text)[1][0][1])
    assert list(whole) == list(values)
    end = "=f>" if not values else "</parameter>" if ended else "</function>"
    cut = data.draw(st.integers(text.rindex(end) + len(end), len(text)))
    words, ((name, arguments),) = read(text[:cut])
    assert (words, name, json.loads(arguments)) == ("", "f", whole)


def test_text_is_told_while_it_is_written():
    parser = Qwen3CoderParser(ASKED.schemas)
    begun = parser.push("<tool_call>\n<function=f>\n<parameter=text>\nBe")
    assert begun == [CallStart(0, "f"), CallArguments(0, '{"text": "Be')]
    assert parser.push("rn\n</para") == [CallArguments(0, "rn")]


def test_a_call_that_must_come_is_written_as_hermes_does():
    grammar = usable("required").constrain(SamplingParams()).grammar
    assert '"<tool_call>" "\\n" ("{\\"name\\": \\"f\\"' in grammar.source
