"""What steps have to say to the senders, sent by the step thread itself: no other thread is woken.

The input thread accepts and rejects, asks for media, and answers; all that steps produce goes out
here, on the same connection. So a request is accepted before its first tokens: by the input thread
before it hands the request over, if all its items are there, or here once it does without.
"""

from __future__ import annotations

from dataclasses import dataclass

from lookonce.core.scheduler_output import SchedulerOutput
from lookonce.ipc.channel import EngineChannelWriter
from lookonce.ipc.messages import Accepted, Deltas
from lookonce.types.request import TokenDelta


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A message was lost: these requests of the sender are cut off, and must end."""

    sender: str
    request_ids: tuple[str, ...]


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
