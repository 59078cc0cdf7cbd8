"""The claims of one API process: granted, held, given up, repeated, and without an engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from lookonce.engine.client import item_claims
from lookonce.engine.client.item_claims import ItemClaims
from lookonce.engine.client.sender_cache import SenderCache
from lookonce.ipc.messages import Claim, Hint, Hints, Unclaim, UpdateCache, Welcome
from tests.support.cache_items import expansion, item, key
from tests.support.engine.sender_receiver_world import MODEL

CAPACITY = 10_000


@asynccontextmanager
async def plenty(nbytes):
    yield


class Site:
    """Claims of a sender whose messages are kept."""

    def __init__(self, num_senders=2):
        self.sender = SenderCache("s", capacity_bytes=num_senders * CAPACITY)
        self.sender.welcome(Welcome(1, MODEL, num_senders, True))
        self.sent = []
        self.claims = ItemClaims(self.sender, plenty, self.sent.append, self.sent.append)

    async def make(self, number, nbytes=900, failure=None):
        """What a resolver does; whether the item was made here."""
        async with self.claims.claimed(key(number)) as publish:
            if publish is None:
                return False
            if failure:
                raise failure
            await publish(item(nbytes))
            return True

    def answer(self, **fields):
        hints = Hints(**fields)
        self.sender.hint(hints)
        self.claims.answered(hints)


async def sent_by(task):
    """After the task has sent what it sends before it waits."""
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_process_alone_asks_nobody():
    async def scenario():
        site = Site(num_senders=1)
        assert await site.make(1)
        assert site.sent == []

    run(scenario)


def test_what_is_granted_is_made_and_published():
    async def scenario():
        site = Site()
        task = await sent_by(asyncio.create_task(site.make(1)))
        assert site.sent == [Claim(1, 1, key(1))]
        assert len(site.claims) == 1
        site.answer(granted=(1,))
        assert await task
        update = site.sent[1]
        assert isinstance(update, UpdateCache)
        assert [keyed.key for keyed in update.ops.adds] == [key(1)]
        assert site.sender.directory.lists_for_certain(key(1))
        assert (len(site.sent), len(site.claims), site.sender.num_claims) == (2, 0, 0)

    run(scenario)


def test_what_another_has_made_is_hinted():
    async def scenario():
        site = Site()
        task = await sent_by(asyncio.create_task(site.make(1)))
        site.answer(items=(Hint(key(1), 900, expansion(4)),), held=(1,))
        assert not await task
        assert site.sender.directory.peek(key(1)) == expansion(4)
        assert len(site.sent) == 1

    run(scenario)


@pytest.mark.parametrize("nbytes", [CAPACITY + 1, 2 * CAPACITY])
def test_an_item_that_cannot_be_listed_passes_the_claim_on(nbytes):
    async def scenario():
        site = Site()
        task = await sent_by(asyncio.create_task(site.make(1, nbytes)))
        site.answer(granted=(1,))
        assert await task
        assert site.sent[1:] == [Unclaim(1, 1)]

    run(scenario)


def test_a_failure_passes_the_claim_on():
    async def scenario():
        site = Site()
        task = await sent_by(asyncio.create_task(site.make(1, failure=ValueError())))
        site.answer(granted=(1,))
        with pytest.raises(ValueError):  # noqa: PT011
            await task
        assert site.sent[1:] == [Unclaim(1, 1)]

    run(scenario)


def test_who_leaves_while_it_waits_gives_its_claim_up():
    async def scenario():
        site = Site()
        task = await sent_by(asyncio.create_task(site.make(1)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert site.sent[1:] == [Unclaim(1, 1)]
        assert (len(site.claims), site.sender.num_claims) == (0, 0)

    run(scenario)


def test_a_grant_that_nobody_wants_is_given_back():
    """A claim that was repeated may be answered twice, the second time with a grant."""

    async def scenario():
        site = Site()
        site.answer(granted=(7,))
        assert site.sent == [Unclaim(1, 7)]

    run(scenario)


def test_a_claim_is_repeated_until_it_is_answered(monkeypatch):
    monkeypatch.setattr(item_claims, "REPEAT_SECONDS", 0.01)

    async def scenario():
        site = Site()
        task = asyncio.create_task(site.make(1))
        while len(site.sent) < 3:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.005)
        assert set(site.sent) == {Claim(1, 1, key(1))}
        site.answer(granted=(1,))
        assert await task

    run(scenario)


def test_who_makes_an_item_repeats_its_claim_with_each_heartbeat():
    async def scenario():
        site, made = Site(), asyncio.Event()

        async def make():
            async with site.claims.claimed(key(1)) as publish:
                await made.wait()
                await publish(item(900))

        site.claims.show_life()
        assert site.sent == []
        task = await sent_by(asyncio.create_task(make()))
        site.answer(granted=(1,))
        await sent_by(task)
        site.claims.show_life()
        assert site.sent == [Claim(1, 1, key(1))] * 2
        made.set()
        await task
        site.claims.show_life()
        assert len(site.sent) == 3, "nothing is claimed any more"

    run(scenario)


def test_without_an_engine_whoever_waits_makes_the_item():
    async def scenario():
        site = Site()
        task = await sent_by(asyncio.create_task(site.make(1)))
        site.sender.disconnect()
        site.claims.forget_all()
        assert await task
        assert len(site.sent) == 1
        assert await site.make(2), "it does not even ask"
        assert len(site.sent) == 1

    run(scenario)


def test_beyond_a_limit_items_are_made_unclaimed(monkeypatch):
    monkeypatch.setattr(item_claims, "MAX_CLAIMS", 1)

    async def scenario():
        site = Site()
        task = await sent_by(asyncio.create_task(site.make(1)))
        assert await site.make(2)
        assert len(site.sent) == 1
        site.answer(granted=(1,))
        assert await task

    run(scenario)
