"""Callers that leave, engines that die, the states between, and several clients at once."""

from __future__ import annotations

import asyncio
import gc

import pytest
from msgspec.structs import force_setattr

from lookonce.errors import (
    BadRequestError,
    DrainingError,
    EngineDeadError,
    NotReadyError,
    RequestFailedError,
)
from lookonce.ipc.messages import KeyedItem
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, key, text
from tests.support.engine.living import World, expected, item, part, rendered, tokens_of, until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
"""It has an end: who counts on it to go on holds the engine's gate."""


async def all_of(generation):
    return [delta async for delta in generation]


@pytest.fixture
def world():
    return World()


# --- what the engine cannot read --------------------------------------------------------------


def unreadable() -> SamplingParams:
    """Something that no check foresaw."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    force_setattr(sampling, "max_tokens", 8.0)
    return sampling


def test_a_request_that_the_engine_cannot_read_fails_alone_and_both_sides_stay_equal(world):
    """`World.run` compares them at the end."""

    async def scenario(client):
        fine = rendered(text(9))
        running = client.generate(fine, LONG, "running")
        deltas = [await anext(running)]
        prompt = rendered(text(20), part("cat"), offsets=(3,))
        with pytest.raises(RequestFailedError, match="cannot read"):
            await all_of(client.generate(prompt, unreadable(), "bad"))
        for name in ("cat", "dog"):
            prompt = rendered(text(20), part(name, held=name == "cat"), offsets=(3,))
            tokens = tokens_of(await all_of(client.generate(prompt, GREEDY, name)))
            assert tokens == expected(prompt, 8)
        deltas += await all_of(running)
        assert tokens_of(deltas) == expected(fine, 200)
        await until(lambda: client._channel.bytes_in_flight == 0)
        assert len(client.directory.sizes()) == 2

    world.run(scenario)


# --- leaving ----------------------------------------------------------------------------------


def test_closing_a_generation_aborts_it(world):
    async def scenario(client):
        generation = client.generate(rendered(text(9)), ENDLESS, "r")
        async for _ in generation:
            break
        await generation.aclose()
        assert client.num_requests == 0
        assert [delta async for delta in generation] == []

    world.run(scenario)


def test_dropping_a_generation_aborts_it(world):
    async def scenario(client):
        async for _ in client.generate(rendered(text(9)), ENDLESS, "r"):
            break
        gc.collect()
        assert client.num_requests == 0

    world.run(scenario)


@pytest.mark.parametrize("begun", [True, False], ids=["accepted", "not begun"])
def test_cancelling_whoever_waits_aborts(world, begun):
    async def scenario(client):
        generation = client.generate(rendered(text(9)), ENDLESS, "r")
        world.engine.runner.gate.clear()
        if begun:
            await generation
        waiting = asyncio.create_task(all_of(generation))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert client.num_requests == 0
        world.engine.runner.gate.set()

    world.run(scenario)


def test_a_generation_that_is_never_begun_gives_its_pins_back(world):
    async def scenario(client):
        client.directory._entries.capacity_bytes = 1 << 20
        await all_of(client.generate(rendered(text(20), part("cat"), offsets=(3,)), GREEDY, "a"))
        client.directory.lookup(key("cat"))
        held = part("cat", held=True)
        held.pinned = True
        client.generate(rendered(text(20), held, offsets=(3,)), GREEDY, "b")
        assert client.directory.num_pins == 0

    world.run(scenario)


def test_aborting_by_id_finishes_every_sample_with_abort(world):
    async def scenario(client):
        sampling = SamplingParams(n=2, max_tokens=3000, ignore_eos=True)
        world.engine.runner.gate.clear()
        generation = await client.generate(rendered(text(9)), sampling, "r")
        await until(lambda: world.engine.runner.is_held)
        await client.abort("r")
        await until(lambda: world.engine.step_channel.num_commands == 1)
        world.engine.runner.gate.set()
        rest = await all_of(generation)
        assert {(d.index, d.finish_reason) for d in rest[-2:]} == {(0, "abort"), (1, "abort")}

    world.run(scenario)


def test_one_sample_may_be_given_up_while_the_other_goes_on(world):
    prompt = rendered(text(9))
    sampling = SamplingParams(n=2, temperature=0.0, max_tokens=30, ignore_eos=True)

    async def scenario(client):
        world.engine.runner.gate.clear()
        generation = await client.generate(prompt, sampling, "r")
        await client.abort("r", 1)
        world.engine.runner.gate.set()
        deltas = await all_of(generation)
        assert tokens_of(deltas, 0) == expected(prompt, 30)
        assert {d.index for d in deltas} == {0}

    world.run(scenario)


# --- failures ---------------------------------------------------------------------------------


def test_a_step_that_breaks_fails_what_was_in_it_and_the_engine_serves_on(world):
    prompt = rendered(text(9))

    async def scenario(client):
        world.engine.runner.raising = 1
        with pytest.raises(RequestFailedError):
            await all_of(client.generate(prompt, SamplingParams(n=2), "broken"))
        assert tokens_of(await all_of(client.generate(prompt, GREEDY, "r"))) == expected(prompt, 8)

    world.run(scenario)


def test_a_dead_engine_ends_every_request_at_once_and_its_successor_serves(world):
    prompt = rendered(text(9), part("cat"), offsets=(3,))

    async def scenario(client):
        epoch = client.sender.epoch
        await all_of(client.generate(prompt, GREEDY, "first"))
        world.engine.runner.gate.clear()
        running = [
            asyncio.create_task(all_of(client.generate(rendered(text(9)), ENDLESS, f"r{n}")))
            for n in range(5)
        ]
        await until(lambda: client.num_requests == 5)
        await asyncio.to_thread(world.engine.die)
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, EngineDeadError)
        assert client.state == "dead"
        with pytest.raises(EngineDeadError):
            await client.generate(prompt, GREEDY, "r")
        with pytest.raises(EngineDeadError):
            await client.stats()
        assert client.model.name == "fake"

        world.new_engine()
        await client.wait_ready()
        assert client.sender.epoch != epoch
        assert len(client.directory) == 0
        again = rendered(text(9), part("cat", held=True), offsets=(3,))
        assert tokens_of(await all_of(client.generate(again, GREEDY, "r"))) == expected(again, 8)

    world.run(scenario)


def test_what_becomes_of_a_dead_engine_is_told_as_it_is(world):
    async def scenario(client):
        client.expect_no_restart()
        world.engine.runner.gate.clear()
        running = asyncio.create_task(all_of(client.generate(rendered(text(9)), ENDLESS, "r")))
        await until(lambda: client.num_requests == 1)
        await asyncio.to_thread(world.engine.die)
        with pytest.raises(EngineDeadError, match="unexpectedly; the server shuts down"):
            await running
        with pytest.raises(EngineDeadError, match="not running; the server shuts down"):
            await client.generate(rendered(text(9)), GREEDY, "again")
        world.new_engine()
        await client.wait_ready()

    world.run(scenario)


def test_requests_that_are_cut_off_say_why_and_leave_the_engine(world):
    async def scenario(client):
        world.engine.runner.gate.clear()
        running = [
            asyncio.create_task(all_of(client.generate(rendered(text(9)), ENDLESS, f"r{n}")))
            for n in range(3)
        ]
        await until(lambda: client.num_requests == 3)
        client.cut_off(DrainingError("the server shuts down"))
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, DrainingError)
        assert client.num_requests == 0
        world.engine.runner.gate.set()
        prompt = rendered(text(9))
        assert tokens_of(await all_of(client.generate(prompt, GREEDY, "r"))) == expected(prompt, 8)

    world.run(scenario)


def test_a_connection_that_comes_back_to_the_same_engine_starts_empty(world):
    async def scenario(client):
        await all_of(client.generate(rendered(text(20), part("cat"), offsets=(3,)), GREEDY, "a"))
        world.engine.runner.gate.clear()
        running = asyncio.create_task(all_of(client.generate(rendered(text(9)), ENDLESS, "b")))
        await until(lambda: client.num_requests == 1)
        link = client._channel._link
        link.announce_down()
        link.announce_up()
        with pytest.raises(EngineDeadError):
            await running
        world.engine.runner.gate.set()
        await client.wait_ready()
        assert len(client.directory) == 0
        prompt = rendered(text(20), part("cat"), offsets=(3,))
        assert tokens_of(await all_of(client.generate(prompt, GREEDY, "c"))) == expected(prompt, 8)

    world.run(scenario)


def test_a_client_that_closes_leaves_nothing_in_the_engine(world):
    async def scenario(client):
        async with world.client() as other:
            await other.wait_ready()
            prompt = rendered(text(20), part("cat"), offsets=(3,))
            world.engine.runner.gate.clear()
            running = await other.generate(prompt, ENDLESS, "r")
        world.engine.runner.gate.set()
        with pytest.raises(EngineDeadError):
            await all_of(running)
        await until(lambda: other.sender.sender_id not in world.engine.receiver_cache.store.senders)

    world.run(scenario)


# --- state ------------------------------------------------------------------------------------


def test_the_states_of_an_engine_that_starts(world):
    world.engine.die()

    async def scenario():
        async with world.client() as client:
            assert client.state == "starting"
            with pytest.raises(NotReadyError):
                client.model  # noqa: B018
            with pytest.raises(NotReadyError):
                await client.generate(rendered(text(9)), GREEDY, "r")
            engine = world.new_engine(ready=False)
            await until(lambda: client._health.connected)
            assert client.state == "starting"
            engine.become_ready()
            await client.wait_ready()
            assert client.state == "ready"

    try:
        asyncio.run(scenario())
    finally:
        world.engine.die()


# --- caches and figures -----------------------------------------------------------------------


def test_stats_name_the_engines_counters(world):
    async def scenario(client):
        await all_of(client.generate(rendered(text(20), part("cat"), offsets=(3,)), GREEDY, "a"))
        stats = await client.stats()
        assert stats["prompt_tokens_total"] == 20
        assert stats["generation_tokens_total"] == 8
        assert stats["encoder_runs_total"] == 1
        assert stats["mm_store_bytes"] == stats["mm_store_listed_bytes"] == item(4).nbytes

    world.run(scenario)


@pytest.mark.parametrize("tier", ["mm", "prefix", "encoder"])
def test_resetting_a_tier_disturbs_no_running_request(world, tier):
    prompt = rendered(text(20), part("cat"), offsets=(3,))
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    async def scenario(client):
        generation = await client.generate(prompt, sampling, "r")
        await client.reset_cache(tier)
        assert tokens_of(await all_of(generation)) == expected(prompt, 40)
        assert len(client.directory) == (0 if tier == "mm" else 1)

    world.run(scenario)


def test_an_unknown_tier_is_refused(world):
    async def scenario(client):
        with pytest.raises(BadRequestError):
            await client.reset_cache("disk")

    world.run(scenario)


def test_injected_items_are_used_without_being_rendered(world):
    async def scenario(client):
        await client.inject([KeyedItem(key("cat"), item(4))])
        known = part("cat", held=True, recoverable=False)
        prompt = rendered(text(20), known, offsets=(3,))
        assert tokens_of(await all_of(client.generate(prompt, GREEDY, "r"))) == expected(prompt, 8)

    world.run(scenario)


# --- several at once --------------------------------------------------------------------------


def test_two_api_processes_share_one_engine_and_each_others_items():
    world = World(num_senders=2)

    async def scenario(client):
        async with world.client() as other:
            await other.wait_ready()
            prompt = rendered(text(20), part("cat"), offsets=(3,))
            await all_of(client.generate(prompt, GREEDY, "a"))
            await until(lambda: other.directory.peek(key("cat")) is not None)
            shared = rendered(text(20), part("cat", held=True, recoverable=False), offsets=(3,))
            deltas = await all_of(other.generate(shared, GREEDY, "b"))
            assert tokens_of(deltas) == expected(shared, 8)
            assert other.sender.resends == 0
        await until(lambda: len(world.engine.receiver_cache.store.senders) == 1)

    world.run(scenario)


def test_an_injected_item_is_stored_once_every_api_process_may_name_it():
    world = World(num_senders=2)

    async def scenario(client):
        async with world.client() as other:
            await other.wait_ready()
            outcomes = await client.inject_items([(key("cat"), item(4))])
            assert [outcome.status for outcome in outcomes] == ["stored"]
            assert other.directory.peek(key("cat")) is not None
        await until(lambda: len(world.engine.receiver_cache.store.senders) == 1)

    world.run(scenario)


def test_any_api_process_may_abort_a_request_of_another():
    world = World(num_senders=2)

    async def scenario(client):
        async with world.client() as other:
            await other.wait_ready()
            world.engine.runner.gate.clear()
            generation = await client.generate(rendered(text(9)), ENDLESS, "r")
            step_channel = world.engine.step_channel
            await until(lambda: world.engine.runner.is_held)
            await other.abort("r")
            await until(lambda: step_channel.num_commands == 1)
            world.engine.runner.gate.set()
            deltas = await all_of(generation)
            assert deltas[-1].finish_reason == "abort"
        await until(lambda: len(world.engine.receiver_cache.store.senders) == 1)

    world.run(scenario)


def test_of_200_streams_a_third_leave_midway_and_nothing_is_left():
    world = World(Limits(num_blocks=80, max_num_seqs=16, max_num_batched_tokens=64))
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    async def one(client, number):
        cat = part(f"cat {number % 7}")
        prompt = rendered(text(10 + number % 17, seed=number % 11), cat, offsets=(2,))
        generation = client.generate(prompt, sampling, f"r{number}")
        if number % 3:
            assert tokens_of(await all_of(generation)) == expected(prompt, 12)
            return
        async with generation:
            for _ in range(number % 5):
                await anext(generation)

    async def scenario(client):
        await asyncio.gather(*(one(client, number) for number in range(200)))
        assert client.num_requests == 0

    world.run(scenario)
