"""Grammars over nano's tokenizer: every walk through the masks conforms; compiling delays none."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import numpy as np
import pytest

from lookonce.config import NANO_EAR_FOLDER, NANO_FOLDER
from lookonce.engine.process.grammar import GrammarCompiler
from lookonce.errors import BadRequestError, RequestFailedError
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.sampling import Grammar, SamplingParams
from tests.support.core.builders import text
from tests.support.engine.grammars import EOS, VOCAB, walk
from tests.support.engine.living import PATIENCE, World, expected, rendered, tokens_of


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(str(NANO_FOLDER), VOCAB, [EOS])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(NANO_FOLDER)


def test_a_tokenizer_that_is_not_read_is_one_line_of_the_log(caplog):
    """nano-ear's: its words are no bytes that follow each other."""
    deaf = GrammarCompiler(str(NANO_EAR_FOLDER), VOCAB, [EOS])
    with pytest.raises(RequestFailedError, match="this model's tokenizer"):
        deaf._tokenizer()
    (line,) = [each for each in caplog.records if "llguidance" in each.getMessage()]
    assert (line.levelname, line.exc_info) == ("WARNING", None)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["ä", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def is_person(text):
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 5
    assert 0 <= person["age"] <= 120
    assert set(person["tags"]) <= {"ä", "b"}
    return True


CASES = {
    "choice": (json.dumps(["a red", "a red circle", 'grü"n', "b\\c"]),
               lambda t: t in ["a red", "a red circle", 'grü"n', "b\\c"]),
    "regex": (r"[0-9]{2,4}(-[a-c]+){1,2}", lambda t: re.fullmatch(r"\d{2,4}(-[a-c]+){1,2}", t)),
    "json_schema": (json.dumps(PERSON), is_person),
    "grammar": ('root ::= "a" [0-9]+ ("," [0-9]+)*',
                lambda t: re.fullmatch(r"a\d+(,\d+)*", t)),
    "lark": ('start: "<call>" %json {"type": "integer", "minimum": 5, "maximum": 9} "</call>"',
             lambda t: re.fullmatch("<call>[5-9]</call>", t)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_whatever_is_drawn_conforms(compiler, tokenizer, kind):
    source, conforms = CASES[kind]
    compiled = compiler.compile(Grammar(kind=kind, source=source))
    rng = np.random.default_rng(5)
    texts = [walk(compiled, tokenizer, rng) for _ in range(25)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 15
    assert len(set(ended)) > 1
    for answer in ended:
        assert conforms(answer), answer


BAD = [
    ("regex", "(a|b", "unclosed group"),
    ("regex", r"(?=a)b", "look-around"),
    ("json_schema", '{"type": "wrong"}', "wrong"),
    ("json_schema", '{"properties": {"a": {"$ref": "#/nowhere"}}}', "does not exist"),
    ("json_schema", '{"not": {"type": "string"}}', "not"),
    ("json_schema", "[1]", "param"),
    ("grammar", "", "root"),
    ("grammar", "root ::= [a", "end of input"),
    ("grammar", "start: A\nA: /a/ & /b/", "nothing can conform to it"),
    ("regex", r"[^\s\S]", "nothing can conform to it"),
    ("lark", "begin: x", "start"),
    ("lark", "start: x", "x"),
]


@pytest.mark.parametrize(("kind", "source", "words"), BAD)
def test_what_cannot_be_is_refused_naming_the_field(compiler, kind, source, words):
    with pytest.raises(BadRequestError) as caught:
        compiler.compile(Grammar(kind=kind, source=source, param="param.of.it"))
    assert caught.value.param == "param.of.it"
    assert caught.value.message.startswith("param.of.it: ")
    assert words in caught.value.message
    assert "<state>" not in caught.value.message
    assert len(caught.value.message) < 500


def test_any_of_ten_thousand_choices_may_be_the_answer(compiler, tokenizer):
    choices = [f"{number * 7919 % 10_007} apples" for number in range(10_000)]
    compiled = compiler.compile(Grammar(kind="choice", source=json.dumps(choices)))
    for wanted in (choices[0], choices[5000], choices[-1]):
        state = compiled.start()
        bits = np.zeros(-(-VOCAB // 32) * 4, np.uint8)
        for token in [*tokenizer.encode(wanted), EOS]:
            state.fill(bits)
            assert state.error is None
            assert bits[token // 8] & 1 << token % 8
            state.accept(token)


def test_a_compiled_grammar_is_followed_by_many(compiler, tokenizer):
    first = compiler.compile(Grammar(kind="choice", source='["yes", "no"]'))
    one, other = first.start(), first.start()
    one.accept(tokenizer.encode("yes")[0])
    bits = np.zeros(-(-VOCAB // 32) * 4, np.uint8)
    other.fill(bits)
    allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    assert {tokenizer.decode([int(t)])[0] for t in allowed} == {"y", "n"}


def test_what_breaks_a_grammar_is_told_in_one_line(compiler, tokenizer):
    state = compiler.compile(Grammar(kind="regex", source="[0-9]+")).start()
    assert state.error is None
    state.accept(tokenizer.encode("x")[0])
    assert state.error
    assert "\n" not in state.error


FREE = SamplingParams(max_tokens=4)


def constrained(source):
    return SamplingParams(max_tokens=4, grammar=Grammar(kind="regex", source=source, param="regex"))


class Compiler:
    """Compiles nothing: `slow` waits for the gate, `bad` is refused, `bug` breaks."""

    nbytes = 10

    def __init__(self):
        self.gate = threading.Event()
        self.begun = threading.Event()

    def __call__(self, grammar, abandoned):
        if grammar.source == "slow":
            self.begun.set()
            assert self.gate.wait(PATIENCE)
        if grammar.source == "bad":
            raise BadRequestError("regex: never closed", param="regex")
        if grammar.source == "bug":
            raise ZeroDivisionError
        return self

    def start(self):
        raise AssertionError("the fake runner follows no grammar")


def run(scenario):
    world, compiler = World(), Compiler()
    world.engine.become_ready(compiler)

    async def whole(client):
        try:
            await scenario(client, compiler)
        finally:
            compiler.gate.set()

    world.run(whole)


async def answer(client, prompt, sampling, name):
    return [delta async for delta in client.generate(prompt, sampling, name)]


def test_a_slow_grammar_stalls_nobody_and_is_followed_when_it_is_there():
    async def scenario(client, compiler):
        prompt = rendered(text(10))
        slow = asyncio.create_task(answer(client, prompt, constrained("slow"), "slow"))
        await asyncio.to_thread(compiler.begun.wait, PATIENCE)
        other = rendered(text(12, seed=1))
        assert tokens_of(await answer(client, other, FREE, "free")) == expected(other, 4)
        assert tokens_of(await answer(client, other, constrained("quick"), "quick"))
        assert not slow.done()
        compiler.gate.set()
        assert tokens_of(await slow) == expected(prompt, 4)

    run(scenario)


def test_what_cannot_be_compiled_is_the_request_s_own_failure():
    async def scenario(client, compiler):
        with pytest.raises(BadRequestError, match="never closed") as caught:
            await answer(client, rendered(text(10)), constrained("bad"), "bad")
        assert caught.value.param == "regex"
        with pytest.raises(RequestFailedError):
            await answer(client, rendered(text(10)), constrained("bug"), "bug")
        assert await answer(client, rendered(text(10)), FREE, "free")

    run(scenario)


def test_an_aborted_request_leaves_nothing_though_its_grammar_is_still_compiled():
    async def scenario(client, compiler):
        work = answer(client, rendered(text(10)), constrained("slow"), "slow")
        slow = asyncio.create_task(work)
        await asyncio.to_thread(compiler.begun.wait, PATIENCE)
        await client.abort("slow")
        deltas = await slow
        assert [delta.finish_reason for delta in deltas] == ["abort"]
        assert await answer(client, rendered(text(10)), FREE, "free")
        compiler.gate.set()
        assert await answer(client, rendered(text(10)), constrained("quick"), "quick")

    run(scenario)
