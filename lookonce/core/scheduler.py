"""Continuous batching: what the engine computes in the next step, and what came of the last one.

    add, supply, abort ──▶ roster ──▶ plan() ──▶ runner ──▶ apply(plan, result) ──▶ output
                             ▲                                       │
                             └───────────────────────────────────────┘

Nothing a step does grows with a prompt's length or with the number of items outside the window it
computes: see `features`, `prefix` and `admission` for how.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from lookonce.config import SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.encoder_scheduling import EncoderPrefetcher, EncoderScheduler, StepPass
from lookonce.core.kv_connector_state import KVConnectorState
from lookonce.core.planning import Admission, Chunker, Planner
from lookonce.core.preemption import Preemption, SessionEviction
from lookonce.core.request import Request, ReuseStats, Sequence
from lookonce.core.request_validation import RequestValidator, check_rows
from lookonce.core.scheduler_state import (
    Counters,
    PendingOutput,
    RequestQueues,
    SchedulerOutput,
    SchedulerState,
)
from lookonce.core.sessions import Sessions
from lookonce.core.update_from_output import UpdateFromOutput
from lookonce.errors import BadRequestError, ConfigError, QueueFullError
from lookonce.types.media import MediaFeature, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.ports import Clock, ExternalPrefixCache
from lookonce.types.request import GenerateRequest
from lookonce.types.step import StepPlan, StepResult

__all__ = ["Scheduler", "SchedulerOutput"]


class Scheduler:
    """Owns every request between `add` and its last delta.

    `external`: KV tiers beyond the device, if there are any. With `fail_on_loss` a request ends
    with an error when a promised prefix does not come; else it is computed. `clock` tells how
    long sessions have been idle.
    """

    def __init__(
        self,
        *,
        block_pool: BlockPool,
        encoder_cache: EncoderCache,
        model: ModelInfo,
        config: SchedulerConfig,
        prefix_caching: bool,
        external: ExternalPrefixCache | None = None,
        fail_on_loss: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        if model.largest_unsplittable > config.max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least {model.largest_unsplittable}: this "
                "model computes an item of that many tokens in one step"
            )
        self._pool = block_pool
        self._encoder_cache = encoder_cache
        self._max_queue = config.max_queue
        self._roster = roster = RequestQueues()
        self._outbox = PendingOutput()
        self._counters = counters = Counters()
        self._lifecycle = lifecycle = SchedulerState(
            block_pool, encoder_cache, roster, self._outbox, clock
        )
        self._external: KVConnectorState | None = None
        if external is not None:
            self._external = KVConnectorState(
                external, block_pool, roster, lifecycle, fail_on_loss=fail_on_loss
            )
            lifecycle.on_end = self._external.finished
        self._door = RequestValidator(
            block_pool, encoder_cache, model, config.max_num_batched_tokens
        )
        preemption = Preemption(block_pool, roster, lifecycle, counters)
        self._sessions = Sessions(self._door, roster, lifecycle, preemption, self._outbox)
        self._idle = SessionEviction(block_pool, roster, lifecycle, clock)
        self._planner = self._make_planner(model, config, preemption, prefix_caching=prefix_caching)
        self._applier = UpdateFromOutput(
            block_pool,
            encoder_cache,
            roster,
            lifecycle,
            self._outbox,
            counters,
            prefix_caching=prefix_caching,
            external=self._external,
        )
        self._next_seq_id = 0
        self._step_id = 0
        self._encode_owners: Iterable[tuple[ReuseStats, int]] = ()

    def _make_planner(
        self,
        model: ModelInfo,
        config: SchedulerConfig,
        preemption: Preemption,
        *,
        prefix_caching: bool,
    ) -> Planner:
        roster, counters = self._roster, self._counters
        admission = Admission(
            self._pool,
            self._encoder_cache,
            roster,
            self._lifecycle,
            counters,
            prefix_caching=prefix_caching,
            external=self._external,
        )
        prefetcher = EncoderPrefetcher(
            roster,
            admission.num_cached,
            self._encoder_cache,
            counters,
            ahead_of_admission=self._external is None,
        )
        return Planner(
            roster,
            self._lifecycle,
            admission,
            preemption,
            Chunker(
                EncoderScheduler(self._encoder_cache, counters, model.unsplittable),
                model.unsplittable,
            ),
            prefetcher if config.encoder_prefetch else None,
            self._idle,
            max_num_seqs=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            max_encoder_rows=config.max_encoder_tokens,
        )

    # --- requests come and go -------------------------------------------------------------

    def add(
        self,
        request: GenerateRequest,
        items: Mapping[bytes, ProcessedItem],
        missing: Iterable[bytes] = (),
        *,
        live: bool = False,
    ) -> None:
        """Queue a request. `items` are those the engine holds; `missing` those it lacks.

        A `live` one may be extended, and generates `max_tokens` tokens after each extension.
        Raises a `RequestError` when it can never be served or the queue is full.
        """
        present = dict(items)
        for key in missing:
            present.pop(key, None)
        self.take_in(self._door.build_request(request, present), live=live)

    def take_in(self, built: Request, *, live: bool = False) -> None:
        """Queue a request that a door with the same limits has built.

        Raises a `RequestError` when its id is in use or the queue is full.
        """
        if built.request_id in self._roster.requests:
            raise BadRequestError(f"request id {built.request_id!r} is in use", param="request_id")
        if self._roster.num_waiting_requests >= self._max_queue:
            raise QueueFullError(f"{self._max_queue} requests are waiting already")
        if live:
            self._sessions.open(built)
        token_limit = self._door.token_limit(built)
        for index in range(built.sampling.n):
            built.sequences.append(Sequence(self._next_seq_id, built, index, token_limit))
            self._next_seq_id += 1
        self._roster.add(built)
        if self._external is not None:
            self._external.add(built)
        self._lifecycle.accept_once_covered(built.sequences[0])

    def extend(
        self,
        request_id: str,
        token_ids: NDArray[np.int32],
        features: tuple[MediaFeature, ...],
        items: Mapping[bytes, ProcessedItem],
    ) -> None:
        """Append to a live session after all it has; offsets count from the first appended token.

        It takes effect with the next plan, and costs the same however long the session is. Raises
        a `RequestError`, with nothing changed, for what could never be computed; a session that
        has ended needs no more.
        """
        request = self._roster.requests.get(request_id)
        if request is not None:
            self._sessions.extend(request, token_ids, features, items)

    def supply(self, request_id: str, items: Mapping[bytes, ProcessedItem]) -> None:
        """Items asked for through `needs` are here; an ended request needs them no more, and a
        live session never did.

        Items that do not fit their places in the prompt end the request with an error delta.
        """
        request = self._roster.requests.get(request_id)
        if request is None or request.session is not None:
            return
        items = dict(items)
        try:
            check_rows(request.features, items)
        except BadRequestError as error:
            self._lifecycle.end(request, "error", error)
            return
        request.items.update(items)
        request.update_missing()
        self._lifecycle.resume(request)
        self._lifecycle.accept_once_covered(request.sequences[0])

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it, in whatever state it is; unknown ones are ended."""
        request = self._roster.requests.get(request_id)
        if request is None:
            return
        for sequence in request.live_sequences():
            if index is None or sequence.index == index:
                self._lifecycle.end_sample(sequence, "abort")

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
        if self._external is not None:
            self._external.take_reports()
        self._sessions.deliver()
        step = self._planner.plan()
        self._encode_owners = step.encode_owners
        if self._outbox.has_news or self._encoder_cache.has_moves:
            return self._plan_with_news(step)
        if not (step.scheduled or step.encode):
            return None
        self._step_id += 1
        return StepPlan(
            self._step_id,
            new=tuple(step.new),
            encode=tuple(step.encode),
            scheduled=tuple(step.scheduled),
        )

    def _plan_with_news(self, step: StepPass) -> StepPlan:
        """Beside what the step computes, what the runner must forget, move or learn more of."""
        self._step_id += 1
        extended, finished = self._outbox.take_extensions(), self._outbox.take_finished()
        moves = self._encoder_cache.host.take_moves()
        return StepPlan(
            self._step_id,
            finished=finished,
            dropped_host=moves.dropped,
            offload=moves.offload,
            dropped_outputs=self._encoder_cache.take_dropped(),
            restore=moves.restore,
            new=tuple(step.new),
            extended=extended,
            encode=tuple(step.encode),
            scheduled=tuple(step.scheduled),
        )

    def apply(self, plan: StepPlan, result: StepResult) -> SchedulerOutput:
        """Take in what the runner computed; everything there is to report since the last call."""
        self._applier.apply(plan, result, self._encode_owners)
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
            roster.num_computing
            or roster.waiting
            or self._sessions.has_deliverable
            or self._outbox.finished
            or self._outbox.output
            or self._encoder_cache.has_moves
        )

    @property
    def seconds_to_next_eviction(self) -> float | None:
        """After a plan that was None: when the next may have something to do although nothing has
        happened until then. None: not before something does."""
        return self._idle.seconds_to_next_eviction

    def stats(self) -> dict[str, float]:
        """Metric names without prefix → values."""
        counters = self._counters
        external = {} if self._external is None else self._external.stats()
        return external | {
            "prefix_cache_queries_total": counters.prefix_cache_queries,
            "prefix_cache_hits_total": counters.prefix_cache_hits,
            "encoder_cache_queries_total": counters.encoder_cache_queries,
            "encoder_cache_hits_total": counters.encoder_cache_hits,
            "encoder_cache_bytes": self._encoder_cache.used_bytes,
            "encoder_cache_holders": self._encoder_cache.num_holders,
            "encoder_cache_host_bytes": self._encoder_cache.host.used_bytes,
            "encoder_cache_restores_total": counters.encoder_cache_restores,
            "encoder_runs_total": counters.encoder_runs,
            "encoder_prefetches_total": counters.encoder_prefetches,
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
        transfers = [] if self._external is None else self._external.block_tables()
        self._pool.check_integrity([s.block_ids for s in sequences] + transfers)
        self._encoder_cache.check_integrity()
        for sequence in sequences:
            features = sequence.request.features
            held = {features[index].key for index in sequence.held}
            if held != set(self._encoder_cache.held_keys(sequence.seq_id)):
                raise RuntimeError(f"sequence {sequence.seq_id} holds other outputs than it says")
        if self._encoder_cache.num_holders > len(sequences):
            raise RuntimeError("an ended sequence still holds encoder outputs")
