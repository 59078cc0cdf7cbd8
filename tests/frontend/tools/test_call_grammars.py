"""Grammars of calls: whatever is drawn from one, its format's parser reads as proper calls."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lookonce.config import NANO_FOLDER
from lookonce.engine.process.grammar import GrammarCompiler
from lookonce.errors import BadRequestError
from lookonce.frontend.tools.calls import (
    Function,
    Tool,
    ToolCalling,
    call_deltas_of,
    content_of,
    read_tools,
)
from lookonce.frontend.tools.formats import choose_dialect
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.sampling import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from tests.support.engine.grammars import EOS, VOCAB, walk

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/C"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"C": {"enum": ["Bern", "Rom"]}},
}
TOOLS = [
    Tool(type="function", function=Function(name="get_weather", parameters=CITY, strict=True)),
    Tool(type="function", function=Function(name="now")),
]
FORMATS = {"hermes": "tools", "llama3": "tools", "mistral": "tools", "newer": "tools [ARGS]"}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(str(NANO_FOLDER), VOCAB, [EOS])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(NANO_FOLDER)


def usable(name, choice, *, parallel=None):
    dialect = choose_dialect(name.replace("newer", "mistral"), FORMATS[name], {})
    asked = read_tools(TOOLS, choice, parallel)
    assert asked is not None
    assert dialect is not None
    return ToolCalling(asked, dialect)


def calls_in(tools, text):
    words = content_of((reader := tools.reader()).push(text, last=True))
    for call in reader.calls:
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, arguments) in [
            ("now", {}), ("get_weather", {"city": "Bern"}), ("get_weather", {"city": "Rom"}),
        ]  # fmt: skip
    return words, reader.calls


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_read_as_what_they_are(compiler, tokenizer, name):
    rng = np.random.default_rng(3)
    for parallel in (None, False):
        tools = usable(name, "required", parallel=parallel)
        compiled = compiler.compile(tools.constrain(SamplingParams()).grammar)
        texts = [walk(compiled, tokenizer, rng, most=300) for _ in range(8)]
        ended = [text for text in texts if text is not None]
        assert ended
        for text in ended:
            words, calls = calls_in(tools, text)
            assert words.strip() == ""
            assert len(calls) == 1 if parallel is False else len(calls) >= 1


STRICT = {
    "hermes": ("a <table> <tool_cal b",
               '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    "llama3": ("no { call", '{"name": "now", "parameters": {}}'),
    "mistral": ("a [TOOL] b", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
    "newer": ("a [TOOL] b", "[TOOL_CALLS]now[ARGS]{}"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_strict_leaves_words_free_and_calls_right(compiler, tokenizer, name):
    tools = usable(name, "auto")
    compiled = compiler.compile(tools.constrain(SamplingParams()).grammar)
    words, call = STRICT[name]
    both = () if name == "llama3" else (words + call,)
    for text in (words, call, *both):
        assert takes(compiled, tokenizer, text), text
    assert not takes(compiled, tokenizer, call.replace("now", "later"))
    assert not takes(compiled, tokenizer, call.replace("{}", '{"a": 1}'))


def takes(compiled, tokenizer, text):
    state = compiled.start()
    for token in [*tokenizer.encode(text), EOS]:
        state.accept(token)
    return state.error is None


RECURSIVE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 1, "maximum": 9},
        "$ref": {"$ref": "#/properties/v"},
        "of": {"const": {"$ref": "#"}},
        "next": {"$ref": "#"},
    },
    "required": ["v"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", FORMATS)
def test_references_are_followed_from_the_parameters_own_root(compiler, tokenizer, name):
    function = Function(name='gr"ün', parameters=RECURSIVE)
    asked = read_tools([Tool(type="function", function=function)], "required", False)
    tools = ToolCalling(asked, choose_dialect(name.replace("newer", "mistral"), FORMATS[name], {}))
    compiled = compiler.compile(tools.constrain(SamplingParams()).grammar)
    call = {
        "hermes": '<tool_call>\n{"name": "gr\\"ün", "arguments": %s}\n</tool_call>',
        "llama3": '{"name": "gr\\"ün", "parameters": %s}',
        "mistral": '[TOOL_CALLS][{"name": "gr\\"ün", "arguments": %s}]',
        "newer": '[TOOL_CALLS]gr"ün[ARGS]%s',
    }[name]
    for right in (
        {"v": 1}, {"v": 1, "next": {"v": 2, "next": {"v": 3}}}, {"v": 1, "$ref": 2},
        {"v": 1, "of": {"$ref": "#"}},
    ):  # fmt: skip
        text = call % json.dumps(right)
        assert takes(compiled, tokenizer, text), text
        (read,) = call_deltas_of((reader := tools.reader()).push(text, last=True))
        assert json.loads(reader.calls[0].function.arguments) == right
        assert read.function.name == 'gr"ün'
    for wrong in ({"v": 1, "next": {}}, {"v": 1, "$ref": 10}, {"v": 1, "next": {"name": "x"}}):
        assert not takes(compiled, tokenizer, call % json.dumps(wrong)), wrong


@pytest.mark.parametrize("name", ["hermes", "mistral", "newer"])
def test_an_answer_is_calls_or_the_form_asked_for(compiler, tokenizer, name):
    tools = usable(name, "auto")
    schema = '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}'
    for form, right in (
        (Grammar(kind="json_schema", source=schema), '{"n": 5}'),
        (Grammar(kind="choice", source='["yes", "n\\"o"]'), 'n"o'),
    ):
        compiled = compiler.compile(tools.constrain(SamplingParams(grammar=form)).grammar)
        assert takes(compiled, tokenizer, STRICT[name][1])
        assert takes(compiled, tokenizer, right)
        assert not takes(compiled, tokenizer, "a" + right)
        assert not takes(compiled, tokenizer, STRICT[name][1] + right)


@pytest.mark.parametrize("form", [None, Grammar(kind="json_schema", source='{"type":"nothing"}')])
def test_the_schema_at_fault_is_named(compiler, form):
    wrong = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    function = Function(name="wrong", parameters=CITY if form else wrong)
    choice = "auto" if form else "required"
    asked = read_tools([*TOOLS, Tool(type="function", function=function)], choice, None)
    tools = ToolCalling(asked, choose_dialect("hermes", "tools", {}))
    with pytest.raises(BadRequestError) as caught:
        compiler.compile(tools.constrain(SamplingParams(grammar=form)).grammar)
    param = "grammar" if form else "tools[2].function.parameters"
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")
    assert "tool_call" not in caught.value.message


def test_a_form_that_is_nested_too_deeply_is_refused_by_its_name():
    """A request's schema was encoded on another stack than it is read again on."""
    form = Grammar(
        kind="json_schema", source='{"a":' * 5000 + "1" + "}" * 5000, param="guided_json"
    )
    with pytest.raises(BadRequestError, match="guided_json: nested too deeply"):
        usable("hermes", "auto").constrain(SamplingParams(grammar=form))


