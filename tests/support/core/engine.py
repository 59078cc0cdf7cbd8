"""Drives a scheduler with the fake runner and gathers what comes out of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from lookonce.core.scheduler_state import SchedulerOutput
from lookonce.types.request import GenerateRequest, PrefillStats, PromptLogprob, TokenDelta
from lookonce.types.step import StepPlan, StepResult
from tests.support.core.builders import ROW_BYTES, Limits, items_for, make_scheduler
from tests.support.core.fake_runner import FakeRunner

OVERLAPPED = bool(os.environ.get("TEST_OVERLAPPED"))
"""Whether steps are planned ahead of results where a test does not say (`make test-overlapped`)."""


COUNTS_STEPS = pytest.mark.skipif(OVERLAPPED, reason="counts steps, and a result comes one later")


@dataclass(frozen=True)
class StepCosts:
    """Seconds that a step takes: `fixed`, and so many for each that decodes and each token of a
    prompt."""

    fixed: float = 0.0
    decode: float = 0.0
    token: float = 0.0

    def of(self, plan: StepPlan) -> float:
        decodes = sum(chunk.num_tokens == 1 for chunk in plan.scheduled)
        tokens = sum(chunk.num_tokens for chunk in plan.scheduled if chunk.num_tokens > 1)
        return self.fixed + self.decode * decodes + self.token * tokens


class Engine:
    """One scheduler and one fake runner that checks every plan against the same limits.

    Its time stands still but for what steps cost, and for whoever sets `now`.
    """

    def __init__(
        self,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        costs: StepCosts = StepCosts(),
        *,
        overlapped: bool = OVERLAPPED,
    ) -> None:
        """`overlapped`: plan each step before the result of the last one is applied."""
        self.overlapped = overlapped
        self.under_way: tuple[StepPlan, StepResult] | None = None
        self.ends_at: dict[int, float] = {}
        """Step under way → when the device will have computed it, after those before it."""
        self.free_at = 0.0
        self.num_ahead = 0
        """Plans that were made ahead of a result."""
        self.limits = limits
        self.costs = costs
        self.now = 0.0
        self.scheduler = make_scheduler(limits, lambda: self.now)
        self.runner = FakeRunner(limits)
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], TokenDelta] = {}
        self.reuse_stats: dict[str, PrefillStats] = {}
        self.scored: dict[str, list[PromptLogprob]] = {}
        """Log-probabilities of prompts."""
        self.accepted: list[str] = []
        self.needs: list[tuple[str, tuple[bytes, ...]]] = []
        self.released: list[str] = []
        self.plans: list[StepPlan] = []

    def add(self, request: GenerateRequest, *, missing: Iterable[bytes] = ()) -> None:
        """Submit with all items but the missing ones."""
        absent = tuple(missing)
        items = {k: v for k, v in items_for(request.features).items() if k not in absent}
        self.scheduler.add(request, items, absent)

    def supply(self, request: GenerateRequest) -> None:
        self.scheduler.supply(request.request_id, items_for(request.features))

    def step(self) -> StepPlan | None:
        plan, before = self.scheduler.plan(), self.under_way
        begun = None
        if plan is not None:
            self.plans.append(plan)
            begun = plan, self.runner.execute(plan)
            self.ends_at[plan.step_id] = max(self.now, self.free_at) + self.costs.of(plan)
            self.free_at = self.ends_at[plan.step_id]
            self.num_ahead += before is not None and bool(plan.scheduled)
        self.under_way = begun
        if before is not None:
            self.update(*before)
        ahead = self.overlapped and self.scheduler.may_plan_ahead
        if begun is not None and not (ahead and begun[0].scheduled and not begun[0].offload):
            self.land()
        self.take(self.scheduler.take_output())
        self.scheduler.check_integrity()
        return plan

    def land(self) -> None:
        """Apply the result of the step that is under way, if one is."""
        if self.under_way is not None:
            begun, self.under_way = self.under_way, None
            self.update(*begun)
            self.take(self.scheduler.take_output())

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """The device has ended a step."""
        self.now = max(self.now, self.ends_at.pop(plan.step_id))
        self.scheduler.update(plan, result)

    @property
    def has_work(self) -> bool:
        return self.under_way is not None or self.scheduler.has_work

    def run(self, *, max_steps: int = 10_000) -> None:
        """Step until there is nothing left to do; everything eventually finishes."""
        for _ in range(max_steps):
            if not self.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def take(self, output: SchedulerOutput) -> None:
        self.accepted += output.accepted
        self.needs += output.needs
        self.released += output.released
        for delta in output.deltas:
            name = (delta.request_id, delta.index)
            assert name not in self.ended, "nothing comes after the last delta"
            if delta.token_ids:
                assert delta.request_id in self.accepted, "accepted comes before the first token"
            self.tokens[name] += delta.token_ids
            if delta.reuse_stats is not None:
                assert delta.request_id not in self.reuse_stats
                self.reuse_stats[delta.request_id] = delta.reuse_stats
            if delta.prompt_logprobs is not None:
                assert delta.request_id not in self.scored
                assert delta.reuse_stats is not None, "both come with the prompt's first token"
                self.scored[delta.request_id] = delta.prompt_logprobs
            if delta.finish_reason is not None:
                self.ended[name] = delta

    def reason(self, name: str, index: int = 0) -> str | None:
        return self.ended[name, index].finish_reason

    def assert_all_free(self) -> None:
        """Nothing running, waiting or held; every block free."""
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats["kv_cache_usage_ratio"] == 0.0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not self.runner.known
        held = self.runner.outputs.values()
        assert stats["encoder_cache_bytes"] == sum(held) * ROW_BYTES
