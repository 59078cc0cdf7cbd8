"""Samples one token for each sequence of a step, and scores prompt tokens that requests ask for.

Plain greedy rows cost one `max` and one read-back; every other feature touches only the rows that
use it. A random draw is an inverse-CDF lookup with one uniform number per row. That number depends
on (seed, position) alone, so a seeded request gets the same tokens in any batch and after a
preemption. The order of operations is vLLM's: allowed tokens, minimum tokens, logit bias,
penalties, grammar, temperature, min-p, top-k, top-p. A speech model's rules come after the grammar.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.errors import BadRequestError, LookOnceError
from lookonce.model import logits_processors
from lookonce.model.device import StepReads, to_device
from lookonce.model.input_batch import InputBatch
from lookonce.model.logits_processors import (
    FAILED,
    NONE_UNTOLD,
    NamedTokens,
    RowFilter,
    TokenCounts,
    TokenRuleState,
    prompt_logprobs,
)
from lookonce.model.sampled_tokens import Draw, SampledTokens
from lookonce.types.request import PromptLogprob, TokenLogprob
from lookonce.types.sampling import CompiledGrammar, GrammarState, SamplingParams
from lookonce.types.step import NewSequence, ScheduledSequence


class SamplerOutput(NamedTuple):
    """One entry per row of the logits."""

    token_ids: list[int]
    """-1 for a row that failed: its logits hold NaN or infinity, or it has an entry in `errors`."""
    logprobs: list[TokenLogprob | None] | None
    """None if no row asked for them; an entry is None if its row did not ask or failed."""
    errors: Mapping[int, LookOnceError] = {}
    """Row → why its grammar failed."""


@dataclass(slots=True)
class _SequenceState:
    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    """In a live session: where the input that was appended last ends."""
    tokens: NamedTokens
    """Its ends are masked until `min_tokens` are generated."""
    counts: TokenCounts | None
    """None without penalties."""
    filter: RowFilter
    grammar: GrammarState | None
    rules: TokenRuleState | None

    def blocks_at(self, position: int) -> bool:
        return position - self.num_prompt_tokens < self.params.min_tokens

    def take(self, token: int) -> None:
        """Update counts and grammar with the token just sampled."""
        if token == FAILED:
            return
        if self.counts is not None:
            self.counts.add_output(token)
        if self.grammar is not None:
            self.grammar.accept(token)
        if self.rules is not None:
            self.rules.take(token)

    def is_plain(self) -> bool:
        """Whether nothing but the logits and its filter decides on its tokens."""
        params = self.params
        return (
            self.counts is None
            and self.grammar is None
            and self.rules is None
            and not params.logit_bias
            and not params.allowed_token_ids
            and params.logprobs is None
            and not params.min_tokens
        )


class Sampler:
    """Samples tokens; holds the sampling state of each running sequence."""

    def __init__(
        self, vocab_size: int, eos_token_ids: Sequence[int], sampled: SampledTokens | None = None
    ) -> None:
        """`sampled`: tokens that were drawn in the step before and that the host does not know
        yet; penalties count them on the device."""
        self._sampled = sampled
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._states: dict[int, _SequenceState] = {}
        self._named: tuple[SamplingParams, NamedTokens] | None = None
        """Of the sequence that was added last: samples of one request come one after the other."""
        self._random: set[int] = set()
        """Sequences that need more than an argmax."""
        self._special: set[int] = set()
        """Those that need more than a draw from their logits."""

    def add(
        self,
        seq_id: int,
        params: SamplingParams,
        sample_index: int,
        prompt_ids: Sequence[int] | np.ndarray,
        output_ids: Sequence[int] | np.ndarray,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Add a sequence; `output_ids` is not empty after a preemption."""
        seed = secrets.randbits(64) if params.seed is None else params.seed + sample_index
        state = _SequenceState(
            params=params,
            seed=seed % 2**64,
            num_prompt_tokens=len(prompt_ids),
            tokens=self._tokens_of(params),
            counts=TokenCounts.for_params(params, prompt_ids, output_ids, self._vocab_size),
            filter=RowFilter.from_params(params),
            grammar=_started(grammar, output_ids),
            rules=None
            if params.token_rules is None
            else TokenRuleState(params.token_rules, list(output_ids), self._vocab_size),
        )
        self._states[seq_id] = state
        if not state.is_plain():
            self._special.add(seq_id)
            self._random.add(seq_id)
        elif not params.greedy:
            self._random.add(seq_id)

    def extend(self, seq_id: int, start: int, token_ids: NDArray[np.int32]) -> None:
        """Tokens appended at `start` count as prompt; `min_tokens` counts from their end."""
        state = self._states[seq_id]
        state.num_prompt_tokens = start + len(token_ids)
        if state.counts is not None and state.params.repetition_penalty != 1.0:
            state.counts.add_prompt(token_ids[(token_ids >= 0) & (token_ids < self._vocab_size)])

    def remove(self, seq_id: int) -> None:
        """Remove a sequence; an unknown one is no error."""
        self._states.pop(seq_id, None)
        self._special.discard(seq_id)
        self._random.discard(seq_id)

    def sample(
        self, logits: Tensor, seq_ids: Sequence[int], positions: Sequence[int]
    ) -> SamplerOutput:
        """As `begin`, waited for."""
        reads = StepReads(logits.device)
        output = self.begin(logits, seq_ids, positions, reads)
        reads.wait()
        return output()

    def begin(
        self, logits: Tensor, seq_ids: Sequence[int], positions: Sequence[int], reads: StepReads
    ) -> Draw[SamplerOutput]:
        """Draw one token per row of `logits` [n, V] float32, which is not changed. What is returned
        gives the output once `reads` were waited for, and is called once.

        Grammars and a speech model's rules must know all tokens before: a sequence that has them
        may not draw again before its last token was told.

        `positions[i]` is the index the sampled token takes in its sequence: prompt tokens plus
        tokens generated so far.
        """
        if self._random.isdisjoint(seq_ids):
            return _plain(logits, reads)
        states = [self._states[seq_id] for seq_id in seq_ids]
        if self._special.isdisjoint(seq_ids):
            return _drawn(logits, states, positions, reads)
        special = [row for row, seq_id in enumerate(seq_ids) if seq_id in self._special]
        scores = _edited(logits, states, positions, self._untold(seq_ids, states))
        scores, errors = _constrained(scores, states, is_copy=scores is not logits)
        scores = _ruled(scores, states, is_copy=scores is not logits)
        tokens = _choose(scores, states, positions)
        drawn, logprobs = reads.later(tokens), _logprobs(logits, scores, tokens, states, reads)

        def told() -> SamplerOutput:
            token_ids: list[int] = drawn.tolist()
            for row in special:
                states[row].take(token_ids[row])
            return SamplerOutput(token_ids, logprobs(token_ids), errors)

        return Draw(tokens, told)

    def _untold(self, seq_ids: Sequence[int], states: list[_SequenceState]) -> Mapping[int, Tensor]:
        """Row → the token [] before it, of rows with penalties whose token is not counted yet."""
        if self._sampled is None or not self._sampled.rows:
            return NONE_UNTOLD
        rows = self._sampled.rows
        return {
            row: self._sampled.tokens[at]
            for row, (seq_id, state) in enumerate(zip(seq_ids, states, strict=True))
            if state.counts is not None and (at := rows.get(seq_id)) is not None
        }

    def _tokens_of(self, params: SamplingParams) -> NamedTokens:
        if self._named is None or self._named[0] is not params:
            named = NamedTokens.of(params, self._eos_token_ids, self._vocab_size)
            self._named = (params, named)
        return self._named[1]


