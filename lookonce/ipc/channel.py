"""The typed channel between API process and engine process, on top of a link.

    API process                                        engine process
    ClientChannel ── ClientLink  ───────▶  EngineLink ── EngineChannel
                                 ◀───────            └── EngineChannelWriter, one per sending thread

A channel sends and receives messages, a link lists of frames. A link keeps the order of each
sender, drops nothing while a connection lives, and never blocks.

Flow control is the channel's alone. A sender first waits for room (`ClientChannel.room`), then
calls `send_now`, which is synchronous, keeps order and can neither block nor drop. The bytes of a
message are in flight until the engine answers `Received`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lookonce.errors import EngineDeadError, ProtocolError
from lookonce.ipc.codec import (
    MessageEncoder,
    SlabReference,
    client_message_decoder,
    engine_message_decoder,
    frames_nbytes,
    request_id_of,
)
from lookonce.ipc.framing import close_fds
from lookonce.ipc.messages import (
    ClientMessage,
    EngineMessage,
    ExtendSession,
    OpenSession,
    Received,
    SlabsLeased,
    Submit,
    SupplyMedia,
    UpdateCache,
)
from lookonce.types.media import Array, Buffer

logger = logging.getLogger(__name__)

COUNTED = (Submit, OpenSession, ExtendSession, SupplyMedia, UpdateCache)
"""Messages that may be large: their bytes are in flight until `Received`."""


class ChannelListener(Protocol):
    """What a `ClientChannel` calls, always from within the event loop."""

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...

    def received(self, message: EngineMessage) -> None: ...

    def leased(self, message: SlabsLeased, fds: Sequence[int]) -> None:
        """Slabs, with a descriptor of each (fewer where this process could not open all), which
        the listener closes."""


class LinkEvents(Protocol):
    """What a client link calls, always from within the event loop."""

    def link_up(self) -> None: ...

    def link_frames(self, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        """`fds`: the descriptors of the message, which the receiver closes."""

    def link_down(self) -> None: ...


class ClientLink(Protocol):
    """The API process's end of a link."""

    def open(self, events: LinkEvents) -> None:
        """Connect, and connect again whenever the other end comes back."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Enqueue; returns at once. The frames' memory must not be written afterwards."""

    def send_soon(self, frames: Sequence[Buffer]) -> None:
        """As `send`, in its order, but at the end of this turn of the event loop: what many tasks
        send in one turn is written at once."""

    def expect_fds(self, expected: bool) -> None:
        """Whether messages with descriptors may come from now on; at first none may.

        Receiving costs more where they may. One that comes unexpected ends the connection.
        """

    def close(self) -> None: ...


