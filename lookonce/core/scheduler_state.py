"""Every transition of a sequence, with what it takes and gives back: one method each."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.request import Request, Sequence, SequenceState
from lookonce.errors import LookOnceError, error_to_wire
from lookonce.types.kv import ExternalFacts
from lookonce.types.ports import Clock
from lookonce.types.request import FinishReason, TokenDelta
from lookonce.types.step import Extension


class SchedulerState:
    """Keeps states, KV blocks, encoder holds and the runner's knowledge in step."""

    def __init__(
        self,
        pool: BlockPool,
        encoder_cache: EncoderCache,
        roster: RequestQueues,
        outbox: PendingOutput,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._encoder_cache = encoder_cache
        self._roster = roster
        self._outbox = outbox
        self._clock = clock
        self.on_end: Callable[[Request], None] = lambda request: None
        """Told of every request that has ended, whatever state it was in."""

    def admit(
        self,
        sequence: Sequence,
        blocks: list[int],
        num_cached_blocks: int,
        external: ExternalFacts | None = None,
    ) -> None:
        """WAITING → PREFILLING with `blocks`, the first `num_cached_blocks` computed already.

        `external`: what external KV tiers did for it, at a request's first admission.
        """
        self._roster.move(sequence, SequenceState.PREFILLING)
        sequence.block_ids = blocks
        sequence.num_computed = num_cached_blocks * self._pool.block_size
        sequence.num_registered = num_cached_blocks
        sequence.cache_generation = self._pool.generation
        sequence.request.facts.note_admission(sequence.num_computed, external)

    def begin_decode(self, sequence: Sequence) -> None:
        """PREFILLING → DECODING: every token but the last sampled one is computed."""
        self._roster.move(sequence, SequenceState.DECODING)

    def pause(self, sequence: Sequence) -> None:
        """PREFILLING or DECODING → IDLE: a live session keeps its blocks until it is extended."""
        self._roster.move(sequence, SequenceState.IDLE)
        sequence.idle_since = self._clock()

    def resume_prefill(self, sequence: Sequence) -> None:
        """IDLE or DECODING → PREFILLING: a live session was extended."""
        self._roster.move(sequence, SequenceState.PREFILLING)

    def release_siblings(self, leader: Sequence) -> None:
        """WAITING_FOR_SIBLING → WAITING for the others, once `leader` has computed the prompt.

        They begin with the leader's prompt hashes, and so find its blocks in the prefix cache.
        """
        request = leader.request
        request.prefilled = True
        prompt_blocks = request.num_prompt_tokens // self._pool.block_size
        for sibling in request.sequences:
            if sibling.state is SequenceState.WAITING_FOR_SIBLING:
                sibling.chain = leader.chain[:prompt_blocks]
                self._roster.move(sibling, SequenceState.WAITING)

    def preempt(self, sequence: Sequence) -> None:
        """PREFILLING or DECODING → WAITING: everything computed is given up."""
        self._give_back(sequence)
        self._roster.move(sequence, SequenceState.WAITING)

    def wait_for_items(self, sequence: Sequence, keys: tuple[bytes, ...]) -> None:
        """WAITING or PREFILLING → WAITING_FOR_ITEMS, asking for `keys`; nothing is kept meanwhile.

        What another sample has asked for already is not asked for again.
        """
        self._give_back(sequence)
        self._roster.move(sequence, SequenceState.WAITING_FOR_ITEMS)
        request = sequence.request
        unasked = tuple(key for key in keys if key not in request.asked)
        if unasked:
            request.asked.update(unasked)
            self._outbox.output.needs.append((request.request_id, unasked))

    def resume(self, request: Request) -> None:
        """WAITING_FOR_ITEMS → WAITING for all samples, in order of arrival."""
        request.asked.clear()
        for sequence in request.sequences:
            if sequence.state is SequenceState.WAITING_FOR_ITEMS:
                self._roster.move(sequence, SequenceState.WAITING)

    def begin_loading(self, sequence: Sequence) -> None:
        """WAITING → LOADING: the load holds its blocks, not the sequence."""
        self._roster.move(sequence, SequenceState.LOADING)

    def end_loading(self, request: Request) -> None:
        """LOADING → WAITING, in its place of arrival: the tiers have answered."""
        for sequence in request.sequences:
            if sequence.state is SequenceState.LOADING:
                self._roster.move(sequence, SequenceState.WAITING)

    def finish(self, sequence: Sequence) -> None:
        """Any state → FINISHED. The request ends with its last sequence."""
        self._give_back(sequence)
        for key in sequence.prefetched.values():
            self._encoder_cache.stop_awaiting(key)
        self._roster.move(sequence, SequenceState.FINISHED)
        request = sequence.request
        if request.finished:
            self._roster.forget(request)
            self._outbox.output.released.append(request.request_id)
            self.on_end(request)
        elif not request.prefilled:
            self._promote_leader(request)

    def end(
        self, request: Request, reason: FinishReason, error: LookOnceError | None = None
    ) -> None:
        """Every unfinished sample → FINISHED, each with a last delta that says why."""
        for sequence in request.live_sequences():
            self.end_sample(sequence, reason, error)

    def end_sample(
        self, sequence: Sequence, reason: FinishReason, error: LookOnceError | None = None
    ) -> None:
        """One sample → FINISHED, with a last delta that says why."""
        wire = None if error is None else error_to_wire(error)
        delta = TokenDelta(
            sequence.request.request_id, sequence.index, [], finish_reason=reason, error=wire
        )
        self._outbox.output.deltas.append(delta)
        self.finish(sequence)

    def accept_once_covered(self, sequence: Sequence) -> None:
        """Report the request as accepted as soon as it has got past all items it lacks."""
        request = sequence.request
        if not request.accepted and sequence.num_computed >= request.last_missing_end:
            request.accepted = True
            self._outbox.output.accepted.append(request.request_id)

    def _promote_leader(self, request: Request) -> None:
        """The sample the others waited for is gone: the next one computes the prompt."""
        live = request.live_sequences()
        if all(s.state is SequenceState.WAITING_FOR_SIBLING for s in live):
            self._roster.move(live[0], SequenceState.WAITING)

    def _give_back(self, sequence: Sequence) -> None:
        self._encoder_cache.release_all(sequence.seq_id)
        if sequence.block_ids:
            self._pool.release(sequence.block_ids)
        if sequence.announced:
            self._outbox.finished.append(sequence.seq_id)
        sequence.clear_computed()


_order = attrgetter("order")


_ACTIVE = frozenset({SequenceState.PREFILLING, SequenceState.DECODING, SequenceState.IDLE})


class SequenceQueue(list[Sequence]):
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


class RequestQueues:
    """Every unfinished sequence, in the lane of its state."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self.waiting_for_sibling, self.waiting, self.aside = (
            SequenceQueue(),
            SequenceQueue(),
            SequenceQueue(),
        )
        self.loading, self.prefilling, self.decoding = (
            SequenceQueue(),
            SequenceQueue(),
            SequenceQueue(),
        )
        self.idle = SequenceQueue()
        self._lanes = {
            SequenceState.WAITING_FOR_SIBLING: self.waiting_for_sibling,
            SequenceState.WAITING: self.waiting,
            SequenceState.WAITING_FOR_ITEMS: self.aside,
            SequenceState.LOADING: self.loading,
            SequenceState.PREFILLING: self.prefilling,
            SequenceState.DECODING: self.decoding,
            SequenceState.IDLE: self.idle,
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

    def move(self, sequence: Sequence, state: SequenceState) -> None:
        """Change a sequence's state and lane; a finished one is no longer listed."""
        was_active = _is_active(sequence)
        lane = self._lanes[sequence.state]
        sequence.move_to(state)
        lane.remove(sequence)
        if state is SequenceState.FINISHED:
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


class PendingOutput:
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


@dataclass(slots=True)
class Counters:
    prefix_cache_queries: int = 0
    """Prompt tokens of requests at their first admission."""
    prefix_cache_hits: int = 0
    """Of those, tokens whose K/V were cached."""
    encoder_cache_queries: int = 0
    """Times a sequence needed an encoder output it did not hold."""
    encoder_cache_hits: int = 0
    """Of those, found held, cached or in flight; the others ran the encoder."""
    encoder_cache_restores: int = 0
    """Outputs brought back from host memory."""
    encoder_prefetches: int = 0
    """Outputs computed before a chunk needed them; also counted among the runs."""
    encoder_runs: int = 0
    """Outputs computed."""
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