def _plain(logits: Tensor, reads: StepReads) -> Draw[SamplerOutput]:
    """The likeliest token of each row."""
    if logits.is_cpu:
        found = SamplerOutput(logits_processors.argmax_on_host(logits), None)
        return Draw(found.token_ids, lambda: found)
    best = logits_processors.argmax(logits)
    tokens = reads.later(best)
    return Draw(best, lambda: SamplerOutput(tokens.tolist(), None))


def _drawn(
    logits: Tensor, states: list[_SequenceState], positions: Sequence[int], reads: StepReads
) -> Draw[SamplerOutput]:
    """The likeliest or a random token of each row."""
    on_host = _draw_on_host(logits, states, positions)
    if on_host is not None:
        found = SamplerOutput(on_host, None)
        return Draw(on_host, lambda: found)
    chosen = _choose(logits, states, positions)
    tokens = reads.later(chosen)
    return Draw(chosen, lambda: SamplerOutput(tokens.tolist(), None))


def _edited(
    logits: Tensor,
    states: list[_SequenceState],
    positions: Sequence[int],
    untold: Mapping[int, Tensor] = NONE_UNTOLD,
) -> Tensor:
    """The logits after allowed tokens, minimum tokens, logit bias and penalties; a copy if any row
    has them. `untold`: row → the token before, which the row's counts lack."""
    blocked = [
        (row, state.tokens.ends)
        for row, (state, position) in enumerate(zip(states, positions, strict=True))
        if len(state.tokens.ends) and state.blocks_at(position)
    ]
    biased = [(row, state.tokens) for row, state in enumerate(states) if len(state.tokens.biased)]
    penalised = [
        (row, state.params, state.counts)
        for row, state in enumerate(states)
        if state.counts is not None
    ]
    kept = [
        (row, state.tokens.allowed)
        for row, state in enumerate(states)
        if state.tokens.allowed is not None
    ]
    if not (blocked or biased or penalised or kept):
        return logits
    scores = logits.clone()
    logits_processors.keep_only(scores, kept)
    logits_processors.block(scores, blocked)
    logits_processors.add_bias(scores, biased)
    logits_processors.penalise(scores, penalised, untold)
    return scores


