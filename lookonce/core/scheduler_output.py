"""What the scheduler has to say, gathered until the next plan or output takes it."""

from __future__ import annotations

import msgspec

from lookonce.types.request import TokenDelta
from lookonce.types.step import Extension


class SchedulerOutput(msgspec.Struct, gc=False):
    """What became known since the last output."""

    deltas: list[TokenDelta] = []
    accepted: list[str] = []
    """Requests whose missing items are covered by what is computed: no longer asked for, unless
    that is given up."""
    needs: list[tuple[str, tuple[bytes, ...]]] = []
    """(request id, keys) of requests put aside until these items are supplied."""
    released: list[str] = []
    """Requests that ended: whatever is kept for them can go."""

    def __bool__(self) -> bool:
        return bool(self.deltas or self.accepted or self.needs or self.released)


class Outbox:
    """Pending output for the clients, and pending news for the runner."""

    __slots__ = ("extensions", "finished", "output")

    def __init__(self) -> None:
        self.output = SchedulerOutput()
        self.finished: list[int] = []
        """Sequences the runner knows and must forget."""
        self.extensions: list[Extension] = []
        """What was appended to sequences the runner knows."""

    @property
    def has_news(self) -> bool:
        """Whether the runner must be told of anything."""
        return bool(self.finished or self.extensions)

    def take_output(self) -> SchedulerOutput:
        output, self.output = self.output, SchedulerOutput()
        return output

    def take_finished(self) -> tuple[int, ...]:
        finished = tuple(self.finished)
        self.finished.clear()
        return finished

    def take_extensions(self) -> tuple[Extension, ...]:
        """Those of sequences that ended meanwhile are of no use to anyone."""
        if not self.extensions:
            return ()
        gone = set(self.finished)
        extensions = tuple(e for e in self.extensions if e.seq_id not in gone)
        self.extensions.clear()
        return extensions
