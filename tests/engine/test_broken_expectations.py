"""What the two ends do when the other is not as they believed: nobody hangs, both start over."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from lookonce.cache.slabs import SMALLEST
from lookonce.ipc.messages import (
    NO_OPS,
    Accepted,
    ClearCache,
    Deltas,
    GetStats,
    Heartbeat,
    Hello,
    ReclaimSlabs,
    Rejected,
    ResendMedia,
    Stats,
    SupplyMedia,
    UpdateCache,
    Welcome,
)
from lookonce.types.media import Expansion
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import PLACEHOLDER, feature, key, request, text
from tests.support.engine.living import (
    PATIENCE,
    World,
    expected,
    item,
    part,
    rendered,
    tokens_of,
    until,
)
from tests.support.engine.raw_client import RawClient, added

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CAT, DOG = feature("cat", 3, 4), feature("dog", 10, 4)


@pytest.fixture
def world():
    world = World()
    yield world
    world.engine.die()


def play(world, scenario):
    async def whole():
        async with asyncio.timeout(PATIENCE):
            client = RawClient(world)
            await client.hello()
            await scenario(client)
            client.channel.close()

    asyncio.run(whole())


async def lose_touch(client, world):
    """The engine cannot reach the client for a moment, and takes it for dead."""
    link = client.channel._link
    world.hub.detach(link)
    await until(lambda: not world.engine.receiver_cache.knows(client.name))
    world.hub.attach(link)


def test_a_living_sender_taken_for_dead_is_told_so_and_starts_over(world):
    async def scenario(client):
        world.engine.runner.gate.clear()
        client.submit(request("old", text(9)), ops=added("cat"))
        await client.next(Accepted)
        await lose_touch(client, world)
        client.submit(request("new", text(20), [CAT]))
        ended, refused = await client.next(Rejected), None
        clear = await client.next(ClearCache)
        refused = await client.next(Rejected)
        assert (ended.request_id, refused.request_id) == ("old", "new")
        assert ended.error[0] == refused.error[0] == "EngineDeadError"
        client.channel.send_now(
            UpdateCache(client.epoch, client.seq(), NO_OPS, cleared=clear.number)
        )
        client.submit(request("again", text(20), [CAT]), ops=added("cat"))
        assert await client.next(Accepted) == Accepted("again")
        world.engine.runner.gate.set()

    play(world, scenario)


@pytest.mark.parametrize("news", ["of its own", "while it is taken back", "while it says hello"])
def test_a_sender_that_starts_over_stands_in_no_other_ones_way(news):
    """Before it has, the engine has no hints for it, and other senders give it some."""
    world = World(num_senders=2)

    async def scenario(client):
        other = RawClient(world, "other")
        await other.hello()
        await lose_touch(client, world)
        if news == "of its own":
            client.submit(request("r", text(9)))
            await client.next(ClearCache)
            await client.next(Rejected)
        elif news == "while it is taken back":
            client.channel.send_now(GetStats(1))
            await client.next(Stats)
        else:
            client.channel.send_now(Hello(client.name, client.epoch))
            await client.next(ClearCache)
        other.submit(request("o", text(20), [CAT]), ops=added("cat"))
        assert (await other.next(Accepted)).request_id == "o"
        other.channel.close()

    try:
        play(world, scenario)
    finally:
        world.engine.die()


def test_who_missed_a_step_hears_that_it_failed_and_never_a_gap(world):
    """The sender is out of reach for one step, sooner than any heartbeat finds out."""

    async def scenario(client):
        world.engine.runner.gate.clear()
        client.submit(request("r", text(9)))
        await client.next(Accepted)
        reach = world.hub.to_client

        def miss_the_first_tokens(sender, frames, fds):
            if b"deltas" not in bytes(frames[0]):
                return reach(sender, frames, fds)
            world.hub.to_client = reach
            return False

        world.hub.to_client = miss_the_first_tokens
        world.engine.runner.gate.set()
        rejected = await client.next(Rejected)
        assert (rejected.request_id, rejected.error[0]) == ("r", "EngineDeadError")
        client.submit(request("new", text(9)))
        assert await client.next(Accepted) == Accepted("new")
        deltas = [d for m in await client.deltas_until_finished() for d in m.deltas]
        assert {delta.request_id for delta in deltas} == {"new"}
        await until(lambda: not world.engine.receiver_cache.store.requests)

    play(world, scenario)


@pytest.mark.parametrize("missed", [b"received", b"accepted"])
def test_a_sender_found_lost_while_its_submission_is_answered_leaves_nothing(world, missed):
    """And hears of the request's end when it comes back."""

    async def scenario(client):
        reach = world.hub.to_client

        def miss_one(sender, frames, fds):
            if missed not in bytes(frames[0]):
                return reach(sender, frames, fds)
            world.hub.to_client = reach
            return False

        world.hub.to_client = miss_one
        ops = NO_OPS if missed == b"received" else added("cat")
        client.submit(request("r", text(20), [CAT]), ops=ops)
        await until(lambda: not world.engine.receiver_cache.knows(client.name))
        await until(lambda: not world.engine.receiver_cache.store.requests)
        client.channel.send_now(GetStats(1))
        rejected = await client.next(Rejected)
        assert (rejected.request_id, rejected.error[0]) == ("r", "EngineDeadError")
        stats = await client.next(Stats)
        assert stats.counters["num_requests_running"] == 0
        assert stats.counters["num_requests_waiting"] == 0

    play(world, scenario)