class EngineLink(Protocol):
    """The engine process's end of a link: one thread owns it, any may call `send` and `wake`.

    Messages of several threads keep the order in which their calls of `send` returned.
    """

    def poll(self, timeout: float) -> list[tuple[str, Sequence[Buffer]]]:
        """All `(sender, frames)` that have come; waits up to `timeout` seconds for the first one.

        Returns early, possibly empty, after `wake` or when a connection changes.
        """

    def send(self, sender: str, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> bool:
        """Enqueue; False when that sender is no longer connected, or this end is closed.

        `fds`: descriptors that the receiver gets copies of; the caller may close them afterwards.
        """

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ClientChannel:
    """The API process's end: one FIFO to the engine, and all messages of the engine.

    The listener gets every message but `Received`, which the channel needs itself.
    """

    def __init__(self, link: ClientLink, *, max_bytes_in_flight: int) -> None:
        self._link = link
        self._capacity = max_bytes_in_flight
        self._flow = FlowControl(max_bytes_in_flight)
        self._in_flight: deque[tuple[int, int]] = deque()
        """`(seq, bytes)` of the messages the engine has not received yet, oldest first."""
        self._awaited: deque[tuple[int, asyncio.Future[None]]] = deque()
        """`(seq, waiter)` of `wait_received`, oldest first."""
        self._encoder = MessageEncoder()
        self._decoder = engine_message_decoder()
        self._up = False

    @property
    def bytes_in_flight(self) -> int:
        return self._flow.used

    def open(self, listener: ChannelListener) -> None:
        """Connect, and connect again when the engine comes back; call within the event loop."""
        self._listener = listener
        self._link.open(self)

    def close(self) -> None:
        self._up = False
        error = EngineDeadError("the channel to the engine is closed")
        self._flow.fail(error)
        self._fail_awaited(error)
        self._link.close()

    @asynccontextmanager
    async def room(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until `nbytes` more may be in flight; send inside the block, without awaiting.

        Raises `EngineDeadError` when the engine goes away meanwhile.
        """
        flow = self._flow  # a disconnect replaces it: release the one that was acquired
        await flow.acquire(nbytes)
        try:
            yield
        finally:
            flow.release(nbytes)

    async def wait_received(self) -> None:
        """Returns once the engine has received all that was sent and is counted (`COUNTED`); it has
        told other API processes of new items by then. Raises `EngineDeadError`."""
        if self._in_flight:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaited.append((self._in_flight[-1][0], waiter))
            await waiter

    def expect_fds(self, expected: bool) -> None:
        """Whether messages with descriptors may come from now on (`ClientLink.expect_fds`)."""
        self._link.expect_fds(expected)

    def send_now(self, message: ClientMessage) -> None:
        """Enqueue a message. Raises `EngineDeadError` when no engine is connected."""
        if not self._up:
            raise EngineDeadError("the engine is not running")
        frames = self._encoder.encode(message)
        if isinstance(message, COUNTED):
            nbytes = frames_nbytes(frames)
            self._in_flight.append((message.seq, nbytes))
            self._flow.take(nbytes)
        if isinstance(message, ExtendSession):
            self._link.send_soon(frames)
        else:
            self._link.send(frames)

    def link_up(self) -> None:
        self._up = True
        self._listener.connected()

    def link_down(self) -> None:
        self._up = False
        self._in_flight.clear()
        stale, self._flow = self._flow, FlowControl(self._capacity)
        error = EngineDeadError("the engine went away")
        stale.fail(error)
        self._fail_awaited(error)
        self._listener.disconnected()

    def link_frames(self, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        try:
            message = self._decoder.decode(frames)
        except ProtocolError as error:
            close_fds(fds)
            logger.error("dropped a message from the engine: %s", error.message)
            return
        if isinstance(message, SlabsLeased):
            self._listener.leased(message, fds)
            return
        if fds:
            close_fds(fds)
            logger.error("a message from the engine has descriptors that it does not take")
        if isinstance(message, Received):
            self._free(message.seq)
        else:
            self._listener.received(message)

    def _free(self, seq: int) -> None:
        while self._in_flight and self._in_flight[0][0] <= seq:
            self._flow.release(self._in_flight.popleft()[1])
        while self._awaited and self._awaited[0][0] <= seq:
            _, waiter = self._awaited.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _fail_awaited(self, error: EngineDeadError) -> None:
        for _, waiter in self._awaited:
            if not waiter.done():
                waiter.set_exception(error)
        self._awaited.clear()


class FlowControl:
    """Limits the bytes in flight of one sender; waiters are served first come, first served.

    An amount above the whole capacity is granted once nothing else is in flight, so that it passes
    alone instead of never. Used from one event loop only.

    Invariant: waiters exist only while the first of them does not fit.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Bytes in flight or reserved."""
        return self._used

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def acquire(self, nbytes: int) -> None:
        """Wait until `nbytes` fit, then take them. Raises what `fail` was given."""
        if not self._waiters and self._fits(nbytes):
            self._used += nbytes
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, granted)
        self._waiters.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise

    def take(self, nbytes: int) -> None:
        """Count bytes that are sent whether they fit or not (small control messages)."""
        self._used += nbytes

    def release(self, nbytes: int) -> None:
        self._used -= nbytes
        self._grant()

    def fail(self, error: Exception) -> None:
        """The channel is gone: raise `error` in all waiters. Held bytes may still be released."""
        waiters, self._waiters = self._waiters, deque()
        for _, granted in waiters:
            if not granted.done():
                granted.set_exception(error)

    def _fits(self, nbytes: int) -> bool:
        return self._used == 0 or self._used + nbytes <= self._capacity

    def _grant(self) -> None:
        while self._waiters and self._fits(self._waiters[0][0]):
            nbytes, granted = self._waiters.popleft()
            if not granted.done():
                self._used += nbytes
                granted.set_result(None)

    def _withdraw(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        """A waiter was cancelled; where it was granted already, the bytes go to the next one."""
        nbytes, granted = entry
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self.release(nbytes)
        elif entry in self._waiters:
            self._waiters.remove(entry)
            self._grant()

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the invariant above is broken."""
        assert self._used >= 0, f"{self._used} bytes in flight"
        if self._waiters:
            nbytes, granted = self._waiters[0]
            leaving = granted.done()  # cancelled; its task has not run since
            assert leaving or not self._fits(nbytes), "a waiter that fits still waits"


class EngineChannelWriter:
    """Encodes and sends messages to API processes; each thread that sends has its own."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._encoder = MessageEncoder()

    def send(self, sender: str, message: EngineMessage, fds: Sequence[int] = ()) -> bool:
        """Enqueue for one sender; False when it is no longer connected."""
        return self._link.send(sender, self._encoder.encode(message), fds)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that cannot be decoded: what it changed in the sender's directory is lost."""

    request_id: str | None
    """The request of the message, where that much can be read."""


ReadSenderSlab = Callable[[str, str, tuple[int, ...], int, SlabReference], Array]
"""`codec.ReadSlab` after the name of the sender; `cache.slabs.SlabOwner.array` is the real one."""


class EngineChannel:
    """The engine process's end, owned by one thread; others may `wake` it, or have a `writer`."""

    def __init__(self, link: EngineLink, read_slab: ReadSenderSlab | None = None) -> None:
        """`read_slab` makes the arrays that lie in slabs of a sender; None: there are none."""
        self._link = link
        self._read_slab = read_slab
        self._writer = EngineChannelWriter(link)
        self._decoder = client_message_decoder()

    def poll(self, timeout: float) -> list[tuple[str, ClientMessage | Unreadable]]:
        """`(sender, message)` in the order they came; waits up to `timeout` seconds.

        A malformed message is logged, and an `Unreadable` stands in its place.
        """
        return [(sender, self._read(sender, frames)) for sender, frames in self._link.poll(timeout)]

    def _read(self, sender: str, frames: Sequence[Buffer]) -> ClientMessage | Unreadable:
        read_slab = None if self._read_slab is None else partial(self._read_slab, sender)
        try:
            return self._decoder.decode(frames, read_slab)
        except ProtocolError as error:
            logger.error("cannot read a message from sender %.40r: %s", sender, error.message)
            return Unreadable(request_id_of(frames))

    def send(self, sender: str, message: EngineMessage, fds: Sequence[int] = ()) -> bool:
        """Enqueue for one sender; False when it is no longer connected."""
        return self._writer.send(sender, message, fds)

    def writer(self) -> EngineChannelWriter:
        """For another thread that sends messages."""
        return EngineChannelWriter(self._link)

    def wake(self) -> None:
        """End a `poll` that waits in the owning thread, or the next one."""
        self._link.wake()

    def close(self) -> None:
        self._link.close()
