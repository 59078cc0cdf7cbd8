"""Every transition of a sequence, with what it takes and gives back: one method each."""

from __future__ import annotations

from collections.abc import Callable

from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.request import Request, Sequence, State
from lookonce.core.request_queues import Roster
from lookonce.core.scheduler_output import Outbox
from lookonce.errors import LookOnceError, error_to_wire
from lookonce.types.kv import ExternalFacts
from lookonce.types.ports import Clock
from lookonce.types.request import FinishReason, TokenDelta


class Lifecycle:
    """Keeps states, KV blocks, encoder holds and the runner's knowledge in step."""

    def __init__(
        self,
        pool: BlockPool,
        encoder_cache: EncoderCache,
        roster: Roster,
        outbox: Outbox,
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
        self._roster.move(sequence, State.PREFILLING)
        sequence.block_ids = blocks
        sequence.num_computed = num_cached_blocks * self._pool.block_size
        sequence.num_registered = num_cached_blocks
        sequence.cache_generation = self._pool.generation
        sequence.request.facts.note_admission(sequence.num_computed, external)

    def begin_decode(self, sequence: Sequence) -> None:
        """PREFILLING → DECODING: every token but the last sampled one is computed."""
        self._roster.move(sequence, State.DECODING)

    def pause(self, sequence: Sequence) -> None:
        """PREFILLING or DECODING → IDLE: a live session keeps its blocks until it is extended."""
        self._roster.move(sequence, State.IDLE)
        sequence.idle_since = self._clock()

    def resume_prefill(self, sequence: Sequence) -> None:
        """IDLE or DECODING → PREFILLING: a live session was extended."""
        self._roster.move(sequence, State.PREFILLING)

    def release_siblings(self, leader: Sequence) -> None:
        """HELD_BACK → WAITING for the other samples, once `leader` has computed the prompt.

        They begin with the leader's prompt hashes, and so find its blocks in the prefix cache.
        """
        request = leader.request
        request.prefilled = True
        prompt_blocks = request.num_prompt_tokens // self._pool.block_size
        for sibling in request.sequences:
            if sibling.state is State.HELD_BACK:
                sibling.chain = leader.chain[:prompt_blocks]
                self._roster.move(sibling, State.WAITING)

    def preempt(self, sequence: Sequence) -> None:
        """PREFILLING or DECODING → WAITING: everything computed is given up."""
        self._give_back(sequence)
        self._roster.move(sequence, State.WAITING)

    def set_aside(self, sequence: Sequence, keys: tuple[bytes, ...]) -> None:
        """WAITING or PREFILLING → ASIDE, asking for `keys`; nothing is kept meanwhile.

        What another sample has asked for already is not asked for again.
        """
        self._give_back(sequence)
        self._roster.move(sequence, State.ASIDE)
        request = sequence.request
        unasked = tuple(key for key in keys if key not in request.asked)
        if unasked:
            request.asked.update(unasked)
            self._outbox.output.needs.append((request.request_id, unasked))

    def resume(self, request: Request) -> None:
        """ASIDE → WAITING for all samples, each in its place of arrival: items have come."""
        request.asked.clear()
        for sequence in request.sequences:
            if sequence.state is State.ASIDE:
                self._roster.move(sequence, State.WAITING)

    def begin_loading(self, sequence: Sequence) -> None:
        """WAITING → LOADING: the load holds its blocks, not the sequence."""
        self._roster.move(sequence, State.LOADING)

    def end_loading(self, request: Request) -> None:
        """LOADING → WAITING, in its place of arrival: the tiers have answered."""
        for sequence in request.sequences:
            if sequence.state is State.LOADING:
                self._roster.move(sequence, State.WAITING)

    def finish(self, sequence: Sequence) -> None:
        """Any state → FINISHED. The request ends with its last sequence."""
        self._give_back(sequence)
        for key in sequence.prefetched.values():
            self._encoder_cache.stop_awaiting(key)
        self._roster.move(sequence, State.FINISHED)
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
        if all(s.state is State.HELD_BACK for s in live):
            self._roster.move(live[0], State.WAITING)

    def _give_back(self, sequence: Sequence) -> None:
        self._encoder_cache.release_all(sequence.seq_id)
        if sequence.block_ids:
            self._pool.release(sequence.block_ids)
        if sequence.announced:
            self._outbox.finished.append(sequence.seq_id)
        sequence.clear_computed()
