"""The input thread's protocol, message by message, over the in-process channel."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from lookonce.cache.slabs import SlabOwner
from lookonce.engine.process import input_thread
from lookonce.engine.process.input_thread import SILENT_BEATS, InputThread
from lookonce.engine.process.receiver_cache import ReceiverCache
from lookonce.engine.process.step_loop import StepChannel
from lookonce.ipc.messages import (
    Abort,
    Accepted,
    Claim,
    Deltas,
    Heartbeat,
    Hello,
    Hints,
    Rejected,
    ResendMedia,
    SupplyMedia,
    UpdateCache,
    Welcome,
)
from tests.support.core.builders import feature, key, request, text
from tests.support.engine.living import PATIENCE, World, until
from tests.support.engine.raw_client import RawClient, added

CAT = feature("cat", 3, 4)


@pytest.fixture
def speak():
    """Runs a scenario with a world and a client that said hello."""

    def run(scenario):
        world = World()

        async def whole():
            async with asyncio.timeout(PATIENCE):
                client = RawClient(world)
                await client.hello()
                await scenario(client, world)
                client.channel.close()

        try:
            asyncio.run(whole())
        finally:
            world.engine.die()

    return run


def test_a_request_whose_items_came_along_is_accepted_without_a_step(speak):
    async def scenario(client, world):
        world.engine.runner.gate.clear()
        client.submit(request("busy", text(9)))
        client.submit(request("r", text(20), [CAT]), ops=added("cat"))
        assert await client.next(Accepted) == Accepted("busy")
        assert await client.next(Accepted) == Accepted("r")
        await client.settled()
        world.engine.runner.gate.set()

    speak(scenario)


def test_a_rejection_waits_for_no_step_either_and_the_operations_hold(speak):
    async def scenario(client, world):
        world.engine.runner.gate.clear()
        client.submit(request("busy", text(9)))
        await client.next(Accepted)
        client.submit(request("r", [5000]), ops=added("cat"))
        rejected = await client.next(Rejected)
        assert rejected.error[0] == "BadRequestError"
        assert set(world.engine.receiver_cache.store.share("api")) == {key("cat")}
        world.engine.runner.gate.set()

    speak(scenario)


def test_missing_items_are_asked_for_and_their_arrival_accepts(speak):
    async def scenario(client, world):
        client.submit(request("r", text(20), [CAT]))
        assert await client.next(ResendMedia) == ResendMedia("r", (CAT.key,))
        client.channel.send_now(SupplyMedia(client.epoch, client.seq(), added("cat"), "r"))
        assert await client.next(Accepted) == Accepted("r")
        await client.deltas_until_finished()

    speak(scenario)


def test_a_supply_for_a_request_that_is_over_still_changes_the_store(speak):
    async def scenario(client, world):
        client.channel.send_now(SupplyMedia(client.epoch, client.seq(), added("cat"), "gone"))
        await client.settled()
        assert set(world.engine.receiver_cache.store.share("api")) == {key("cat")}

    speak(scenario)


def test_a_request_id_in_use_is_rejected_and_the_first_goes_on(speak):
    async def scenario(client, world):
        world.engine.runner.gate.clear()
        client.submit(request("r", text(9)))
        await client.next(Accepted)
        client.submit(request("r", text(9)), ops=added("cat"))
        await client.next(Rejected)
        world.engine.runner.gate.set()
        assert len(await client.deltas_until_finished()) == 8
        assert set(world.engine.receiver_cache.store.share("api")) == {key("cat")}

    speak(scenario)


def test_one_message_a_step_carries_all_deltas_of_a_sender(speak):
    async def scenario(client, world):
        world.engine.runner.gate.clear()
        step_channel = world.engine.step_channel
        client.submit(request("first", text(9)))
        await client.next(Accepted)
        await until(lambda: step_channel.stalled_seconds > 0)
        for name in ("second", "third"):
            client.submit(request(name, text(9)))
            await client.next(Accepted)
        await until(lambda: step_channel.num_commands == 2)
        world.engine.runner.gate.set()
        sizes: list[int] = []
        while sum(sizes) < 24:
            sizes.append(len((await client.next(Deltas)).deltas))
        assert max(sizes) == 3
        assert sum(sizes) == 24

    speak(scenario)


def test_messages_of_another_epoch_do_nothing_but_free_their_room(speak):
    async def scenario(client, world):
        client.submit(request("r", text(20), [CAT]), epoch=client.epoch + 1, ops=added("cat"))
        old = UpdateCache(client.epoch + 1, client.seq(), added("dog"))
        client.channel.send_now(old)
        client.channel.send_now(Abort(client.epoch + 1, ("r",)))
        await client.settled()
        assert len(world.engine.receiver_cache.store) == 0
        assert not world.engine.receiver_cache.store.requests

    speak(scenario)


def test_who_says_no_hello_is_not_heard(speak, caplog):
    async def scenario(client, world):
        rude = RawClient(world, "rude")
        rude.channel.open(rude)
        await asyncio.sleep(0)
        world.engine.runner.gate.clear()
        rude.submit(request("r", text(9)))
        client.submit(request("s", text(9)))
        await client.next(Accepted)
        await until(lambda: "said no hello" in caplog.text)
        assert world.engine.receiver_cache.store.requests == ("s",)
        world.engine.runner.gate.set()
        rude.channel.close()

    with caplog.at_level(logging.WARNING):
        speak(scenario)


def test_a_second_hello_ends_what_ran_for_the_first(speak):
    async def scenario(client, world):
        endless = msgspec.structs.replace(request("x", text(9)).sampling, max_tokens=200)
        world.engine.runner.gate.clear()
        client.submit(request("r", text(9), sampling=endless), ops=added("cat"))
        await client.next(Accepted)
        client.channel.send_now(Hello("api"))
        await client.next(Welcome)
        assert world.engine.receiver_cache.store.share("api") == {}
        world.engine.runner.gate.set()
        await until(lambda: not world.engine.receiver_cache.store.requests)

    speak(scenario)


def test_heartbeats_tell_that_an_idle_engine_is_well(speak):
    async def scenario(client, world):
        assert await client.next(Heartbeat) == Heartbeat(client.epoch, True, 0.0)

    speak(scenario)


def test_heartbeats_go_on_while_a_step_takes_long(speak):
    async def scenario(client, world):
        world.engine.runner.gate.clear()
        client.submit(request("r", text(9)))
        await client.next(Accepted)
        stalled = 0.0
        while stalled == 0.0:
            stalled = (await client.next(Heartbeat)).stalled_seconds
        world.engine.runner.gate.set()
        await client.deltas_until_finished()

    speak(scenario)


class ScriptedChannel:
    """Gives the input thread one list of messages with each poll, and ends it after the last."""

    def __init__(self, script):
        self.script = iter(script)
        self.sent = []

    def poll(self, timeout):
        messages = next(self.script, None)
        if messages is None:
            self.thread.stop()
        return messages or []

    def send(self, sender, message, fds=()):
        self.sent.append((sender, message))
        return True

    def wake(self):
        pass

    close = wake


@pytest.mark.parametrize("silent", [True, False])
def test_the_claims_of_a_sender_that_answers_no_heartbeat_pass_on(silent, monkeypatch):
    """A stopped API process keeps its connection: the others must not wait until it goes on."""
    monkeypatch.setattr(input_thread, "HEARTBEAT_SECONDS", 0.0)  # one with each poll
    claims = [(sender, Claim(1, 1, key("cat"))) for sender in ("a", "b")]
    channel = ScriptedChannel(
        [
            [("a", Hello("a")), ("b", Hello("b"))],
            claims,
            *([] if silent else claims[:1] for _ in range(SILENT_BEATS)),
            [],
        ]
    )
    channel.thread = InputThread(
        channel,
        ReceiverCache(1),
        StepChannel(channel.wake, channel),
        SlabOwner(0),
        num_senders=2,
        max_queue=1,
        max_sessions=1,
        max_tenant_sessions=1,
    )
    channel.thread.run()
    granted = {sender for sender, message in channel.sent if isinstance(message, Hints)}
    assert granted == ({"a", "b"} if silent else {"a"})
