"""Thoughts between markers: where they end, however the text is cut, and under a grammar."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from lookonce.config import REASONING_PARSERS
from lookonce.engine.process.grammar import GrammarCompiler
from lookonce.errors import BadRequestError
from lookonce.frontend.reasoning import (
    MARKERS,
    ReasoningFormat,
    ReasoningReader,
    ReasoningTokens,
    choose_reasoning,
)
from lookonce.frontend.responses import ToolCallDelta
from lookonce.frontend.tools.calls import (
    Function,
    Tool,
    content_of,
    read_tools,
    reader_of,
    reasoning_of,
    tool_calling,
)
from lookonce.frontend.tools.formats import choose_dialect
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.sampling import Grammar, SamplingParams
from tests.support.server.harmony import TEMPLATE

THINK = ReasoningFormat("<think>", "</think>")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def calls_that_must_come():
    asked = read_tools([Tool(type="function", function=Function(name="now"))], "required", None)
    calling = tool_calling(asked, choose_dialect("hermes", "{{ tools }}<tool_call>", {}))
    return calling.constrain(SamplingParams()).grammar


STARTS = ("in thought", "free", "after thought")


def hermes():
    asked = read_tools([Tool(type="function", function=Function(name="now"))], "auto", None)
    return tool_calling(asked, choose_dialect("hermes", "{{ tools }}<tool_call>", {}))


def read(text, start="free", cuts=(), *, tools=None, format=THINK):
    """`(reasoning, content, names of calls, characters of the thought)`."""
    reader = ReasoningReader(format, start, reader_of(tools))
    deltas, begin = [], 0
    for end in sorted(cuts):
        deltas += reader.push(text[begin:end], last=False)
        begin = end
    deltas += reader.push(text[begin:], last=True)
    assert not any(isinstance(d, ToolCallDelta) and d.index >= len(reader.calls) for d in deltas)
    names = [call.function.name for call in reader.calls]
    return reasoning_of(deltas), content_of(deltas), names, reader.num_thought


SAYS = [
    ("<think>\nHm.\n</think>\n\nHello!", "free", ("Hm.", "Hello!", [])),
    ("\n<think>Hm.</think>Hello!", "free", ("Hm.", "Hello!", [])),
    ("<think>\n\n</think>\n\nHello!", "free", ("", "Hello!", [])),
    ("Hm.\n</think>\n\nHello!", "in thought", ("Hm.", "Hello!", [])),
    ("<think>\nHm.\n</think>\n\nHello!", "in thought", ("Hm.", "Hello!", [])),
    ("Hm. </thin", "in thought", ("Hm. </thin", "", [])),
    ("Hm. ", "in thought", ("Hm.", "", [])),
    ("<think>Hm.", "free", ("Hm.", "", [])),
    ("Hello <think>!</think>", "free", ("", "Hello <think>!</think>", [])),
    ("Hello </think>!", "free", ("", "Hello </think>!", [])),
    ("<think>Hm.</think>", "after thought", ("", "<think>Hm.</think>", [])),
    ("<think>Hm.</think>a<think>b</think>", "free", ("Hm.", "a<think>b</think>", [])),
    ("  Hello!", "free", ("", "  Hello!", [])),
    ("<thi", "free", ("", "<thi", [])),
    ("<thi", "in thought", ("<thi", "", [])),
    ("", "in thought", ("", "", [])),
    (f"<think>I could {CALL}</think>{CALL}", "free", (f"I could {CALL}", "", ["now"])),
    (f"I could {CALL}", "in thought", (f"I could {CALL}", "", [])),
    (f"<think>Hm.</think>\n\nI look.\n{CALL}", "free", ("Hm.", "I look.", ["now"])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "start", "meaning"), SAYS)
def test_what_is_thought_said_and_called(text, start, meaning):
    assert read(text, start, tools=hermes())[:3] == meaning


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "[THINK]", "[/THINK]", CALL, "<tool_call>", "<thi", "</", "</think",
     ">", " ", "\n", "\n\n", "words", "ü😀", "<"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    fragments=st.lists(FRAGMENTS, max_size=9),
    start=st.sampled_from(STARTS),
    format=st.sampled_from([THINK, ReasoningFormat("[THINK]", "[/THINK]")]),
    tools=st.booleans(),
    data=st.data(),
)
def test_it_never_matters_how_the_text_is_cut(fragments, start, format, tools, data):
    text = "".join(fragments)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    asked = hermes() if tools else None
    whole = read(text, start, tools=asked, format=format)
    assert read(text, start, cuts, tools=asked, format=format) == whole
    assert read(text, start, range(len(text)), tools=asked, format=format) == whole
    reasoning, content, _, num_thought = whole
    assert format.end not in reasoning
    assert reasoning in text[:num_thought]
    if not tools:
        assert content == (text[num_thought:].lstrip() if num_thought else text)
    if start == "after thought":
        assert not num_thought


@settings(max_examples=100, deadline=None)
@given(
    fragments=st.lists(FRAGMENTS, max_size=6), start=st.sampled_from(STARTS), lag=st.integers(0, 9)
)
def test_a_thought_s_tokens_are_counted_however_late_its_text_comes(fragments, start, lag):
    """Tokens are bytes; their text comes up to `lag` characters later, as with stop strings."""
    text = "".join(fragments)
    reader = ReasoningReader(THINK, start, reader_of(None))
    tokens = ReasoningTokens(reader, lambda token: bytes([token]), ())
    pushed = 0
    for number, character in enumerate(text):
        tokens.take(list(character.encode()))
        ready = max(pushed, number + 1 - lag)
        reader.push(text[pushed:ready], last=False)
        pushed = ready
    reader.push(text[pushed:], last=True)
    assert tokens.count == len(text[: reader.num_thought].encode())


# --- which format, and where an answer begins -------------------------------------------------


def test_every_option_has_a_format():
    assert set(REASONING_PARSERS) == {"auto", "none", *MARKERS}


def test_the_format_is_found_among_the_tokens_or_in_the_template():
    tokens = {"<think>": 5, "</think>": 6}
    assert choose_reasoning("auto", None, tokens) == ReasoningFormat("<think>", "</think>", tokens)
    assert choose_reasoning("auto", "{{ '<think>' }}…</think>", {}) == THINK
    assert choose_reasoning("auto", "", {"[THINK]": 1, "[/THINK]": 2}, ["[THINK]", "[/THINK]"]) == (
        ReasoningFormat("[THINK]", "[/THINK]", {"[THINK]": 1, "[/THINK]": 2})
    )
    assert choose_reasoning("auto", "{{ messages }}", {"<think>": 5}) is None
    assert choose_reasoning("auto", TEMPLATE, tokens) is None
    assert choose_reasoning("none", "</think>", tokens) is None
    assert choose_reasoning("seed_oss", "", {}).end == "</seed:think>"


@pytest.mark.parametrize(
    ("prompt", "continued", "start"),
    [
        ("…assistant\n", None, "free"),
        ("…assistant\n<think>\n", None, "in thought"),
        ("…assistant\n<think>\n\n</think>\n\n", None, "after thought"),
        ("Say <think></user>assistant\n", None, "free"),
        ("…assistant\n<think>\nI", "<think>\nI", "in thought"),
        ("<think></user>assistant\nI", "I", "after thought"),
        ("…<think>Hm.</think>I", "<think>Hm.</think>I", "after thought"),
    ],
)
def test_the_end_of_the_prompt_says_where_the_answer_begins(prompt, continued, start):
    assert THINK.start_after(prompt, continued) == start


# --- grammars -----------------------------------------------------------------------------------


FIVE = Grammar(kind="json_schema", source='{"type":"integer"}')
FORMS = {
    "json": (FIVE, "5", "five"),
    "regex": (Grammar(kind="regex", source="[a-c]+"), "abc", "abd"),
    "choice": (Grammar(kind="choice", source='["red","blue"]'), "red", "green"),
    "grammar": (Grammar(kind="grammar", source='start: "yes" | "no"'), "no", "maybe"),
    "calls": (
        calls_that_must_come(),
        CALL,
        "I look.",
    ),
}


@pytest.fixture(scope="module", params=["special", "added", "text", "odd"])
def thinking(request, tmp_path_factory):
    """A format, its tokenizer and a compiler: the markers are special tokens, added ones, text
    alone, or added tokens that llguidance takes for text."""
    names = MARKERS["kimi_vl" if request.param == "odd" else "qwen3"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    if request.param != "text":
        special = request.param == "special"
        backend.add_tokens([AddedToken(name, special=special) for name in names])
    folder = tmp_path_factory.mktemp(request.param)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}'
    )
    tokenizer = Tokenizer.load(folder)
    added = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
    format = choose_reasoning("auto", "…".join(names), added, tokenizer.special_texts)
    compiler = GrammarCompiler(str(folder), tokenizer.vocab_size, [added["<end>"]])
    yield format, tokenizer, compiler, added["<end>"]
    compiler.close()


def takes(compiled, tokenizer, text, end):
    """Whether the grammar lets a model write this, and end."""
    state = compiled.start()
    bits = np.zeros(-(-tokenizer.vocab_size // 32) * 4, np.uint8)
    for token in [*tokenizer.encode(text, add_special_tokens=False), end]:
        state.fill(bits)
        if state.error or not bits[token // 8] >> token % 8 & 1:
            return False
        state.accept(token)
    return True


@pytest.mark.parametrize("form", FORMS)
def test_a_grammar_begins_after_the_thought(thinking, form):
    format, tokenizer, compiler, end = thinking
    grammar, right, wrong = FORMS[form]
    sampling = SamplingParams(grammar=grammar)
    thought = f"Hm {{5}} <b>\n{format.end}\n\n"
    judged = {
        "in thought": ([thought + right, format.end + right], [right, thought + wrong, "Hm"]),
        "free": (
            [right, f"{format.begin}\n{thought}{right}", format.begin + format.end + right],
            [wrong, thought + right, format.begin + right, format.begin + thought + wrong],
        ),
        "after thought": ([right], [wrong, thought + right, format.begin + thought + right]),
    }
    for start, (rights, wrongs) in judged.items():
        compiled = compiler.compile(format.constrain(sampling, start).grammar)
        assert [t for t in rights if not takes(compiled, tokenizer, t, end)] == []
        assert [t for t in wrongs if takes(compiled, tokenizer, t, end)] == []


def test_a_grammar_that_does_not_compile_is_refused_as_without_thoughts(thinking):
    format, _, compiler, _ = thinking
    bad = Grammar(kind="regex", source="(", param="guided_regex")
    with pytest.raises(BadRequestError) as plain:
        compiler.compile(bad)
    with pytest.raises(BadRequestError) as after:
        compiler.compile(format.constrain(SamplingParams(grammar=bad), "free").grammar)
    assert (after.value.param, after.value.message) == ("guided_regex", plain.value.message)
