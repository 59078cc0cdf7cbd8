"""A client and a whole engine that share slabs: the real threads, channel, scheduler and store."""

from __future__ import annotations

import asyncio
import gc
import os

import numpy as np
import pytest
from msgspec.structs import force_setattr

from lookonce.cache.slab_pool import OwnSlabs
from lookonce.cache.slabs import LARGE, SMALLEST
from lookonce.errors import EngineDeadError, RequestFailedError
from lookonce.ipc.messages import KeyedItem, ReclaimSlabs
from lookonce.types.media import Array, Expansion, ProcessedItem
from lookonce.types.request import RenderedItem
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import PLACEHOLDER, key, text
from tests.support.engine.living import PATIENCE, World, expected, rendered, tokens_of, until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CACHE_BYTES = 4 * (SMALLEST + 1024)


@pytest.fixture
def world() -> World:
    return World(slab_bytes=16 * SMALLEST)


def floats(value: float = 1.0) -> ProcessedItem:
    pixels = Array("float32", (LARGE // 4,), np.full(LARGE // 4, value, np.float32).data)
    return ProcessedItem("image", {"pixels": pixels}, Expansion(((PLACEHOLDER, 4),), PLACEHOLDER))


def run(world: World, scenario) -> None:
    async def whole() -> None:
        async with asyncio.timeout(2 * PATIENCE), world.client(cache_bytes=CACHE_BYTES) as client:
            await client.wait_ready()
            await until(lambda: client.slabs.is_open)
            await scenario(client, OwnSlabs(client.slabs))
            await world.quiet(client)
            world.engine.check_empty()
            client.slabs.check_integrity()
            store = world.engine.receiver_cache.store
            assert client.directory.sizes() == dict(store.share(client.sender.sender_id))

    try:
        asyncio.run(whole())
    finally:
        world.engine.die()


async def placed(own: OwnSlabs, value: float = 1.0) -> ProcessedItem:
    item = await asyncio.to_thread(own.place, floats(value))
    assert item.arrays["pixels"].place is not None
    return item


def prompt_with(name: str, item: ProcessedItem, recover=None):
    part = RenderedItem(key(name), key(name), "image", item.expansion, item, recover=recover)
    return rendered(text(20), part, offsets=(3,))


async def answer(client, prompt, name: str, sampling=GREEDY) -> list[int]:
    return tokens_of([delta async for delta in client.generate(prompt, sampling, name)])


def test_items_pass_by_number_and_their_memory_is_used_again(world: World) -> None:
    async def scenario(client, own: OwnSlabs) -> None:
        for number in range(20):
            prompt = prompt_with(f"picture {number}", await placed(own, number))
            assert await answer(client, prompt, str(number)) == expected(prompt, 8)
            del prompt
        stats = await client.stats()
        assert stats["mm_slab_bytes"] <= 16 * SMALLEST
        assert stats["mm_store_listed_bytes"] == client.directory.nbytes == 4 * (SMALLEST + 512)
        assert stats["mm_slab_leases_total"] <= 16, "twenty pictures, four at a time"
        assert client.slabs.num_reuses >= 4
        assert client.slabs.num_fallbacks == 0
        assert client._channel.bytes_in_flight == 0

    run(world, scenario)


def test_a_message_that_cannot_be_read_leaves_no_slab_in_use(world: World) -> None:
    async def scenario(client, own: OwnSlabs) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        force_setattr(sampling, "max_tokens", 8.0)
        item = await placed(own)
        slab = item.arrays["pixels"].place.slab
        with pytest.raises(RequestFailedError, match="cannot read"):
            await answer(client, prompt_with("cat", item), "bad", sampling)
        del item
        gc.collect()  # the error's traceback holds the prompt
        await until(lambda: client.slabs.sweep() or slab.state == "free")
        prompt = prompt_with("cat", await placed(own))
        assert await answer(client, prompt, "good") == expected(prompt, 8)

    run(world, scenario)


def test_a_reset_frees_the_slabs_of_everything_that_was_cached(world: World) -> None:
    async def scenario(client, own: OwnSlabs) -> None:
        await client.inject([KeyedItem(key("cat"), await placed(own))])
        await client.reset_cache("mm")
        await until(lambda: client.slabs.reclaim() or not client.slabs.leased_sizes())
        await until(lambda: world.engine.slabs.nbytes == 0)

    run(world, scenario)


def test_an_item_of_an_engine_that_died_reaches_its_successor_in_messages(world: World) -> None:
    async def scenario(client, own: OwnSlabs) -> None:
        item = await placed(own)
        await asyncio.to_thread(world.engine.die)
        world.new_engine()
        await until(lambda: item.arrays["pixels"].place is None)
        await until(lambda: client.state == "ready" and client.slabs.is_open)
        prompt = prompt_with("cat", item)
        assert await answer(client, prompt, "a") == expected(prompt, 8)
        assert client.directory.nbytes == LARGE + 512, "what it takes there"
        prompt = prompt_with("dog", await placed(own))
        assert await answer(client, prompt, "b") == expected(prompt, 8)

    run(world, scenario)


def test_a_sender_taken_for_dead_begins_with_new_slabs(world: World) -> None:
    async def scenario(client, own: OwnSlabs) -> None:
        item = await placed(own)
        sender = client.sender.sender_id
        leased = world.engine.slabs.leased
        await until(
            lambda: leased(sender) == client.slabs.leased_sizes() and len(leased(sender)) == 2
        )
        world.engine._threads._input._goodbye(sender)  # no message of the sender is on its way
        world.engine._threads._input._channel.wake()
        assert world.engine.slabs.leased(sender) == {}
        with pytest.raises((RequestFailedError, EngineDeadError)):
            await answer(client, prompt_with("cat", item), "a")
        await until(lambda: item.arrays["pixels"].place is None)
        prompt = prompt_with("cat", item)
        assert await answer(client, prompt, "b") == expected(prompt, 8)
        prompt = prompt_with("dog", await placed(own))
        assert await answer(client, prompt, "c") == expected(prompt, 8)
        await until(lambda: world.engine.slabs.leased(sender) == client.slabs.leased_sizes())

    run(world, scenario)


def test_the_engine_asks_for_free_slabs_when_it_has_no_room(world: World) -> None:
    async def scenario(client, own: OwnSlabs) -> None:
        async with world.client(cache_bytes=CACHE_BYTES) as other:
            await other.wait_ready()
            await until(lambda: other.slabs.is_open)
            used = await asyncio.to_thread(other.slabs.writer().grant, 6 * SMALLEST)
            assert used is not None
            await until(lambda: len(other.slabs.leased_sizes()) == 2)  # one is spare
            assert await asyncio.to_thread(own._writer.grant, 7 * SMALLEST) is None
            await until(lambda: len(other.slabs.leased_sizes()) == 1)
            grant = await asyncio.to_thread(own._writer.grant, 7 * SMALLEST)
            assert grant is not None
            own._writer.finish([grant.slab])
            for fd in (used.fd, grant.fd):
                os.close(fd)

    run(world, scenario)


def test_reclaiming_and_ending_are_told_apart(world: World) -> None:
    async def scenario(client, own: OwnSlabs) -> None:
        item = await placed(own)
        client.received(ReclaimSlabs())
        assert item.arrays["pixels"].place is not None, "it is in use"
        assert len(client.slabs.leased_sizes()) == 1, "the spare one is given back"

    run(world, scenario)