def _started(
    grammar: CompiledGrammar | None, output_ids: Sequence[int] | np.ndarray
) -> GrammarState | None:
    if grammar is None:
        return None
    state = grammar.start()
    for token in output_ids:
        state.accept(int(token))
    return state


def _constrained(
    scores: Tensor, states: list[_SequenceState], *, is_copy: bool
) -> tuple[Tensor, dict[int, LookOnceError]]:
    """The scores without the tokens that grammars forbid, and by row the error of its grammar.

    Grammars fill their masks row by row on the host; the masks are applied to all rows at once.
    """
    rows = [(row, state.grammar) for row, state in enumerate(states) if state.grammar is not None]
    if not rows:
        return scores, {}
    allowed = np.zeros((len(rows), logits_processors.mask_bytes(scores.shape[1])), np.uint8)
    errors: dict[int, LookOnceError] = {}
    for bits, (row, grammar) in zip(allowed, rows, strict=True):
        grammar.fill(bits)
        if (error := grammar.error) is not None:
            errors[row] = _grammar_error(states[row].params, error)
            bits[:] = 0  # no score is left: the row fails
    scores = scores if is_copy else scores.clone()
    logits_processors.allow_only(scores, [row for row, _ in rows], allowed)
    return scores, errors


def _ruled(scores: Tensor, states: list[_SequenceState], *, is_copy: bool) -> Tensor:
    """The scores without the tokens that a speech model may not write next."""
    rows = [(row, state.rules) for row, state in enumerate(states) if state.rules is not None]
    if not rows:
        return scores
    scores = scores if is_copy else scores.clone()
    for row, rules in rows:
        rules.apply(scores[row])
    return scores


def _grammar_error(params: SamplingParams, reason: str) -> BadRequestError:
    """A grammar that exceeds the limits of its engine, which are wide."""
    param = "grammar" if params.grammar is None else params.grammar.param
    return BadRequestError(f"{param} is too complex: {reason}", param=param)


def _draw_on_host(
    scores: Tensor, states: list[_SequenceState], positions: Sequence[int]
) -> list[int] | None:
    filters = [None if state.params.greedy else state.filter for state in states]
    seeds = [state.seed for state in states]
    return logits_processors.draw_on_host(scores, filters, seeds, positions)


def _choose(scores: Tensor, states: list[_SequenceState], positions: Sequence[int]) -> Tensor:
    """Token ids [n]: the largest score of greedy rows, a random draw for the others."""
    on_host = _draw_on_host(scores, states, positions)
    if on_host is not None:
        return torch.tensor(on_host, dtype=torch.long)
    greedy = [row for row, state in enumerate(states) if state.params.greedy]
    random = [row for row, state in enumerate(states) if not state.params.greedy]
    if not random:
        return logits_processors.argmax(scores)
    seeds = [states[row].seed for row in random]
    uniform = logits_processors.uniforms(seeds, [positions[row] for row in random])
    drawn = logits_processors.draw(
        _rows(scores, random), [states[row].filter for row in random], uniform
    )
    if not greedy:
        return drawn
    both = torch.cat([logits_processors.argmax(_rows(scores, greedy)), drawn])
    at = to_device(np.array(greedy + random), scores.device)
    return torch.empty_like(both).index_copy_(0, at, both)


