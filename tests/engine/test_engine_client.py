"""The client against a whole engine: real input thread, step loop and scheduler, a fake runner."""

from __future__ import annotations

import asyncio
import time as system_time

import msgspec
import pytest

from lookonce.engine.client.engine_client import EngineHealth
from lookonce.errors import (
    BadRequestError,
    EngineDeadError,
    LookOnceError,
    MediaNotCachedError,
    NotReadyError,
    QueueFullError,
    RequestFailedError,
    UnprocessableMediaError,
)
from lookonce.ipc.messages import Heartbeat
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, key, model_info, text
from tests.support.engine.living import World, expected, part, rendered, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)


async def all_of(generation):
    return [delta async for delta in generation]


@pytest.fixture
def world():
    return World()


# --- answers ----------------------------------------------------------------------------------


def test_a_prompt_gets_its_tokens_one_delta_a_step(world):
    prompt = rendered(text(30))

    async def scenario(client):
        deltas = await all_of(client.generate(prompt, GREEDY, "r"))
        assert tokens_of(deltas) == expected(prompt, 8)
        assert [d.finish_reason for d in deltas] == [None] * 7 + ["length"]
        assert deltas[0].reuse_stats.prefix_cached_tokens == 0
        assert client.num_requests == 0

    world.run(scenario)


def test_every_sample_of_a_request_arrives(world):
    prompt = rendered(text(30))
    sampling = SamplingParams(n=3, temperature=0.0, max_tokens=5, ignore_eos=True)

    async def scenario(client):
        deltas = await all_of(client.generate(prompt, sampling, "r"))
        for index in range(3):
            assert tokens_of(deltas, index) == expected(prompt, 5, index)

    world.run(scenario)


def test_awaiting_a_generation_returns_once_the_engine_has_accepted(world):
    async def scenario(client):
        world.engine.runner.gate.clear()
        generation = await client.generate(rendered(text(30)), GREEDY, "r")
        assert client.num_requests == 1
        world.engine.runner.gate.set()
        assert len(await all_of(generation)) == 8

    world.run(scenario)


def test_pictures_travel_once_and_later_requests_refer_to_them(world):
    async def scenario(client):
        first = rendered(text(20), part("cat"), offsets=(3,))
        assert tokens_of(await all_of(client.generate(first, GREEDY, "a"))) == expected(first, 8)
        assert client.directory.lookup(key("cat")) is not None
        known = part("cat", held=True, recoverable=False)
        known.pinned = True
        again = rendered(text(20, seed=1), known, offsets=(5,))
        assert tokens_of(await all_of(client.generate(again, GREEDY, "b"))) == expected(again, 8)
        assert client.sender.resends == 0

    world.run(scenario)


def test_arrays_are_let_go_once_accepted(world):
    async def scenario(client):
        prompt = rendered(text(20), part("cat"), offsets=(3,))
        async with await client.generate(prompt, GREEDY, "a"):
            assert prompt.items[0].item is None

    world.run(scenario)


def test_sources_are_let_go_too_once_the_engine_holds_every_item(world):
    async def scenario(client):
        known = part("cat")
        known.encoded = b"png"
        async with await client.generate(rendered(text(20), known, offsets=(3,)), GREEDY, "a"):
            assert (known.item, known.recover, known.encoded) == (None, None, None)

    world.run(scenario)


def test_sources_are_kept_where_a_prefix_stands_for_an_item_the_engine_lacks(world):
    async def scenario(client):
        await all_of(client.generate(rendered(text(40), part("cat"), offsets=(3,)), GREEDY, "a"))
        await client.reset_cache("mm")
        ahead = part("cat", held=True)
        ahead.encoded = b"png"
        async with await client.generate(rendered(text(40), ahead, offsets=(3,)), GREEDY, "b"):
            assert ahead.recover is not None
            assert ahead.encoded == b"png"

    world.run(scenario)


