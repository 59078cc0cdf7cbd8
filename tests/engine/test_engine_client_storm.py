"""Everything at once: two API processes, a cache too small, leavers, resets, rejections, restarts.

Whatever happens, a request gets exactly its tokens or a documented error, and when it is quiet the
directories equal the store and nothing is held.
"""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from lookonce.errors import BadRequestError, EngineDeadError, NotReadyError
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


class Storm:
    def __init__(self, seed, *, restarts):
        self.world = World(LIMITS, num_senders=2)
        self.random = random.Random(seed)
        self.restarts = restarts
        self.answered = 0

    def picture(self, client, number):
        """As a renderer makes it: found in the directory and pinned, or processed."""
        found = client.directory.lookup(key(f"picture {number}")) is not None
        made = part(f"picture {number}", held=found)
        made.pinned = found
        return made

    def prompt(self, client):
        numbers = self.random.sample(range(NUM_PICTURES), self.random.randint(0, 3))
        parts = [self.picture(client, number) for number in numbers]
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
        prompt = self.prompt(client)
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
        limits = {
            "cache_bytes": 2 * ROOM_FOR * item(4).nbytes,
            "max_bytes_in_flight": 3 * item(4).nbytes,
        }
        world = self.world
        async with (
            asyncio.timeout(2 * PATIENCE),
            world.client(**limits) as first,
            world.client(**limits) as second,
        ):
            clients = [first, second]
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
        self.world.engine.check_empty()
        assert self.answered > NUM_REQUESTS / 4


@pytest.mark.parametrize("restarts", [False, True], ids=["resets", "restarts"])
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_leaves_nothing_behind_and_no_wrong_answer(seed, restarts):
    storm = Storm(seed, restarts=restarts)
    try:
        asyncio.run(storm.run())
    finally:
        storm.world.engine.die()
