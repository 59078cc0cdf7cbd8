"""The API process's client of the engine: submit a prompt, iterate over its tokens.

Everything runs on one event loop. The channel calls `received` for each message, which wakes only
the tasks whose request got something. `SenderCache` decides what travels with a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from types import TracebackType
from typing import Literal, Self

import msgspec

from lookonce.cache.directory import Directory
from lookonce.cache.slab_pool import SlabPool
from lookonce.config import ChannelConfig
from lookonce.engine.client.delta_stream import DeltaStream, PendingRequest
from lookonce.engine.client.item_claims import ItemClaims
from lookonce.engine.client.sender_cache import InjectionOutcome, Keyed, SenderCache, inject
from lookonce.engine.client.session import EngineSession, PendingSession
from lookonce.errors import (
    BadRequestError,
    EngineDeadError,
    LookOnceError,
    NotReadyError,
    RequestFailedError,
    error_from_wire,
)
from lookonce.ipc.channel import ClientChannel, ClientLink
from lookonce.ipc.messages import (
    Abort,
    Accepted,
    AdapterAnswer,
    AdapterList,
    AdaptersKnown,
    ClearCache,
    ClientMessage,
    CloseSession,
    Deltas,
    EngineMessage,
    GetStats,
    Heartbeat,
    Hints,
    KeyedItem,
    LeaseSlabs,
    LoadAdapter,
    ReclaimSlabs,
    Rejected,
    ResendMedia,
    ResetCache,
    SlabsLeased,
    SlabsReleased,
    Stats,
    SupplyMedia,
    TakeProfile,
    UnloadAdapter,
    UpdateCache,
    Welcome,
)
from lookonce.ipc.socket_client_link import SocketClientLink
from lookonce.types.counts import Counts
from lookonce.types.lora import LoRAInfo
from lookonce.types.media import Array, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.ports import Clock
from lookonce.types.request import (
    SESSION_CREDITS,
    ExtendOptions,
    GenerateRequest,
    RenderedItem,
    RenderedPrompt,
    SessionOptions,
    client_request_id,
)
from lookonce.types.sampling import SamplingParams

logger = logging.getLogger(__name__)
MESSAGE_OVERHEAD = 4096
"""Bytes that a submission is counted with beside its prompt and its items."""
UNREAD_BEATS_SECONDS = 1.0
"""Silence for so long, two heartbeats, may be that of this process, which has not read them."""
READING_SECONDS = 0.05
"""In which it reads what waits for it."""
STATS_TIMEOUT = 2.0
"""Seconds to wait for an answer, which a long step delays, before the last one is returned."""


class EngineClient:
    """One API process's connection to the engine process; use as an async context manager.

    `processor_cache_bytes` is the budget of the processor cache of all API processes together.
    `connect` makes the link for a sender id; None: a unix socket at `config.address`.
    """

    def __init__(
        self,
        config: ChannelConfig,
        *,
        processor_cache_bytes: int,
        connect: Callable[[str], ClientLink] | None = None,
        clock: Clock = time.monotonic,
        counts: Counts | None = None,
    ) -> None:
        sender_id = uuid.uuid4().hex
        self.sender = SenderCache(sender_id, capacity_bytes=processor_cache_bytes, counts=counts)
        self._channel = ClientChannel(
            connect(sender_id) if connect else SocketClientLink(config.address, sender_id),
            max_bytes_in_flight=config.max_bytes_in_flight,
        )
        self._health = EngineHealth(config.stall_timeout, clock)
        self._stats_requests = StatsRequests()
        self.adapters = KnownAdapters()
        """LoRA adapters that requests may ask for."""
        self._requests: dict[str, PendingRequest] = {}
        self.slabs = SlabPool(self._slabs_changed, counts)
        """The shared memory that the engine leases to this process; none until its welcome."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slab_bytes = 0
        """What the engine leases to all API processes together."""
        self._num_leases_wanted = 0
        """Slabs that were asked for; descriptors come until all answers have come."""
        self.claims = ItemClaims(self.sender, self._room, self._commit, self._send_if_connected)
        self._resender = Resender(self.sender, self._room, self._commit, self._give_up)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._channel.open(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lose_engine("the server is shutting down")
        await self._resender.close()
        self._channel.close()
        self._loop = None

    # --- state --------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """ "dead" only after a connection was lost; "stuck" while a step takes too long."""
        return self._health.state

    async def silent_seconds(self) -> float | None:
        """Since the engine process last said that it lives, which it does twice a second whatever
        its steps take; None while there is no connection. What it has said is read first: where
        this process's own event loop was held up, that is none of the engine's silence."""
        if (self._health.silent_seconds or 0.0) > UNREAD_BEATS_SECONDS:
            await asyncio.sleep(READING_SECONDS)
        return self._health.silent_seconds

    @property
    def model(self) -> ModelInfo:
        """The served model, also after the engine has died; `NotReadyError` before it was ready."""
        return self._health.model

    @property
    def directory(self) -> Directory:
        """The items that the engine holds: the renderer looks there before it decodes media."""
        return self.sender.directory

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    async def wait_ready(self) -> None:
        """Returns once the engine takes requests, if need be after restarts."""
        await self._health.wait_ready()

    # --- requests -----------------------------------------------------------------------------

    def generate(
        self,
        rendered: RenderedPrompt,
        sampling: SamplingParams,
        request_id: str,
        *,
        arrival: float | None = None,
    ) -> DeltaStream:
        """Submit a prompt when the stream is awaited or iterated (`DeltaStream`).

        The prompt's pins are given back in every case. Its arrays and sources are dropped once the
        engine holds all its items: the prompt cannot be submitted again. The stream raises
        `UnavailableError`, the error that the engine rejects with, or the one that it failed with.
        """
        request = PendingRequest(request_id, rendered, sampling.n)
        wire = _wire_request(rendered, sampling, request_id, arrival)

        async def submit(pending: PendingRequest) -> None:
            await self._submit(pending, wire)

        return DeltaStream(request, submit, self._leave)

    async def open_session(
        self,
        rendered: RenderedPrompt,
        sampling: SamplingParams,
        request_id: str,
        options: SessionOptions | None = None,
    ) -> EngineSession:
        """A live session that begins with a prompt; returns once the engine has accepted it.

        Raises `QueueFullError` where too many are open, `UnavailableError`, or why the engine
        refuses it. The prompt's pins are given back in every case.
        """
        options = options or SessionOptions()
        options = msgspec.structs.replace(options, credits=options.credits or SESSION_CREDITS)
        pending = PendingSession(request_id, rendered, options)
        session = EngineSession(pending, self, self._leave_session)
        wire = _wire_request(rendered, sampling, request_id, None)
        try:
            _check_encodable(wire)
            async with self._room_for_session(rendered):
                if request_id in self._requests:
                    raise BadRequestError("this request_id is running", param="request_id")
                self._commit(self.sender.open_session(wire, rendered, options))
                self._requests[request_id] = pending
                pending.submitted = True
            await pending.wait_accepted()
        except BaseException:
            session.close()
            raise
        return session

    async def extend_session(
        self,
        session: PendingSession,
        rendered: RenderedPrompt,
        options: ExtendOptions,
        *,
        loose: bool,
    ) -> int:
        """Called by `EngineSession.extend`, one call at a time for each session."""
        try:
            await session.wait_credits()
            async with self._room_for_session(rendered):
                session.require_open()
                message = self.sender.extend_session(
                    session.request_id,
                    session.spend(rendered.cost),
                    rendered,
                    options,
                    loose=loose,
                )
                self._commit(message)
        finally:
            self.sender.cancel(rendered)
            self.sender.settle(rendered)
        return message.number

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples, whichever API process has submitted it.

        The samples of an aborted request finish with "abort"; a sample that is aborted alone gets
        no more deltas.
        """
        request = self._requests.get(request_id)
        if request is not None and index is None:
            request.finish("abort")
        elif request is not None and index is not None:
            request.forget_sample(index)
        if request is not None and request.closed:
            self._requests.pop(request_id)
            index = None
        self._send_if_connected(Abort(self.sender.epoch, (request_id,), index))

    async def inject(self, items: Iterable[KeyedItem]) -> UpdateCache:
        """Add items to the engine's store; `ops.adds` of the result are those that were added."""
        given = list(items)
        async with self._channel.room(sum(keyed.item.message_nbytes for keyed in given)):
            self._health.require_ready()
            update = self.sender.update(given)
            self._commit(update)
        return update

    async def inject_items(self, items: Sequence[Keyed]) -> list[InjectionOutcome]:
        """Add items that were processed elsewhere; what became of each (`sender_cache.inject`).

        Returns once other API processes know them, too. Raises `UnavailableError`.
        """
        outcomes = await inject(self.directory, self.inject, items)
        if self.sender.claims_items:
            await self._channel.wait_received()
        return outcomes

    # --- the engine ---------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        """The engine's counters at the end of the step in progress; the last known ones where that
        takes longer than `STATS_TIMEOUT`. Raises `EngineDeadError`."""
        try:
            async with asyncio.timeout(STATS_TIMEOUT):
                return await self._ask_stats()
        except TimeoutError:
            if self._stats_requests.last_counters is None:
                raise EngineDeadError("the engine does not answer") from None
            return self._stats_requests.last_counters

    async def reset_cache(self, tier: str) -> None:
        """Empty the tier "mm", "encoder" or "prefix"; returns when it is done.

        Running requests keep what they hold. Raises `EngineDeadError`.
        """
        if tier not in ("mm", "encoder", "prefix"):
            raise BadRequestError(f"there is no cache tier {tier!r}", param="tier")
        self._health.require_ready()
        self._send(ResetCache(self.sender.epoch, tier))
        await self._ask_stats()  # answered after the reset: all messages keep their order

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load the LoRA adapter in a folder of the engine's machine; returns once all API processes
        know it. Raises `BadRequestError` why it cannot be served, and `EngineDeadError`."""
        self._health.require_ready()
        nonce, answer = self.adapters.ask()
        self._send(LoadAdapter(self.sender.epoch, nonce, name, path, replace))
        await answer

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; requests that run with it go on. Raises `ModelNotFoundError`, and
        `EngineDeadError`."""
        self._health.require_ready()
        nonce, answer = self.adapters.ask()
        self._send(UnloadAdapter(self.sender.epoch, nonce, name))
        await answer

    def take_profile(self, seconds: float, path: str) -> None:
        """Let the engine profile its steps; the trace is at `path` some time after `seconds`.

        Raises `EngineDeadError`, `NotReadyError`.
        """
        self._health.require_ready()
        self._send(TakeProfile(seconds, path))

    def expect_no_restart(self) -> None:
        """The supervisor is gone: an engine that ends now is not started again."""
        self._health.outlook = "the server shuts down"

    def cut_off(self, error: LookOnceError) -> None:
        """End all requests of this client with `error`."""
        for request in list(self._requests.values()):
            self._give_up(request, error)

    # --- called by the channel ----------------------------------------------------------------

    def connected(self) -> None:
        self._health.connect()
        self._send(self.sender.hello())

    def disconnected(self) -> None:
        self._lose_engine(f"the engine ended unexpectedly; {self._health.outlook}")

    def received(self, message: EngineMessage) -> None:
        match message:
            case Deltas(deltas):
                for delta in deltas:
                    request = self._requests.get(delta.request_id)
                    if request is not None:
                        request.push(delta)
                        self._settle(request)
            case Accepted(request_id, complete):
                if request_id in self._requests:
                    self._requests[request_id].accept(complete=complete)
                    self.sender.settle(self._requests[request_id].rendered)
            case Rejected(request_id, error):
                if request_id in self._requests:
                    self._requests.pop(request_id).fail(error_from_wire(*error))
            case ResendMedia(request_id, keys):
                if request_id in self._requests:
                    self.sender.asked(self._requests[request_id].rendered, keys)
                    self._resender.start(self._requests[request_id], keys)
            case Heartbeat():
                self._health.beat(message, self.sender.epoch)
                self.claims.show_life()
                self.slabs.sweep()
            case Welcome():
                self._welcome(message)
            case ClearCache():
                self._send_if_connected(self.sender.clear(message))
                self.slabs.settle()
            case SlabsReleased(slabs):
                self.slabs.released(slabs)
            case ReclaimSlabs(ended):
                self._reclaim_slabs(ended=ended)
            case Hints():
                self.sender.hint(message)
                self.claims.answered(message)
            case Stats():
                self._stats_requests.answer(message)
            case AdapterList(number, adapters):
                self.adapters.set(adapters)
                self._send_if_connected(AdaptersKnown(self.sender.epoch, number))
            case AdapterAnswer():
                self.adapters.answer(message)

    def leased(self, message: SlabsLeased, fds: Sequence[int]) -> None:
        self.slabs.leased(message.slabs, fds)
        self._num_leases_wanted -= len(message.slabs)
        if self._num_leases_wanted <= 0:
            self._channel.expect_fds(False)

    # --- slabs --------------------------------------------------------------------------------

    def _slabs_changed(self) -> None:
        """There is something to tell the engine; called in any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._send_slab_changes)

    def _send_slab_changes(self) -> None:
        while self._health.connected and (changes := self.slabs.take_changes()) is not None:
            if changes.wanted:
                self._num_leases_wanted += len(changes.wanted)
                self._channel.expect_fds(True)
            self._send(
                LeaseSlabs(self.sender.epoch, changes.given_back, changes.uses, changes.wanted)
            )

    def _reclaim_slabs(self, *, ended: bool) -> None:
        if ended:
            self.slabs.lose()
            self.slabs.open(self._slab_bytes)
        else:
            self.slabs.reclaim()

    # --- inside -------------------------------------------------------------------------------

    async def _submit(self, request: PendingRequest, wire: GenerateRequest) -> None:
        _check_encodable(wire)
        self._health.require_ready()
        async with self._room_for(request, wire):
            self._health.require_ready()
            if request.request_id in self._requests:
                raise BadRequestError("this request_id is running", param="request_id")
            self._commit(self.sender.submit(wire, request.rendered))
            self._requests[request.request_id] = request
            request.submitted = True

    def _room_for(
        self, request: PendingRequest, wire: GenerateRequest
    ) -> AbstractAsyncContextManager[None]:
        """Room on the channel for a request that brings items. One that brings none is small and
        does not wait: a known picture never waits for new ones."""
        items = [
            part.item
            for part in request.rendered.items
            if part.item is not None and not self.directory.lists_for_certain(part.key)
        ]
        if not items:
            return nullcontext()
        nbytes = MESSAGE_OVERHEAD + wire.prompt.nbytes + sum(i.message_nbytes for i in items)
        return self._channel.room(nbytes)

    @asynccontextmanager
    async def _room_for_session(self, rendered: RenderedPrompt) -> AsyncIterator[None]:
        """Room on the channel for a session's prompt, all of whose items are there: those that are
        not held for certain are made again."""
        while True:
            self._health.require_ready()
            for part in self.sender.to_complete(rendered):
                if part.recover is not None:
                    part.item = await part.recover()
            nbytes = MESSAGE_OVERHEAD + rendered.ids.nbytes
            nbytes += 0 if rendered.frames is None else rendered.frames.nbytes
            nbytes += sum(part.item.message_nbytes for part in rendered.items if part.item)
            async with self._room(nbytes):
                self._health.require_ready()
                if not self.sender.to_complete(rendered):  # a reset may have come meanwhile
                    yield
                    return

    def _leave_session(self, session: PendingSession) -> None:
        """The caller has closed or dropped the session."""
        self.sender.cancel(session.rendered)
        self.sender.settle(session.rendered)
        if self._requests.get(session.request_id) is session:
            del self._requests[session.request_id]
            self._send_if_connected(CloseSession(self.sender.epoch, session.request_id))
        session.fail(BadRequestError("the session is closed", param="session"))

    def _room(self, nbytes: int) -> AbstractAsyncContextManager[None]:
        return self._channel.room(nbytes)

    def _leave(self, request: PendingRequest) -> None:
        """The caller has dropped the request: give its pins back, let the engine stop computing."""
        self.sender.cancel(request.rendered)
        self.sender.settle(request.rendered)
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
            request.fail(RequestFailedError("the caller left"))
            self._send_if_connected(Abort(self.sender.epoch, (request.request_id,)))

    def _settle(self, request: PendingRequest) -> None:
        """Forget a closed request; where one sample failed, abort its other samples."""
        if request.closed:
            self._requests.pop(request.request_id, None)
            if isinstance(request, PendingSession) and request.error is not None:
                self._send_if_connected(CloseSession(self.sender.epoch, request.request_id))
            elif request.error is not None and request.num_unfinished > 1:
                self._send_if_connected(Abort(self.sender.epoch, (request.request_id,)))

    def _give_up(self, request: PendingRequest, error: LookOnceError) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            request.fail(error)
            self._send_if_connected(Abort(self.sender.epoch, (request.request_id,)))

    def _welcome(self, message: Welcome) -> None:
        logger.info("connected to the engine, epoch %d", message.epoch)
        same_engine = message.epoch == self.sender.epoch
        if not same_engine:
            self.claims.forget_all()
        self.sender.welcome(message)
        self._slab_bytes = message.slab_bytes
        self.slabs.open(message.slab_bytes)
        for lost in self.adapters.welcome(message.adapters, same_engine=same_engine):
            self._send(LoadAdapter(message.epoch, 0, lost.name, lost.path))
        self._health.welcome(message.model, ready=message.ready)

    def _lose_engine(self, why: str) -> None:
        """End all requests at once; the directory starts empty with the next welcome."""
        self._health.disconnect()
        self.sender.disconnect()
        self.claims.forget_all()
        self.slabs.lose()
        self._num_leases_wanted = 0
        self._channel.expect_fds(False)
        requests, self._requests = self._requests, {}
        if requests:
            logger.error("%s (%d requests fail)", why, len(requests))
        for request in requests.values():
            is_session = isinstance(request, PendingSession)
            request.fail(EngineDeadError(f"{why}; its sessions have ended" if is_session else why))
        self._stats_requests.fail(EngineDeadError(why))
        self.adapters.fail(EngineDeadError(why))

    async def _ask_stats(self) -> dict[str, float]:
        if not self._health.connected:
            raise EngineDeadError("the engine is not running")
        number, answer = self._stats_requests.ask()
        self._send(GetStats(number))
        try:
            return await answer
        finally:
            self._stats_requests.forget(number)

    def _commit(self, message: ClientMessage) -> None:
        """Send a change that the directory has already made; if that fails both start over."""
        try:
            self._send(message)
        except EngineDeadError:
            raise  # the next welcome empties the directory anyway
        except Exception:
            self._send(self.sender.resync())
            self.slabs.settle()
            raise

    def _send(self, message: ClientMessage) -> None:
        self._channel.send_now(message)

    def _send_if_connected(self, message: ClientMessage) -> None:
        """Send if the engine is connected."""
        if self._health.connected:
            self._send(message)


