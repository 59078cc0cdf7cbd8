"""Harmony: which channel is what, however the text is cut, and whatever the grammars allow."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.engine.process.grammar import GrammarCompiler
from lookonce.frontend.reasoning import AnswerReaders
from lookonce.frontend.tools.calls import (
    NO_REQUESTED_TOOLS,
    Function,
    Tool,
    ToolCalling,
    content_of,
    read_tools,
    reasoning_of,
    tool_calling,
)
from lookonce.frontend.tools.formats import choose_dialect
from lookonce.frontend.tools.harmony import MARKERS, HarmonyParser
from lookonce.frontend.tools.parser import CallStart, ContentText, joined
from lookonce.render.prompt.detokenizer import Detokenizer
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.sampling import Grammar, SamplingParams
from tests.support.server.harmony import CALL, FINAL, TEMPLATE, THOUGHT


def parse(text, cuts=(), *, calls=True):
    parser = HarmonyParser(calls=calls)
    deltas, start = [], 0
    for end in [*sorted(cuts), len(text)]:
        deltas += parser.push(text[start:end])
        start = end
    return joined(deltas + parser.finish())


def read(text, *, tools=True):
    """`(thoughts, words, calls)` of an answer."""
    dialect = choose_dialect("auto", TEMPLATE, {})
    asked = read_tools([Tool(type="function", function=Function(name="now"))], "auto", None)
    told = (reader := tool_calling(asked if tools else None, dialect).reader()).push(
        text, last=True
    )
    calls = [(call.function.name, call.function.arguments) for call in reader.calls]
    return reasoning_of(told), content_of(told), calls


SAYS = [
    (THOUGHT + FINAL + "<|return|>", ("Hm.", "Hello!", [])),
    (FINAL + "<|end|>", ("", "Hello!", [])),
    (THOUGHT + FINAL + " <|retu", ("Hm.", "Hello! <|retu", [])),
    (THOUGHT + CALL + '{"a": 1}<|call|>', ("Hm.", "", [("now", '{"a": 1}')])),
    (THOUGHT + CALL + '{"a": 1', ("Hm.", "", [("now", '{"a": 1')])),
    (CALL + "<|call|>", ("", "", [("now", "{}")])),
    (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("now", "{}")])),
    (CALL.replace(" <|con", "<|con") + "{}", ("", "", [("now", "{}")])),
    (CALL.replace("commentary", "analysis") + "{}<|call|>", ("", "", [("now", "{}")])),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL + "{}<|call|>",
     ("", "I look.", [("now", "{}")])),
    (CALL + "{}<|call|><|start|>assistant" + CALL + "[]", ("", "", [("now", "{}"), ("now", "[]")])),
    (CALL + "{}<|start|>assistant" + FINAL, ("", "Hello!", [("now", "{}")])),
    (THOUGHT + THOUGHT + FINAL, ("Hm.\nHm.", "Hello!", [])),
    (FINAL + "<|end|>" + FINAL, ("", "Hello!\nHello!", [])),
    ("<|channel|>commentary to=python<|message|>1 + 1", ("", "1 + 1", [])),
    ("<|channel|>analysis to=python<|message|>1 + 1", ("1 + 1", "", [])),
    ("<|message|>Hello!<|return|>", ("", "Hello!", [])),
    ("Hello <|world|> <|", ("", "Hello <|world|> <|", [])),
    ("to be", ("", "to be", [])),
    (" to", ("", " to", [])),
    ("to=" + "o" * 600, ("", "to=" + "o" * 600, [])),
    ("<|channel|>analy", ("", "", [])),
    ("", ("", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "meaning"), SAYS)
def test_what_is_thought_said_and_called(text, meaning):
    assert read(text) == meaning


def test_without_tools_what_is_addressed_to_a_function_is_said():
    assert read(THOUGHT + CALL + "{}<|call|>", tools=False) == ("Hm.", "{}", [])


FRAGMENTS = st.sampled_from(
    [*MARKERS, THOUGHT, FINAL, CALL, "assistant", " to=functions.now", "to=", " ", "\n", "final",
     "analysis", '{"a": 1}', "words", "ü😀", "<|", "<|chan", "|>"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=9), calls=st.booleans(), data=st.data())
def test_it_never_matters_how_the_text_is_cut(fragments, calls, data):
    text = "".join(fragments)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = parse(text, calls=calls)
    assert parse(text, cuts, calls=calls) == whole
    assert parse(text, range(len(text)), calls=calls) == whole
    if not calls:
        assert not any(isinstance(delta, CallStart) for delta in whole)
    if text.strip() and not any(marker in text for marker in MARKERS):
        assert whole == [ContentText(text)]


# --- over the tokens of a folder of gpt-oss' kind ---------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder("gpt_oss"))


@pytest.fixture(scope="module")
def compiler(folder, tokenizer):
    end = tokenizer.special_texts["<|return|>"]
    return GrammarCompiler(str(folder("gpt_oss")), tokenizer.vocab_size, [end])


def usable(tokenizer, choice, *, strict=None):
    city = {"type": "object", "properties": {"city": {"enum": ["Bern"]}}, "required": ["city"]}
    functions = [Function(name="get", parameters=city, strict=strict), Function(name="now")]
    asked = read_tools([Tool(type="function", function=f) for f in functions], choice, None)
    return tool_calling(asked, choose_dialect("auto", TEMPLATE, tokenizer.special_texts))


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [
        (THOUGHT + FINAL + "<|return|>", ["Hm."]),
        (THOUGHT + THOUGHT + CALL + "{}<|call|>", ["Hm.", "Hm."]),
        ("<|channel|>analysis<|message|>Hm", ["Hm"]),
        ("<|channel|>commentary to=analysis<|message|>Hm.<|end|>", []),
        ("analysis <|message|>Hello", []),
        (FINAL, []),
    ],
)
def test_tokens_on_the_channel_of_analysis_are_counted(tokenizer, text, thoughts):
    tools = tool_calling(None, choose_dialect("auto", TEMPLATE, tokenizer.special_texts))
    readers = AnswerReaders(tools, None, tokenizer)
    for token in tokenizer.encode(text, add_special_tokens=False):
        readers.note(0, [token])
    count = sum(len(tokenizer.encode(each, add_special_tokens=False)) for each in thoughts)
    assert readers.num_reasoning_tokens == count


def test_special_tokens_are_read_and_end_the_answer(tokenizer):
    tools = tool_calling(None, choose_dialect("auto", TEMPLATE, tokenizer.special_texts))
    ids = tokenizer.encode(THOUGHT + FINAL + "<|return|>", add_special_tokens=False)
    text = Detokenizer(tokenizer, skipped=tokenizer.special_ids_except(tools.markers)).push(ids)
    told = tools.reader().push(text, last=True)
    assert (reasoning_of(told), content_of(told)) == ("Hm.", "Hello!")
    ends = {tokenizer.special_texts[text] for text in ("<|return|>", "<|call|>")}
    assert set(tools.constrain(SamplingParams()).stop_token_ids) == ends
    assert tools.constrain(SamplingParams(ignore_eos=True)).stop_token_ids == ()


def takes(compiled, tokenizer, text):
    state = compiled.start()
    for token in tokenizer.encode(text + "<|return|>", add_special_tokens=False):
        state.accept(token)
    return state.error is None


GET = THOUGHT + CALL.replace("now", "get")
FIVE = "<|channel|>final<|message|>5"
JUDGED = {
    "required": ({GET + '{"city": "Bern"}', CALL + "{}"},
                 {FINAL, GET + '{"city": "Rom"}', CALL.replace("now", "later") + "{}", "Hello"}),
    "strict": ({GET + '{"city": "Bern"}', CALL + "{}", THOUGHT + FINAL, FINAL},
               {GET + '{"city": "Rom"}', CALL + "1", "Hello"}),
    "form": ({THOUGHT + FIVE, FIVE},
             {FINAL, "5", CALL + "{}", THOUGHT.replace("analysis", "commentary") + FIVE}),
    "tools and form": ({GET + '{"city": "Bern"}', FIVE},
                       {FINAL, "5", GET + "{}"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", JUDGED)
def test_calls_and_forms_are_held_to_within_the_channels(compiler, tokenizer, kind):
    form = Grammar(kind="json_schema", source='{"type":"integer"}') if "form" in kind else None
    tools = usable(tokenizer, "required" if kind == "required" else "auto", strict=kind == "strict")
    if kind == "form":
        tools = ToolCalling(NO_REQUESTED_TOOLS, tools.dialect)
    compiled = compiler.compile(tools.constrain(SamplingParams(grammar=form)).grammar)
    right, wrong = JUDGED[kind]
    for text in right:
        assert takes(compiled, tokenizer, text), text
    for text in wrong:
        assert not takes(compiled, tokenizer, text), text


def test_a_call_that_must_come_can_be_drawn_and_is_read(compiler, tokenizer):
    rng, tools = np.random.default_rng(5), usable(tokenizer, "required")
    state = compiler.compile(tools.constrain(SamplingParams()).grammar).start()
    bits = np.zeros(-(-tokenizer.vocab_size // 32) * 4, np.uint8)
    tokens = []
    for _ in range(600):
        state.fill(bits)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        ends = [
            t for t in allowed if tokenizer.added_tokens.get(int(t)) in ("<|end|>", "<|return|>")
        ]
        tokens.append(int(rng.choice(ends if ends and len(tokens) > 20 else allowed)))
        if tokenizer.added_tokens.get(tokens[-1]) == "<|return|>":
            break
        state.accept(tokens[-1])
        assert state.error is None
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    (reader := tools.reader()).push(text, last=True)
    assert [call.function.name in ("get", "now") for call in reader.calls] == [True]
    json.loads(reader.calls[0].function.arguments)
