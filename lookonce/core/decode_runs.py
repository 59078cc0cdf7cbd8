"""Many steps that only decode, applied at once: what a simulation of the scheduler spends time on.

Between two events (an arrival, the end of a sequence) a step that decodes is followed by others of
the same sequences. Each of these grows some block tables and registers some full blocks, and
changes nothing else. `DecodeRuns.advance` makes these changes alone, in the order in which
`Scheduler.plan` and `Scheduler.update_from_output` make them, and so leaves the same state behind
as so many steps would. There are no deltas of those tokens: who calls this knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lookonce.core.request import Sequence
from lookonce.core.scheduler_state import SchedulerState

if TYPE_CHECKING:
    from lookonce.core.planning import Planner

GROW, COMPLETE = 0, 1
"""What happens to a sequence in a step: it gets a block, or has filled one."""


class DecodeRuns:
    """Of one scheduler. `advance_full` is what an update does to a sequence with a full block."""

    def __init__(
        self,
        state: SchedulerState,
        planner: Planner,
        advance_full: Callable[[Sequence], None],
        *,
        stores: bool,
    ) -> None:
        """`stores`: full blocks are offered to external tiers, at the end of their step."""
        self._state = state
        self._planner = planner
        self._advance_full = advance_full
        self._stores = stores

    def longest(self) -> int:
        """How many steps from now on only decode what decodes now, and end no sequence; 0 where
        the next step does anything else, or where that is not certain."""
        state, queues = self._state, self._state.queues
        decoding = queues.decoding
        if (
            not decoding
            or queues.has_prompts
            or queues.idle
            or state.output
            or state.has_runner_updates
            or state.snapshots is not None
            or len(decoding) > self._planner.max_decodes
            or self._planner.has_starved
            or self._planner.decode_shares.may_limit
        ):
            return 0
        block_size = state.block_pool.block_size
        steps = min(s.token_limit - 2 - s.num_computed for s in decoding)
        if self._stores:
            steps = min(steps, *(block_size - 1 - s.num_computed % block_size for s in decoding))
        if steps < 1:
            return 0
        for sequence in decoding:
            request = sequence.request
            if request.session or request.eos_token_ids or request.stop_token_ids or request.frames:
                return 0
        new = sum(
            max(0, -(-(s.num_computed + steps) // block_size) - len(s.block_ids)) for s in decoding
        )
        return steps if new <= state.block_pool.num_free else 0

    def advance(
        self, num_steps: int, tokens_of: Callable[[Sequence, int], NDArray[np.int32]]
    ) -> None:
        """Apply `num_steps` such steps, at most `longest()`. `tokens_of` gives the next tokens of
        a sequence, as many as are asked for."""
        state = self._state
        pool, decoding = state.block_pool, state.queues.decoding
        block_size = pool.block_size
        changes: list[tuple[int, int, int]] = []
        starts = []
        for at, sequence in enumerate(decoding):
            start = sequence.num_computed
            starts.append(start)
            sequence.tokens.extend(tokens_of(sequence, num_steps))
            grows = len(sequence.block_ids) * block_size - start + 1
            while grows <= num_steps:
                changes.append((grows, GROW, at))
                grows += block_size
            full = block_size - start % block_size
            while full <= num_steps:
                changes.append((full, COMPLETE, at))
                full += block_size
        changes.sort()
        for step, kind, at in changes:
            sequence = decoding[at]
            if kind == GROW:
                state.try_grow(sequence, 1)
                sequence.deliver_blocks()
            else:
                sequence.num_computed = starts[at] + step
                self._advance_full(sequence)
        for start, sequence in zip(starts, decoding, strict=True):
            sequence.num_computed = sequence.num_planned = start + num_steps
        state.counters.generation_tokens += num_steps * len(decoding)
        self._planner.step_id += num_steps
