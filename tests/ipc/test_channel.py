"""The channel, over a real unix socket and over the in-process double: one specification."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import asynccontextmanager

import pytest

from lookonce.errors import EngineDeadError
from lookonce.ipc.channel import ClientChannel, EngineChannel
from lookonce.ipc.messages import Accepted, GetStats, Heartbeat, Hello, Received, UpdateCache
from lookonce.ipc.socket_client_link import SocketClientLink
from lookonce.ipc.socket_engine_link import SocketEngineLink
from tests.support.in_process_link import InProcessHub
from tests.support.ipc_samples import update

PATIENCE = 100.0


class Echo:
    """An engine's end in a thread: receives everything, says `Received`, can be told to wait."""

    def __init__(self, link):
        self.channel = EngineChannel(link)
        self.received = []
        self.open = threading.Event()
        self.open.set()
        self.silent = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stopping:
            for sender, message in self.channel.poll(PATIENCE):
                self.received.append((sender, message))
                if isinstance(message, UpdateCache):
                    self.open.wait(PATIENCE)
                    if not self.silent:
                        self.channel.send(sender, Received(message.seq))
                else:
                    self.channel.send(sender, Accepted(type(message).__name__))

    def stop(self):
        self._stopping = True
        self.open.set()
        self.channel.wake()
        self._thread.join()
        self.channel.close()


class Listener:
    def __init__(self):
        self.messages: asyncio.Queue = asyncio.Queue()
        self.up, self.down = asyncio.Event(), asyncio.Event()

    def connected(self):
        self.down.clear()
        self.up.set()

    def disconnected(self):
        self.up.clear()
        self.down.set()

    def received(self, message):
        self.messages.put_nowait(message)


class Socket:
    def __init__(self, folder):
        self.path = f"{folder}/socket"

    def engine(self):
        return SocketEngineLink(self.path)

    def client(self, name):
        return SocketClientLink(self.path, name)


class Double:
    def __init__(self, folder):
        self.hub = InProcessHub()

    def engine(self):
        return self.hub.engine_link()

    def client(self, name):
        return self.hub.client_link(name)


@pytest.fixture(params=[Socket, Double])
def wire(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("s"))


@asynccontextmanager
async def connected(wire, name="api", capacity=1 << 20):
    listener = Listener()
    channel = ClientChannel(wire.client(name), max_bytes_in_flight=capacity)
    channel.open(listener)
    try:
        async with asyncio.timeout(PATIENCE):
            await listener.up.wait()
            yield channel, listener
    finally:
        channel.close()


def run(scenario):
    asyncio.run(scenario)


async def until(condition):
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.01)


async def polled(engine):
    """The first messages that come: a poll may end early, for a new connection say."""
    while not (received := await asyncio.to_thread(engine.poll, PATIENCE)):
        pass
    return received


def heard(engine, wire, send):
    """What the engine has received once `send(channel)` is done."""

    async def scenario():
        async with connected(wire) as (channel, listener):
            await send(channel)
            channel.send_now(GetStats(1))
            assert await listener.messages.get() == Accepted("GetStats")

    try:
        run(scenario())
    finally:
        engine.stop()
    assert {sender for sender, _ in engine.received} == {"api"}
    return [message for _, message in engine.received[:-1]]


def test_messages_keep_their_order_and_their_arrays(wire):
    sent = [update(seq, 10, 70_000) for seq in range(1, 40)]

    async def send(channel):
        for message in sent:
            async with channel.room(71_000):
                channel.send_now(message)

    assert heard(Echo(wire.engine()), wire, send) == sent


def test_messages_larger_than_a_socket_takes_keep_their_order_too(wire):
    sent = [update(1, 5_000_000), update(2, 10), update(3, 2_000, 3_000_000, 150_000)]

    async def send(channel):
        for message in sent:
            channel.send_now(message)

    assert heard(Echo(wire.engine()), wire, send) == sent


def test_room_is_awaited_until_the_engine_has_received(wire):
    engine = Echo(wire.engine())
    engine.open.clear()

    async def scenario():
        async with connected(wire, capacity=100_000) as (channel, _):
            async with channel.room(60_000):
                channel.send_now(update(1, 60_000))

            async def send_second():
                async with channel.room(60_000):
                    channel.send_now(update(2, 60_000))

            second = asyncio.create_task(send_second())
            await asyncio.sleep(0.05)
            assert not second.done()
            assert 60_000 < channel.bytes_in_flight < 61_000
            engine.open.set()
            await second
            await until(lambda: channel.bytes_in_flight == 0)

    try:
        run(scenario())
    finally:
        engine.stop()
    assert [message.seq for _, message in engine.received] == [1, 2]


def test_sending_neither_blocks_nor_drops_whatever_the_engine_does(wire):
    engine = Echo(wire.engine())
    engine.open.clear()
    count = 5000

    async def scenario():
        async with connected(wire, capacity=1) as (channel, _):
            for seq in range(1, count + 1):
                channel.send_now(update(seq, 10))
            engine.open.set()
            await until(lambda: channel.bytes_in_flight == 0)

    try:
        run(scenario())
    finally:
        engine.stop()
    assert [message.seq for _, message in engine.received] == list(range(1, count + 1))


def test_what_was_sent_is_awaited_until_the_engine_has_received_it_or_is_gone(wire):
    engine = Echo(wire.engine())
    engine.open.clear()

    async def scenario():
        async with connected(wire) as (channel, _):
            await channel.wait_received()  # nothing is under way
            channel.send_now(update(1, 10))
            waiting = asyncio.create_task(channel.wait_received())
            left = asyncio.create_task(channel.wait_received())
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.wait([left])
            assert not waiting.done()
            engine.open.set()
            await waiting
            engine.silent = True
            channel.send_now(update(2, 10))
            lost = asyncio.create_task(channel.wait_received())
            await until(lambda: len(engine.received) == 2)
            await asyncio.to_thread(engine.stop)
            with pytest.raises(EngineDeadError):
                await lost

    run(scenario())


