"""Many steps at once leave behind what so many steps do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lookonce.core.block_pool import BlockPool
from lookonce.core.request import Sequence
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerOutput
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import StepPlan, StepResult
from tests.support.core.builders import Limits, make_scheduler, request, text

BLOCK_SIZE = 4


class Told:
    """What the prefix cache tells its followers."""

    needs_content = True

    def __init__(self, pool: BlockPool) -> None:
        self.log: list[tuple[str, bytes]] = []
        pool.events = self

    def stored(
        self, block_hash: bytes, parent: object, tokens: bytes, items: object, adapter: bytes
    ) -> None:
        self.log.append((tokens.hex(), block_hash))

    def removed(self, block_hash: bytes) -> None:
        self.log.append(("removed", block_hash))

    def cleared(self) -> None:
        self.log.append(("cleared", b""))

    def computed(self, *told: object) -> None:
        self.log.append(("computed", repr(told).encode()))


def token_of(seq_id: int, at: int) -> int:
    return 3 + (17 * seq_id + at) % 800


def one_step(scheduler: Scheduler) -> SchedulerOutput | None:
    """A step whose tokens are `token_of` sequence and position. None: nothing to do."""
    plan = scheduler.plan()
    if plan is None:
        return None
    return scheduler.update_from_output(plan, StepResult(token_ids=tokens_of(plan)))


def tokens_of(plan: StepPlan) -> tuple[int, ...]:
    return tuple(
        token_of(each.seq_id, each.start + each.num_tokens)
        for each in plan.scheduled
        if each.sample
    )


def next_tokens(sequence: Sequence, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    at = len(sequence.tokens)
    return np.array([token_of(sequence.seq_id, at + n) for n in range(count)], dtype=np.int32)


def seen(scheduler: Scheduler) -> object:
    """All that later decisions depend on."""
    state = scheduler._state
    pool = state.block_pool
    return (
        list(pool._free),
        pool._hashes,
        pool._references,
        [
            (s.seq_id, s.num_computed, s.block_ids, s.num_delivered, s.num_registered)
            for s in state.queues.decoding
        ],
        [s.tokens.view().tolist() for s in state.queues.decoding],
        [(each, request.num_active) for each, request in state.queues.requests.items()],
        state.finished,
        scheduler._planner.step_id,
        scheduler.stats(),
    )


def ends(outputs: Iterable[SchedulerOutput | None]) -> list[object]:
    """What clients are told of the ends of their requests."""
    found: list[object] = []
    for output in outputs:
        if output is not None:
            found += [each for each in output.deltas if each.finish_reason is not None]
            found += output.released
    return found


@given(
    prompts=st.lists(st.tuples(st.integers(1, 13), st.integers(1, 24)), min_size=1, max_size=5),
    num_blocks=st.integers(10, 60),
    later=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), max_size=3),
)
def test_a_run_equals_its_steps(
    prompts: list[tuple[int, int]], num_blocks: int, later: list[tuple[int, int]]
) -> None:
    limits = Limits(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=8)
    pairs = [make_scheduler(limits, lambda: 0.0) for _ in range(2)]
    told = [Told(each._state.block_pool) for each in pairs]
    waiting = deque((0, *each) for each in prompts)
    waiting.extend((at, 4, answer) for at, answer in sorted(later))
    number = steps = 0
    while waiting or any(each.has_work for each in pairs):
        while waiting and waiting[0][0] <= steps:
            _, length, answer = waiting.popleft()
            for scheduler in pairs:
                sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
                scheduler.add(
                    request(f"r{number}", text(length, seed=number % 3), sampling=sampling), {}
                )
            number += 1
        single, fast = pairs
        count = fast.decode_runs.longest()
        if waiting:
            count = min(count, waiting[0][0] - steps)
        if count > 0:
            fast.decode_runs.advance(count, next_tokens)
            by_steps = ends([one_step(single) for _ in range(count)])
            assert ends([fast.take_output()]) == by_steps
        elif fast.decode_runs.forget_finished():
            count = 1
            assert ends([one_step(single)]) == []
            assert single.plan() is None
        else:
            count = 1
            assert one_step(single) == one_step(fast)
        steps += count
        assert seen(single) == seen(fast)
        assert told[0].log == told[1].log
        for scheduler in pairs:
            scheduler.check_integrity()
        assert steps < 1000
