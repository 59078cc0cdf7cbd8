"""What a step costs does not depend on what lies outside its window: operations are counted.

Counted are lines of our code executed and calls made from them (a copy made inside one call would
escape that), and the bytes a step allocates at its peak (a copy does not escape that). The last
two tests show that a scan and a copy are noticed.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import lookonce
from lookonce.core.mm_features import MultiModalFeatures
from lookonce.core.request import extend_chain, root_hash
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import StepPlan, StepResult
from tests.support.core.builders import (
    INTERRUPT,
    Limits,
    feature,
    items_for,
    make_scheduler,
    model_info,
    prompt_with,
    request,
    text,
)

SMALL, LARGE = 1_000, 32_000
OURS = f"{Path(lookonce.__file__).parent}/"


def count_operations(action: Callable[[], object]) -> int:
    """Lines of our code executed, and calls of C functions from there, during the action."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if OURS not in frame.f_code.co_filename:
            return None
        count += 1
        return trace

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "c_call" and OURS in frame.f_code.co_filename

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


def peak_bytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class LongRequest:
    """One request with an item of 2 rows every 3 positions, computed in chunks of 48."""

    def __init__(self, num_items: int, *, skip: int = 12) -> None:
        features = [feature(str(i), 3 * i, 2, modality="audio") for i in range(num_items)]
        self.request: GenerateRequest = request(
            "a",
            text(3 * num_items + 1),
            features,
            sampling=SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
        self.scheduler = make_scheduler(
            Limits(
                num_blocks=3 * num_items // 16 + 4,
                block_size=16,
                encoder_rows=256,
                max_num_batched_tokens=48,
                max_encoder_tokens=48,
                model=model_info(max_model_len=10**6),
            )
        )
        self.scheduler.add(self.request, items_for(features))
        for _ in range(skip):
            self.plan()
            self.apply()

    def plan(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        self.last: StepPlan = plan

    def apply(self) -> None:
        sampled = tuple(7 for chunk in self.last.scheduled if chunk.sample)
        self.scheduler.update_from_output(self.last, StepResult(token_ids=sampled))

    def step(self) -> None:
        self.plan()
        self.apply()

    def to_decoding(self) -> LongRequest:
        """Pass over the rest of the prompt; what is measured then is a decode step."""
        while not self.last.scheduled[0].sample:
            self.step()
        self.step()
        return self


@pytest.fixture(scope="module")
def prefilling() -> dict[int, LongRequest]:
    return {num_items: LongRequest(num_items) for num_items in (SMALL, LARGE)}


@pytest.fixture(scope="module")
def decoding() -> dict[int, LongRequest]:
    return {num_items: LongRequest(num_items).to_decoding() for num_items in (SMALL, LARGE)}


def test_a_chunk_costs_the_same_with_32_times_the_items(
    prefilling: dict[int, LongRequest],
) -> None:
    counts = {n: count_operations(long.step) for n, long in prefilling.items()}
    assert len(prefilling[LARGE].last.scheduled[0].embeds) == 16
    assert counts[LARGE] <= 1.05 * counts[SMALL]
    assert counts[SMALL] < 4_700


def test_a_chunk_allocates_the_same_with_32_times_the_items(
    prefilling: dict[int, LongRequest],
) -> None:
    peaks = {n: peak_bytes(long.step) for n, long in prefilling.items()}
    assert max(peaks.values()) < 50_000


def test_a_decode_costs_the_same_with_32_times_the_items(
    decoding: dict[int, LongRequest],
) -> None:
    counts = {n: count_operations(long.step) for n, long in decoding.items()}
    assert decoding[LARGE].last.scheduled[0].num_tokens == 1
    assert counts[LARGE] <= counts[SMALL] + 5
    assert counts[SMALL] < 260


def test_a_decode_allocates_the_same_with_32_times_the_items(
    decoding: dict[int, LongRequest],
) -> None:
    assert max(peak_bytes(long.step) for long in decoding.values()) < 20_000


def test_a_blocked_queue_costs_the_same_with_32_times_the_items() -> None:
    counts = {}
    for num_items in (SMALL, LARGE):
        long = LongRequest(num_items)
        waiting = request("b", text(3 * num_items, seed=5), arrival=1.0)
        long.scheduler.add(waiting, {})
        long.step()
        counts[num_items] = count_operations(long.step)
        assert long.scheduler.num_waiting == 1
    assert counts[LARGE] <= 1.05 * counts[SMALL]


def test_extending_a_session_that_waits_costs_the_same_with_32_times_the_extensions() -> None:
    counts = {}
    for num_extensions in (100, 3_200):
        scheduler = make_scheduler(Limits(model=model_info(max_model_len=10**6), num_blocks=10**5))
        scheduler.add(request("live", text(4)), {}, live=True)
        coming = feature("x", 0, 2, modality="audio")
        tokens = np.array(prompt_with(text(3), [coming]), np.int32)
        give = partial(scheduler.extend, "live", tokens, (coming,), items_for([coming]), INTERRUPT)
        for _ in range(num_extensions):
            give()
        counts[num_extensions] = count_operations(give)
    assert counts[3_200] == counts[100]


def test_finding_a_window_takes_a_logarithm_of_comparisons() -> None:
    long = LongRequest(LARGE, skip=0)
    features = long.scheduler._state.queues.requests["a"].features
    assert count_operations(lambda: features.overlapping(60_000, 60_048)) < 12


def test_hashing_reads_only_what_was_not_hashed_before(
    prefilling: dict[int, LongRequest],
) -> None:
    counts = {}
    for num_items, long in prefilling.items():
        sequence = next(iter(long.scheduler._state.queues.prefilling))
        tokens, features = sequence.tokens, sequence.request.features
        chain = sequence.block_hashes[:-1]
        root = root_hash(long.request.scope)
        counts[num_items] = count_operations(
            lambda c=chain, r=root, t=tokens, f=features: extend_chain(c, r, t, f, 16, len(c) + 1)
        )
        assert chain == sequence.block_hashes
    assert max(counts.values()) < 300


def test_ending_a_request_costs_its_blocks_and_held_outputs_not_its_items() -> None:
    counts = {}
    for num_items in (SMALL, LARGE):
        long = LongRequest(num_items)
        sequence = next(iter(long.scheduler._state.queues.prefilling))
        per_block = len(sequence.block_ids)
        counts[num_items] = count_operations(lambda s=long: s.scheduler.abort("a")) / per_block
    assert counts[LARGE] < 12


def scan_all(features: MultiModalFeatures, start: int, end: int) -> range:
    found = [i for i, f in enumerate(features.as_tuple()) if f.end > start and f.offset < end]
    return range(found[0], found[-1] + 1) if found else range(0)


def copy_all(features: MultiModalFeatures, start: int, end: int) -> range:
    copied = list(features.as_tuple())
    return bisected(features, start, end) if copied else range(0)


bisected = MultiModalFeatures.overlapping


def test_a_linear_scan_would_be_noticed(
    prefilling: dict[int, LongRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiModalFeatures, "overlapping", scan_all)
    counts = {n: count_operations(long.step) for n, long in prefilling.items()}
    assert counts[LARGE] > 10 * counts[SMALL]


def test_a_copy_would_be_noticed(
    prefilling: dict[int, LongRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiModalFeatures, "overlapping", copy_all)
    assert peak_bytes(prefilling[LARGE].step) > 200_000