def test_free_tools_need_no_grammar():
    free = [Tool(type="function", function=Function(name="now"))]
    asked = read_tools(free, None, None)
    dialect = choose_dialect("hermes", "tools", {})
    assert ToolCalling(asked, dialect).constrain(SamplingParams()).grammar is None


@pytest.mark.parametrize("name", FORMATS)
def test_tools_whose_schemas_are_too_large_together_are_refused_by_the_one_that_is_too_much(name):
    half = {"type": "object", "description": "d" * (MAX_GRAMMAR_BYTES // 2)}
    large = [
        Tool(type="function", function=Function(name=each, parameters=half)) for each in ("a", "b")
    ]
    dialect = choose_dialect(name.replace("newer", "mistral"), FORMATS[name], {})
    asked = read_tools(large, "required", None)
    assert asked is not None
    assert dialect is not None
    with pytest.raises(BadRequestError, match="at most") as caught:
        ToolCalling(asked, dialect).constrain(SamplingParams())
    assert caught.value.param == "tools[1].function.parameters"


def test_beside_calls_any_of_ten_thousand_choices_may_be_the_answer(compiler, tokenizer):
    choices = [f"{number * 7919 % 10_007} apples" for number in range(10_000)]
    form = Grammar(kind="choice", source=json.dumps(choices))
    grammar = usable("hermes", "auto").constrain(SamplingParams(grammar=form)).grammar
    state = compiler.compile(grammar).start()
    bits = np.zeros(-(-VOCAB // 32) * 4, np.uint8)
    for token in [*tokenizer.encode(choices[5000]), EOS]:
        state.fill(bits)
        assert state.error is None
        assert bits[token // 8] & 1 << token % 8
        state.accept(token)
