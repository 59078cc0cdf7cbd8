"""Many steps that only decode, applied at once: what a simulation of the scheduler spends time on.

Between two events (an arrival, the end of a sequence) a step that decodes is followed by others of
the same sequences. Each of these grows some block tables and registers some full blocks; the last
one may end sequences. `DecodeRuns.advance` makes these changes alone, in the order in which
`Scheduler.plan` and `Scheduler.update_from_output` make them, and so leaves the same state behind
as so many steps would. There are no deltas of tokens that end no sequence: who calls this knows
them.
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

PLAN, UPDATE = 0, 1
"""When something happens to a sequence in a step: it gets a block; it has filled one, or ends."""


class DecodeRuns:
    """Of one scheduler. `advance_full` is what an update does to a sequence with a full block,
    `append_token` to one that ends with its next token."""

    def __init__(
        self,
        state: SchedulerState,
        planner: Planner,
        advance_full: Callable[[Sequence], None],
        append_token: Callable[[Sequence, int, None], None],
        *,
        stores: bool,
    ) -> None:
        """`stores`: full blocks are offered to external tiers, at the end of their step."""
        self._state = state
        self._planner = planner
        self._advance_full = advance_full
        self._append_token = append_token
        self._stores = stores

    def longest(self) -> int:
        """How many steps from now on only decode what decodes now, the last of which may end
        sequences; 0 where the next step does anything else, or where that is not certain."""
        state, queues = self._state, self._state.queues
        decoding = queues.decoding
        if (
            not decoding
            or queues.prefilling
            or queues.waiting
            or queues.idle
            or state.output
            or state.extensions
            or state.encoder_cache.has_moves
            or state.snapshots is not None
            or len(decoding) > self._planner.max_decodes
            or self._planner.has_starved
            or self._planner.decode_shares.may_limit
        ):
            return 0
        block_size = state.block_pool.block_size
        steps = min([s.token_limit - 1 - s.num_computed for s in decoding])
        if self._stores:
            if state.finished:
                return 0
            blocks = [block_size - 1 - s.num_computed % block_size for s in decoding]
            steps = min(steps - 1, *blocks)
        if steps < 1:
            return 0
        new = 0
        for sequence in decoding:
            request = sequence.request
            if request.session or request.eos_token_ids or request.stop_token_ids or request.frames:
                return 0
            grown = -(-(sequence.num_computed + steps) // block_size) - len(sequence.block_ids)
            if grown > 0:
                new += grown
        return steps if new <= state.block_pool.num_free else 0

    def advance(
        self, num_steps: int, tokens_of: Callable[[Sequence, int], NDArray[np.int32]]
    ) -> None:
        """Apply `num_steps` such steps, at most `longest()`. `tokens_of` gives the next tokens of
        a sequence, as many as are asked for."""
        state = self._state
        decoding = list(state.queues.decoding)
        block_size = state.block_pool.block_size
        changes: list[tuple[int, int, int]] = []
        starts = []
        state.finished.clear()  # the first plan tells the runner of them
        for at, sequence in enumerate(decoding):
            start = sequence.num_computed
            starts.append(start)
            ends = start + num_steps + 1 == sequence.token_limit
            if num_steps > ends:
                sequence.tokens.extend(tokens_of(sequence, num_steps - ends))
            grows = len(sequence.block_ids) * block_size - start + 1
            while grows <= num_steps:
                changes.append((grows, PLAN, at))
                grows += block_size
            full = block_size - start % block_size
            while full <= num_steps:
                changes.append((full, UPDATE, at))
                full += block_size
            if ends and full != num_steps + block_size:
                changes.append((num_steps, UPDATE, at))
        changes.sort()
        num_ended = 0
        for step, when, at in changes:
            sequence = decoding[at]
            if when == PLAN:
                state.try_grow(sequence, 1)
                sequence.deliver_blocks()
                continue
            reached = sequence.num_computed = starts[at] + step
            if reached % block_size == 0:
                self._advance_full(sequence)
            if reached + 1 == sequence.token_limit:
                num_ended += 1
                sequence.num_planned = reached
                self._append_token(sequence, int(tokens_of(sequence, 1)[0]), None)
        for start, sequence in zip(starts, decoding, strict=True):
            if sequence.block_ids:  # it has not ended
                sequence.num_computed = sequence.num_planned = start + num_steps
        state.counters.generation_tokens += num_steps * len(decoding) - num_ended
        self._planner.step_id += num_steps

    def forget_finished(self) -> bool:
        """Whether the next step would only tell the runner which sequences have ended, and there
        is no other after it. They count as told then."""
        state, queues = self._state, self._state.queues
        if (
            self._stores
            or queues.sequences
            or not state.finished
            or state.output
            or state.extensions
            or state.encoder_cache.has_moves
            or state.snapshots is not None
            or self._planner.has_starved
        ):
            return False
        state.finished.clear()
        self._planner.step_id += 1
        return True
