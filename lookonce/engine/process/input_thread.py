"""The engine process's input thread: it owns the channel and the store, and answers without a step.

    Submit ──▶ cache operations applied ──▶ preprocessed ──▶ Rejected
                                               ├──▶ all items held: Accepted, and to the step thread
                                               └──▶ some missing: to the step thread, which finds
                                                    that it does without them (Accepted) or not
                                                    (ResendMedia)

The protocol's state lives in this thread alone. Tokens do not pass through it: the step thread
sends them itself (`step_loop.OutputSender`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.cache.slabs import SlabOwner
from lookonce.core.request import Request
from lookonce.core.scheduler import check_queue
from lookonce.engine.process.adapters import EngineAdapters, Load
from lookonce.engine.process.engine_core import RequestPreprocessor
from lookonce.engine.process.grammar import CompiledRequest, GrammarCompilerPool
from lookonce.engine.process.receiver_cache import Held, ReceiverCache
from lookonce.engine.process.step_loop import (
    AbortCommand,
    AddCommand,
    CutOffCommand,
    ExtendCommand,
    InstallCommand,
    Outcome,
    ProfileCommand,
    ResetCommand,
    StatsAnswer,
    StatsCommand,
    StepChannel,
    SupplyCommand,
    UnreachableSender,
)
from lookonce.errors import (
    BadRequestError,
    EngineDeadError,
    LookOnceError,
    MediaNotCachedError,
    ModelNotFoundError,
    NotReadyError,
    QueueFullError,
    RequestFailedError,
    error_to_wire,
)
from lookonce.ipc.channel import EngineChannel, Unreadable
from lookonce.ipc.messages import (
    Abort,
    Accepted,
    AdapterAnswer,
    AdapterList,
    AdaptersKnown,
    Claim,
    ClearCache,
    ClientMessage,
    CloseSession,
    EngineMessage,
    ExtendSession,
    GetStats,
    Heartbeat,
    Hello,
    LeaseSlabs,
    LoadAdapter,
    OpenSession,
    Received,
    ReclaimSlabs,
    Rejected,
    ResendMedia,
    ResetCache,
    SlabsLeased,
    SlabsReleased,
    Stats,
    Submit,
    SupplyMedia,
    TakeProfile,
    Unclaim,
    UnloadAdapter,
    UpdateCache,
    Welcome,
)
from lookonce.types.media import Array, ProcessedItem
from lookonce.types.request import SESSION_CREDITS, GenerateRequest, client_request_id

logger = logging.getLogger(__name__)
audit_logger = logging.getLogger("lookonce.audit")

HEARTBEAT_SECONDS = 0.5
SILENT_BEATS = 10
"""Heartbeats after which a sender that has sent nothing since makes nothing that others wait for:
an API process that has claimed an item answers each. Beats are counted and not seconds, so that an
engine that was stopped itself takes nobody for silent."""
MAX_LOST = 64
"""Unreachable senders that are remembered; one forgotten that comes back must say hello."""


class InputThread:
    """What the input thread runs; other threads call only `open` and `stop`."""

    def __init__(
        self,
        channel: EngineChannel,
        receiver_cache: ReceiverCache,
        step_channel: StepChannel,
        slabs: SlabOwner,
        *,
        num_senders: int,
        max_queue: int,
        max_sessions: int,
        max_tenant_sessions: int,
    ) -> None:
        """`max_sessions`, of which one tenant may have `max_tenant_sessions`, may be open."""
        self._channel = channel
        self._receiver_cache = receiver_cache
        self._step_channel = step_channel
        self._slabs = slabs
        self._num_senders = num_senders
        self._max_queue = max_queue
        self._sessions = OpenSessions(max_sessions, max_tenant_sessions)
        self._preprocessor: RequestPreprocessor | None = None
        """None until the model is loaded."""
        self._opening: RequestPreprocessor | None = None
        """Set by `open` in another thread, taken by this one."""
        self._senders: set[str] = set()
        self._owners: dict[str, str] = {}
        """Request → its sender, from its submission to its release."""
        self._unaccepted: set[str] = set()
        """Requests whose sender still keeps the sources of their items."""
        self._pending_resends = PendingResends()
        self._lost: dict[str, set[str]] = {}
        """Senders that could not be reached → requests whose end they must still be told."""
        self._grammar_pool = GrammarCompilerPool(channel.wake)
        """Requests whose grammar is being compiled, and which the step thread does not have yet."""
        self._num_clears = 0
        self._unanswered: Counter[str] = Counter()
        """Sender → heartbeats since its last message."""
        self._claims_moved = False
        """A sender has gone, or is silent: others may have been granted its claims, and are yet to
        be told."""
        self._adapters: EngineAdapters | None = None
        """None: the engine serves no LoRA adapters."""
        self._adapter_answers = AdapterAnswers()
        self._stopped = False

    # --- called by other threads --------------------------------------------------------------

    def open(self, preprocessor: RequestPreprocessor) -> None:
        """The model is loaded and warm: take requests."""
        self._opening = preprocessor
        self._channel.wake()

    def stop(self) -> None:
        self._stopped = True
        self._channel.wake()

    # --- the input thread ---------------------------------------------------------------------

    def run(self, on_beat: Callable[[float], None] = lambda stalled: None) -> None:
        """Receive until `stop`. `on_beat` gets the stalled seconds with every heartbeat."""
        next_beat = time.monotonic()
        while not self._stopped:
            for sender, message in self._channel.poll(max(0.0, next_beat - time.monotonic())):
                self._receive(sender, message)
            if self._opening is not None:
                self._welcome_all(self._opening)
            for compiled in self._grammar_pool.take():
                self._grammar_compiled(compiled)
            for outcome in self._step_channel.take_outcomes():
                self._handle_outcome(outcome)
            if self._adapters is not None:
                self._take_adapters(self._adapters)
            if self._claims_moved:
                self._claims_moved = False
                self._send_hints()
            self._release_slabs()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_SECONDS
                self._beat(on_beat)
        self._grammar_pool.close()
        self._channel.close()

    def _beat(self, on_beat: Callable[[float], None]) -> None:
        stalled, ready = self._step_channel.stalled_seconds, self._preprocessor is not None
        self._broadcast(Heartbeat(self._receiver_cache.epoch, ready, stalled))
        self._pass_over_silent()
        on_beat(stalled)

    def _pass_over_silent(self) -> None:
        """An API process that is stopped makes none of the items that it has claimed."""
        for sender in self._senders:
            self._unanswered[sender] += 1
            if self._unanswered[sender] < SILENT_BEATS:
                continue
            if self._receiver_cache.pass_claims_on(sender):
                self._claims_moved = True
                logger.warning("an API process is silent: others make the items that it claimed")

    def _receive(self, sender: str, message: ClientMessage | Unreadable) -> None:
        self._unanswered.pop(sender, None)
        if sender in self._lost and not isinstance(message, Hello):
            self._restore_sender(sender)
        if not isinstance(message, Hello) and sender not in self._senders:
            logger.warning("dropped a message of a sender that said no hello")
            return
        match message:
            case Submit():
                self._submit(sender, message)
            case OpenSession():
                self._open_session(sender, message)
            case ExtendSession():
                self._extend_session(sender, message)
            case CloseSession(epoch, request_id):
                if epoch == self._receiver_cache.epoch:
                    self._abort((request_id,), None)
            case SupplyMedia():
                self._supply(sender, message)
            case UpdateCache():
                if not self._receiver_cache.update(sender, message):
                    self._discarded(sender, message.epoch)
                self._received(sender, message.seq)
            case Claim():
                if not self._receiver_cache.claim(sender, message):
                    self._discarded(sender, message.epoch)
                self._send_hints()
            case Unclaim():
                self._receiver_cache.unclaim(sender, message)
                self._send_hints()
            case Abort(epoch, request_ids, index):
                if epoch == self._receiver_cache.epoch:
                    self._abort(request_ids, index)
            case ResetCache(epoch, tier):
                if epoch == self._receiver_cache.epoch:
                    self._reset(tier)
            case LeaseSlabs():
                self._lease_slabs(sender, message)
            case LoadAdapter():
                self._load_adapter(sender, message)
            case UnloadAdapter():
                self._unload_adapter(sender, message)
            case AdaptersKnown(_, number):
                self._adapters_known(sender, number)
            case GetStats(nonce):
                self._step_channel.command(StatsCommand(sender, nonce))
            case TakeProfile(seconds, path):
                self._step_channel.command(ProfileCommand(seconds, path))
            case Hello():
                self._hello(sender, message)
            case Unreadable(request_id):
                self._unreadable(sender, request_id)

    # --- senders ------------------------------------------------------------------------------

    def _hello(self, sender: str, message: Hello) -> None:
        """A sender has (re)connected: nobody reads what ran for its earlier connection."""
        self._answer_adapters(self._adapter_answers.forget(sender))
        self._end_requests(sender)
        self._slabs.end(sender)
        self._lost.pop(sender, None)
        self._senders.add(sender)
        if not self._receiver_cache.hello(sender, message.epoch):
            self._discarded(sender, message.epoch)
        logger.info("API process connected (%d of %d)", len(self._senders), self._num_senders)
        if self._preprocessor is not None:
            self._welcome(sender, self._preprocessor)
        self._send_hints()

    def _welcome_all(self, preprocessor: RequestPreprocessor) -> None:
        self._preprocessor, self._opening = preprocessor, None
        self._adapters = preprocessor.adapters
        if self._adapters is not None:
            self._adapters.wake = self._channel.wake
        for sender in list(self._senders):
            self._welcome(sender, preprocessor)

    def _welcome(self, sender: str, preprocessor: RequestPreprocessor) -> None:
        epoch, model = self._receiver_cache.epoch, preprocessor.model
        slabs = self._slabs.capacity_bytes
        adapters = () if self._adapters is None else self._adapters.listed
        welcome = Welcome(epoch, model, self._num_senders, True, slabs, adapters)
        self._send(sender, welcome)

    def _goodbye(self, sender: str) -> None:
        logger.warning("API process disconnected")
        self._senders.discard(sender)
        self._answer_adapters(self._adapter_answers.forget(sender))
        self._unanswered.pop(sender, None)
        self._lost[sender] = set(self._end_requests(sender))
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        self._receiver_cache.goodbye(sender)
        self._claims_moved = True
        self._slabs.end(sender)

    def _restore_sender(self, sender: str) -> None:
        """A sender taken for dead is alive: tell it which of its requests have ended meanwhile,
        and that its slabs are not leased any more."""
        self._senders.add(sender)
        ended = self._lost.pop(sender)
        if self._slabs.capacity_bytes:
            self._send(sender, ReclaimSlabs(ended=True))
        for request_id in ended:
            self._reject(sender, request_id, _lost_touch())

    def _discarded(self, sender: str, epoch: int) -> None:
        """A message for a share that was closed was dropped: both sides begin with an empty one."""
        if epoch == self._receiver_cache.epoch:
            self._num_clears += 1
            self._send(sender, ClearCache(self._num_clears))

    def _unreadable(self, sender: str, request_id: str | None) -> None:
        """The message's changes of the sender's directory are lost, so both sides start over."""
        self._discarded(sender, self._receiver_cache.epoch)
        if request_id is not None:
            error = RequestFailedError("the engine cannot read this request")
            self._reject(sender, request_id, error)
            if self._owners.get(request_id) == sender:
                self._end(request_id)

    def _end_requests(self, sender: str) -> list[str]:
        ended = [r for r, owner in self._owners.items() if owner == sender]
        if ended:
            self._step_channel.command(CutOffCommand(sender))
        for request_id in ended:
            self._end(request_id)
        return ended

    # --- slabs --------------------------------------------------------------------------------

    def _lease_slabs(self, sender: str, message: LeaseSlabs) -> None:
        """Answer a sender that asks for slabs; where there is no room for all, ask every sender
        for its free ones."""
        if message.epoch != self._receiver_cache.epoch:
            return
        leases = self._slabs.change(sender, message.given_back, message.uses, message.wanted)
        if not leases.slabs:
            return
        try:
            self._send(sender, SlabsLeased(leases.slabs), leases.descriptors)
        except OSError as error:  # this process has too many descriptors
            logger.error("slabs cannot be handed over: %s", error.strerror)
            self._slabs.give_back(sender, [number for _, number, _ in leases.slabs])
            refused = tuple((want, 0, nbytes) for want, _, nbytes in leases.slabs)
            self._send(sender, SlabsLeased(refused))
        finally:
            for fd in leases.descriptors:
                os.close(fd)
        audit_logger.info(
            "leased",
            extra={
                "event": "leased",
                "sender": sender,
                "slabs": sum(number > 0 for _, number, _ in leases.slabs),
                "bytes": sum(nbytes for _, number, nbytes in leases.slabs if number),
            },
        )
        if leases.is_short:
            self._broadcast(ReclaimSlabs())

    def _release_slabs(self) -> None:
        for sender, uses in self._slabs.collect().items():
            self._send(sender, SlabsReleased(uses))

    # --- requests -----------------------------------------------------------------------------

    def _submit(self, sender: str, message: Submit) -> None:
        built = self._build(sender, message)
        if built is None:
            return
        request, held = built
        request.recoverable = message.recoverable
        self._owners[request.request_id] = sender
        self._unaccepted.add(request.request_id)
        grammar = request.sampling.grammar
        if grammar is None or self._preprocessor is None:
            self._add(request, complete=not held.missing)
        else:
            compile_grammar = self._preprocessor.compile_grammar
            complete, tenant = not held.missing, message.request.tenant
            self._grammar_pool.begin(request, grammar, compile_grammar, complete, tenant)

    def _build(self, sender: str, message: Submit | OpenSession) -> tuple[Request, Held] | None:
        """The scheduler's request, and what it holds; None where it was rejected."""
        request_id = message.request.request_id
        try:
            held = self._hold_items(sender, message)
        except LookOnceError as error:
            self._reject(sender, request_id, error)
            return None
        try:
            if isinstance(message, OpenSession):
                self._sessions.check_room(message.request.tenant)
                _require_all_items(held)
                self._check_session_adapter(message.request)
            return self._preprocess(self._with_adapter(message.request), held.items), held
        except LookOnceError as error:
            self._receiver_cache.release(request_id)
            self._release_adapter(request_id)
            self._reject(sender, request_id, error)
            return None

    def _open_session(self, sender: str, message: OpenSession) -> None:
        built = self._build(sender, message)
        if built is None:
            return
        request, _ = built
        request_id = request.request_id
        self._owners[request_id] = sender
        self._sessions.open(request_id, request.tenant)
        self._send(sender, Accepted(request_id))
        if sender not in self._senders:  # sending `Accepted` has found the sender unreachable
            self._release(request_id)
            return
        asked = message.options.credits or SESSION_CREDITS
        options = msgspec.structs.replace(message.options, credits=min(asked, SESSION_CREDITS))
        self._step_channel.command(AddCommand(request, sender, accepted=True, session=options))

    def _extend_session(self, sender: str, message: ExtendSession) -> None:
        """What is wrong with an extension ends the session: those after it build on it."""
        held = self._receiver_cache.extend(sender, message)
        self._received(sender, message.seq)
        request_id = message.request_id
        if held is None:
            self._discarded(sender, message.epoch)
        if self._owners.get(request_id) != sender or request_id not in self._sessions:
            return  # the session has ended meanwhile
        try:
            if held is None:
                raise _lost_touch()
            self._sessions.count_extension(request_id, message.number)
            _require_all_items(held)
            token_ids = _token_array(message.token_ids)
        except LookOnceError as error:
            self._reject(sender, request_id, error)
            self._end(request_id)
            return
        self._step_channel.command(
            ExtendCommand(
                request_id,
                token_ids,
                message.features,
                held.items,
                message.options,
                message.frames,
            )
        )

    def _hold_items(self, sender: str, message: Submit | OpenSession) -> Held:
        """The items that the request holds now. Raises, with nothing held, why it holds none."""
        try:
            held = self._receiver_cache.submit(sender, message)
        finally:
            self._received(sender, message.seq)
        if held is None:
            self._discarded(sender, message.epoch)
            raise _lost_touch()
        if sender not in self._senders:  # sending `Received` has found the sender unreachable
            self._receiver_cache.release(message.request.request_id)
            raise _lost_touch()
        return held

    def _preprocess(self, request: GenerateRequest, items: dict[bytes, ProcessedItem]) -> Request:
        """The scheduler's request; raises what stands in the way of serving it."""
        if self._preprocessor is None:
            raise NotReadyError("the model is still loading")
        channel = self._step_channel
        coming = channel.num_commands + len(self._grammar_pool)
        waiting = channel.num_waiting() + coming
        check_queue(waiting, channel.num_waiting_of(request.tenant) + coming, self._max_queue)
        try:
            return self._preprocessor.preprocess(request, items)
        except LookOnceError:
            raise
        except Exception as error:
            logger.exception(
                "a request could not be validated",
                extra={"request_id": client_request_id(request.request_id)},
            )
            raise RequestFailedError("the engine does not understand this request") from error

    def _grammar_compiled(self, compiled: CompiledRequest) -> None:
        request_id = compiled.request.request_id
        if compiled.error is None:
            self._add(compiled.request, complete=compiled.complete)
        else:
            self._reject(self._owners[request_id], request_id, compiled.error)
            self._release(request_id)

    def _add(self, request: Request, *, complete: bool) -> None:
        """Hand the request to the step thread; `complete`: all its items are held."""
        request_id = request.request_id
        sender = self._owners[request_id]
        if complete:
            self._accept(request_id)
        if sender not in self._senders:  # sending `Accepted` has found the sender unreachable
            self._release(request_id)
            return
        self._step_channel.command(AddCommand(request, sender, accepted=complete))

    def _reject(self, sender: str, request_id: str, error: LookOnceError) -> None:
        self._send(sender, Rejected(request_id, error_to_wire(error)))
        if sender in self._lost:
            self._lost[sender].add(request_id)

    def _supply(self, sender: str, message: SupplyMedia) -> None:
        """Items came. Those that are still missing may not be needed: the step thread asks."""
        held = self._receiver_cache.supply(sender, message)
        self._received(sender, message.seq)
        request_id = message.request_id
        if held is None:
            self._discarded(sender, message.epoch)
        elif self._owners.get(request_id) != sender:
            return  # the request has ended meanwhile
        elif self._pending_resends.lacks_after_answer(request_id, held.items.keys()):
            self._reject(sender, request_id, MediaNotCachedError("referenced media did not come"))
            self._step_channel.command(AbortCommand(request_id))
        else:
            complete = not held.missing
            if complete:
                self._accept(request_id)
            self._step_channel.command(SupplyCommand(request_id, held.items, accepted=complete))

    def _accept(self, request_id: str) -> None:
        if request_id in self._unaccepted:
            self._unaccepted.discard(request_id)
            self._send(self._owners[request_id], Accepted(request_id))

    def _ask_resend(self, request_id: str, keys: tuple[bytes, ...]) -> None:
        self._pending_resends.ask(request_id, keys)
        self._send(self._owners[request_id], ResendMedia(request_id, keys))

    def _abort(self, request_ids: tuple[str, ...], index: int | None) -> None:
        for request_id in request_ids:
            if request_id in self._owners:
                self._end(request_id, index)

    def _end(self, request_id: str, index: int | None = None) -> None:
        """End a request; one whose grammar is being compiled ends here, and nobody is answered."""
        if index is None and self._grammar_pool.cancel(request_id):
            self._release(request_id)
        else:
            self._step_channel.command(AbortCommand(request_id, index))

    def _reset(self, tier: str) -> None:
        if tier != "mm":
            self._step_channel.command(ResetCommand(tier))
            return
        self._num_clears += 1
        self._broadcast(ClearCache(self._num_clears))

    # --- what the step thread reports ---------------------------------------------------------

    def _handle_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, StatsAnswer):
            counters = outcome.counters | self._receiver_cache.counters() | self._slabs.counters()
            counters |= self._sessions.counters()
            if self._adapters is not None:
                counters |= self._adapters.counters()
            self._send(outcome.sender, Stats(outcome.nonce, counters))
        elif isinstance(outcome, UnreachableSender):
            self._end_cut_off(outcome)
        else:
            self._unaccepted.difference_update(outcome.accepted)
            for request_id, keys in outcome.needs:
                if request_id in self._owners:
                    self._ask_resend(request_id, keys)
            for request_id in outcome.released:
                self._release(request_id)

    def _end_cut_off(self, unreachable: UnreachableSender) -> None:
        """Sending the rejection finds out whether the sender is still unreachable."""
        for request_id in unreachable.request_ids:
            if self._owners.get(request_id) == unreachable.sender:
                self._reject(unreachable.sender, request_id, _lost_touch())
                self._end(request_id)

    def _release(self, request_id: str) -> None:
        self._owners.pop(request_id, None)
        self._sessions.close(request_id)
        self._unaccepted.discard(request_id)
        self._pending_resends.forget(request_id)
        self._receiver_cache.release(request_id)
        self._release_adapter(request_id)

    # --- adapters -----------------------------------------------------------------------------

    def _with_adapter(self, request: GenerateRequest) -> GenerateRequest:
        """The request with the contents of the adapter that it asks for, which stay for it, or of
        the model's own adapter for its media, where it asks for none. Raises
        `ModelNotFoundError`."""
        identity = None
        if request.lora_name:
            if self._adapters is None:
                raise ModelNotFoundError("this engine serves no adapters", param="model")
            identity = self._adapters.acquire(request.request_id, request.lora_name)
        elif self._adapters is not None:
            identity = self._adapters.own({feature.modality for feature in request.features})
        if identity == request.adapter:
            return request
        return msgspec.structs.replace(request, adapter=identity)

    def _check_session_adapter(self, request: GenerateRequest) -> None:
        """Raises `BadRequestError` for a session whose adapter its later media would choose."""
        chosen_by_media = self._adapters is not None and self._adapters.chosen_by_media
        if chosen_by_media and not request.lora_name:
            raise BadRequestError(
                "this model has no live sessions: it is adapted to the media of a prompt, all of "
                "which must be known when it begins"
            )

    def _release_adapter(self, request_id: str) -> None:
        if self._adapters is not None:
            self._adapters.release(request_id)

    def _load_adapter(self, sender: str, message: LoadAdapter) -> None:
        if message.epoch != self._receiver_cache.epoch:
            return
        adapters, name = self._adapters, message.name
        if message.nonce == 0 and (adapters is None or adapters.knows(name)):
            return
        load = Load(sender, message.nonce, name, message.path)
        try:
            if adapters is None:
                raise BadRequestError("this engine serves no adapters")
            adapters.load(load, replace=message.replace)
        except LookOnceError as error:
            self._send(sender, AdapterAnswer(message.nonce, error_to_wire(error)))

    def _unload_adapter(self, sender: str, message: UnloadAdapter) -> None:
        if message.epoch != self._receiver_cache.epoch:
            return
        try:
            if self._adapters is None:
                raise BadRequestError("this engine serves no adapters")
            self._adapters.unload(message.name)
        except LookOnceError as error:
            self._send(sender, AdapterAnswer(message.nonce, error_to_wire(error)))
            return
        self._announce_adapters(sender, message.nonce)

    def _take_adapters(self, adapters: EngineAdapters) -> None:
        installs, ended = adapters.take()
        for install in installs:
            self._step_channel.command(InstallCommand(install))
        for load, error in ended:
            if error is None:
                self._announce_adapters(load.sender, load.nonce)
            else:
                logger.warning("an adapter was not loaded: %s", error.message)
                self._send(load.sender, AdapterAnswer(load.nonce, error_to_wire(error)))

    def _announce_adapters(self, sender: str, nonce: int) -> None:
        """Tell all senders which adapters there are; once all know, answer the one that asked."""
        assert self._adapters is not None
        number = self._adapter_answers.begin(sender, nonce, self._senders)
        self._broadcast(AdapterList(number, self._adapters.listed))

    def _adapters_known(self, sender: str, number: int) -> None:
        self._answer_adapters(self._adapter_answers.known(sender, number))

    def _answer_adapters(self, asked: list[tuple[str, int]]) -> None:
        for sender, nonce in asked:
            self._send(sender, AdapterAnswer(nonce))

    # --- sending ------------------------------------------------------------------------------

    def _received(self, sender: str, seq: int) -> None:
        """Other senders are told of new items first: once this one knows that they came
        (`ClientChannel.wait_received`), a request to any API process may name them."""
        if len(self._senders) > 1:
            self._send_hints()
        self._send(sender, Received(seq))

    def _send_hints(self) -> None:
        for sender in list(self._senders):
            hints = self._receiver_cache.take_hints(sender)
            if hints is not None:
                self._send(sender, hints)

    def _broadcast(self, message: EngineMessage) -> None:
        for sender in list(self._senders):
            self._send(sender, message)

    def _send(self, sender: str, message: EngineMessage, fds: Sequence[int] = ()) -> None:
        """Raises `OSError` when there are too many descriptors to send `fds`."""
        if sender in self._senders and not self._channel.send(sender, message, fds):
            self._goodbye(sender)


