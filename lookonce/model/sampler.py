"""From logits to tokens, all sequences of a step at once.

Rows that use nothing special cost one `max` and one read-back. Every other feature touches only the
rows that ask for it. A draw is an inverse-CDF lookup with one uniform number per row that depends
on nothing but (seed, position), so a seeded request gets the same tokens whatever shares its batch
and after a preemption. Order of operations, as vLLM's: minimum tokens, logit bias, penalties,
temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookonce.model import token_logits
from lookonce.model.token_logits import FAILED, RowFilter, TokenCounts
from lookonce.types.request import TokenLogprob
from lookonce.types.sampling import SamplingParams


class Sampled(NamedTuple):
    """One entry per row of the logits."""

    token_ids: list[int]
    """-1 where the row's logits hold NaN or infinity: that sequence failed."""
    logprobs: list[TokenLogprob | None] | None
    """None when no row asked; None in a row that did not ask or failed."""


@dataclass(slots=True)
class _SequenceState:
    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    blocked: list[int]
    """Ids masked until `min_tokens` are generated."""
    counts: TokenCounts | None
    """Present only with penalties."""
    filter: RowFilter

    def blocks_at(self, position: int) -> bool:
        return position - self.num_prompt_tokens < self.params.min_tokens

    def is_plain_greedy(self) -> bool:
        params = self.params
        return (
            params.greedy
            and self.counts is None
            and not params.logit_bias
            and params.logprobs is None
            and not params.min_tokens
        )


class Sampler:
    """Holds what sampling must remember of each running sequence."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._states: dict[int, _SequenceState] = {}
        self._special: set[int] = set()
        """Sequences that need more than an argmax."""

    def add(
        self,
        seq_id: int,
        params: SamplingParams,
        sample_index: int,
        prompt_ids: Sequence[int] | np.ndarray,
        output_ids: Sequence[int] | np.ndarray,
    ) -> None:
        """Learn a sequence; `output_ids` is not empty after a preemption."""
        seed = secrets.randbits(64) if params.seed is None else params.seed + sample_index
        state = _SequenceState(
            params=params,
            seed=seed % 2**64,
            num_prompt_tokens=len(prompt_ids),
            blocked=self._known({*self._eos_token_ids, *params.stop_token_ids}),
            counts=TokenCounts.for_params(params, prompt_ids, output_ids, self._vocab_size),
            filter=RowFilter.from_params(params, self._vocab_size),
        )
        self._states[seq_id] = state
        if not state.is_plain_greedy():
            self._special.add(seq_id)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; one that is not known is no error."""
        self._states.pop(seq_id, None)
        self._special.discard(seq_id)

    def sample(self, logits: Tensor, seq_ids: Sequence[int], positions: Sequence[int]) -> Sampled:
        """Draw one token per row of `logits` [n, V] float32, which is not changed.

        `positions[i]` is the index the sampled token takes in its sequence: prompt tokens plus
        tokens generated so far.
        """
        special = [row for row, seq_id in enumerate(seq_ids) if seq_id in self._special]
        highest, best = logits.max(dim=-1)
        greedy = torch.where(highest.isfinite(), best, FAILED)
        if not special:
            return Sampled(greedy.tolist(), None)
        token_ids = greedy.tolist()
        self._sample_special(logits, token_ids, special, seq_ids, positions)
        self._count(token_ids, special, seq_ids)
        return Sampled(token_ids, self._logprobs(logits, token_ids, special, seq_ids))

    def _sample_special(
        self,
        logits: Tensor,
        token_ids: list[int],
        special: list[int],
        seq_ids: Sequence[int],
        positions: Sequence[int],
    ) -> None:
        """Replace the argmax of every row that needs more by its real draw."""
        rows = [row for row in special if token_ids[row] != FAILED]
        rows = [row for row in rows if self._changes_argmax(seq_ids[row], positions[row])]
        if not rows:
            return
        states = [self._states[seq_ids[row]] for row in rows]
        scores = logits[rows].float()
        self._edit(scores, states, [positions[row] for row in rows])
        drawn = token_logits.argmax(scores)
        random = [i for i, state in enumerate(states) if not state.params.greedy]
        if random:
            uniform = token_logits.uniforms(
                [states[i].seed for i in random], [positions[rows[i]] for i in random]
            )
            chosen = scores if len(random) == len(rows) else scores[random]
            draws = token_logits.draw(chosen, [states[i].filter for i in random], uniform)
            for i, token in zip(random, draws, strict=True):
                drawn[i] = token
        for row, token in zip(rows, drawn, strict=True):
            token_ids[row] = token

    def _changes_argmax(self, seq_id: int, position: int) -> bool:
        state = self._states[seq_id]
        return (
            not state.params.greedy
            or state.counts is not None
            or bool(state.params.logit_bias)
            or state.blocks_at(position)
        )

    def _edit(self, scores: Tensor, states: list[_SequenceState], positions: list[int]) -> None:
        """Minimum tokens, logit bias and penalties, in place."""
        blocked = [
            (row, state.blocked)
            for row, (state, position) in enumerate(zip(states, positions, strict=True))
            if state.blocked and state.blocks_at(position)
        ]
        token_logits.block(scores, blocked)
        biased = [
            (row, state.params.logit_bias)
            for row, state in enumerate(states)
            if state.params.logit_bias
        ]
        token_logits.add_bias(scores, biased)
        penalised = [
            (row, state.params, state.counts)
            for row, state in enumerate(states)
            if state.counts is not None
        ]
        token_logits.penalise(scores, penalised)

    def _count(self, token_ids: list[int], special: list[int], seq_ids: Sequence[int]) -> None:
        for row in special:
            counts = self._states[seq_ids[row]].counts
            if counts is not None and token_ids[row] != FAILED:
                counts.add_output(token_ids[row])

    def _logprobs(
        self,
        logits: Tensor,
        token_ids: list[int],
        special: list[int],
        seq_ids: Sequence[int],
    ) -> list[TokenLogprob | None] | None:
        """Of the raw logits: before bias, penalties and temperature."""
        asked = [
            (row, wanted)
            for row in special
            if (wanted := self._states[seq_ids[row]].params.logprobs) is not None
        ]
        if not asked:
            return None
        result: list[TokenLogprob | None] = [None] * len(token_ids)
        alive = [(row, wanted) for row, wanted in asked if token_ids[row] != FAILED]
        rows = [row for row, _ in alive]
        entries = token_logits.logprobs(
            logits, rows, [token_ids[row] for row in rows], [wanted for _, wanted in alive]
        )
        for row, entry in zip(rows, entries, strict=True):
            result[row] = entry
        return result

    def _known(self, token_ids: set[int]) -> list[int]:
        return sorted(t for t in token_ids if 0 <= t < self._vocab_size)
