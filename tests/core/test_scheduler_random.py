"""Any workload, any limits, any interruption: answers are right and everything is free at the end.

The runner objects to every wrong plan, and its tokens depend on all that was computed before, so
equal tokens mean that every position was computed once, in order, from the right inputs.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lookonce.core import encoder_cache, encoder_scheduling, mm_features
from lookonce.core.preemption import IDLE_SECONDS
from lookonce.errors import TooLargeError
from lookonce.types.lora import LoRAIdentity
from lookonce.types.media import MediaFeature, Modality
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import (
    INTERRUPT,
    Limits,
    feature,
    items_for,
    key,
    model_info,
    prompt_with,
    request,
    text,
)
from tests.support.core.engine import Engine, StepCosts
from tests.support.core.fake_runner import prompt_scores, reference

LENGTHS = {"a": 2, "b": 3, "c": 5, "d": 8, "gaps": 7}
GAPS = ((0, 2), (3, 4), (6, 7))
STATE_BYTES = 16
"""Of a state, of models that keep any."""
LONGEST_PROMPT = 40
LONGEST = 60
"""Tokens a sequence may have."""


def limits() -> st.SearchStrategy[Limits]:
    models = [((), 0), (("image",), 0), ((), STATE_BYTES), (("image",), STATE_BYTES)]
    return st.builds(
        Limits,
        num_blocks=st.integers(LONGEST_PROMPT // 4, 20),
        block_size=st.sampled_from([4, 5]),
        encoder_rows=st.sampled_from([8, 9, 13, 64]),
        host_rows=st.sampled_from([0, 0, 5, 13, 64]),
        encoder_prefetch=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([8, 11, 17, 64]),
        max_encoder_tokens=st.sampled_from([1, 8, 13]),
        prefix_caching=st.booleans(),
        num_snapshots=st.integers(0, 5),
        model=st.sampled_from(models).map(
            lambda one: model_info(max_model_len=LONGEST, unsplittable=one[0], state_bytes=one[1])
        ),
    )


def feature_named(name: str, offset: int) -> MediaFeature:
    """The item of that name: its length and modality are part of what the name says."""
    modality: Modality = "audio" if name == "b" else "image"
    ranges = GAPS if name == "gaps" else None
    return feature(name, offset, LENGTHS[name], modality=modality, is_embed=ranges)


COSTS = [StepCosts(), StepCosts(0.001, 0.0005, 0.0002), StepCosts(0.0, 0.01, 0.01)]
"""Where steps take time, tenants share them by it."""
CONVERSATIONS = [
    [],
    [feature_named("d", 2), feature_named("a", 12), feature_named("gaps", 18)],
    [feature_named("d", 2), feature_named("a", 12), feature_named("d", 18), feature_named("c", 30)],
    [feature_named("b", 0), feature_named("gaps", 3), feature_named("gaps", 10)],
]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[MediaFeature]]:
    """The beginning of a conversation, so that prompts share prefixes, or any other prompt."""
    length = draw(st.sampled_from([LONGEST_PROMPT, LONGEST_PROMPT - 1, 30, 24, 17, 5, 1]))
    features = draw(st.one_of(st.sampled_from(CONVERSATIONS), placements()))
    return text(LONGEST_PROMPT)[:length], [f for f in features if f.end <= length]


@st.composite
def placements(draw: st.DrawFn) -> list[MediaFeature]:
    features, at = [], draw(st.integers(0, 6))
    for name in draw(st.lists(st.sampled_from(sorted(LENGTHS)), max_size=5)):
        features.append(feature_named(name, at))
        at += LENGTHS[name] + draw(st.integers(0, 4))
    return features


ADAPTERS = [
    *(None, None, LoRAIdentity(b"a" * 32), LoRAIdentity(b"b" * 32, b"e" * 32)),
    LoRAIdentity(b"c" * 32, b"e" * 32),
]
"""None; one of the text model alone; two that change the encoder alike."""


class SchedulerMachine(RuleBasedStateMachine):
    """Sessions forget passed items, and items are released and encoded together, from two on."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(mm_features, "SPARE_FEATURES", 1)
        for module in (mm_features, encoder_scheduling, encoder_cache):
            self.patch.setattr(module, "MANY", 2)

    @initialize(chosen=limits(), costs=st.sampled_from(COSTS), overlapped=st.booleans())
    def start(self, chosen: Limits, costs: StepCosts, overlapped: bool) -> None:
        self.engine = Engine(chosen, costs, overlapped=overlapped)
        self.requests: dict[str, GenerateRequest] = {}
        self.sessions: set[str] = set()
        """Of those, the live ones."""
        self.asked = 0
        """How many of the engine's needs were answered or given up."""

    @rule(
        batch=st.lists(prompts(), min_size=1, max_size=4),
        samples=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 20),
        lacking=st.sets(st.sampled_from(sorted(LENGTHS))),
        arrival=st.floats(0, 10),
        scope=st.sampled_from([b"1" * 32, b"1" * 32, b"2" * 32]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        adapter=st.sampled_from(ADAPTERS),
    )
    def add(
        self,
        batch: list[tuple[list[int], list[MediaFeature]]],
        samples: int,
        max_tokens: int,
        lacking: set[str],
        arrival: float,
        scope: bytes,
        prompt_logprobs: int | None,
        adapter: LoRAIdentity | None,
    ) -> None:
        sampling = SamplingParams(
            n=samples, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs
        )
        for tokens, features in batch:
            name = str(len(self.requests))
            new = request(name, tokens, features, sampling=sampling, arrival=arrival, scope=scope)
            new = msgspec.structs.replace(new, tenant=scope[:1].decode(), adapter=adapter)
            self.requests[name] = new
            self.engine.add(new, missing=[key(n) for n in lacking])

    @rule(
        prompt=prompts(),
        turn=st.integers(1, 4),
        arrival=st.floats(0, 10),
        adapter=st.sampled_from(ADAPTERS),
    )
    def open_session(
        self,
        prompt: tuple[list[int], list[MediaFeature]],
        turn: int,
        arrival: float,
        adapter: LoRAIdentity | None,
    ) -> None:
        name, (tokens, features) = str(len(self.requests)), prompt
        sampling = SamplingParams(max_tokens=turn, ignore_eos=True)
        new = request(name, tokens, features, sampling=sampling, arrival=arrival)
        self.requests[name] = msgspec.structs.replace(new, adapter=adapter)
        self.sessions.add(name)
        self.engine.scheduler.add(self.requests[name], items_for(features), live=True)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), features=placements(), tail=st.integers(0, 5))
    def extend(self, data: st.DataObject, features: list[MediaFeature], tail: int) -> None:
        self.give(data.draw(st.sampled_from(sorted(self.sessions))), features, tail)

    def give(self, name: str, features: list[MediaFeature], tail: int) -> None:
        tokens = prompt_with(text(max([1, *(f.end for f in features)]) + tail), features)
        with suppress(TooLargeError):
            self.engine.scheduler.extend(
                name, np.array(tokens, np.int32), tuple(features), items_for(features), INTERRUPT
            )

    @rule(steps=st.integers(1, 10))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), features=placements(), tail=st.integers(0, 5))
    def feed_in_every_step(
        self, data: st.DataObject, features: list[MediaFeature], tail: int
    ) -> None:
        """All others end meanwhile, however long other sessions were idle by then."""
        fed = data.draw(st.sampled_from(sorted(self.sessions)))
        others = self.requests.keys() - self.sessions
        samples = sum(self.requests[name].sampling.n for name in others)
        for _ in range(2 * LONGEST * (samples + len(self.sessions)) + 1):
            if others <= set(self.engine.released):
                return
            self.give(fed, features, tail)
            self.supply()
            self.engine.now += IDLE_SECONDS
            self.engine.step()
        raise AssertionError("some request does not come to its end beside a session")

    @rule()
    def supply(self) -> None:
        for name, _keys in self.engine.needs[self.asked :]:
            self.engine.supply(self.requests[name])
        self.asked = len(self.engine.needs)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), index=st.sampled_from([None, None, 0, 1]))
    def abort(self, data: st.DataObject, index: int | None) -> None:
        self.engine.scheduler.abort(data.draw(st.sampled_from(sorted(self.requests))), index)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort_between_plan_and_apply(self, data: st.DataObject) -> None:
        self.engine.land()
        plan = self.engine.scheduler.plan()
        if plan is not None:
            result = self.engine.runner.execute(plan)
            self.abort(data, None)
            self.engine.take(self.engine.scheduler.update_from_output(plan, result))

    @rule(failing=st.sampled_from(sorted(LENGTHS)))
    def step_with_a_failing_item(self, failing: str) -> None:
        self.engine.runner.failing_items.add(key(failing))
        self.engine.step()
        self.engine.runner.failing_items.clear()

    @rule(data=st.data())
    def step_with_a_failing_sequence(self, data: st.DataObject) -> None:
        runner = self.engine.runner
        runner.failing_sequences = {data.draw(st.integers(0, 6))}
        self.engine.step()
        runner.failing_sequences.clear()

    @rule()
    def step_with_host_memory_short(self) -> None:
        self.engine.runner.losing_copies = True
        self.engine.step()
        self.engine.runner.losing_copies = False

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    @rule()
    def reset_encoder_cache(self) -> None:
        self.engine.scheduler.reset_encoder_cache()

    @invariant()
    def sums_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.finish_everything()
                self.check_answers()
                self.engine.assert_all_free()
                self.engine.scheduler.reset_prefix_cache()
                assert not self.engine.scheduler.stats().get("state_cache_bytes")
        finally:
            self.patch.undo()

    def finish_everything(self) -> None:
        for name in self.sessions:
            self.engine.scheduler.abort(name)
        self.engine.run()
        while self.asked < len(self.engine.needs):
            self.supply()
            self.engine.run()

    def check_answers(self) -> None:
        engine = self.engine
        assert sorted(engine.released) == sorted(self.requests), "each request ends once"
        for name, one in self.requests.items():
            if name in self.sessions:
                continue  # what came when is not known here: `test_sessions` checks the answers
            if one.sampling.prompt_logprobs is not None and engine.tokens[name, 0]:
                assert engine.scored[name] == prompt_scores(one)
            else:
                assert name not in engine.scored
            for index in range(one.sampling.n):
                got = engine.tokens[name, index]
                assert got == reference(one, len(got), index)
                reason = engine.reason(name, index)
                assert reason in ("length", "abort", "error")
                if reason == "length":
                    assert len(got) == self.expected_length(one)

    def expected_length(self, one: GenerateRequest) -> int:
        limits = self.engine.limits
        room = min(limits.model.max_model_len, limits.num_blocks * limits.block_size + 1)
        return min(one.sampling.max_tokens, room - one.prompt.shape[0])


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
