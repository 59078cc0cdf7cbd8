"""Live sessions through the client: a whole engine with threads and messages, a fake runner."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from lookonce.errors import (
    BadRequestError,
    EngineDeadError,
    MediaNotCachedError,
    QueueFullError,
    SessionFullError,
)
from lookonce.ipc.messages import CacheOps, ExtendSession
from lookonce.types.media import Array
from lookonce.types.request import ExtendOptions, SessionOptions
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, model_info, text
from tests.support.core.fake_runner import advance, sample
from tests.support.engine.living import World, part, rendered, tokens_of, until

TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
UNANSWERED = SessionOptions(answer=False)


@pytest.fixture
def world():
    return session_world(Limits(num_blocks=4096))


def session_world(*args, **kwargs) -> World:
    made = World(*args, **kwargs)
    made.engine.runner.allows_unanswered = True
    return made


async def begun(world: World, opening):
    """A session that is being answered: it has its first token, and the second step is held up."""
    await world.quiet_steps()
    world.engine.runner.gate.clear()
    world.engine.runner.num_passing = 1
    session = await opening
    assert (await anext(session)).token_ids
    await until(lambda: world.engine.runner.is_held)
    return session


async def in_the_next_step(world: World, num_commands: int) -> None:
    """Let the step go on that is held up, once so many commands wait for its end."""
    await until(lambda: world.engine.step_channel.num_commands == num_commands)
    world.engine.runner.gate.set()


async def answer(session):
    """The deltas of one answer, up to its end."""
    deltas = []
    async for delta in session:
        deltas.append(delta)
        if delta.session.ended:
            return deltas
    raise AssertionError("the session ended without an answer")


def expected(*given: list[int], answers: int = 2) -> list[list[int]]:
    """The answers of an engine that computes everything in one go: after each list of tokens."""
    state, found = b"", []
    for tokens in given:
        for token in tokens:
            state = advance(state, token, None)
        found.append([])
        for _ in range(answers):
            found[-1].append(sample(state, 0))
            state = advance(state, found[-1][-1], None)
    return found


def test_a_session_answers_its_prompt_and_each_extension(world):
    first, *more = [text(6, seed=seed) for seed in range(5)]

    async def scenario(client):
        async with await client.open_session(rendered(first), TWO, "s") as session:
            answers = [tokens_of(await answer(session))]
            for number, tokens in enumerate(more, 1):
                assert await session.extend(rendered(tokens)) == number
                deltas = await answer(session)
                assert {delta.session.extension for delta in deltas} == {number}
                answers.append(tokens_of(deltas))
        assert answers == expected(first, *more)

    world.run(scenario)


def test_a_queued_extension_waits_for_the_answer_before_it(world):
    async def scenario(client):
        async with await client.open_session(rendered(text(6)), TWO, "s") as session:
            await session.extend(rendered(text(6, seed=1)))
            await session.extend(rendered(text(6, seed=2)))
            answers = [await answer(session) for _ in range(3)]
            assert [tokens_of(deltas) for deltas in answers] == expected(
                text(6), text(6, seed=1), text(6, seed=2)
            )
            assert [deltas[-1].session.ended for deltas in answers] == ["length"] * 3

    world.run(scenario)


def test_an_interrupting_extension_ends_the_answer_that_is_generated(world):
    async def scenario(client):
        async with await begun(world, client.open_session(rendered(text(6)), LONG, "s")) as session:
            await session.extend(
                rendered(text(6, seed=1)), ExtendOptions(interrupt=True, max_tokens=1)
            )
            await in_the_next_step(world, 1)
            interrupted, after = await answer(session), await answer(session)
            assert interrupted[-1].session.ended == "interrupted"
            assert len(interrupted) < 3000
            assert [d.session.extension for d in after] == [1]
            assert after[-1].session.ended == "length"

    world.run(scenario)


def test_an_interruption_takes_in_what_waits_before_it(world):
    async def scenario(client):
        async with await begun(world, client.open_session(rendered(text(6)), LONG, "s")) as session:
            await session.extend(rendered(text(3, seed=1)))
            await session.extend(
                rendered(text(3, seed=2)), ExtendOptions(interrupt=True, max_tokens=1)
            )
            await in_the_next_step(world, 2)
            await answer(session)
            after = await answer(session)
            assert [delta.session.extension for delta in after] == [2]

    world.run(scenario)


def test_what_asks_for_no_answer_gets_none_and_counts_all_the_same(world):
    async def scenario(client):
        session = await client.open_session(rendered(text(6)), TWO, "s", UNANSWERED)
        async with session:
            await session.extend(rendered(text(5, seed=1)), ExtendOptions(answer=False))
            await session.extend(rendered(text(4, seed=2)))
            deltas = await answer(session)
            whole = text(6) + text(5, seed=1) + text(4, seed=2)
            assert tokens_of(deltas) == expected(whole)[0]

    world.run(scenario)


def test_items_come_with_the_opening_and_with_extensions(world):
    async def scenario(client):
        opening = rendered(text(20), part("cat"), offsets=(3,))
        async with await client.open_session(opening, TWO, "s") as session:
            await answer(session)
            await session.extend(rendered(text(9), part("dog"), offsets=(2,)))
            await answer(session)
            held = part("cat", held=True)
            await session.extend(rendered(text(9), held, offsets=(1,)))
            await answer(session)
            alone = part("frame")
            await session.extend(rendered(text(9), alone, offsets=(1,)), loose=True)
            await answer(session)
            assert client.directory.listing(alone.key) is None
            assert client.directory.listing(held.key) is not None
            store = world.engine.receiver_cache.store
            assert store.get(alone.key) is None, "nothing is held for a session"

    world.run(scenario)


def test_an_item_that_the_engine_lost_is_made_again_before_it_is_sent(world):
    async def scenario(client):
        async with await client.open_session(rendered(text(6)), TWO, "s") as session:
            await answer(session)
            await session.extend(rendered(text(9), part("cat", held=True), offsets=(2,)))
            await answer(session)
            nameless = part("dog", held=True, recoverable=False)
            with pytest.raises(MediaNotCachedError):
                await session.extend(rendered(text(9), nameless, offsets=(2,)))
            await session.extend(rendered(text(3)))
            await answer(session)

    world.run(scenario)


# --- credits ----------------------------------------------------------------------------------


def test_who_sends_faster_than_it_is_computed_waits_for_credits(world):
    async def scenario(client):
        options = SessionOptions(answer=False, credits=10)
        async with await client.open_session(rendered(text(6)), TWO, "s", options) as session:
            await world.quiet_steps()
            world.engine.runner.gate.clear()
            for seed in range(3):
                await session.extend(rendered(text(4, seed=seed)), ExtendOptions(answer=False))
            assert session.is_slowed
            blocked = asyncio.create_task(
                session.extend(rendered(text(4)), ExtendOptions(answer=False))
            )
            await asyncio.sleep(0.05)
            assert not blocked.done()
            world.engine.runner.gate.set()
            assert await blocked == 4
            await until(lambda: session.credits == 10)

    world.run(scenario)


def test_credits_wait_for_a_caller_that_does_not_read(world, monkeypatch):
    monkeypatch.setattr("lookonce.engine.client.session.MAX_UNREAD", 2)

    async def scenario(client):
        options = SessionOptions(credits=4)
        async with await client.open_session(rendered(text(6)), TWO, "s", options) as session:
            await session.extend(rendered(text(4)))
            await until(lambda: session._session.num_unread == 4)
            blocked = asyncio.create_task(session.extend(rendered(text(4))))
            await asyncio.sleep(0.02)
            assert not blocked.done()
            await answer(session)
            await anext(session)
            assert await blocked == 2

    world.run(scenario)


def test_more_than_the_credits_ends_the_session(world):
    async def scenario(client):
        options = SessionOptions(answer=False, credits=8)
        session = await client.open_session(rendered(text(6)), TWO, "s", options)
        await world.quiet_steps()
        world.engine.runner.gate.clear()
        tokens = np.array(text(8), np.int32)
        for number in (1, 2, 3):
            message = ExtendSession(
                client.sender.epoch,
                client.sender._next_seq(),
                CacheOps(),
                "s",
                number,
                Array("int32", (8,), tokens.tobytes()),
            )
            client._commit(message)
            await until(lambda: world.engine.runner.is_held)
        # The first is being computed; the others wait for the step's end, and come in together.
        await in_the_next_step(world, 2)
        with pytest.raises(BadRequestError, match="not computed; 8 may be"):
            async for _ in session:
                pass

    world.run(scenario)


def test_an_extension_that_was_lost_ends_the_session(world):
    async def scenario(client):
        session = await client.open_session(rendered(text(6)), TWO, "s", UNANSWERED)
        session._session.num_extensions = 3
        await session.extend(rendered(text(3)))
        with pytest.raises(BadRequestError, match="extension 4 of the session came as the 1th"):
            await anext(session)

    world.run(scenario)


# --- ends -------------------------------------------------------------------------------------


def test_a_full_context_ends_the_session_with_a_clear_error():
    world = session_world(Limits(model=model_info(max_model_len=20)))

    async def scenario(client):
        ten = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        session = await client.open_session(rendered(text(6)), ten, "s")
        await answer(session)
        await session.extend(rendered(text(3)))
        with pytest.raises(SessionFullError, match="filled the model's context"):
            await answer(session)
        with pytest.raises(SessionFullError):
            await session.extend(rendered(text(2)))

    world.run(scenario)


def test_an_engine_that_dies_ends_its_sessions_and_the_next_one_serves_new_ones(world):
    async def scenario(client):
        world.engine.runner.gate.clear()
        session = await client.open_session(rendered(text(6)), LONG, "s")
        options = SessionOptions(answer=False, credits=1)
        other = await client.open_session(rendered(text(6)), TWO, "t", options)
        await other.extend(rendered(text(6)))
        waiting = asyncio.create_task(other.extend(rendered(text(2))))
        await asyncio.sleep(0.02)
        world.engine.die()
        with pytest.raises(EngineDeadError, match=r"ended unexpectedly.*sessions have ended"):
            await answer(session)
        with pytest.raises(EngineDeadError, match="ended unexpectedly"):
            await waiting
        world.new_engine()
        await client.wait_ready()
        async with await client.open_session(rendered(text(6)), TWO, "s") as again:
            assert tokens_of(await answer(again)) == expected(text(6))[0]

    world.run(scenario)


def test_an_api_process_that_is_gone_loses_its_sessions_and_others_keep_theirs():
    """It says nothing; the engine finds out when it sends."""
    world = session_world(Limits(num_blocks=4096), num_senders=2)

    async def scenario(client):
        mine = await client.open_session(rendered(text(6)), TWO, "mine")
        answers = [tokens_of(await answer(mine))]
        other = world.client()
        async with other:
            await other.wait_ready()
            idle = await other.open_session(rendered(text(9)), TWO, "idle")
            await answer(idle)
            busy = await begun(world, other.open_session(rendered(text(9)), LONG, "busy"))
            world.hub.detach(other._channel._link)
            world.engine.runner.gate.set()
            await until(lambda: len(world.engine.receiver_cache.store.requests) == 1)
            busy.close()
        await mine.extend(rendered(text(4)))
        answers.append(tokens_of(await answer(mine)))
        assert answers == expected(text(6), text(4))
        assert (await client.stats())["sessions_open"] == 1
        mine.close()

    world.run(scenario)


def test_closing_wakes_whoever_iterates_or_waits(world):
    async def scenario(client):
        options = SessionOptions(answer=False, credits=1)
        session = await client.open_session(rendered(text(6)), TWO, "s", options)
        await world.quiet_steps()
        world.engine.runner.gate.clear()
        await session.extend(rendered(text(6)), ExtendOptions(answer=False))
        reading = asyncio.create_task(anext(session))
        sending = asyncio.create_task(session.extend(rendered(text(6))))
        await asyncio.sleep(0.01)
        session.close()
        world.engine.runner.gate.set()
        with pytest.raises(StopAsyncIteration):
            await reading
        with pytest.raises(BadRequestError, match="closed"):
            await sending

    world.run(scenario)


def test_a_session_that_is_dropped_is_closed(world):
    async def scenario(client):
        session = await client.open_session(rendered(text(6)), LONG, "s")
        await anext(session)
        del session
        await until(lambda: client.num_requests == 0)

    world.run(scenario)


def test_a_session_that_is_dropped_in_another_thread_is_closed_in_the_client_s(world):
    async def scenario(client):
        left_in = []
        session = await client.open_session(rendered(text(6)), LONG, "s")
        leave = session._leave
        session._leave = lambda pending: (left_in.append(threading.get_ident()), leave(pending))
        held = [session]
        del session
        await asyncio.to_thread(held.clear)
        await until(lambda: client.num_requests == 0)
        assert left_in == [threading.get_ident()]

    world.run(scenario)


def test_sessions_are_limited_in_all_and_by_tenant():
    world = session_world(max_sessions=3, max_tenant_sessions=2)

    async def scenario(client):
        sessions = []
        for number in range(2):
            prompt = rendered(text(6))
            sessions.append(await client.open_session(prompt, TWO, f"{number}", UNANSWERED))
        with pytest.raises(QueueFullError, match="2 sessions of this key's tenant are open"):
            await client.open_session(rendered(text(6)), TWO, "2", UNANSWERED)
        prompt = rendered(text(6))
        prompt.tenant = "b"
        sessions.append(await client.open_session(prompt, TWO, "3", UNANSWERED))
        prompt = rendered(text(6))
        prompt.tenant = "c"
        with pytest.raises(QueueFullError, match="3 sessions are open"):
            await client.open_session(prompt, TWO, "4", UNANSWERED)
        sessions.pop(0).close()
        prompt = rendered(text(6))
        prompt.tenant = "c"
        await until_released(world)
        sessions.append(await client.open_session(prompt, TWO, "4", UNANSWERED))
        assert (await client.stats())["sessions_open"] == 3
        for session in sessions:
            session.close()

    world.run(scenario)


async def until_released(world: World) -> None:
    await until(lambda: len(world.engine.receiver_cache.store.requests) < 3)


def test_a_thousand_sessions_opened_and_dropped_leave_nothing():
    world = session_world(Limits(num_blocks=65536, max_num_seqs=64, max_num_batched_tokens=256))

    async def scenario(client):
        steady = await client.open_session(rendered(text(6, seed=7)), TWO, "steady")
        answers = [tokens_of(await answer(steady))]

        async def one(number: int) -> None:
            session = await client.open_session(rendered(text(6, seed=number)), LONG, f"s{number}")
            if number % 3:
                await session.extend(rendered(text(3)), ExtendOptions(interrupt=number % 2 == 0))
            if number % 4 == 0:
                await anext(session)
            session.close()

        gate = asyncio.Semaphore(32)

        async def bounded(number: int) -> None:
            async with gate:
                while True:
                    try:
                        return await one(number)
                    except QueueFullError:
                        await asyncio.sleep(0.005)

        await asyncio.gather(*map(bounded, range(1000)))
        await steady.extend(rendered(text(4)))
        answers.append(tokens_of(await answer(steady)))
        assert answers == expected(text(6, seed=7), text(4))
        steady.close()
        await until(lambda: not world.engine.receiver_cache.store.requests)
        assert (await client.stats())["sessions_open"] == 0
        assert client.num_requests == 0

    world.run(scenario)