def _wire_request(
    rendered: RenderedPrompt, sampling: SamplingParams, request_id: str, arrival: float | None
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        scope=rendered.scope,
        prompt=Array("int32", rendered.ids.shape, rendered.ids.data),
        features=rendered.features,
        sampling=sampling,
        arrival=time.monotonic() if arrival is None else arrival,
        tenant=rendered.tenant,
        frames=rendered.frames,
        weight=rendered.weight,
        lora_name=rendered.lora_name,
    )


def _check_encodable(request: GenerateRequest) -> None:
    """Raises `BadRequestError` for numbers and strings that no message can carry."""
    try:
        msgspec.msgpack.encode((request.sampling, request.features))
    except OverflowError:
        raise BadRequestError("a number in the request is out of range") from None
    except UnicodeError:
        raise BadRequestError("a string in the request is not Unicode text") from None


class KnownAdapters:
    """The LoRA adapters of the engine by name, and what waits for the engine to change them."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoRAInfo] = {}
        self._before: dict[str, LoRAInfo] = {}
        """Those of an engine that is gone, until the one after it has them."""
        self._nonce = 0
        self._open: dict[int, asyncio.Future[None]] = {}

    def get(self, name: str) -> LoRAInfo | None:
        return self._by_name.get(name)

    def names(self) -> list[str]:
        return list(self._by_name)

    def listed(self) -> list[LoRAInfo]:
        return list(self._by_name.values())

    def set(self, adapters: Iterable[LoRAInfo]) -> None:
        """Names that came back with an engine after the first are compared with what they stood
        for: their folders may have changed."""
        self._by_name = {info.name: info for info in adapters}
        for name in self._before.keys() & self._by_name.keys():
            if self._before.pop(name).identity != self._by_name[name].identity:
                logger.warning(
                    "the adapter %s has other contents than before the engine started anew", name
                )

    def welcome(self, adapters: Iterable[LoRAInfo], *, same_engine: bool) -> list[LoRAInfo]:
        """Set what an engine has; those that an engine before it had beside them."""
        if not same_engine:
            self._before = self._before | self._by_name
        self.set(adapters)
        if same_engine:
            return []
        return [info for info in self._before.values() if info.name not in self._by_name]

    def ask(self) -> tuple[int, asyncio.Future[None]]:
        """A nonce to send, and the future of its answer."""
        self._nonce += 1
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[self._nonce] = answer
        return self._nonce, answer

    def answer(self, message: AdapterAnswer) -> None:
        asked = self._open.pop(message.nonce, None)
        if asked is None or asked.done():
            return
        if message.error is None:
            asked.set_result(None)
        else:
            asked.set_exception(error_from_wire(*message.error))

    def fail(self, error: LookOnceError) -> None:
        """The engine is gone: fail what waits."""
        asked, self._open = self._open, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(error)


class StatsRequests:
    """Requests for the engine's counters that wait for their answer, by nonce."""

    def __init__(self) -> None:
        self.last_counters: dict[str, float] | None = None
        """The newest answer to any of them."""
        self._number = 0
        self._open: dict[int, asyncio.Future[dict[str, float]]] = {}

    def ask(self) -> tuple[int, asyncio.Future[dict[str, float]]]:
        """A nonce to send, and the future of its answer."""
        self._number += 1
        answer: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        self._open[self._number] = answer
        return self._number, answer

    def forget(self, number: int) -> None:
        self._open.pop(number, None)

    def answer(self, message: Stats) -> None:
        self.last_counters = message.counters
        asked = self._open.pop(message.nonce, None)
        if asked is not None and not asked.done():
            asked.set_result(message.counters)

    def fail(self, error: LookOnceError) -> None:
        """The engine is gone: fail all of them."""
        asked, self._open = self._open, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(error)


