"""A client that sends and receives the protocol's messages one by one."""

from __future__ import annotations

import asyncio

from lookonce.ipc.channel import ClientChannel
from lookonce.ipc.messages import (
    NO_OPS,
    CacheOps,
    Deltas,
    Heartbeat,
    Hello,
    KeyedItem,
    Submit,
    Welcome,
)
from tests.support.core.builders import key
from tests.support.engine.living import item, until


class RawClient:
    """Sends the messages that a test asks for, and keeps those that come."""

    def __init__(self, world, name="api"):
        self.name = name
        self.channel = ClientChannel(world.hub.client_link(name), max_bytes_in_flight=1 << 20)
        self.messages: asyncio.Queue = asyncio.Queue()
        self.epoch = world.engine.receiver_cache.epoch
        self._seq = 0

    def connected(self):
        pass

    def disconnected(self):
        pass

    def received(self, message):
        self.messages.put_nowait(message)

    def seq(self):
        self._seq += 1
        return self._seq

    async def hello(self):
        self.channel.open(self)
        await asyncio.sleep(0)
        self.channel.send_now(Hello(self.name))
        return await self.next(Welcome)

    def submit(self, wire, *, epoch=None, ops=NO_OPS):
        self.channel.send_now(Submit(epoch or self.epoch, self.seq(), ops, wire))

    async def next(self, kind):
        """The next message that is no heartbeat, which must be of this kind."""
        while isinstance(message := await self.messages.get(), Heartbeat):
            if kind is Heartbeat:
                return message
        assert isinstance(message, kind), message
        return message

    async def deltas_until_finished(self):
        found = []
        while not found or found[-1].deltas[-1].finish_reason is None:
            found.append(await self.next(Deltas))
        return found

    async def settled(self):
        """Everything sent so far has been received."""
        await until(lambda: self.channel.bytes_in_flight == 0)


def added(*names):
    return CacheOps(adds=tuple(KeyedItem(key(name), item(4)) for name in names))
