"""Everything at once: two API processes, a cache too small, leavers, resets, rejections, restarts.

Whatever happens, a request gets exactly its tokens or a documented error, and when it is quiet the
directories equal the store and nothing is held.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from functools import partial

import numpy as np
import pytest

from lookonce.cache.slab_pool import OwnSlabs
from lookonce.cache.slabs import slab_size
from lookonce.errors import BadRequestError, EngineDeadError, NotReadyError
from lookonce.types.media import ITEM_OVERHEAD, Array, ProcessedItem
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import Limits, key, text
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

NUM_PICTURES = 12
ROOM_FOR = 4
"""Pictures one API process may list."""
NUM_REQUESTS = 150
LIMITS = Limits(num_blocks=80, max_num_seqs=8, max_num_batched_tokens=48)


SLAB_BYTES = 4 << 20
LARGE_FLOATS = 20_000
"""Of an item that goes into a slab."""


class Storm:
    def __init__(self, seed, *, restarts, cache_type):
        self.in_slabs = cache_type == "shm"
        slab_bytes = SLAB_BYTES if self.in_slabs else 0
        self.world = World(LIMITS, num_senders=2, slab_bytes=slab_bytes)
        self.own_slabs = {}
        self.random = random.Random(seed)
        self.restarts = restarts
        self.answered = 0

    async def picture(self, client, number):
        """As a renderer makes it: found in the directory and pinned, or processed."""
        found = client.directory.lookup(key(f"picture {number}")) is not None
        made = part(f"picture {number}", held=found)
        made.pinned = found
        if self.in_slabs:
            made.recover = partial(self.placed, client)
            made.item = None if found else await self.placed(client)
        return made

    async def placed(self, client):
        """An item in a slab, where one can be had."""
        pixels = np.ones(LARGE_FLOATS, np.float32)
        array = Array("float32", (LARGE_FLOATS,), pixels.data.cast("B"))
        made = ProcessedItem("image", {"pixels": array}, item(4).expansion)
        return await asyncio.to_thread(self.own_slabs[client].place, made)

    async def prompt(self, client):
        numbers = self.random.sample(range(NUM_PICTURES), self.random.randint(0, 3))
        parts = [await self.picture(client, number) for number in numbers]
        offsets = tuple(2 + 7 * place for place in range(len(parts)))
        length = self.random.randint(24, 40)
        return rendered(text(length, seed=self.random.randint(0, 3)), *parts, offsets=offsets)

    async def one(self, client, name):
        fate = self.random.random()
        num_tokens = self.random.randint(1, 12)
        refused = fate < 0.1
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            stop_token_ids=(5000,) if refused else (),
        )
        prompt = await self.prompt(client)
        async with client.generate(prompt, sampling, name) as generation:
            if refused:
                with pytest.raises(BadRequestError):
                    await generation
            elif fate < 0.3:
                await self.leave(generation)
            else:
                deltas = [delta async for delta in generation]
                assert tokens_of(deltas) == expected(prompt, num_tokens)
                self.answered += 1

    async def leave(self, generation):
        """In the middle, wherever that is."""
        reading = asyncio.create_task(anext(generation))
        await asyncio.wait([reading], timeout=self.random.random() * 0.02)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def request(self, client, name):
        """Asks again, as any client would, of the engine that comes after one that died."""
        await asyncio.sleep(self.random.random() * 0.3)
        for attempt in itertools.count():
            try:
                return await self.one(client, f"{name}-{attempt}")
            except (EngineDeadError, NotReadyError):
                assert self.restarts
                await client.wait_ready()
        raise AssertionError("it never ends")

    async def disturb(self, clients):
        """Resets, and restarts where they are asked for."""
        for _ in range(3):
            await asyncio.sleep(0.08)
            await self.random.choice(clients).reset_cache("mm")
            if self.restarts:
                await asyncio.to_thread(self.world.engine.die)
                self.world.new_engine()
                await asyncio.gather(*(client.wait_ready() for client in clients))

    async def run(self):
        nbytes = slab_size(4 * LARGE_FLOATS) + ITEM_OVERHEAD if self.in_slabs else item(4).nbytes
        limits = {"cache_bytes": 2 * ROOM_FOR * nbytes, "max_bytes_in_flight": 3 * nbytes}
        world = self.world
        async with (
            asyncio.timeout(2 * PATIENCE),
            world.client(**limits) as first,
            world.client(**limits) as second,
        ):
            clients = [first, second]
            self.own_slabs = {client: OwnSlabs(client.slabs) for client in clients}
            await asyncio.gather(*(client.wait_ready() for client in clients))
            requests = [
                self.request(self.random.choice(clients), f"r{number}")
                for number in range(NUM_REQUESTS)
            ]
            await asyncio.gather(*requests, self.disturb(clients))
            for client in clients:
                await world.quiet(client)
            await self.check(clients)

    async def check(self, clients):
        store = self.world.engine.receiver_cache.store
        for client in clients:
            share = store.share(client.sender.sender_id)
            await until(lambda c=client, s=share: c.directory.sizes() == dict(s))
            client.directory.check_integrity()
            assert client.directory.num_pins == 0
            assert client.num_requests == 0
            assert client._channel.bytes_in_flight == 0
        assert store.mismatches == 0
        if self.in_slabs:
            await self.check_slabs(clients)
        self.world.engine.check_empty()
        assert self.answered > NUM_REQUESTS / 4

    async def check_slabs(self, clients):
        """Once all caches are empty, every slab is free, or given back."""
        await clients[0].reset_cache("mm")
        await until(lambda: not any(client.directory.sizes() for client in clients))
        gc.collect()  # tasks that were cancelled are in cycles, and hold their prompts' items
        for client in clients:
            await until(lambda c=client: c.slabs._free.keys() == c.slabs._slabs.keys())
            client.slabs.check_integrity()
        self.world.engine.slabs.check_integrity()


@pytest.mark.parametrize("cache_type", ["shm", "lru"])
@pytest.mark.parametrize("restarts", [False, True], ids=["resets", "restarts"])
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_leaves_nothing_behind_and_no_wrong_answer(seed, restarts, cache_type):
    storm = Storm(seed, restarts=restarts, cache_type=cache_type)
    try:
        asyncio.run(storm.run())
    finally:
        storm.world.engine.die()