def test_a_sender_that_is_lost_again_while_it_is_told_so_still_hears_of_its_requests():
    world = World(slab_bytes=SMALLEST)

    async def scenario(client):
        reach = world.hub.to_client
        missed = [b"received", b"reclaim_slabs"]

        def miss_each_once(sender, frames, fds):
            if not missed or missed[0] not in bytes(frames[0]):
                return reach(sender, frames, fds)
            missed.pop(0)
            return False

        world.hub.to_client = miss_each_once
        client.submit(request("r", text(20), [CAT]), ops=added("cat"))
        await until(lambda: len(missed) == 1)
        client.channel.send_now(GetStats(1))
        await until(lambda: not missed)
        client.channel.send_now(GetStats(2))
        assert await client.next(ReclaimSlabs) == ReclaimSlabs(ended=True)
        rejected = await client.next(Rejected)
        assert (rejected.request_id, rejected.error[0]) == ("r", "EngineDeadError")

    try:
        play(world, scenario)
    finally:
        world.engine.die()


def test_an_answer_that_cannot_be_read_ends_its_request_and_both_start_over(world):
    async def scenario(client):
        client.submit(request("r", text(20), [CAT]))
        await client.next(ResendMedia)
        bad = SupplyMedia(client.epoch, client.seq(), added("cat"), "r", loose=(5,))
        client.channel.send_now(bad)
        clear = await client.next(ClearCache)
        rejected = await client.next(Rejected)
        assert (rejected.request_id, rejected.error[0]) == ("r", "RequestFailedError")
        client.channel.send_now(
            UpdateCache(client.epoch, client.seq(), NO_OPS, cleared=clear.number)
        )
        await until(lambda: client.channel.bytes_in_flight == 0)
        await until(lambda: not world.engine.receiver_cache.store.requests)
        assert world.engine.receiver_cache.store.share(client.name) == {}

    play(world, scenario)


def test_even_what_nobody_can_tell_the_use_of_lets_both_start_over(world):
    async def scenario(client):
        client.submit(request("r", text(20), [CAT]), ops=added("cat"))
        await client.next(Accepted)
        client.channel._link.send([b"\xc1 nonsense", bytes(5000)])
        while not isinstance(message := await client.messages.get(), ClearCache):
            assert isinstance(message, Deltas | Heartbeat)

    play(world, scenario)


def test_a_hello_that_claims_a_closed_share_is_answered_with_a_clear(world):
    async def scenario(client):
        await lose_touch(client, world)
        client.channel.send_now(Hello(client.name, client.epoch))
        await client.next(ClearCache)
        await client.next(Welcome)

    play(world, scenario)


def test_a_request_of_another_epoch_is_refused(world):
    async def scenario(client):
        client.submit(request("r", text(9)), epoch=client.epoch + 1)
        assert (await client.next(Rejected)).error[0] == "EngineDeadError"

    play(world, scenario)


def test_an_item_asked_for_that_does_not_come_fails_its_request(world):
    async def scenario(client):
        client.submit(request("r", text(30), [CAT, DOG]))
        assert set((await client.next(ResendMedia)).keys) == {CAT.key, DOG.key}
        client.channel.send_now(SupplyMedia(client.epoch, client.seq(), added("cat"), "r"))
        assert (await client.next(Rejected)).error[0] == "MediaNotCachedError"
        await until(lambda: not world.engine.receiver_cache.store.requests)

    play(world, scenario)


def test_an_item_nobody_asked_for_need_not_come(world):
    """The prefix covers the first picture; only the second is asked for."""

    async def scenario(client):
        client.submit(request("first", text(40), [CAT]), ops=added("cat"))
        await client.next(Accepted)
        await client.deltas_until_finished()
        await until(lambda: not world.engine.receiver_cache.store.requests)
        client.channel.send_now(UpdateCache(client.epoch, client.seq(), NO_OPS, cleared=-1))
        client.submit(request("r", text(40), [CAT, feature("dog", 30, 4)]))
        assert await client.next(ResendMedia) == ResendMedia("r", (key("dog"),))
        client.channel.send_now(SupplyMedia(client.epoch, client.seq(), added("dog"), "r"))
        assert await client.next(Accepted) == Accepted("r", complete=False)
        await client.deltas_until_finished()

    play(world, scenario)


def test_a_committed_message_that_cannot_be_encoded_lets_both_sides_start_over():
    async def scenario(client):
        await first_of(client, "a", part("dog"))
        unspeakable = part("cat")
        unspeakable.item = msgspec.structs.replace(
            item(4), expansion=Expansion(((PLACEHOLDER, 2**70),), PLACEHOLDER)
        )
        with pytest.raises(OverflowError):
            await first_of(client, "b", unspeakable)
        assert len(client.directory) == 0
        await first_of(client, "c", part("cat"))

    async def first_of(client, name, picture):
        prompt = rendered(text(20), picture, offsets=(3,))
        deltas = [delta async for delta in client.generate(prompt, GREEDY, name)]
        assert tokens_of(deltas) == expected(prompt, 8)

    World().run(scenario)
