"""The engine process's main thread: take commands, step, tell the senders.

Most steps make tokens and nothing else: those go out by the postbox and wake no other thread. What
the input thread must know of goes to it as an outcome.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lookonce.core.request import Request
from lookonce.core.scheduler_output import SchedulerOutput
from lookonce.engine.process.engine_core import EngineCore
from lookonce.errors import LookOnceError, error_to_wire
from lookonce.ipc.channel import EngineChannelWriter
from lookonce.ipc.messages import Accepted, Deltas
from lookonce.types.media import ProcessedItem
from lookonce.types.request import TokenDelta


@dataclass(frozen=True, slots=True)
class Add:
    request: Request
    """Built by the input thread, which has let go of it."""
    sender: str
    accepted: bool
    """Its sender has been told."""


@dataclass(frozen=True, slots=True)
class Supply:
    request_id: str
    items: Mapping[bytes, ProcessedItem]
    accepted: bool
    """Its sender has been told that nothing more is needed."""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class CutOff:
    """Say nothing more of the requests this sender has now; they will be aborted."""

    sender: str


@dataclass(frozen=True, slots=True)
class ResetTier:
    tier: str


@dataclass(frozen=True, slots=True)
class AskStats:
    sender: str
    nonce: int


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class _Wake:
    """Nothing to obey: another step, to see what external tiers have reported."""


Command: TypeAlias = Add | Supply | AbortRequest | CutOff | ResetTier | AskStats | Stop
"""What the step loop obeys."""


@dataclass(frozen=True, slots=True)
class StatsAnswer:
    sender: str
    nonce: int
    counters: dict[str, float]


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A message was lost: these requests of the sender are cut off, and must end."""

    sender: str
    request_ids: tuple[str, ...]


Outcome: TypeAlias = SchedulerOutput | StatsAnswer | Unreachable
"""What the input thread is told. Of an output, the deltas are sent already."""