@dataclass(slots=True)
class _Resend:
    keys: set[bytes] = field(default_factory=set)
    num_answers: int = 0
    """How many answers are still to come."""


class PendingResends:
    """Per request, the items that `ResendMedia` asked for and that have not come.

    A request may be asked more than once; what is pending is the sum of all asks.
    """

    def __init__(self) -> None:
        self._resends: dict[str, _Resend] = {}

    def ask(self, request_id: str, keys: Collection[bytes]) -> None:
        resend = self._resends.setdefault(request_id, _Resend())
        resend.keys.update(keys)
        resend.num_answers += 1

    def lacks_after_answer(self, request_id: str, came: Collection[bytes]) -> bool:
        """Take one answer; true when it was the last, and items that were asked for are missing."""
        resend = self._resends.get(request_id, _Resend())
        resend.keys.difference_update(came)
        resend.num_answers -= 1
        return bool(resend.keys) and resend.num_answers <= 0

    def forget(self, request_id: str) -> None:
        self._resends.pop(request_id, None)


class OpenSessions:
    """The live sessions of all senders: their number is limited, and that of each tenant."""

    def __init__(self, max_sessions: int, max_tenant_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._max_tenant_sessions = max_tenant_sessions
        self._tenants: dict[str, str] = {}
        """Request id → tenant."""
        self._num_of: Counter[str] = Counter()
        """Tenant → its open sessions."""
        self._num_extensions: dict[str, int] = {}
        """Request id → extensions that came."""
        self._num_opened = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tenants

    def check_room(self, tenant: str) -> None:
        """Raises `QueueFullError` where one more session of the tenant is one too many."""
        if len(self._tenants) >= self._max_sessions:
            raise QueueFullError(f"{self._max_sessions} sessions are open, the most that may be")
        if self._num_of[tenant] >= self._max_tenant_sessions:
            raise QueueFullError(
                f"{self._max_tenant_sessions} sessions of this key's tenant are open, the most "
                "that may be"
            )

    def open(self, request_id: str, tenant: str) -> None:
        self._tenants[request_id] = tenant
        self._num_of[tenant] += 1
        self._num_extensions[request_id] = 0
        self._num_opened += 1

    def count_extension(self, request_id: str, number: int) -> None:
        """Raises `BadRequestError` unless `number` is the next one: none may be lost."""
        self._num_extensions[request_id] += 1
        if number != self._num_extensions[request_id]:
            raise BadRequestError(
                f"extension {number} of the session came as the "
                f"{self._num_extensions[request_id]}th",
                param="number",
            )

    def close(self, request_id: str) -> None:
        """Forget a session; other requests are none, and may be given."""
        tenant = self._tenants.pop(request_id, None)
        if tenant is not None:
            del self._num_extensions[request_id]
            self._num_of[tenant] -= 1
            if not self._num_of[tenant]:
                del self._num_of[tenant]

    def counters(self) -> dict[str, float]:
        return {
            "sessions_open": float(len(self._tenants)),
            "sessions_opened_total": float(self._num_opened),
        }


class AdapterAnswers:
    """Who waits until all senders know which adapters there are."""

    def __init__(self) -> None:
        self._number = 0
        self._waiting: dict[int, tuple[str, int, set[str]]] = {}
        """Number of a list → sender and nonce of the answer, and the senders that have not read
        the list."""

    def begin(self, sender: str, nonce: int, told: Iterable[str]) -> int:
        """The number of a list that all in `told` are sent; one of them has asked for it."""
        self._number += 1
        self._waiting[self._number] = sender, nonce, set(told)
        return self._number

    def known(self, sender: str, number: int) -> list[tuple[str, int]]:
        """A sender has read a list; who is to be answered now, and under which nonce."""
        waiting = self._waiting.get(number)
        if waiting is None:
            return []
        waiting[2].discard(sender)
        if waiting[2]:
            return []
        del self._waiting[number]
        return [waiting[:2]]

    def forget(self, sender: str) -> list[tuple[str, int]]:
        """A sender has gone: nobody waits for it."""
        return [each for number in list(self._waiting) for each in self.known(sender, number)]


def _require_all_items(held: Held) -> None:
    """Raises `MediaNotCachedError` unless a session's items are all there: none is asked for."""
    if held.missing:
        raise MediaNotCachedError("media of a session is not held any more; send it again")


def _token_array(token_ids: Array) -> NDArray[np.int32]:
    """Raises `BadRequestError` for what is no list of token ids."""
    if token_ids.dtype != "int32" or len(token_ids.shape) != 1:
        raise BadRequestError(
            f"the tokens of an extension are {token_ids.dtype} of shape {token_ids.shape}; they "
            "are int32 with one dimension",
            param="prompt",
        )
    return np.frombuffer(token_ids.data, dtype="<i4")


def _lost_touch() -> EngineDeadError:
    return EngineDeadError("the engine lost touch with this server process")
