"""Continuous batching: what the engine computes in the next step, and what came of the last one.

One step is `plan()` → the runner executes → `apply(plan, result)`. A plan takes, within the token
budget: first every sequence that decodes, then running prompts in chunks, then waiting sequences
in order of arrival. Nothing a step does grows with a prompt's length or with the number of items
outside the chunk: see `features`, `prefix` and `admission` for how.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lookonce.config import SchedulerConfig
from lookonce.core.admission import Admission, Door, check_rows
from lookonce.core.blocks import BlockPool
from lookonce.core.budget import StepPass
from lookonce.core.chunking import Chunker
from lookonce.core.completion import finish_reason
from lookonce.core.counters import Counters
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.lifecycle import Lifecycle
from lookonce.core.outbox import Outbox, SchedulerOutput
from lookonce.core.preemption import Preemption
from lookonce.core.request import Request, Sequence, State
from lookonce.core.roster import Roster
from lookonce.errors import BadRequestError, ConfigError, LookOnceError, QueueFullError
from lookonce.types.media import ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import GenerateRequest, TokenDelta, TokenLogprob
from lookonce.types.step import ScheduledSequence, StepPlan, StepResult

__all__ = ["Scheduler", "SchedulerOutput"]


class Scheduler:
    """Owns every request between `add` and its last delta."""

    def __init__(
        self,
        *,
        block_pool: BlockPool,
        encoder_cache: EncoderCache,
        model: ModelInfo,
        config: SchedulerConfig,
        prefix_caching: bool,
    ) -> None:
        if model.largest_unsplittable > config.max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least {model.largest_unsplittable}: this "
                "model computes an item of that many tokens in one step"
            )
        self._pool = block_pool
        self._encoder_cache = encoder_cache
        self._config = config
        self._prefix_caching = prefix_caching
        self._roster = Roster()
        self._outbox = Outbox()
        self._counters = Counters()
        self._lifecycle = Lifecycle(block_pool, encoder_cache, self._roster, self._outbox)
        self._door = Door(block_pool, encoder_cache, model, config.max_num_batched_tokens)
        self._admission = Admission(
            block_pool,
            encoder_cache,
            self._roster,
            self._lifecycle,
            self._counters,
            prefix_caching=prefix_caching,
        )
        self._preemption = Preemption(block_pool, self._roster, self._lifecycle, self._counters)
        self._chunker = Chunker(encoder_cache, self._counters, model.unsplittable)
        self._next_seq_id = 0
        self._step_id = 0
        self._encode_owners: dict[bytes, tuple[Request, int]] = {}

    # --- requests come and go -------------------------------------------------------------

    def add(
        self,
        request: GenerateRequest,
        items: Mapping[bytes, ProcessedItem],
        missing: Iterable[bytes] = (),
    ) -> None:
        """Queue a request. `items` are those the engine holds; `missing` those it lacks.

        Raises a `RequestError` when it can never be served or the queue is full.
        """
        if request.request_id in self._roster.requests:
            raise BadRequestError(
                f"request id {request.request_id!r} is in use", param="request_id"
            )
        if self._roster.num_waiting_requests >= self._config.max_queue:
            raise QueueFullError(f"{self._config.max_queue} requests are waiting already")
        absent = set(missing)
        present = {key: item for key, item in items.items() if key not in absent}
        built = self._door.build_request(request, present)
        max_tokens = self._door.max_tokens(built)
        for index in range(request.sampling.n):
            built.sequences.append(Sequence(self._next_seq_id, built, index, max_tokens))
            self._next_seq_id += 1
        if self._prefix_caching:
            built.sequences[0].extend_chain(self._pool.block_size)
        self._roster.add(built)
        if built.self_sufficient:
            self._accept(built)

    def supply(self, request_id: str, items: Mapping[bytes, ProcessedItem]) -> None:
        """Items asked for through `needs` are here; an ended request needs them no more.

        Items that do not fit their places in the prompt end the request with an error delta.
        """
        request = self._roster.requests.get(request_id)
        if request is None:
            return
        try:
            check_rows(request.features, items)
        except BadRequestError as error:
            self._fail(request, error)
            return
        request.items.update(items)
        request.update_missing()
        for sequence in request.sequences:
            if sequence.state is State.ASIDE:
                self._lifecycle.resume(sequence)
        if request.self_sufficient and not request.accepted:
            self._accept(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it, in whatever state it is; unknown ones are ended."""
        request = self._roster.requests.get(request_id)
        if request is None:
            return
        for sequence in request.live_sequences():
            if index is None or sequence.index == index:
                self._outbox.end(request_id, sequence.index, "abort")
                self._lifecycle.finish(sequence)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests keep their blocks."""
        self._pool.reset()

    def reset_encoder_cache(self) -> None:
        """Drop every encoder output nobody holds; held ones leave with their last holder."""
        self._encoder_cache.clear()

    # --- one step -------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute and nothing to forget.

        A plan that schedules nothing carries what the runner must forget. Planning itself may
        have something to report (`take_output`), when it puts requests aside.
        """
        step = StepPass(self._config.max_num_batched_tokens, self._config.max_encoder_tokens)
        self._plan_decodes(step)
        self._plan_prefills(step)
        self._plan_admissions(step)
        finished = self._outbox.take_finished()
        dropped = self._encoder_cache.take_dropped()
        if not (step.scheduled or finished or dropped):
            return None
        self._encode_owners = step.encode_owners
        self._step_id += 1
        return StepPlan(
            step_id=self._step_id,
            finished=finished,
            dropped_outputs=dropped,
            new=tuple(step.new),
            encode=tuple(step.encode),
            scheduled=tuple(step.scheduled),
        )

    def apply(self, plan: StepPlan, result: StepResult) -> SchedulerOutput:
        """Take in what the runner computed; everything there is to report since the last call."""
        self._take_encodings(plan, result)
        self._fail_broken(result)
        sampled = 0
        for entry in plan.scheduled:
            sequence = self._roster.sequences.get(entry.seq_id)
            if sequence is not None:
                self._advance(sequence, entry, result, sampled)
            sampled += entry.sample
        return self.take_output()

    def take_output(self) -> SchedulerOutput:
        """What there is to report since the last call; for when there was no step to apply."""
        return self._outbox.take_output()

    # --- what there is to know ------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return self._roster.num_running_requests

    @property
    def num_waiting(self) -> int:
        """Requests that do not: queued, preempted, or aside until their items come."""
        return self._roster.num_waiting_requests

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do or to report; requests that are all aside do not."""
        roster = self._roster
        return bool(
            roster.num_active
            or roster.waiting
            or self._outbox.finished
            or self._outbox.output
            or self._encoder_cache.has_dropped
        )

    def stats(self) -> dict[str, float]:
        """Metric names without prefix → values."""
        counters = self._counters
        return {
            "prefix_cache_queries_total": counters.prefix_cache_queries,
            "prefix_cache_hits_total": counters.prefix_cache_hits,
            "encoder_cache_queries_total": counters.encoder_cache_queries,
            "encoder_cache_hits_total": counters.encoder_cache_hits,
            "encoder_cache_bytes": self._encoder_cache.used_bytes,
            "encoder_runs_total": counters.encoder_runs,
            "num_requests_running": self.num_running,
            "num_requests_waiting": self.num_waiting,
            "kv_cache_usage_ratio": 1.0 - self._pool.num_free / self._pool.num_blocks,
            "num_preemptions_total": counters.num_preemptions,
            "prompt_tokens_total": counters.prompt_tokens,
            "generation_tokens_total": counters.generation_tokens,
        }

    def check_integrity(self) -> None:
        """Raise `RuntimeError` where sequences, blocks and encoder outputs disagree."""
        self._roster.check_integrity()
        sequences = self._roster.sequences.values()
        self._pool.check_integrity([s.block_ids for s in sequences])
        self._encoder_cache.check_integrity()
        for sequence in sequences:
            features = sequence.request.features
            held = {features[index].key for index in sequence.held}
            if held != set(self._encoder_cache.held_keys(sequence.seq_id)):
                raise RuntimeError(f"sequence {sequence.seq_id} holds other outputs than it says")
        if self._encoder_cache.num_holders > len(sequences):
            raise RuntimeError("an ended sequence still holds encoder outputs")

    # --- planning -------------------------------------------------------------------------

    def _plan_decodes(self, step: StepPass) -> None:
        decodes = self._roster.decoding.head(step.tokens)
        self._preemption.make_room(decodes)
        for sequence in decodes:
            if sequence.state is State.DECODING:
                blocks = sequence.deliver_blocks()
                step.scheduled.append(
                    ScheduledSequence(
                        sequence.seq_id, sequence.num_computed, 1, blocks, (), (), True
                    )
                )
        step.tokens -= len(step.scheduled)

    def _plan_prefills(self, step: StepPass) -> None:
        for sequence in self._roster.prefilling.head(self._config.max_num_seqs):
            self._plan_chunk(sequence, step)

    def _plan_admissions(self, step: StepPass) -> None:
        while not step.stalled and self._roster.num_active < self._config.max_num_seqs:
            sequence = self._roster.waiting.first
            if sequence is None or step.tokens <= 0 or not self._admission.try_admit(sequence):
                return
            if sequence.state is State.PREFILLING:
                self._accept_once_covered(sequence)
                self._plan_chunk(sequence, step)

    def _plan_chunk(self, sequence: Sequence, step: StepPass) -> None:
        if step.tokens > 0 and self._chunker.plan(sequence, step):
            return
        if self._chunker.first_missing(sequence):
            needed = self._admission.needed_keys(sequence, sequence.num_computed)
            self._lifecycle.set_aside(sequence, needed)
        else:
            step.stalled = True

    # --- applying -------------------------------------------------------------------------

    def _take_encodings(self, plan: StepPlan, result: StepResult) -> None:
        for encoded in plan.encode:
            if encoded.key in result.failed_items:
                continue
            self._counters.encoder_runs += 1
            seconds = result.encode_seconds.get(encoded.key)
            if seconds is not None:
                self._encoder_cache.record_cost(encoded.key, seconds)
                request, index = self._encode_owners[encoded.key]
                if request.facts is not None:
                    request.facts.note_encoding(index, seconds)

    def _fail_broken(self, result: StepResult) -> None:
        """End every request that needed what failed; the others never notice."""
        for key, error in result.failed_items.items():
            holders = self._encoder_cache.holders(key)
            self._encoder_cache.remove_failed(key)
            self._fail_all(holders, error)
        for seq_id, error in result.failed_sequences.items():
            self._fail_all((seq_id,), error)

    def _fail_all(self, seq_ids: Iterable[int], error: LookOnceError) -> None:
        for seq_id in seq_ids:
            sequence = self._roster.sequences.get(seq_id)
            if sequence is not None:
                self._fail(sequence.request, error)

    def _fail(self, request: Request, error: LookOnceError) -> None:
        for sequence in request.live_sequences():
            self._outbox.end(request.request_id, sequence.index, "error", error)
            self._lifecycle.finish(sequence)

    def _advance(
        self, sequence: Sequence, entry: ScheduledSequence, result: StepResult, sampled: int
    ) -> None:
        sequence.num_computed = entry.start + entry.num_tokens
        self._register_blocks(sequence)
        if sequence.held:
            self._release_passed_items(sequence)
        if sequence.state is State.PREFILLING:
            self._accept_once_covered(sequence)
        if entry.sample:
            logprob = None if result.logprobs is None else result.logprobs[sampled]
            self._append(sequence, result.token_ids[sampled], logprob)

    def _register_blocks(self, sequence: Sequence) -> None:
        """Remember full blocks under their hashes, unless a reset made their K/V outdated."""
        full = sequence.num_computed // self._pool.block_size
        if full <= sequence.num_registered or not self._prefix_caching:
            return
        if sequence.cache_generation == self._pool.generation:
            sequence.extend_chain(self._pool.block_size)
            for index in range(sequence.num_registered, full):
                self._pool.register(sequence.block_ids[index], sequence.chain[index])
        sequence.num_registered = full

    def _release_passed_items(self, sequence: Sequence) -> None:
        """Items that end at or before what is computed are not needed any more."""
        features = sequence.request.features
        held = sequence.held
        while held and features[held[0]].end <= sequence.num_computed:
            self._encoder_cache.release(sequence.seq_id, features[held.popleft()].key)

    def _append(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        request = sequence.request
        sequence.tokens.append(token_id)
        self._counters.generation_tokens += 1
        reason, stop_token_id = finish_reason(sequence, token_id)
        delta = TokenDelta(request.request_id, sequence.index, [token_id], reason, stop_token_id)
        if logprob is not None:
            delta.logprobs = [logprob]
        if sequence.index == 0 and sequence.num_generated == 1 and request.facts is not None:
            delta.facts = request.facts.freeze()
        self._outbox.output.deltas.append(delta)
        if not request.prefilled:
            self._lifecycle.release_siblings(sequence)
        if reason is not None:
            self._lifecycle.finish(sequence)
        elif sequence.state is State.PREFILLING:
            self._lifecycle.begin_decode(sequence)

    def _accept_once_covered(self, sequence: Sequence) -> None:
        request = sequence.request
        if not request.accepted and sequence.num_computed >= request.last_missing_end:
            self._accept(request)

    def _accept(self, request: Request) -> None:
        request.accepted = True
        self._outbox.output.accepted.append(request.request_id)
