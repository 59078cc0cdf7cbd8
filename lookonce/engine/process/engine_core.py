"""The engine's step: plan, execute, update.

    add, supply, abort ──▶ scheduler ──plan──▶ runner ──result──▶ scheduler ──▶ SchedulerOutput

With overlapped planning the next step is planned and begun before the result of the last one is
waited for, so that an accelerator always has work:

    plan 1  begin 1  plan 2  begin 2  result 1  update 1  plan 3  begin 3  result 2  update 2 ...

Nothing here knows of processes, threads or messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookonce.core.request import Request
from lookonce.core.request_validation import RequestValidator
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerOutput
from lookonce.engine.process.adapters import EngineAdapters
from lookonce.engine.process.cache_events import (
    IDLE_LOAD_SECONDS,
    EventPublisher,
    Load,
    StepEvents,
)
from lookonce.engine.process.grammar import Compile
from lookonce.errors import DeviceLostError, LookOnceError, RequestFailedError
from lookonce.types.media import Array, MediaFeature, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.ports import ExternalEncoderCache, ExternalPrefixCache, ModelRunner
from lookonce.types.request import EXTEND, ExtendOptions, GenerateRequest, SessionOptions
from lookonce.types.request_validation import check_fits
from lookonce.types.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

MAX_BROKEN_STEPS = 8
"""Steps in a row that may raise as a whole before the device counts as lost."""
MIN_OBSERVED_TOKENS = 64
"""Steps of fewer tokens are mostly decodes: they say little of what a prompt costs."""


class EngineCore:
    """Runs steps. A step that fails ends the requests that were in it, never the engine.

    Used by one thread. A bug in the scheduler raises.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        external: ExternalPrefixCache | None = None,
        external_outputs: ExternalEncoderCache | None = None,
        *,
        overlapped: bool = False,
    ) -> None:
        """`external`, `external_outputs`: the tiers the scheduler was given. `overlapped`: plan
        ahead of results (`--async-scheduling`)."""
        self._overlapped = overlapped
        self._under_way: _StepUnderWay | None = None
        self._ended_at = 0.0
        """When the result of the last step was there."""
        self._scheduler = scheduler
        self._runner = runner
        self._external = external
        self._external_outputs = external_outputs
        self._broken_steps = 0
        self._untimed: dict[int, tuple[StepPlan, StepResult]] = {}
        """Steps that were done of which an accelerator has not told yet how long they took."""
        self._events: StepEvents | None = None
        self.load: Load | None = None
        """Where steps are counted; None: they are not."""
        self.add_figures: Callable[[], dict[str, float]] = dict
        """More counters for `stats`; benchmarks set this."""

    def step(self) -> SchedulerOutput | None:
        """One step; its output, None when there was nothing to do."""
        output = self._step()
        if self._events is not None:
            scheduler = self._scheduler
            self._events.tell_load(time.monotonic(), scheduler.num_running, scheduler.num_waiting)
            self._events.flush()
        return output

    def publish(self, publisher: EventPublisher) -> None:
        """From now on the caches tell `publisher` what they gain and lose; they are empty yet."""
        if self.load is None:
            self.load = Load()
        self._events = publisher.open_step_events(
            self._scheduler.block_size,
            self._scheduler.take_output_changes,
            self.load,
            self._tier_stats,
        )
        self._scheduler.watch(self._events)
        self._events.tell_load(time.monotonic(), running=0, waiting=0)
        self._events.flush()

    def _tier_stats(self) -> dict[str, float]:
        tiers = (self._external, self._external_outputs)
        return {name: value for tier in tiers if tier for name, value in tier.stats().items()}

    def _step(self) -> SchedulerOutput | None:
        if self._overlapped:
            return self._overlapped_step()
        plan = self._scheduler.plan()
        if plan is None:
            return self._scheduler.take_output() or None
        result = self._execute(plan)
        return self._scheduler.update_from_output(plan, result)

    def _overlapped_step(self) -> SchedulerOutput | None:
        """Begin a step, then update from the one before it, which is under way."""
        before, plan = self._under_way, self._scheduler.plan()
        self._under_way = None if plan is None else self._begin(plan)
        if before is not None:
            self._land(before)
        elif plan is None:
            return self._scheduler.take_output() or None
        begun = self._under_way
        if begun is not None and not (self._scheduler.may_plan_ahead and begun.goes_on):
            self._under_way = None
            self._land(begun)
        return self._scheduler.take_output()

    def land(self) -> SchedulerOutput:
        """Wait for the step that is under way, if one is, and return its output: the last one."""
        step, self._under_way = self._under_way, None
        if step is not None:
            self._land(step)
        return self._scheduler.take_output()

    def _begin(self, plan: StepPlan) -> _StepUnderWay:
        started = time.monotonic()
        try:
            return _StepUnderWay(plan, self._runner.begin(plan), started)
        except Exception as error:
            if self._counts_as_lost(error):
                raise
            broken = _result_of_broken(plan, error)
            return _StepUnderWay(plan, lambda: broken, started, is_broken=True)

    def _land(self, step: _StepUnderWay) -> None:
        """Wait for a step and update from its result."""
        try:
            result = step.wait()
        except Exception as error:
            if self._counts_as_lost(error):
                raise
            result = _result_of_broken(step.plan, error)
        else:
            if not step.is_broken:
                self._note_done(step.plan, result, max(step.begun_at, self._ended_at))
        self._ended_at = time.monotonic()
        self._scheduler.update(step.plan, result)

    def add(
        self,
        request: GenerateRequest,
        items: Mapping[bytes, ProcessedItem],
        missing: tuple[bytes, ...] = (),
        *,
        live: bool = False,
        options: SessionOptions | None = None,
    ) -> None:
        """Raises `RequestError` for a request that could never run; a `live` one is extended."""
        self._scheduler.add(request, items, missing, live=live, options=options)

    def extend(
        self,
        request_id: str,
        token_ids: NDArray[np.int32],
        features: tuple[MediaFeature, ...],
        items: Mapping[bytes, ProcessedItem],
        options: ExtendOptions = EXTEND,
    ) -> None:
        """Append tokens and items to a live session (`Scheduler.extend`)."""
        self._scheduler.extend(request_id, token_ids, features, items, options)

    def extend_frames(self, request_id: str, frames: Array) -> None:
        """Append frames of sound to a live session (`Scheduler.extend_frames`)."""
        self._scheduler.extend_frames(request_id, frames)

    def take_in(self, request: Request, options: SessionOptions | None = None) -> None:
        """As `add`, for a request that was built before (`RequestPreprocessor.preprocess`).

        With `options` it is a live session.
        """
        self._scheduler.take_in(request, live=options is not None, options=options)

    def supply(self, request_id: str, items: Mapping[bytes, ProcessedItem]) -> None:
        self._scheduler.supply(request_id, items)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._scheduler.abort(request_id, index)

    def fail(self, request_id: str, error: LookOnceError) -> None:
        """End a request with an error."""
        self._scheduler.fail(request_id, error)

    def reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        self._scheduler.reset_encoder_cache()

    def stats(self) -> dict[str, float]:
        return self._scheduler.stats() | self.add_figures()

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when a tier has something for the next step."""
        for external in (self._external, self._external_outputs):
            if external is not None:
                external.wake = wake

    def close(self) -> None:
        """End the threads of the external tiers."""
        for external in (self._external, self._external_outputs):
            if external is not None:
                external.close()

    @property
    def has_work(self) -> bool:
        return self._under_way is not None or self._scheduler.has_work

    @property
    def seconds_to_wait(self) -> float | None:
        """How long nothing can happen by itself once a step had nothing to do: until an idle
        session has to be evicted, or the load is told again. None: for ever."""
        seconds = self._scheduler.seconds_to_next_eviction
        if self._events is None:
            return seconds
        return IDLE_LOAD_SECONDS if seconds is None else min(seconds, IDLE_LOAD_SECONDS)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def num_waiting_of(self, tenant: str) -> int:
        return self._scheduler.num_waiting_of(tenant)

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def _execute(self, plan: StepPlan) -> StepResult:
        started = time.monotonic()
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            if self._counts_as_lost(error):
                raise
            return _result_of_broken(plan, error)
        self._note_done(plan, result, started)
        return result

    def _counts_as_lost(self, error: Exception) -> bool:
        """Count a step that has raised. Whether the device is lost: the error says so, or so many
        steps in a row have raised."""
        self._broken_steps += 1
        return isinstance(error, DeviceLostError) or self._broken_steps >= MAX_BROKEN_STEPS

    def _note_done(self, plan: StepPlan, result: StepResult, started: float) -> None:
        if plan.scheduled:
            self._broken_steps = 0
        if result.device_seconds is None:
            self._note_seconds(plan, result, time.monotonic() - started)
            return
        # Without items and what was sampled, which would be held longer than they need to be.
        computed = StepPlan(plan.step_id, scheduled=plan.scheduled)
        encoded = StepResult(encode_seconds=result.encode_seconds)
        self._untimed[plan.step_id] = computed, encoded
        for step_id, seconds in result.device_seconds:
            if (done := self._untimed.pop(step_id, None)) is not None:
                self._note_seconds(*done, seconds)

    def _note_seconds(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if self.load is not None:
            self.load.note_step(plan, result, seconds)
        if plan.scheduled and self._external is not None:
            _observe(self._external, plan, seconds)


@dataclass(frozen=True, slots=True)
class _StepUnderWay:
    """A step that was begun and not waited for."""

    plan: StepPlan
    wait: Callable[[], StepResult]
    begun_at: float
    is_broken: bool = False
    """It could not be begun."""

    @property
    def goes_on(self) -> bool:
        """Whether the next step may be planned before this one's result is there. Not where there
        is nothing to wait for, nor where a copy may be lost that the next step would bring back."""
        return bool(self.plan.scheduled) and not (self.plan.offload or self.is_broken)


def _observe(external: ExternalPrefixCache, plan: StepPlan, seconds: float) -> None:
    """Tell the KV tiers what computing a prompt's tokens costs, to compare with loading them."""
    num_tokens = plan.num_tokens
    if num_tokens >= MIN_OBSERVED_TOKENS:
        external.observe_prefill(num_tokens, seconds)