class StepChannel:
    """Where the two threads meet: commands one way, outcomes the other, and how the loop is.

    Either end of either queue is used by one thread only.
    """

    def __init__(self, wake_input: Callable[[], None], outlet: EngineChannelWriter) -> None:
        """`outlet` is for the step thread."""
        self.outlet = outlet
        self._commands: queue.SimpleQueue[Command | _Wake] = queue.SimpleQueue()
        self._waking = False
        """A wake-up is in the queue already."""
        self._outcomes: deque[Outcome] = deque()
        self._wake_input = wake_input
        self.busy_since: float | None = None
        """`time.monotonic()` when the step in progress began; None when idle."""
        self.num_waiting: Callable[[], int] = int
        """Requests the scheduler has not begun: an estimate, since it goes on meanwhile."""

    # --- the input thread's side --------------------------------------------------------------

    def command(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def num_commands(self) -> int:
        return max(0, self._commands.qsize() - self._waking)

    def wake(self) -> None:
        """Let the loop look again, from any thread; many calls at once are one."""
        if not self._waking:
            self._waking = True
            self._commands.put(_Wake())

    def take_outcomes(self) -> list[Outcome]:
        taken = []
        while self._outcomes:
            taken.append(self._outcomes.popleft())
        return taken

    @property
    def stalled_seconds(self) -> float:
        since = self.busy_since
        return 0.0 if since is None else time.monotonic() - since

    # --- the step thread's side ---------------------------------------------------------------

    def report(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._wake_input()

    def take_commands(self, *, wait: bool, seconds: float | None = None) -> Sequence[Command]:
        """Everything commanded; with `wait`, returns once there is a command or a wake-up, or
        after so many seconds."""
        if not wait and self._commands.empty():
            return ()
        taken: list[Command] = []
        try:
            command = self._commands.get(block=wait, timeout=seconds)
            while True:
                if isinstance(command, _Wake):
                    self._waking = False
                else:
                    taken.append(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return taken


class StepLoop:
    """Steps as long as there is work, and sleeps in the command queue when there is none.

    No longer than until an idle session has to make way: nobody wakes it for that.
    """

    def __init__(self, core: EngineCore, exchange: StepChannel) -> None:
        self._core = core
        self._exchange = exchange
        self._postbox = OutputSender(exchange.outlet)
        self._stopped = False
        exchange.num_waiting = lambda: core.num_waiting
        core.wake_with(exchange.wake)

    def run(self) -> None:
        """Returns after `Stop`."""
        exchange, core = self._exchange, self._core
        idle = True
        while True:
            seconds = core.seconds_to_next_look if idle else None
            for command in exchange.take_commands(wait=idle, seconds=seconds):
                self._obey(command)
            if self._stopped:
                self._core.close()
                return
            exchange.busy_since = time.monotonic()
            output = core.step()
            if output is None:
                exchange.busy_since = None
            else:
                self._tell(output)
            idle = output is None

    def _tell(self, output: SchedulerOutput) -> None:
        for unreachable in self._postbox.send(output):
            self._exchange.report(unreachable)
        if output.accepted or output.needs or output.released:
            self._exchange.report(output)

    def _obey(self, command: Command) -> None:
        match command:
            case Add():
                self._add(command)
            case Supply():
                self._supply(command)
            case CutOff(sender):
                self._postbox.cut_off(sender)
            case AbortRequest(request_id, index):
                self._core.abort(request_id, index)
            case ResetTier("prefix"):
                self._core.reset_prefix_cache()
            case ResetTier("encoder"):
                self._core.reset_encoder_cache()
            case AskStats(sender, nonce):
                self._exchange.report(StatsAnswer(sender, nonce, self._core.stats()))
            case Stop():
                self._stopped = True

    def _add(self, command: Add) -> None:
        """What the scheduler refuses ends like any other request that failed."""
        request = command.request
        self._postbox.open(request.request_id, command.sender, accepted=command.accepted)
        try:
            self._core.take_in(request)
        except LookOnceError as error:
            deltas = _failed(request, error)
            self._tell(SchedulerOutput(deltas, released=[request.request_id]))

    def _supply(self, command: Supply) -> None:
        if command.accepted:
            self._postbox.accept(command.request_id)
        self._core.supply(command.request_id, command.items)


def _failed(request: Request, error: LookOnceError) -> list[TokenDelta]:
    wire = error_to_wire(error)
    return [
        TokenDelta(request.request_id, index, [], finish_reason="error", error=wire)
        for index in range(request.sampling.n)
    ]


class OutputSender:
    """Knows whose the requests are. One message per sender and step carries all its deltas."""

    def __init__(self, outlet: EngineChannelWriter) -> None:
        self._outlet = outlet
        self._senders: dict[str, str] = {}
        """Request → its sender; those whose sender was lost are missing."""
        self._unaccepted: set[str] = set()
        """Requests whose sender waits for `Accepted`."""

    def open(self, request_id: str, sender: str, *, accepted: bool) -> None:
        """What comes of this request from now on is for `sender`."""
        self._senders[request_id] = sender
        if not accepted:
            self._unaccepted.add(request_id)

    def accept(self, request_id: str) -> None:
        """Its sender has been told."""
        self._unaccepted.discard(request_id)

    def cut_off(self, sender: str) -> Unreachable:
        """Nothing more of its requests: a sender that comes back must not get tokens with a gap."""
        cut = tuple(r for r, owner in self._senders.items() if owner == sender)
        for request_id in cut:
            del self._senders[request_id]
        return Unreachable(sender, cut)

    def send(self, output: SchedulerOutput) -> list[Unreachable]:
        """Acceptances, then deltas; tells whom it could not reach and has cut off."""
        lost: set[str] = set()
        for request_id in output.accepted:
            if request_id in self._unaccepted:
                self._unaccepted.discard(request_id)
                accepted = Accepted(request_id, complete=False)
                self._send(self._senders.get(request_id), accepted, lost)
        for sender, deltas in self._by_sender(output.deltas).items():
            self._send(sender, Deltas(deltas), lost)
        unreachable = [self.cut_off(sender) for sender in lost]
        for request_id in output.released:
            self._senders.pop(request_id, None)
            self._unaccepted.discard(request_id)
        return unreachable

    def _by_sender(self, deltas: list[TokenDelta]) -> dict[str, list[TokenDelta]]:
        senders = self._senders
        by_sender: dict[str, list[TokenDelta]] = {}
        for delta in deltas:
            sender = senders.get(delta.request_id)
            if sender in by_sender:
                by_sender[sender].append(delta)
            elif sender is not None:
                by_sender[sender] = [delta]
        return by_sender

    def _send(self, sender: str | None, message: Accepted | Deltas, lost: set[str]) -> None:
        if sender is not None and sender not in lost and not self._outlet.send(sender, message):
            lost.add(sender)
