"""Continuous batching: plans each step, and updates the requests from what the step computed.

    add, extend, supply, abort ─▶ plan() ─▶ runner ─▶ update_from_output(plan, result) ─▶ output

The cost of a step does not grow with the length of a prompt, nor with the number of items outside
the positions that it computes (`mm_features`, `request`, `planning.Admission`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from lookonce.config import SchedulerConfig
from lookonce.core.decode_runs import DecodeRuns
from lookonce.core.encoder_connector_state import EncoderConnectorState
from lookonce.core.encoder_scheduling import EncodedRows
from lookonce.core.frame_digests import FrameDigests
from lookonce.core.kv_connector_state import KVConnectorState
from lookonce.core.mm_features import FrameInputs
from lookonce.core.planning import Planner, PlanNotes
from lookonce.core.preemption import Preemption
from lookonce.core.request import (
    NO_CONTENT,
    Request,
    Sequence,
    SequenceState,
    Session,
    block_content,
)
from lookonce.core.request_validation import RequestValidator, check_rows
from lookonce.core.scheduler_state import SchedulerOutput, SchedulerState
from lookonce.core.sessions import Sessions
from lookonce.errors import BadRequestError, ConfigError, LookOnceError, QueueFullError
from lookonce.types.media import Array, MediaFeature, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.ports import BlockEvents, ExternalEncoderCache, ExternalPrefixCache
from lookonce.types.request import (
    EXTEND,
    ExtendOptions,
    FinishReason,
    GenerateRequest,
    SessionOptions,
    TokenDelta,
    TokenLogprob,
)
from lookonce.types.step import StepPlan, StepResult

MAX_ITEMS_TOLD = 1000
"""Of a prompt, in the event that it was computed."""
MAX_BLOCKS_TOLD = 16
"""The same of its blocks, the last one among them; a cache that is full gives up that one first."""
MAX_SHARES = 4
"""How many tenants may have as many requests waiting as one tenant may."""


class Scheduler:
    """Owns every request between `add` and its last delta.

    `external`: KV tiers beyond the device. With `fail_on_loss` a request ends with an error when a
    prefix that the tiers promised could not be loaded; otherwise the prefix is computed.
    `external_outputs`: tiers of encoder outputs.
    """

    def __init__(
        self,
        state: SchedulerState,
        model: ModelInfo,
        config: SchedulerConfig,
        external: ExternalPrefixCache | None = None,
        *,
        fail_on_loss: bool = False,
        external_outputs: ExternalEncoderCache | None = None,
    ) -> None:
        if model.largest_unsplittable > config.max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least {model.largest_unsplittable}: this "
                "model computes an item of that many tokens in one step"
            )
        self._state = state
        self._max_queue = config.max_queue
        self._next_seq_id = 0
        self.validator = RequestValidator(
            state.block_pool, state.encoder_cache, model, config.max_num_batched_tokens
        )
        """Reads only limits that never change: the input thread uses it, too."""
        self._kv_connector = (
            None
            if external is None
            else KVConnectorState(external, state, fail_on_loss=fail_on_loss)
        )
        self._encoder_connector = (
            None if external_outputs is None else EncoderConnectorState(external_outputs, state)
        )
        preemption = Preemption(state)
        self._sessions = Sessions(state, self.validator, preemption)
        self._planner = Planner(
            state, model, config, preemption, self._kv_connector, self._encoder_connector
        )
        self._update = UpdateFromOutput(
            state,
            self._sessions,
            self._planner.encoded_rows,
            self._kv_connector,
            self._encoder_connector,
        )
        self.decode_runs = DecodeRuns(
            state,
            self._planner,
            self._update.advance,
            self._update.append_token,
            stores=external is not None,
        )
        """For simulations: many steps at once."""

    # --- one step -------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute and nothing to tell the runner.

        A plan that schedules nothing tells the runner what to forget. Planning may itself produce
        output (`take_output`), such as requests for missing items.
        """
        if self._kv_connector is not None:
            self._kv_connector.take_reports()
        if self._encoder_connector is not None:
            self._encoder_connector.take_reports()
        if self._sessions.extended or self._sessions.filling:
            self._sessions.append_inputs()
        return self._planner.plan()

    def update_from_output(self, plan: StepPlan, result: StepResult) -> SchedulerOutput:
        """Apply what the runner computed for `plan`. Returns all output since the last call."""
        self.update(plan, result)
        return self.take_output()

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """As `update_from_output`, whose output `take_output` returns.

        One more plan may have been made since `plan`, where `may_plan_ahead` was true. Nothing that
        it computes for a sequence that has ended, or lost its blocks, is taken.
        """
        notes = self._planner.take_notes(plan)
        if self._state.snapshot_planner is not None:
            self._state.snapshot_planner.note_done()
        if plan.new or notes.shared:
            self._planner.decode_shares.note_done(
                plan,
                notes.encode_owners,
                notes.planned_at,
                measured=notes.shared,
                device_seconds=result.device_seconds,
            )
        elif result.device_seconds:
            self._planner.decode_shares.note_times(result.device_seconds)
        self._update.update(plan, result, notes, is_ahead=self._planner.is_ahead)

    @property
    def may_plan_ahead(self) -> bool:
        """Whether the next step may be planned before the result of the last one is there."""
        return not self._state.queues.num_landing and self._state.snapshots is None

    def take_output(self) -> SchedulerOutput:
        """All output since the last call."""
        return self._state.take_output()

    # --- requests -------------------------------------------------------------------------------

    def add(
        self,
        request: GenerateRequest,
        items: Mapping[bytes, ProcessedItem],
        missing: Iterable[bytes] = (),
        *,
        live: bool = False,
        options: SessionOptions | None = None,
    ) -> None:
        """Queue a request. `items`: those that the engine holds, except the `missing` keys.

        A `live` request may be extended, and generates `max_tokens` tokens after each extension,
        as `options` say.
        Raises a `RequestError` when it can never be served or the queue is full.
        """
        present = dict(items)
        for key in missing:
            present.pop(key, None)
        built = self.validator.build_request(request, present)
        self.take_in(built, live=live, options=options)

    def take_in(
        self, built: Request, *, live: bool = False, options: SessionOptions | None = None
    ) -> None:
        """Queue a request that a `RequestValidator` with the same limits has built.

        Raises a `RequestError` when its id is in use or the queue is full.
        """
        queues = self._state.queues
        if built.request_id in queues.requests:
            raise BadRequestError(f"request id {built.request_id!r} is in use", param="request_id")
        check_queue(
            queues.num_waiting_requests, queues.num_waiting_of(built.tenant), self._max_queue
        )
        built.lands_each_step = (
            live or built.grammar is not None or built.sampling.token_rules is not None
        )
        if live:
            self._sessions.open(built, options or SessionOptions())
        elif built.frames is not None:
            raise BadRequestError("only a live session has frames of sound", param="frames")
        session = built.session
        token_limit = self.validator.token_limit(built) if session is None else session.token_limit
        for index in range(built.sampling.n):
            built.sequences.append(
                Sequence(self._next_seq_id, built, index, token_limit, self._state.block_hash_cache)
            )
            self._next_seq_id += 1
        built.reuse_stats.received_at = self._state.clock()
        queues.add(built)
        if self._kv_connector is not None:
            self._kv_connector.add(built)
        if not self._state.try_finish_known(built.sequences[0]):
            self._state.accept_once_covered(built.sequences[0])

    def extend(
        self,
        request_id: str,
        token_ids: NDArray[np.int32],
        features: tuple[MediaFeature, ...],
        items: Mapping[bytes, ProcessedItem],
        options: ExtendOptions = EXTEND,
    ) -> None:
        """Append to a live session; offsets count from the first appended token.

        Takes effect with the next plan, and costs the same however long the session is. Does
        nothing for a session that has ended. Raises a `RequestError`, with nothing changed, for
        what could never be computed.
        """
        request = self._state.queues.requests.get(request_id)
        if request is not None:
            self._sessions.extend(request, token_ids, features, items, options)

    def extend_frames(self, request_id: str, frames: Array) -> None:
        """Append frames of sound to a live session, which generates one token for each.

        Otherwise as `extend`.
        """
        request = self._state.queues.requests.get(request_id)
        if request is not None:
            self._sessions.extend_frames(request, frames)

    def supply(self, request_id: str, items: Mapping[bytes, ProcessedItem]) -> None:
        """Add items that were asked for through `SchedulerOutput.needs`.

        Items that do not fit their features end the request with an error delta. Does nothing for
        a request that has ended, and for a live session, which never lacks items.
        """
        request = self._state.queues.requests.get(request_id)
        if request is None or request.session is not None:
            return
        items = dict(items) if request.adapted is None else request.adapted.items(items)
        try:
            check_rows(request.features, items)
        except BadRequestError as error:
            self._state.end(request, "error", error)
            return
        request.items.update(items)
        request.update_missing()
        self._state.resume(request)
        self._state.accept_once_covered(request.sequences[0])

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it, in any state. Unknown ids have ended already."""
        request = self._state.queues.requests.get(request_id)
        if request is None:
            return
        for sequence in request.unfinished_sequences():
            if index is None or sequence.index == index:
                self._state.end_sample(sequence, "abort")

    def fail(self, request_id: str, error: LookOnceError) -> None:
        """End a request with an error. Unknown ids have ended already."""
        request = self._state.queues.requests.get(request_id)
        if request is not None:
            self._state.end(request, "error", error)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix and pooled output; running requests keep their blocks."""
        self._state.block_pool.reset()
        self._state.pooled_outputs.clear()
        if self._state.snapshots is not None:
            self._state.snapshots.clear()

    def reset_encoder_cache(self) -> None:
        """Drop every encoder output; those in use leave when no sequence holds them any more."""
        self._state.encoder_cache.clear()

    # --- events ---------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._state.block_pool.block_size

    def watch(self, events: BlockEvents) -> None:
        """From now on `events` is told of KV blocks, and `take_output_changes` of outputs."""
        self._state.block_pool.events = events
        self._state.encoder_cache.watch()

    def take_output_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of encoder outputs that are held now and were not at the last call; the reverse."""
        return self._state.encoder_cache.take_changes()

    # --- figures --------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return self._state.queues.num_running_requests

    @property
    def num_waiting(self) -> int:
        """Requests that hold none: queued, preempted, or waiting for items or a load."""
        return self._state.queues.num_waiting_requests

    def num_waiting_of(self, tenant: str) -> int:
        """Of `num_waiting`, those of one tenant."""
        return self._state.queues.num_waiting_of(tenant)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do or to report. False where all requests wait for items
        or external tiers."""
        state = self._state
        return bool(
            state.queues.num_computing
            or state.queues.waiting
            or (self._sessions.extended and self._sessions.has_appendable)
            or state.finished
            or state.output
            or state.encoder_cache.has_moves
        )

    @property
    def seconds_to_next_eviction(self) -> float | None:
        """Seconds until an idle session may be evicted for a waiting request; None: none will be.

        As of the last plan: without other events, the next plan before then is None again.
        """
        at = self._planner.session_eviction.next_time
        return None if at is None else max(0.0, at - self._state.clock())

    def stats(self) -> dict[str, float]:
        """Metric name without prefix → value."""
        state, counters = self._state, self._state.counters
        external = {} if self._kv_connector is None else self._kv_connector.stats()
        if self._encoder_connector is not None:
            external |= self._encoder_connector.stats()
        if (snapshots := state.snapshots) is not None:
            external |= {
                "state_cache_bytes": snapshots.used_bytes,
                "state_cache_hits_total": snapshots.num_hits,
                "state_cache_snapshots_total": snapshots.num_taken,
                "state_cache_evictions_total": snapshots.num_evictions,
            }
        return external | {
            "prefix_cache_queries_total": counters.prefix_cache_queries,
            "prefix_cache_hits_total": counters.prefix_cache_hits,
            "encoder_cache_queries_total": counters.encoder_cache_queries,
            "encoder_cache_hits_total": counters.encoder_cache_hits,
            "encoder_cache_bytes": state.encoder_cache.used_bytes,
            "encoder_cache_holders": state.encoder_cache.num_holders,
            "encoder_cache_host_bytes": state.encoder_cache.host.used_bytes,
            "encoder_cache_restores_total": counters.encoder_cache_restores,
            "encoder_runs_total": counters.encoder_runs,
            "encoder_prefetches_total": counters.encoder_prefetches,
            "num_requests_running": self.num_running,
            "num_requests_waiting": self.num_waiting,
            "kv_cache_usage_ratio": 1.0 - state.block_pool.num_free / state.block_pool.num_blocks,
            "engine_steps_total": self._planner.step_id,
            "num_preemptions_total": counters.num_preemptions,
            "session_extensions_total": counters.session_extensions,
            "session_tokens_dropped_total": counters.session_tokens_dropped,
            "session_compactions_total": counters.session_compactions,
            "session_reanchors_total": counters.session_reanchors,
            "prompt_tokens_total": counters.prompt_tokens,
            "generation_tokens_total": counters.generation_tokens,
            "pooled_cache_queries_total": counters.pooled_cache_queries,
            "pooled_cache_hits_total": counters.pooled_cache_hits,
        }

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where sequences, blocks and encoder outputs disagree."""
        self._state.check_integrity()
        tables = [sequence.block_ids for sequence in self._state.queues.sequences.values()]
        if self._kv_connector is not None:
            tables += self._kv_connector.block_tables()
        if self._encoder_connector is not None:
            self._encoder_connector.check_integrity()
        self._state.block_pool.check_integrity(tables)


class UpdateFromOutput:
    """Advances every scheduled sequence by what the runner computed for it."""

    def __init__(
        self,
        state: SchedulerState,
        sessions: Sessions,
        encoded_rows: EncodedRows,
        kv_connector: KVConnectorState | None,
        encoder_connector: EncoderConnectorState | None = None,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._encoded_rows = encoded_rows
        self._kv_connector = kv_connector
        self._encoder_connector = encoder_connector

    def update(
        self, plan: StepPlan, result: StepResult, notes: PlanNotes, *, is_ahead: bool = False
    ) -> None:
        """Update all sequences of `plan` except those that have ended, or been preempted, since it
        was made. `is_ahead`: another plan was made since."""
        if plan.encode or result.lost_copies:
            self._update_encodings(plan, result, notes, is_ahead=is_ahead)
        if result.failed_items or result.failed_sequences:
            self._end_failed(plan, result)
        if result.prompt_logprobs:
            self._note_prompt_logprobs(plan, result)
        for seq_id, positions in result.alignments.items():
            if (aligned := self._computed_by(plan, seq_id)) is not None:
                aligned.request.alignment = positions
        sequences, token_ids = self._state.queues.sequences, result.token_ids
        if is_ahead:
            known = {entry.seq_id: sequences.get(entry.seq_id) for entry in plan.scheduled}
            sequences = {
                seq_id: sequence
                for seq_id, sequence in known.items()
                if sequence is not None and sequence.known_since <= plan.step_id
            }
        logprobs = result.logprobs
        block_size, decoding = self._state.block_pool.block_size, SequenceState.DECODING
        sampled = 0
        for entry in plan.scheduled:
            sequence = sequences.get(entry.seq_id)
            if sequence is not None:
                sequence.num_computed = entry.start + entry.num_tokens
                advances = sequence.num_computed % block_size == 0 or sequence.state is not decoding
                if advances:
                    self.advance(sequence)
                if entry.sample:
                    logprob = None if logprobs is None else logprobs[sampled]
                    self.append_token(sequence, token_ids[sampled], logprob)
                elif sequence.request.pooling is not None:
                    self._finish_pooled(sequence, result.pooled.get(entry.seq_id))
                elif sequence.request.frames is not None:
                    self._pause_without_frames(sequence, sequence.request.frames)
                elif sequence.num_computed == len(sequence.tokens):
                    self._state.pause(sequence)  # a session without an answer
                if advances and sequence.request.session is not None:
                    self._sessions.advance(sequence)
            sampled += entry.sample
        if self._kv_connector is not None:
            self._kv_connector.store_registered()

    def _finish_pooled(self, sequence: Sequence, output: bytes | None) -> None:
        """With its last chunk; one that was computed before a reset is not kept."""
        if output is None:
            return
        if sequence.cache_generation == self._state.block_pool.generation:
            self._state.pooled_outputs.put(sequence.request, output)
        self._state.finish_pooled(sequence, output)

    def _update_encodings(
        self,
        plan: StepPlan,
        result: StepResult,
        notes: PlanNotes,
        *,
        is_ahead: bool,
    ) -> None:
        encodes_from = notes.encodes_from
        encode_seconds = sum(result.encode_seconds.values())
        encodes_to = encodes_from + encode_seconds
        in_turn = result.device_seconds is None and not is_ahead
        if in_turn and len(result.encode_seconds) == len(plan.encode) > 0:  # none failed
            others = self._state.clock() - encodes_to
            self._encoded_rows.note(notes.encoded_rows, encode_seconds, others)
        encoder_cache, encode_owners = self._state.encoder_cache, notes.encode_owners
        owners = ((r.reuse_stats, index) for r, indices in encode_owners for index in indices)
        for encoded, (stats, index) in zip(plan.encode, owners, strict=True):
            if encoded.key in result.failed_items:
                continue
            self._state.counters.encoder_runs += 1
            seconds = result.encode_seconds.get(encoded.key)
            if seconds is not None:
                encoder_cache.record_cost(encoded.key, seconds)
                stats.note_encoding(index, seconds)
                stats.note_encoding_time(encodes_from, encodes_to)
        if self._encoder_connector is not None:
            self._encoder_connector.store_encoded(notes.encoding)
        for key in result.lost_copies:
            encoder_cache.host.lose(key)

    def _note_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for entry in plan.scheduled:
            sequence = self._computed_by(plan, entry.seq_id)
            scored = result.prompt_logprobs.get(entry.seq_id)
            if sequence is not None and scored is not None:
                sequence.request.note_prompt_logprobs(entry.start, scored)

    def _computed_by(self, plan: StepPlan, seq_id: int) -> Sequence | None:
        """The sequence that a plan computed; None if it has ended since, or was preempted."""
        sequence = self._state.queues.sequences.get(seq_id)
        return None if sequence is None or sequence.known_since > plan.step_id else sequence

    def _end_failed(self, plan: StepPlan, result: StepResult) -> None:
        """End every request that needed a failed item or had a failed sequence, and no other. One
        that was preempted since is computed again, and fails then if it must."""
        for key, error in result.failed_items.items():
            holders = self._state.encoder_cache.holders(key)
            self._state.encoder_cache.remove_failed(key)
            self._end_requests(holders, error)
        for seq_id, error in result.failed_sequences.items():
            if self._computed_by(plan, seq_id) is not None:
                self._end_requests((seq_id,), error)

    def _end_requests(self, seq_ids: Iterable[int], error: LookOnceError) -> None:
        for seq_id in seq_ids:
            sequence = self._state.queues.sequences.get(seq_id)
            if sequence is not None:
                self._state.end(sequence.request, "error", error)

    def advance(self, sequence: Sequence) -> None:
        """Update what depends on computed positions; in a decode, only full blocks do."""
        self._register_blocks(sequence)
        if sequence.pending_snapshots and self._state.snapshot_planner is not None:
            outdated = sequence.cache_generation != self._state.block_pool.generation
            self._state.snapshot_planner.register(sequence, outdated=outdated)
        if sequence.held:
            self._release_passed_items(sequence)
        if sequence.state is SequenceState.PREFILLING:
            self._state.accept_once_covered(sequence)

    def _pause_without_frames(self, sequence: Sequence, frames: FrameDigests) -> None:
        """Pause a session within its prompt, where the next position has no frame yet."""
        computing = sequence.state is SequenceState.PREFILLING
        if computing and sequence.num_computed >= frames.total:
            self._state.pause(sequence)

    def _register_blocks(self, sequence: Sequence) -> None:
        """Register full blocks under their hashes, unless a reset made their K/V outdated."""
        pool = self._state.block_pool
        num_full = sequence.num_computed // pool.block_size
        if num_full <= sequence.num_registered or not self._state.prefix_caching:
            return
        if sequence.request.needs_every_position:
            return  # nothing would look for them
        session = sequence.request.session
        if session is not None and session.num_dropped:
            return  # no prompt begins as its tokens do
        if sequence.cache_generation == pool.generation:
            sequence.hash_blocks(pool.block_size, num_full)
            told = self._kv_connector is not None or pool.events is not None
            blocks, hashes = sequence.block_ids, sequence.block_hashes
            for index in range(sequence.num_registered, num_full):
                if pool.register(blocks[index], hashes[index]) and told:
                    self._tell_registered(sequence, index)
        sequence.num_registered = num_full

    def _tell_registered(self, sequence: Sequence, index: int) -> None:
        """Tell the external tiers and subscribers of a block that was registered."""
        block_hash, pool = sequence.block_hashes[index], self._state.block_pool
        if self._kv_connector is not None:
            self._kv_connector.note_registered(block_hash, sequence.block_ids[index])
        events = pool.events
        if events is not None:
            content = NO_CONTENT
            if events.needs_content:
                content = block_content(sequence, index, pool.block_size)
            events.stored(block_hash, *content)

    def _tell_computed(self, sequence: Sequence) -> None:
        """Tell subscribers of a prompt whose last token was computed."""
        pool, request = self._state.block_pool, sequence.request
        num_full = min(request.num_prompt_tokens // pool.block_size, len(sequence.block_hashes))
        count = 0 if request.session is not None else min(len(request.features), MAX_ITEMS_TOLD)
        told = [request.features[at] for at in range(count)]  # a session forgets its first ones
        keys = tuple(feature.key for feature in told)
        if request.adapted is not None:
            keys = request.adapted.sent(keys)
        assert pool.events is not None
        every = -(-num_full // MAX_BLOCKS_TOLD) or 1
        earlier = range(every - 1, num_full - 1, every)
        pool.events.computed(
            request.request_id,
            request.num_prompt_tokens,
            sequence.block_hashes[num_full - 1] if num_full else None,
            tuple((key, each.length) for key, each in zip(keys, told, strict=True)),
            tuple((sequence.block_hashes[at], (at + 1) * pool.block_size) for at in earlier),
        )

    def _release_passed_items(self, sequence: Sequence) -> None:
        """Release the outputs of items that end at or before the last computed position."""
        features, held = sequence.request.features, sequence.held
        coming, passed = features.next_index(sequence.num_computed), []
        while held and held[0] < coming:
            passed.append(held.popleft())
        keys = [features[index].key for index in passed]
        self._state.encoder_cache.release_many(sequence.seq_id, keys)

    def append_token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        """Append the sampled token, report it, and end the sequence if it was the last."""
        state, request = self._state, sequence.request
        sequence.tokens.append(token_id)
        state.counters.generation_tokens += 1
        reason, stop_token_id = finish_reason(sequence, token_id)
        pausing = reason is not None and _awaits_extension(sequence, reason)
        ended = None
        if pausing:
            ended, reason, stop_token_id = reason, None, None
        delta = TokenDelta(request.request_id, sequence.index, [token_id], reason, stop_token_id)
        if request.session is not None:
            state.queues.turns.charge(request, 1)
            self._note_answer(request, request.session, delta, ended)
        if logprob is not None:
            delta.logprobs = [logprob]
        state.output.deltas.append(delta)
        prefilling = sequence.state is SequenceState.PREFILLING
        if prefilling:
            self._end_prompt(sequence, delta)
        if pausing:
            state.pause(sequence)
        elif reason is not None:
            state.finish(sequence)
        elif prefilling:
            state.begin_decode(sequence)

    @staticmethod
    def _note_answer(
        request: Request, session: Session, delta: TokenDelta, ended: FinishReason | None
    ) -> None:
        """A session with a token for each frame of sound has one answer, which goes on."""
        goes_on = ended is None or request.frames is not None
        delta.session = session.update(ended=None if goes_on else ended)
        session.answering = goes_on
        if ended is not None and session.computing:  # decodes may leave out `advance`
            num_computed = request.sequences[0].num_computed
            delta.session.credits = session.take_credits(num_computed)

    def _end_prompt(self, sequence: Sequence, delta: TokenDelta) -> None:
        """Add to `delta`, of the first token, what is reported once about a prompt."""
        request = sequence.request
        if sequence.index == 0 and sequence.num_generated == 1:
            delta.reuse_stats = request.reuse_stats.freeze(self._state.clock())
            delta.prompt_logprobs = request.take_prompt_logprobs()
            delta.alignment = request.alignment
            if self._state.block_pool.events is not None:
                self._tell_computed(sequence)
        if self._encoder_connector is not None:
            self._encoder_connector.release_all(request)
        if not request.prefilled:
            self._state.release_siblings(sequence)


def check_queue(num_waiting: int, num_of_tenant: int, max_queue: int) -> None:
    """Raises `QueueFullError` where one more request of a tenant may not wait: `max_queue` may of
    one tenant, and `MAX_SHARES` times as many of all, so that one that floods the queue does not
    close it to the others."""
    if num_of_tenant >= max_queue:
        raise QueueFullError(f"{num_of_tenant} of your requests are waiting, the most that may")
    if num_waiting >= MAX_SHARES * max_queue:
        raise QueueFullError(f"{num_waiting} requests are waiting, the most that may")


def finish_reason(sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
    """Why the token just appended ends the sequence, and the stop token if one did.

    The model's EOS tokens take precedence over `stop_token_ids`, and both over the length.
    """
    request = sequence.request
    if token_id in request.eos_token_ids:
        return "stop", None
    if token_id in request.stop_token_ids:
        return "stop", token_id
    if sequence.num_computed + 1 >= sequence.token_limit:  # all but the new token are computed
        features = request.features
        ends_with_sound = isinstance(features, FrameInputs) and sequence.token_limit == features.end
        return "stop" if ends_with_sound else "length", None
    return None, None


def _awaits_extension(sequence: Sequence, reason: FinishReason) -> bool:
    """Whether the sequence pauses instead of ending: a live session with room for more tokens.

    One with a token for each frame of sound ends where its model says so."""
    session = sequence.request.session
    if session is None or (sequence.request.frames is not None and reason != "length"):
        return False
    return len(sequence.tokens) < session.limit
