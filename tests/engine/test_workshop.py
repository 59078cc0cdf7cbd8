"""Requests that wait for their grammar: nobody else waits with them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lookonce.errors import BadRequestError, RequestFailedError
from lookonce.types.sampling import Grammar, SamplingParams
from tests.support.core.builders import text
from tests.support.engine.living import PATIENCE, World, expected, rendered, tokens_of

FREE = SamplingParams(max_tokens=4)


def constrained(source):
    return SamplingParams(max_tokens=4, grammar=Grammar(kind="regex", source=source, param="regex"))


class Compiler:
    """Compiles nothing: `slow` waits for the gate, `bad` is refused, `bug` breaks."""

    def __init__(self):
        self.gate = threading.Event()
        self.begun = threading.Event()

    def __call__(self, grammar):
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