def _logprobs(
    logits: Tensor,
    scores: Tensor,
    tokens: Tensor,
    states: list[_SequenceState],
    reads: StepReads,
) -> Callable[[list[int]], list[TokenLogprob | None] | None]:
    """Log-probabilities under the raw logits, before bias, penalties and temperature, of `tokens`
    [n], which are told once more when their values are known.

    Those of a speech model are under its rules, as Whisper's thresholds expect them.
    """
    asked = [
        (row, state.params.logprobs)
        for row, state in enumerate(states)
        if state.params.logprobs is not None
    ]
    if not asked:
        return lambda token_ids: None
    ruled = [row for row, state in enumerate(states) if state.rules and not state.rules.rules.only]
    if ruled:
        at = to_device(np.array(ruled), logits.device)
        logits = logits.index_copy(0, at, scores.index_select(0, at))
    rows = [row for row, _ in asked]
    entries = logits_processors.logprobs(
        _rows(logits, rows), _rows(tokens, rows), [wanted for _, wanted in asked], reads
    )

    def told(token_ids: list[int]) -> list[TokenLogprob | None]:
        result: list[TokenLogprob | None] = [None] * len(states)
        for row, entry in zip(rows, entries(), strict=True):
            result[row] = None if token_ids[row] == FAILED else entry
        return result

    return told


def _rows(values: Tensor, rows: list[int]) -> Tensor:
    """The listed rows; `values` itself if those are all."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, to_device(np.array(rows), values.device))


SLICE_ELEMENTS = 1 << 24
"""Most logits of prompt tokens in memory at a time: 64 MiB."""


class _PromptRequest(NamedTuple):
    num_prompt_tokens: int
    wanted: int
    """The number of likeliest tokens at each position."""


class _Part(NamedTuple):
    """Rows `[first, first + len(token_ids))` of a step predict these tokens."""

    seq_id: int
    first: int
    token_ids: Tensor
    wanted: int


class PromptLogprobScorer:
    """Log-probabilities of prompt tokens, for the sequences that ask for them.

    The logits after a token give the probability of the next one.
    """

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        self._batch = batch
        self._vocab_size = vocab_size
        self._asked: dict[int, _PromptRequest] = {}

    def add(self, new: NewSequence) -> None:
        """Only the first of several samples scores their prompt, and only before it generates."""
        wanted = new.sampling.prompt_logprobs
        if wanted is None or new.sample_index or len(new.token_ids) > new.num_prompt_tokens:
            return
        self._asked[new.seq_id] = _PromptRequest(new.num_prompt_tokens, wanted)

    def remove(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._asked.pop(seq_id, None)

    def parts(self, chunks: Sequence[ScheduledSequence]) -> list[_Part]:
        """The prompt tokens to score in this step; nearly always none."""
        if not self._asked:
            return []
        parts, row = [], 0
        for chunk in chunks:
            asked = self._asked.get(chunk.seq_id)
            if asked is not None:
                last = min(chunk.start + chunk.num_tokens, asked.num_prompt_tokens - 1)
                known = self._batch.tokens[self._batch.row_of(chunk.seq_id)]
                token_ids = torch.from_numpy(known[chunk.start + 1 : last + 1].astype("int64"))
                if len(token_ids):
                    parts.append(_Part(chunk.seq_id, row, token_ids, asked.wanted))
            row += chunk.num_tokens
        return parts

    def score(
        self,
        hidden: Tensor,
        parts: Iterable[_Part],
        compute_logits: Callable[[Tensor], Tensor],
        reads: StepReads,
    ) -> Callable[[], dict[int, list[PromptLogprob]]]:
        """Scores by sequence from a step's last hidden states [T, H], once `reads` were waited for.

        `compute_logits` computes logits [n, V] from hidden states [n, H].
        """
        size = max(1, SLICE_ELEMENTS // self._vocab_size)
        scored: dict[int, list[Callable[[], list[PromptLogprob]]]] = {}
        for part in parts:
            entries = scored[part.seq_id] = []
            for start in range(0, len(part.token_ids), size):
                token_ids = to_device(part.token_ids[start : start + size], hidden.device)
                first = part.first + start
                logits = compute_logits(hidden[first : first + len(token_ids)])
                entries.append(prompt_logprobs(logits, token_ids, part.wanted, reads))
        return lambda: {
            seq_id: [entry for told in entries for entry in told()]
            for seq_id, entries in scored.items()
        }
