"""The engine process's input thread: owns the channel and the store, answers without a step.

    Submit ──▶ operations applied ──▶ judged ──▶ Rejected
                                        └──▶ all held: Accepted, and on to the step thread
                                        └──▶ some missing: on to the step thread, which says
                                             if it does without (Accepted) or not (ResendMedia)

Protocol state lives here, in one thread. The step thread computes, and tells the senders itself
what came of it (`postbox`): tokens do not pass through here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from lookonce.core.request import Request
from lookonce.engine.process.engine_core import RequestPreprocessor
from lookonce.engine.process.grammar import CompiledRequest, GrammarCompilerPool
from lookonce.engine.process.receiver_cache import Held, ReceiverCache
from lookonce.engine.process.step_loop import (
    AbortRequest,
    Add,
    AskStats,
    CutOff,
    Outcome,
    ResetTier,
    StatsAnswer,
    StepChannel,
    Supply,
    Unreachable,
)
from lookonce.errors import (
    EngineDeadError,
    LookOnceError,
    MediaNotCachedError,
    NotReadyError,
    QueueFullError,
    RequestFailedError,
    error_to_wire,
)
from lookonce.ipc.channel import EngineChannel, Unreadable
from lookonce.ipc.messages import (
    Abort,
    Accepted,
    ClearCache,
    ClientMessage,
    EngineMessage,
    GetStats,
    Heartbeat,
    Hello,
    Received,
    Rejected,
    ResendMedia,
    ResetCache,
    Stats,
    Submit,
    SupplyMedia,
    UpdateCache,
    Welcome,
)
from lookonce.types.media import ProcessedItem
from lookonce.types.request import GenerateRequest

logger = logging.getLogger(__name__)


HEARTBEAT_SECONDS = 0.5


MAX_LOST = 64
"""Senders out of reach that are remembered; one that comes back later starts as a stranger."""


class InputThread:
    """One object for the input thread; only `stop` and `exchange` are touched by others."""

    def __init__(
        self, channel: EngineChannel, intake: ReceiverCache, *, num_senders: int, max_queue: int
    ) -> None:
        self.exchange = StepChannel(channel.wake, channel.outlet())
        self._channel = channel
        self._intake = intake
        self._num_senders = num_senders
        self._max_queue = max_queue
        self._judge: RequestPreprocessor | None = None
        self._opening: RequestPreprocessor | None = None
        """Set by another thread, taken by this one."""
        self._senders: set[str] = set()
        self._owners: dict[str, str] = {}
        """Request → its sender, from judging to release."""
        self._unaccepted: set[str] = set()
        """Requests whose sender still keeps the sources."""
        self._debts = PendingResends()
        self._lost: dict[str, set[str]] = {}
        """Senders that could not be reached, and the requests of whose end they must be told."""
        self._workshop = GrammarCompilerPool(channel.wake)
        """Requests whose grammar is being compiled: the step thread has not heard of them."""
        self._num_clears = 0
        self._stopped = False

    # --- called by other threads --------------------------------------------------------------

    def open_doors(self, judge: RequestPreprocessor) -> None:
        """The model is loaded and warm: requests may come."""
        self._opening = judge
        self._channel.wake()

    def stop(self) -> None:
        self._stopped = True
        self._channel.wake()

    # --- the input thread ---------------------------------------------------------------------

    def run(self, on_beat: Callable[[float], None] = lambda stalled: None) -> None:
        """Until `stop`. `on_beat` gets the stalled seconds with every heartbeat."""
        next_beat = time.monotonic()
        while not self._stopped:
            for sender, message in self._channel.poll(max(0.0, next_beat - time.monotonic())):
                self._receive(sender, message)
            if self._opening is not None:
                self._open(self._opening)
            for finished in self._workshop.take():
                self._compiled(finished)
            for outcome in self.exchange.take_outcomes():
                self._take_note(outcome)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_SECONDS
                self._beat(on_beat)
        self._channel.close()

    def _beat(self, on_beat: Callable[[float], None]) -> None:
        stalled = self.exchange.stalled_seconds
        self._broadcast(Heartbeat(self._intake.epoch, self._judge is not None, stalled))
        on_beat(stalled)

    def _receive(self, sender: str, message: ClientMessage | Unreadable) -> None:
        if sender in self._lost and not isinstance(message, Hello):
            self._take_back(sender)
        if not isinstance(message, Hello) and sender not in self._senders:
            logger.warning("dropped a message of a sender that said no hello")
            return
        match message:
            case Submit():
                self._submit(sender, message)
            case SupplyMedia():
                self._supply(sender, message)
            case UpdateCache():
                if not self._intake.update(sender, message):
                    self._discarded(sender, message.epoch)
                self._received(sender, message.seq)
            case Abort(epoch, request_ids, index):
                if epoch == self._intake.epoch:
                    self._abort(sender, request_ids, index)
            case ResetCache(epoch, tier):
                if epoch == self._intake.epoch:
                    self._reset(tier)
            case GetStats(nonce):
                self.exchange.command(AskStats(sender, nonce))
            case Hello():
                self._hello(sender, message)
            case Unreadable(request_id):
                self._misread(sender, request_id)

    # --- senders ------------------------------------------------------------------------------

    def _hello(self, sender: str, message: Hello) -> None:
        """A (re)connection: what ran for an earlier one has nobody to read it."""
        self._end_requests(sender)
        self._lost.pop(sender, None)
        self._senders.add(sender)
        if not self._intake.hello(sender, message.epoch):
            self._discarded(sender, message.epoch)
        logger.info("API process connected (%d of %d)", len(self._senders), self._num_senders)
        if self._judge is not None:
            self._welcome(sender, self._judge)

    def _open(self, judge: RequestPreprocessor) -> None:
        self._judge, self._opening = judge, None
        for sender in list(self._senders):
            self._welcome(sender, judge)

    def _welcome(self, sender: str, judge: RequestPreprocessor) -> None:
        welcome = Welcome(self._intake.epoch, judge.model, self._num_senders, ready=True)
        self._send(sender, welcome)

    def _goodbye(self, sender: str) -> None:
        logger.warning("API process disconnected")
        self._senders.discard(sender)
        self._lost[sender] = set(self._end_requests(sender))
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        self._intake.goodbye(sender)

    def _take_back(self, sender: str) -> None:
        """It was taken for dead and lives: it must not wait for what has ended."""
        self._senders.add(sender)
        for request_id in self._lost.pop(sender):
            self._reject(sender, request_id, _out_of_touch())

    def _discarded(self, sender: str, epoch: int) -> None:
        """A message meant for a share that was closed: both sides begin with an empty one."""
        if epoch == self._intake.epoch:
            self._num_clears += 1
            self._send(sender, ClearCache(self._num_clears))

    def _misread(self, sender: str, request_id: str | None) -> None:
        """What the message changed in the sender's directory is lost, so both sides start over."""
        self._discarded(sender, self._intake.epoch)
        if request_id is not None:
            error = RequestFailedError("the engine cannot read this request")
            self._reject(sender, request_id, error)
            if self._owners.get(request_id) == sender:
                self._end(request_id)

    def _end_requests(self, sender: str) -> list[str]:
        ended = [r for r, owner in self._owners.items() if owner == sender]
        if ended:
            self.exchange.command(CutOff(sender))
        for request_id in ended:
            self._end(request_id)
        return ended

    # --- requests -----------------------------------------------------------------------------

    def _submit(self, sender: str, message: Submit) -> None:
        request_id = message.request.request_id
        try:
            held = self._take_in(sender, message)
        except LookOnceError as error:
            self._reject(sender, request_id, error)
            return
        try:
            built = self._check(message.request, held.items)
        except LookOnceError as error:
            self._intake.release(request_id)
            self._reject(sender, request_id, error)
            return
        built.recoverable = message.recoverable
        self._owners[request_id] = sender
        self._unaccepted.add(request_id)
        grammar = built.sampling.grammar
        if grammar is None or self._judge is None:
            self._admit(built, complete=not held.missing)
        else:
            compile_grammar = self._judge.compile_grammar
            self._workshop.begin(built, grammar, compile_grammar, complete=not held.missing)

    def _take_in(self, sender: str, message: Submit) -> Held:
        """What the request holds now. Raises, with nothing held, what stands in its way."""
        try:
            held = self._intake.submit(sender, message)
        finally:
            self._received(sender, message.seq)
        if held is None:
            self._discarded(sender, message.epoch)
            raise _out_of_touch()
        if sender not in self._senders:  # saying so has found that out
            self._intake.release(message.request.request_id)
            raise _out_of_touch()
        return held

    def _compiled(self, finished: CompiledRequest) -> None:
        request_id = finished.request.request_id
        if finished.error is None:
            self._admit(finished.request, complete=finished.complete)
        else:
            self._reject(self._owners[request_id], request_id, finished.error)
            self._release(request_id)

    def _admit(self, request: Request, *, complete: bool) -> None:
        """`complete`: all its items are held, so nothing will be asked of its sender."""
        request_id = request.request_id
        sender = self._owners[request_id]
        if complete:
            self._accept(request_id)
        if sender not in self._senders:  # saying so has found that out, and ended what it owned
            self._release(request_id)
            return
        self.exchange.command(Add(request, sender, accepted=complete))

    def _check(self, request: GenerateRequest, items: dict[bytes, ProcessedItem]) -> Request:
        """The request as built for the scheduler; raises what stands in the way of serving it."""
        if self._judge is None:
            raise NotReadyError("the model is still loading")
        exchange = self.exchange
        waiting = exchange.num_waiting() + exchange.num_commands + len(self._workshop)
        if waiting >= self._max_queue:
            raise QueueFullError(f"{waiting} requests are waiting, the most that may")
        try:
            return self._judge.preprocess(request, items)
        except LookOnceError:
            raise
        except Exception as error:
            logger.exception("request %s could not be judged", request.request_id)
            raise RequestFailedError("the engine does not understand this request") from error

    def _reject(self, sender: str, request_id: str, error: LookOnceError) -> None:
        self._send(sender, Rejected(request_id, error_to_wire(error)))
        if sender in self._lost:
            self._lost[sender].add(request_id)

    def _supply(self, sender: str, message: SupplyMedia) -> None:
        """What is still missing then may not be needed: if it is, the step thread asks."""
        held = self._intake.supply(sender, message)
        self._received(sender, message.seq)
        request_id = message.request_id
        if held is None:
            self._discarded(sender, message.epoch)
        elif self._owners.get(request_id) != sender:
            return  # it has ended meanwhile
        elif self._debts.unpaid_after(request_id, held.items.keys()):
            self._reject(sender, request_id, MediaNotCachedError("referenced media did not come"))
            self.exchange.command(AbortRequest(request_id))
        else:
            complete = not held.missing
            if complete:
                self._accept(request_id)
            self.exchange.command(Supply(request_id, held.items, accepted=complete))

    def _accept(self, request_id: str) -> None:
        if request_id in self._unaccepted:
            self._unaccepted.discard(request_id)
            self._send(self._owners[request_id], Accepted(request_id))

    def _ask(self, request_id: str, keys: tuple[bytes, ...]) -> None:
        self._debts.ask(request_id, keys)
        self._send(self._owners[request_id], ResendMedia(request_id, keys))

    def _abort(self, sender: str, request_ids: tuple[str, ...], index: int | None) -> None:
        for request_id in request_ids:
            if request_id in self._owners:
                self._end(request_id, index)

    def _end(self, request_id: str, index: int | None = None) -> None:
        """One that waits for its grammar ends here and at once: whoever aborts needs no answer."""
        if index is None and self._workshop.cancel(request_id):
            self._release(request_id)
        else:
            self.exchange.command(AbortRequest(request_id, index))

    def _reset(self, tier: str) -> None:
        if tier != "mm":
            self.exchange.command(ResetTier(tier))
            return
        self._num_clears += 1
        self._broadcast(ClearCache(self._num_clears))

    # --- what the step thread reports ---------------------------------------------------------

    def _take_note(self, outcome: Outcome) -> None:
        if isinstance(outcome, StatsAnswer):
            counters = outcome.counters | self._intake.counters()
            self._send(outcome.sender, Stats(outcome.nonce, counters))
        elif isinstance(outcome, Unreachable):
            self._end_cut_off(outcome)
        else:
            self._unaccepted.difference_update(outcome.accepted)
            for request_id, keys in outcome.needs:
                if request_id in self._owners:
                    self._ask(request_id, keys)
            for request_id in outcome.released:
                self._release(request_id)

    def _end_cut_off(self, lost: Unreachable) -> None:
        """If the sender is out of reach still, telling it so finds that out."""
        for request_id in lost.request_ids:
            if self._owners.get(request_id) == lost.sender:
                self._reject(lost.sender, request_id, _out_of_touch())
                self._end(request_id)

    def _release(self, request_id: str) -> None:
        self._owners.pop(request_id, None)
        self._unaccepted.discard(request_id)
        self._debts.forget(request_id)
        self._intake.release(request_id)

    # --- sending ------------------------------------------------------------------------------

    def _received(self, sender: str, seq: int) -> None:
        self._send(sender, Received(seq))
        if len(self._senders) > 1:
            self._send_hints()

    def _send_hints(self) -> None:
        for sender in list(self._senders):
            hints = self._intake.take_hints(sender)
            if hints is not None:
                self._send(sender, hints)

    def _broadcast(self, message: EngineMessage) -> None:
        for sender in list(self._senders):
            self._send(sender, message)

    def _send(self, sender: str, message: EngineMessage) -> None:
        if sender in self._senders and not self._channel.send(sender, message):
            self._goodbye(sender)


def _out_of_touch() -> EngineDeadError:
    return EngineDeadError("the engine lost touch with this server process")


@dataclass(slots=True)
class _Debt:
    keys: set[bytes] = field(default_factory=set)
    num_answers: int = 0


class PendingResends:
    """By request. One may be asked for more than once: what is owed is the sum of all asks."""

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def ask(self, request_id: str, keys: Collection[bytes]) -> None:
        debt = self._debts.setdefault(request_id, _Debt())
        debt.keys.update(keys)
        debt.num_answers += 1

    def unpaid_after(self, request_id: str, came: Collection[bytes]) -> bool:
        """Take an answer: whether items that were asked for are in none of the answers."""
        debt = self._debts.get(request_id, _Debt())
        debt.keys.difference_update(came)
        debt.num_answers -= 1
        return bool(debt.keys) and debt.num_answers <= 0

    def forget(self, request_id: str) -> None:
        self._debts.pop(request_id, None)