class Resender:
    """Answers each `ResendMedia` in a task of its own; the caller of the request does not notice.

    `room` waits for bytes on the channel, `commit` sends at once, and `give_up` ends a request
    whose items cannot be made again.
    """

    def __init__(
        self,
        sender: SenderCache,
        room: Callable[[int], AbstractAsyncContextManager[None]],
        commit: Callable[[SupplyMedia], None],
        give_up: Callable[[PendingRequest, LookOnceError], None],
    ) -> None:
        self._sender = sender
        self._room = room
        self._commit = commit
        self._give_up = give_up
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: PendingRequest, keys: tuple[bytes, ...]) -> None:
        task = asyncio.get_running_loop().create_task(self._resend(request, keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _resend(self, request: PendingRequest, keys: tuple[bytes, ...]) -> None:
        """Process the items that the engine lacks again from their sources, and send them."""
        try:
            recovered: dict[bytes, ProcessedItem] = {}
            while not await self._try_supply(request, keys, recovered):
                pass  # a reset has emptied the directory meanwhile: more items must be made again
        except LookOnceError as error:
            self._give_up(request, error)
        except Exception:
            logger.exception(
                "media could not be made again",
                extra={"request_id": client_request_id(request.request_id)},
            )
            self._give_up(request, RequestFailedError("media could not be processed again"))

    async def _try_supply(
        self,
        request: PendingRequest,
        keys: tuple[bytes, ...],
        recovered: dict[bytes, ProcessedItem],
    ) -> bool:
        """Add the items that must be made again to `recovered`, then send all; False when more
        items have come to be missing meanwhile."""

        def lacking() -> tuple[RenderedItem, ...]:
            rest = [key for key in keys if key not in recovered]
            return self._sender.to_recover(request.rendered, rest)

        if request.complete:
            return True
        parts = lacking()
        made = await asyncio.gather(*(part.recover() for part in parts if part.recover))
        recovered.update((part.key, item) for part, item in zip(parts, made, strict=True))
        async with self._room(sum(item.message_nbytes for item in recovered.values())):
            if request.closed:
                return True
            if lacking():
                return False
            self._commit(self._sender.supply(request.request_id, request.rendered, keys, recovered))
            _drop_resent_items(request, recovered)
            return True


def _drop_resent_items(request: PendingRequest, sent: Container[bytes]) -> None:
    """Drop arrays that the engine holds now; they could be made once more."""
    for part in request.rendered.items:
        if part.recover is not None and part.key in sent:
            part.item = None


EngineState = Literal["starting", "ready", "stuck", "dead"]


class EngineHealth:
    """The engine's state as one client sees it.

    starting ── welcome ──▶ ready ◀── a step takes too long ──▶ stuck
        ▲                     └───────── connection lost ─────────┴──▶ dead
        └────────────────────────── connected again ─────────────────────┘
    """

    def __init__(self, stall_timeout: float, clock: Clock) -> None:
        self.connected = False
        self.outlook = "it is being restarted"
        """What becomes of an engine that has ended."""
        self._stall_timeout = stall_timeout
        self._clock = clock
        self._was_connected = False
        self._ready = asyncio.Event()
        self._model: ModelInfo | None = None
        self._last_beat = 0.0
        self._stalled = 0.0

    @property
    def state(self) -> EngineState:
        """ "dead" only after a connection was lost; "stuck" while a step takes too long."""
        if not self.connected:
            return "dead" if self._was_connected else "starting"
        if not self._ready.is_set():
            return "starting"
        stalled = self._stalled + (self.silent_seconds or 0.0)
        return "stuck" if stalled > self._stall_timeout else "ready"

    @property
    def silent_seconds(self) -> float | None:
        """Since the last heartbeat; None while there is no connection."""
        return self._clock() - self._last_beat if self.connected else None

    @property
    def model(self) -> ModelInfo:
        """The served model, also after the engine has died; `NotReadyError` before it was ready."""
        if self._model is None:
            raise NotReadyError("the model is still loading")
        return self._model

    async def wait_ready(self) -> None:
        await self._ready.wait()

    def require_ready(self) -> None:
        """Raises `NotReadyError` or `EngineDeadError` unless the engine takes requests now."""
        match self.state:
            case "starting":
                raise NotReadyError("the model is still loading")
            case "dead":
                raise EngineDeadError(f"the engine is not running; {self.outlook}")
            case "stuck":
                raise EngineDeadError("the engine does not answer")

    def connect(self) -> None:
        self.connected = self._was_connected = True
        self._last_beat = self._clock()

    def welcome(self, model: ModelInfo, *, ready: bool) -> None:
        self._model = model
        self._last_beat = self._clock()
        if ready:
            self._ready.set()

    def beat(self, message: Heartbeat, epoch: int) -> None:
        """`epoch`: that of the engine that has sent its welcome."""
        self._last_beat = self._clock()
        self._stalled = message.stalled_seconds
        if message.ready and message.epoch == epoch:
            self._ready.set()

    def disconnect(self) -> None:
        self.connected = False
        self._ready.clear()
        self._stalled = 0.0
