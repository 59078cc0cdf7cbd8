"""Whose turn it is to go first in a step, so that nobody waits without end behind live sessions.

A live session keeps its place of arrival for hours, and is computed ahead of all who came later in
every step that finds it extended. What it takes may be what another needs whole: all tokens of a
step, or all of its encoder budget. So whoever got nothing in a step queues up here, and in every
second step at most the first of the queue goes ahead of all, decodes too. Then there is enough of
everything but room in the encoder cache: that is kept for it, as `StepPass.room_kept` says.

    bound   beside k sessions one gets something within 2 (k + 1) steps, and those in which others
            compute to its end the one item that each of them has begun

Queued are live sessions and, as all others keep to their order of arrival, the first other one.
"""

from __future__ import annotations

from collections.abc import Iterable

from lookonce.core.request import Sequence, State
from lookonce.core.request_queues import Roster


class Turns:
    """Who goes first in which step."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.queue: dict[Sequence, None] = {}
        """Those who got nothing in the last step, who has for the longest time first."""
        self._taken = False
        """The last step was somebody's turn: this one is in order of arrival."""

    def due(self) -> Iterable[Sequence]:
        """Who may go first in the step that begins, in this order of preference."""
        taken, self._taken = self._taken, False
        return () if taken else tuple(self.queue)

    def take(self) -> None:
        """One of them went first, and got something."""
        self._taken = True

    def note(self, starved: list[Sequence]) -> None:
        """Who got nothing in this step, in order of arrival."""
        first_other = self._first_other()
        queued = {each: None for each in starved if self._may_queue(each, first_other)}
        staying = {sequence: None for sequence in self.queue if sequence in queued}
        self.queue = staying | queued
        self._taken = self._taken and bool(queued)

    def _may_queue(self, sequence: Sequence, first_other: Sequence | None) -> bool:
        if sequence is first_other:
            return True
        return sequence.request.session is not None and sequence.state is State.PREFILLING

    def _first_other(self) -> Sequence | None:
        """The earliest running prompt that is no session's; else the first that waits."""
        prompts = (s for s in self._roster.prefilling if s.request.session is None)
        return next(prompts, self._roster.waiting.first)