def _result_of_broken(plan: StepPlan, cause: Exception) -> StepResult:
    """The result of a step that raised, which is logged: all sequences and items in it failed."""
    logger.error(
        "step %d failed: %d sequences end", plan.step_id, len(plan.scheduled), exc_info=cause
    )
    error = RequestFailedError(f"the model failed on this request ({type(cause).__name__})")
    outputs = [item.key for item in plan.encode] + [output.key for output in plan.received]
    return StepResult(
        token_ids=(-1,) * sum(chunk.sample for chunk in plan.scheduled),
        failed_items=dict.fromkeys((*outputs, *plan.restore), error),
        lost_copies=plan.offload,
        failed_sequences={chunk.seq_id: error for chunk in plan.scheduled},
    )


class RequestPreprocessor:
    """Turns a client's request into the scheduler's, and refuses what the engine cannot serve.

    Reads only limits that never change: the input thread uses it while the step thread steps.
    """

    def __init__(
        self, model: ModelInfo, validator: RequestValidator, compile_grammar: Compile
    ) -> None:
        """`compile_grammar` may take seconds: `GrammarCompilerPool` calls it in its own threads."""
        self.model = model
        self.compile_grammar = compile_grammar
        self.adapters: EngineAdapters | None = None
        """None: no LoRA adapters are served."""
        self._validator = validator

    def preprocess(self, request: GenerateRequest, items: Mapping[bytes, ProcessedItem]) -> Request:
        """The request as the scheduler takes it in; `items`: those that the engine holds already.

        Raises a `RequestError` naming what the served model cannot take.
        """
        num_tokens = request.prompt.shape[0] if request.prompt.shape else 0
        check_fits(num_tokens, request.sampling, self.model)
        return self._validator.build_request(request, dict(items))