def test_known_pictures_do_not_wait_until_there_is_room_for_new_ones(world):
    async def scenario(client):
        await all_of(client.generate(rendered(text(20), part("cat"), offsets=(3,)), GREEDY, "a"))
        async with client._channel.room(1 << 20):  # all there is
            new = rendered(text(20), part("dog"), offsets=(3,))
            waiting = asyncio.create_task(all_of(client.generate(new, GREEDY, "new")))
            known = rendered(text(20, seed=1), part("cat", held=True), offsets=(5,))
            await all_of(client.generate(known, GREEDY, "known"))
            await all_of(client.generate(rendered(text(20, seed=2)), GREEDY, "text"))
            assert not waiting.done()
        assert tokens_of(await waiting) == expected(new, 8)

    world.run(scenario)


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "sampling", "param"),
    [
        ([1, 5000], GREEDY, "prompt"),
        ([], GREEDY, "prompt"),
        ([2**31], GREEDY, "prompt"),
        ([1] * 4096, GREEDY, "prompt"),
        ([1] * 4000, SamplingParams(max_tokens=97), "max_tokens"),
        ([1], SamplingParams(stop_token_ids=(5000,)), "stop_token_ids"),
        ([1], SamplingParams(logit_bias={2**70: 1.0}), None),
    ],
    ids=["vocabulary", "empty", "no int32", "too long", "asks too much", "stop id", "huge"],
)
def test_what_the_model_cannot_take_is_refused_before_it_is_accepted(
    world, token_ids, sampling, param
):
    async def scenario(client):
        async def submit():
            await client.generate(RenderedPrompt(token_ids, scope=b"s" * 32), sampling, "r")

        with pytest.raises(BadRequestError) as refusal:
            await submit()
        assert refusal.value.param == param
        assert client.num_requests == 0

    world.run(scenario)


def test_numbers_that_nothing_can_hold_fail_their_request_alone(world):
    async def scenario(client):
        prompt = rendered(text(20), part("cat"), offsets=(3,))
        prompt.features = (msgspec.structs.replace(prompt.features[0], offset=2**63),)
        with pytest.raises(LookOnceError):
            await client.generate(prompt, GREEDY, "r")
        assert len(await all_of(client.generate(rendered(text(9)), GREEDY, "s"))) == 8

    world.run(scenario)


def test_a_refused_request_leaves_directory_and_store_equal(world):
    async def scenario(client):
        sampling = SamplingParams(stop_token_ids=(5000,))
        prompt = rendered(text(20), part("cat"), offsets=(3,))
        with pytest.raises(BadRequestError):
            await client.generate(prompt, sampling, "r")
        assert key("cat") in client.directory

    world.run(scenario)


def test_a_request_id_that_is_running_is_refused(world):
    async def scenario(client):
        world.engine.runner.gate.clear()
        async with await client.generate(rendered(text(9)), GREEDY, "r"):
            with pytest.raises(BadRequestError, match="running"):
                await client.generate(rendered(text(9)), GREEDY, "r")
        world.engine.runner.gate.set()

    world.run(scenario)


def test_more_requests_than_may_wait_are_refused_and_the_others_served():
    world = World(Limits(max_num_seqs=1, max_queue=3))

    async def scenario(client):
        world.engine.runner.gate.clear()
        tries = [client.generate(rendered(text(9)), GREEDY, f"r{n}") for n in range(12)]
        outcomes = await asyncio.gather(*(wait_for(g) for g in tries), return_exceptions=True)
        refused = [o for o in outcomes if isinstance(o, QueueFullError)]
        assert len(refused) >= 8
        world.engine.runner.gate.set()
        for generation in tries:
            if generation not in refused and generation in outcomes:
                assert len(await all_of(generation)) == 8

    async def wait_for(generation):
        return await generation

    world.run(scenario)


# --- resends ----------------------------------------------------------------------------------


def test_an_item_the_engine_lost_is_made_again_and_the_caller_never_knows(world):
    async def scenario(client):
        prompt = rendered(text(20), part("cat", held=True), offsets=(3,))
        deltas = await all_of(client.generate(prompt, GREEDY, "r"))
        assert tokens_of(deltas) == expected(prompt, 8)
        assert client.sender.resends == 1
        assert client.sender.asks == 0

    world.run(scenario)


def test_a_reference_with_nothing_behind_it_fails_with_media_not_cached(world):
    async def scenario(client):
        lost = part("cat", held=True, recoverable=False)
        with pytest.raises(MediaNotCachedError):
            await client.generate(rendered(text(20), lost, offsets=(3,)), GREEDY, "r")

    world.run(scenario)


@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (UnprocessableMediaError("the picture changed"), UnprocessableMediaError),
        (ZeroDivisionError("a bug"), RequestFailedError),
    ],
)
def test_an_item_that_cannot_be_made_again_fails_its_request_alone(world, failure, seen):
    async def broken():
        raise failure

    async def scenario(client):
        lost = part("cat", held=True)
        lost.recover = broken
        prompt = rendered(text(20), lost, offsets=(3,))
        other = client.generate(rendered(text(9)), GREEDY, "other")
        with pytest.raises(seen):
            await client.generate(prompt, GREEDY, "r")
        assert len(await all_of(other)) == 8

    world.run(scenario)


