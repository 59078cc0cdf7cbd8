"""The engine process's main thread: take commands, step, send what the step generated.

    input thread ──commands──▶ StepChannel ──▶ StepLoop ──▶ EngineCore
                 ◀──outcomes──                    └──▶ OutputSender ──▶ API processes

Most steps generate tokens and nothing else. `OutputSender` sends those from this thread, so that no
other is woken; the input thread is told of a step only what changes the protocol's state.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lookonce.core.request import Request
from lookonce.core.scheduler_state import SchedulerOutput
from lookonce.engine.process.engine_core import EngineCore
from lookonce.engine.process.profiler import StepProfiler
from lookonce.errors import LookOnceError, error_to_wire
from lookonce.ipc.channel import EngineChannelWriter
from lookonce.ipc.messages import Accepted, Deltas
from lookonce.types.lora import Install
from lookonce.types.media import Array, MediaFeature, ProcessedItem
from lookonce.types.request import ExtendOptions, SessionOptions, TokenDelta, client_request_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AddCommand:
    request: Request
    """Built by the input thread, which does not touch it any more."""
    sender: str
    accepted: bool
    """`Accepted` was sent."""
    session: SessionOptions | None = None
    """In live sessions only."""


@dataclass(frozen=True, slots=True)
class ExtendCommand:
    """What an `ExtendSession` appends."""

    request_id: str
    token_ids: NDArray[np.int32]
    features: tuple[MediaFeature, ...]
    items: Mapping[bytes, ProcessedItem]
    options: ExtendOptions
    frames: Array | None = None
    """Of sound; then nothing else is appended."""


@dataclass(frozen=True, slots=True)
class SupplyCommand:
    request_id: str
    items: Mapping[bytes, ProcessedItem]
    accepted: bool
    """`Accepted` was sent."""


@dataclass(frozen=True, slots=True)
class AbortCommand:
    request_id: str
    index: int | None = None
    """Only this sample; None: the whole request."""


@dataclass(frozen=True, slots=True)
class CutOffCommand:
    """Send nothing more of the requests this sender has now; they will be aborted."""

    sender: str


@dataclass(frozen=True, slots=True)
class ResetCommand:
    tier: str


@dataclass(frozen=True, slots=True)
class StatsCommand:
    sender: str
    nonce: int


@dataclass(frozen=True, slots=True)
class ProfileCommand:
    """Begin a profile of so many seconds, which is written to `path`."""

    seconds: float
    path: str


@dataclass(frozen=True, slots=True)
class EndProfileCommand:
    pass


@dataclass(frozen=True, slots=True)
class InstallCommand:
    """Let the runner use other LoRA adapters from the next step on."""

    install: Install


@dataclass(frozen=True, slots=True)
class StopCommand:
    pass


@dataclass(frozen=True, slots=True)
class _Wake:
    """No command: the loop steps once to see what the external KV tiers have reported."""


Command: TypeAlias = (
    AddCommand
    | ExtendCommand
    | SupplyCommand
    | AbortCommand
    | CutOffCommand
    | ResetCommand
    | StatsCommand
    | ProfileCommand
    | EndProfileCommand
    | InstallCommand
    | StopCommand
)
"""What the input thread tells the step loop."""


@dataclass(frozen=True, slots=True)
class StatsAnswer:
    sender: str
    nonce: int
    counters: dict[str, float]


@dataclass(frozen=True, slots=True)
class UnreachableSender:
    """A message to this sender was lost: these requests of it are cut off, and must end."""

    sender: str
    request_ids: tuple[str, ...]


Outcome: TypeAlias = SchedulerOutput | StatsAnswer | UnreachableSender
"""What the step loop tells the input thread. The deltas of an output are sent already."""


class StepChannel:
    """Commands from the input thread to the step thread, and outcomes back.

    Each end of each queue is used by one thread only.
    """

    def __init__(self, wake_input: Callable[[], None], writer: EngineChannelWriter) -> None:
        """`writer` sends messages from the step thread."""
        self.writer = writer
        self._commands: queue.SimpleQueue[Command | _Wake] = queue.SimpleQueue()
        self._waking = False
        """There is a `_Wake` in the queue."""
        self._outcomes: deque[Outcome] = deque()
        self._wake_input = wake_input
        self.busy_since: float | None = None
        """`time.monotonic()` when the step in progress began; None when idle."""
        self.num_waiting: Callable[[], int] = int
        """Requests the scheduler has not begun: an estimate, since it goes on meanwhile."""
        self.num_waiting_of: Callable[[str], int] = lambda tenant: 0
        """The same of one tenant."""

    # --- the input thread's side --------------------------------------------------------------

    def command(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def num_commands(self) -> int:
        return max(0, self._commands.qsize() - self._waking)

    def wake(self) -> None:
        """Let the loop step once, from any thread; many calls at once are one."""
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
        """All commands in the queue; with `wait`, blocks until there is a command or a wake-up, or
        for that many seconds."""
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
    """Steps as long as there is work, and blocks in the command queue when there is none.

    It does not block beyond the time at which an idle session has to be evicted, or the load is
    told again.
    """

    def __init__(self, core: EngineCore, channel: StepChannel) -> None:
        self._core = core
        self._channel = channel
        self._output_sender = OutputSender(channel.writer)
        self._profiler = StepProfiler()
        self._stopped = False
        channel.num_waiting = lambda: core.num_waiting
        channel.num_waiting_of = core.num_waiting_of
        core.wake_with(channel.wake)

    def run(self) -> None:
        """Returns after `StopCommand`."""
        channel, core = self._channel, self._core
        idle = True
        while True:
            seconds = core.seconds_to_wait if idle else None
            for command in channel.take_commands(wait=idle, seconds=seconds):
                self._execute_command(command)
            if self._stopped:
                self._send(core.land())
                self._core.close()
                return
            channel.busy_since = time.monotonic()
            output = core.step()
            if output is None:
                channel.busy_since = None
            else:
                self._send(output)
            idle = output is None

    def _send(self, output: SchedulerOutput) -> None:
        for unreachable in self._output_sender.send(output):
            self._channel.report(unreachable)
        if output.accepted or output.needs or output.released:
            self._channel.report(output)
        if output.released:
            _log_failures(output.deltas)

    def _execute_command(self, command: Command) -> None:
        match command:
            case AddCommand():
                self._add(command)
            case ExtendCommand():
                self._extend(command)
            case SupplyCommand():
                self._supply(command)
            case CutOffCommand(sender):
                self._output_sender.cut_off(sender)
            case AbortCommand(request_id, index):
                self._core.abort(request_id, index)
            case ResetCommand("prefix"):
                self._core.reset_prefix_cache()
            case ResetCommand("encoder"):
                self._core.reset_encoder_cache()
            case StatsCommand(sender, nonce):
                self._channel.report(StatsAnswer(sender, nonce, self._core.stats()))
            case ProfileCommand(seconds, path):
                self._profile(seconds, path)
            case EndProfileCommand():
                self._profiler.stop()
            case InstallCommand(install):
                install()
            case StopCommand():
                self._stopped = True

    def _profile(self, seconds: float, path: str) -> None:
        """The time runs from when the profiler has started: the first start may take seconds."""
        self._profiler.start(path)
        timer = threading.Timer(seconds, self._channel.command, [EndProfileCommand()])
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # this thread must not end with it
            logger.warning("no thread for ending a profile can be started")
            self._profiler.stop()

    def _add(self, command: AddCommand) -> None:
        """A request that the scheduler refuses ends like any other that failed."""
        request = command.request
        if logger.isEnabledFor(logging.DEBUG):
            extra = {
                "request_id": client_request_id(request.request_id),
                "prompt_tokens": request.num_prompt_tokens,
            }
            logger.debug("a request is taken in", extra=extra)
        self._output_sender.open(request.request_id, command.sender, accepted=command.accepted)
        try:
            self._core.take_in(request, command.session)
        except LookOnceError as error:
            deltas = _failed(request, error)
            self._send(SchedulerOutput(deltas, released=[request.request_id]))

    def _extend(self, command: ExtendCommand) -> None:
        """An extension that the scheduler refuses ends its session."""
        try:
            if command.frames is not None:
                self._core.extend_frames(command.request_id, command.frames)
                return
            self._core.extend(
                command.request_id,
                command.token_ids,
                command.features,
                command.items,
                command.options,
            )
        except LookOnceError as error:
            self._core.fail(command.request_id, error)

    def _supply(self, command: SupplyCommand) -> None:
        if command.accepted:
            self._output_sender.accept(command.request_id)
        self._core.supply(command.request_id, command.items)


class OutputSender:
    """Sends what steps generate to the senders of the requests: one message per sender and step.

    A request is accepted before its first tokens: by the input thread before it hands the request
    over, if all its items are there, or here once the scheduler does without the missing ones.
    """

    def __init__(self, writer: EngineChannelWriter) -> None:
        self._writer = writer
        self._senders: dict[str, str] = {}
        """Request → its sender; requests whose sender was cut off are missing."""
        self._unaccepted: set[str] = set()
        """Requests whose sender waits for `Accepted`."""

    def open(self, request_id: str, sender: str, *, accepted: bool) -> None:
        """From now on output of this request goes to `sender`."""
        self._senders[request_id] = sender
        if not accepted:
            self._unaccepted.add(request_id)

    def accept(self, request_id: str) -> None:
        """The input thread has sent `Accepted`."""
        self._unaccepted.discard(request_id)

    def cut_off(self, sender: str) -> UnreachableSender:
        """Send nothing more of a sender's requests: after a lost message its tokens have a gap."""
        cut = tuple(r for r, owner in self._senders.items() if owner == sender)
        for request_id in cut:
            del self._senders[request_id]
        return UnreachableSender(sender, cut)

    def send(self, output: SchedulerOutput) -> list[UnreachableSender]:
        """Send acceptances, then deltas. Returns the senders that were not reached: cut off now."""
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
        if sender is not None and sender not in lost and not self._writer.send(sender, message):
            lost.add(sender)


def _log_failures(deltas: Sequence[TokenDelta]) -> None:
    """One line for each request that ended with an error; its message is the client's alone."""
    for delta in deltas:
        if delta.error is not None and delta.index == 0:
            name = client_request_id(delta.request_id)
            extra = {"request_id": name, "error": delta.error[0], "param": delta.error[2]}
            logger.warning("a request ended with an error", extra=extra)


def _failed(request: Request, error: LookOnceError) -> list[TokenDelta]:
    wire = error_to_wire(error)
    return [
        TokenDelta(request.request_id, index, [], finish_reason="error", error=wire)
        for index in range(request.sampling.n)
    ]
