"""Which sequences are in which state, each lane in order of arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from lookonce.core.request import Request, Sequence, State

_order = attrgetter("order")
_ACTIVE = frozenset({State.PREFILLING, State.DECODING, State.IDLE})


class Lane(list[Sequence]):
    """Sequences of one state, earliest arrival first. A list, since steps ask for its length."""

    __slots__ = ()

    @property
    def first(self) -> Sequence | None:
        return self[0] if self else None

    def head(self, count: int) -> list[Sequence]:
        """A snapshot of the first `count`: the lane may change while it is walked."""
        return self[:count]

    def add(self, sequence: Sequence) -> None:
        insort(self, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        del self[bisect_left(self, sequence.order, key=_order)]


class Roster:
    """Every unfinished sequence, in the lane of its state."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self.held_back, self.waiting, self.aside = Lane(), Lane(), Lane()
        self.loading, self.prefilling, self.decoding = Lane(), Lane(), Lane()
        self.idle = Lane()
        self._lanes = {
            State.HELD_BACK: self.held_back,
            State.WAITING: self.waiting,
            State.ASIDE: self.aside,
            State.LOADING: self.loading,
            State.PREFILLING: self.prefilling,
            State.DECODING: self.decoding,
            State.IDLE: self.idle,
        }
        self.num_running_requests = 0

    @property
    def num_waiting_requests(self) -> int:
        return len(self.requests) - self.num_running_requests

    @property
    def has_prompts(self) -> bool:
        """Whether any sequence computes its prompt, or waits to."""
        return bool(self.prefilling or self.waiting)

    @property
    def num_active(self) -> int:
        """Sequences that hold KV blocks."""
        return len(self.prefilling) + len(self.decoding) + len(self.idle)

    @property
    def num_computing(self) -> int:
        """Sequences that have positions to compute, and the blocks for them."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        for sequence in request.sequences:
            self.sequences[sequence.seq_id] = sequence
            self._lanes[sequence.state].add(sequence)

    def move(self, sequence: Sequence, state: State) -> None:
        """Change a sequence's state and lane; a finished one is no longer listed."""
        was_active = _is_active(sequence)
        lane = self._lanes[sequence.state]
        sequence.move_to(state)
        lane.remove(sequence)
        if state is State.FINISHED:
            del self.sequences[sequence.seq_id]
        else:
            self._lanes[state].add(sequence)
        if was_active != _is_active(sequence):
            self._count_active(sequence.request, -1 if was_active else 1)

    def forget(self, request: Request) -> None:
        del self.requests[request.request_id]

    def check_integrity(self) -> None:
        listed = {s.seq_id: s for lane in self._lanes.values() for s in lane}
        if listed != self.sequences:
            raise RuntimeError("lanes and sequences disagree")
        for state, lane in self._lanes.items():
            if any(s.state is not state for s in lane):
                raise RuntimeError(f"a sequence in the lane {state.value!r} is in another state")
            if [s.order for s in lane] != sorted(s.order for s in lane):
                raise RuntimeError(f"the lane {state.value!r} is out of order")
        active = {s.request.request_id for s in listed.values() if _is_active(s)}
        if len(active) != self.num_running_requests:
            raise RuntimeError("the count of running requests is wrong")
        if {s.request.request_id for s in listed.values()} != self.requests.keys():
            raise RuntimeError("a request without sequences is still listed")

    def _count_active(self, request: Request, change: int) -> None:
        before = request.num_active > 0
        request.num_active += change
        self.num_running_requests += (request.num_active > 0) - before


def _is_active(sequence: Sequence) -> bool:
    return sequence.state in _ACTIVE