@pytest.mark.parametrize("recoverable", [True, False])
def test_who_relies_on_a_prefix_never_fails_in_the_middle_of_an_answer(recoverable):
    """There is room for one of the answers: without its source the other is not begun."""
    world = World(Limits(num_blocks=24, block_size=4, max_num_batched_tokens=32))
    sampling = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    outcomes = []

    def prompt(name, **known):
        return rendered(text(24, seed=len(name)), part(name, **known), offsets=(4,))

    async def ask(client, name):
        got = []
        try:
            async for delta in client.generate(
                prompt(name, held=True, recoverable=recoverable), sampling, name
            ):
                got += delta.token_ids
        except MediaNotCachedError:
            outcomes.append(got)
        else:
            assert got == expected(prompt(name), 70)
            outcomes.append("done")

    async def scenario(client):
        for name in ("cat", "horse"):
            await all_of(client.generate(prompt(name), GREEDY, f"first {name}"))
        await client.reset_cache("mm")
        await client.reset_cache("encoder")
        await asyncio.gather(ask(client, "cat"), ask(client, "horse"))
        assert outcomes.count("done") == (2 if recoverable else 1)
        assert all(outcome in ("done", []) for outcome in outcomes)

    world.run(scenario)


def test_an_item_that_the_prefix_covers_is_accepted_without_being_sent(world):
    async def scenario(client):
        first = rendered(text(40), part("cat"), offsets=(3,))
        await all_of(client.generate(first, GREEDY, "a"))
        await client.reset_cache("mm")
        again = rendered(text(40), part("cat", held=True, recoverable=False), offsets=(3,))
        deltas = await all_of(client.generate(again, GREEDY, "b"))
        assert tokens_of(deltas) == expected(again, 8)
        assert deltas[0].reuse_stats.prefix_cached_tokens > 0

    world.run(scenario)


STALL_TIMEOUT = 120.0
EPOCH = 7


class Time:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def health(time):
    """Of an engine that serves."""
    serving = EngineHealth(STALL_TIMEOUT, time)
    serving.connect()
    serving.welcome(model_info(), ready=True)
    return serving


def test_until_the_welcome_an_engine_is_starting(time):
    health = EngineHealth(STALL_TIMEOUT, time)
    assert health.state == "starting"
    health.connect()
    assert health.state == "starting"
    with pytest.raises(NotReadyError):
        health.require_ready()
    with pytest.raises(NotReadyError):
        health.model  # noqa: B018
    health.welcome(model_info(), ready=True)
    assert health.state == "ready"
    assert health.model == model_info()


def test_an_engine_that_warms_up_is_ready_with_the_heartbeat_that_says_so(time):
    health = EngineHealth(STALL_TIMEOUT, time)
    health.connect()
    health.welcome(model_info(), ready=False)
    health.beat(Heartbeat(EPOCH, False, 0.0), EPOCH)
    assert health.state == "starting"
    health.beat(Heartbeat(EPOCH, True, 0.0), EPOCH)
    assert health.state == "ready"


def test_a_lost_connection_is_death_and_a_new_one_a_start(health):
    health.disconnect()
    assert health.state == "dead"
    with pytest.raises(EngineDeadError, match="restarted"):
        health.require_ready()
    assert health.model == model_info()
    health.connect()
    assert health.state == "starting"


def test_a_heartbeat_of_another_epoch_does_not_make_it_ready(health):
    health.disconnect()
    health.connect()
    health.beat(Heartbeat(EPOCH + 1, True, 0.0), EPOCH)
    assert health.state == "starting"


def test_a_long_step_is_stuck_only_beyond_the_stall_timeout(health):
    health.beat(Heartbeat(EPOCH, True, STALL_TIMEOUT), EPOCH)
    assert health.state == "ready"
    health.beat(Heartbeat(EPOCH, True, STALL_TIMEOUT + 0.5), EPOCH)
    assert health.state == "stuck"
    with pytest.raises(EngineDeadError, match="answer"):
        health.require_ready()
    health.beat(Heartbeat(EPOCH, True, 0.0), EPOCH)
    assert health.state == "ready"


def test_an_event_loop_that_was_held_up_says_nothing_of_the_engines_silence(world):
    async def scenario(client):
        system_time.sleep(2.0)  # noqa: ASYNC251 - heartbeats come and are not read
        assert await client.silent_seconds() < 1.0

    world.run(scenario)


def test_silence_counts_as_stalling(health, time):
    health.beat(Heartbeat(EPOCH, True, 100.0), EPOCH)
    time.now += 19.0
    assert health.state == "ready"
    assert health.silent_seconds == 19.0
    time.now += 2.0
    assert health.state == "stuck"