def test_room_that_is_not_used_comes_back(wire):
    engine = Echo(wire.engine())

    async def scenario():
        async with connected(wire, capacity=100) as (channel, _):
            with pytest.raises(RuntimeError):
                async with channel.room(100):
                    raise RuntimeError("rejected meanwhile")
            async with channel.room(100):
                pass
            assert channel.bytes_in_flight == 0

    try:
        run(scenario())
    finally:
        engine.stop()


def test_a_dead_engine_is_noticed_at_once_and_a_new_one_is_found(wire):
    engine = Echo(wire.engine())
    engine.silent = True

    async def send(channel, seq):
        async with channel.room(1000):
            channel.send_now(update(seq, 900))

    async def scenario():
        nonlocal engine
        async with connected(wire, capacity=1000) as (channel, listener):
            await send(channel, 1)
            waiting = asyncio.create_task(send(channel, 2))
            await asyncio.sleep(0)
            await asyncio.to_thread(engine.stop)
            await listener.down.wait()
            with pytest.raises(EngineDeadError):
                await waiting
            with pytest.raises(EngineDeadError):
                channel.send_now(Hello("api"))
            assert channel.bytes_in_flight == 0
            engine = Echo(wire.engine())
            await listener.up.wait()
            channel.send_now(Hello("api"))
            while await listener.messages.get() != Accepted("Hello"):
                pass

    try:
        run(scenario())
    finally:
        engine.stop()
    assert [message for _, message in engine.received] == [Hello("api")]


def test_malformed_frames_harm_nobody_but_their_sender(wire, caplog):
    engine = Echo(wire.engine())

    async def scenario():
        async with connected(wire, "rogue") as (rogue, _), connected(wire) as (channel, listener):
            rogue._link.send([b"\xc1 nonsense", bytes(5000)])
            channel.send_now(GetStats(1))
            assert await listener.messages.get() == Accepted("GetStats")
            rogue.send_now(GetStats(2))

    with caplog.at_level(logging.ERROR):
        try:
            run(scenario())
        finally:
            engine.stop()
    assert "rogue" in caplog.text


def test_malformed_frames_from_the_engine_are_dropped_and_logged(wire, caplog):
    link = wire.engine()
    engine = EngineChannel(link)

    async def scenario():
        polling = asyncio.create_task(polled(engine))
        async with connected(wire) as (channel, listener):
            channel.send_now(Hello("api"))
            [(sender, _)] = await polling
            link.send(sender, [b"\xc1"])
            engine.send(sender, Accepted("r"))
            assert await listener.messages.get() == Accepted("r")

    with caplog.at_level(logging.ERROR):
        try:
            run(scenario())
        finally:
            engine.close()
    assert "dropped a message from the engine" in caplog.text


def test_sending_to_a_client_that_left_says_so(wire):
    engine = EngineChannel(wire.engine())

    async def scenario():
        polling = asyncio.create_task(polled(engine))
        async with connected(wire) as (channel, _):
            channel.send_now(Hello("api"))
            await polling
            assert engine.send("api", Accepted("r"))
        for _ in range(200):
            if not engine.send("api", Accepted("r")):
                return
            await asyncio.sleep(0.02)
            engine.poll(0.0)
        raise AssertionError("the engine never noticed")

    try:
        run(scenario())
    finally:
        engine.close()


def test_wake_ends_a_poll_from_another_thread(wire):
    engine = EngineChannel(wire.engine())
    waker = threading.Timer(0.05, engine.wake)
    waker.start()
    try:
        assert engine.poll(PATIENCE) == []
    finally:
        waker.join()
        engine.close()


def test_threads_that_send_at_once_lose_nothing_either_way(wire):
    """Each thread's messages keep their order; what comes meanwhile is still heard of."""
    engine = EngineChannel(wire.engine())
    count, heard, delivered = 2000, [], threading.Event()

    def speak():
        writer = engine.writer()
        for number in range(count):
            assert writer.send("api", Heartbeat(number, ready=True, stalled_seconds=0.0))

    def listen():
        while not delivered.is_set():
            for sender, message in engine.poll(PATIENCE):
                heard.append(message.nonce)
                engine.send(sender, Accepted(str(message.nonce)))

    async def scenario():
        polling = asyncio.create_task(polled(engine))
        async with connected(wire) as (channel, listener):
            channel.send_now(Hello("api"))
            await polling
            both = asyncio.gather(asyncio.to_thread(speak), asyncio.to_thread(listen))
            for nonce in range(count):
                channel.send_now(GetStats(nonce))
                if nonce % 50 == 0:
                    await asyncio.sleep(0)
            await until(lambda: listener.messages.qsize() == 2 * count)
            delivered.set()
            engine.wake()
            await both
            messages = [listener.messages.get_nowait() for _ in range(2 * count)]
            assert [m.epoch for m in messages if isinstance(m, Heartbeat)] == list(range(count))
            assert [m.request_id for m in messages if isinstance(m, Accepted)] == [
                str(nonce) for nonce in range(count)
            ]

    try:
        run(scenario())
    finally:
        engine.close()
    assert heard == list(range(count))


def test_what_is_sent_after_the_end_is_refused(wire):
    engine = EngineChannel(wire.engine())
    writer = engine.writer()
    engine.close()
    assert not writer.send("api", Accepted("r"))
    engine.wake()
