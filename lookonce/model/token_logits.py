"""The arithmetic of sampling: stateless functions on [rows, V] logits, and two small row records.

Thresholds instead of sorted indices: top-k, top-p and min-p each keep `logits >= threshold`, which
depends on a row's own values alone. Equal logits (common with bf16 weights) are all kept, so the
outcome never depends on the order in which a sort leaves ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookonce.types.request import TokenLogprob
from lookonce.types.sampling import SamplingParams

FAILED = -1
"""The token of a row whose logits are not finite."""

NUCLEUS_CANDIDATES = 512
"""Largest logits looked at first for top-p; a flatter row than they cover is sorted whole."""


class TokenCounts:
    """Which tokens a sequence has seen, and how often it generated each; grows by doubling."""

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, seen: NDArray[np.int64], output_ids: Sequence[int]) -> None:
        unique = np.unique(seen)
        self._slots = {int(token): slot for slot, token in enumerate(unique)}
        self._ids = unique
        self._counts = np.zeros(len(unique), np.float32)
        for token in output_ids:
            self.add_output(int(token))

    @classmethod
    def for_params(
        cls,
        params: SamplingParams,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        output_ids: Sequence[int] | NDArray[np.int32],
        vocab_size: int,
    ) -> TokenCounts | None:
        """None without penalties. The prompt matters to the repetition penalty only.

        Media placeholders may have ids outside the vocabulary, which no logit stands for.
        """
        repetition = params.repetition_penalty != 1.0
        if not (repetition or params.presence_penalty or params.frequency_penalty):
            return None
        prompt = np.asarray(prompt_ids if repetition else [], np.int64)
        prompt = prompt[(prompt >= 0) & (prompt < vocab_size)]
        return cls(prompt, np.asarray(output_ids, np.int64).tolist())

    def add_output(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            room = max(16, slot)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """[m] distinct tokens of prompt and output."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """[m] times each was generated; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._slots)]


@dataclass(frozen=True, slots=True)
class RowFilter:
    """How one row is narrowed before a draw; the neutral value keeps everything."""

    temperature: float
    top_k: int
    top_p: float
    log_min_p: float

    @classmethod
    def from_params(cls, params: SamplingParams, vocab_size: int) -> RowFilter:
        top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        return cls(max(params.temperature, 1e-5), top_k, params.top_p, log_min_p)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """[n] numbers in [0, 1), each a function of its (seed, position) alone (SplitMix64)."""
    state = _mix(np.array(seeds, np.uint64))
    state = _mix(state + np.array(positions, np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def argmax(scores: Tensor) -> list[int]:
    """[n, V] → n tokens; `FAILED` where nothing finite is left."""
    highest, best = scores.max(dim=-1)
    chosen: list[int] = torch.where(highest.isfinite(), best, FAILED).tolist()
    return chosen


def block(scores: Tensor, blocked: list[tuple[int, list[int]]]) -> None:
    """Make the listed tokens of the listed rows impossible, in place."""
    if not blocked:
        return
    rows, ids = _flat_index(scores, [(row, np.asarray(ids)) for row, ids in blocked])
    scores[rows, ids] = -math.inf


def add_bias(scores: Tensor, biased: Sequence[tuple[int, Mapping[int, float]]]) -> None:
    """Add each row's {token: bias}, in place; tokens outside the vocabulary are passed over."""
    if not biased:
        return
    vocab_size = scores.shape[1]
    kept = [(row, {t: b for t, b in bias.items() if 0 <= t < vocab_size}) for row, bias in biased]
    rows, ids = _flat_index(scores, [(row, np.array(list(b), np.int64)) for row, b in kept])
    values = [value for _, bias in kept for value in bias.values()]
    scores[rows, ids] += torch.tensor(values, dtype=scores.dtype, device=scores.device)


def penalise(scores: Tensor, penalised: list[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Repetition over prompt and output, frequency and presence over output, in place."""
    if not penalised:
        return
    rows, ids = _flat_index(scores, [(row, counts.ids) for row, _, counts in penalised])
    sizes = [len(counts.ids) for _, _, counts in penalised]
    counts = _like(scores, np.concatenate([c.counts for _, _, c in penalised]))
    repetition, frequency, presence = (
        _like(scores, np.repeat(np.asarray(values, np.float32), sizes))
        for values in zip(
            *(
                (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
                for _, p, _ in penalised
            ),
            strict=True,
        )
    )
    values = scores[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    scores[rows, ids] = values


def draw(scores: Tensor, filters: list[RowFilter], uniform: NDArray[np.float64]) -> list[int]:
    """One token per row of `scores` [n, V] by inverse CDF in the order of token ids."""
    temperatures = [row.temperature for row in filters]
    scores = scores / _like(scores, np.asarray(temperatures, np.float32))[:, None]
    scores = _filtered(scores, filters)
    cumulative = torch.softmax(scores, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = torch.from_numpy(uniform).to(scores.device)[:, None] * cumulative[:, -1:]
    # right=True passes over tokens of probability 0: their sum equals the one before.
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    chosen: list[int] = torch.where(cumulative[:, -1].isfinite(), tokens, FAILED).tolist()
    return chosen


def _filtered(scores: Tensor, filters: list[RowFilter]) -> Tensor:
    """`scores` with everything that min-p, top-k and top-p exclude at minus infinity."""
    scores = _apply_min_p(scores, filters)
    narrowed = [i for i, row in enumerate(filters) if row.top_k < scores.shape[1] or row.top_p < 1]
    if not narrowed:
        return scores
    if len(narrowed) == len(filters):
        return _apply_thresholds(scores, filters)
    scores[narrowed] = _apply_thresholds(scores[narrowed], [filters[i] for i in narrowed])
    return scores


def _apply_min_p(scores: Tensor, filters: list[RowFilter]) -> Tensor:
    if all(row.log_min_p == -math.inf for row in filters):
        return scores
    margin = _like(scores, np.asarray([row.log_min_p for row in filters], np.float32))
    threshold = scores.max(dim=-1).values + margin
    return scores.masked_fill(scores < threshold[:, None], -math.inf)


def _apply_thresholds(scores: Tensor, filters: list[RowFilter]) -> Tensor:
    vocab_size = scores.shape[1]
    largest_k = max((row.top_k for row in filters if row.top_k < vocab_size), default=0)
    candidates = min(vocab_size, max(largest_k, NUCLEUS_CANDIDATES))
    threshold, settled = _thresholds(scores, filters, candidates)
    rest = [] if candidates == vocab_size else (~settled).nonzero()[:, 0].tolist()
    if rest:
        threshold[rest], _ = _thresholds(scores[rest], [filters[i] for i in rest], vocab_size)
    return scores.masked_fill(scores < threshold[:, None], -math.inf)


def _thresholds(scores: Tensor, filters: list[RowFilter], candidates: int) -> tuple[Tensor, Tensor]:
    """Each row's smallest kept logit, and whether the `candidates` largest were enough to tell.

    top-p keeps the fewest largest tokens whose probabilities, within the top-k, reach `top_p`: a
    token stays as long as those before it do not.
    """
    ordered = scores.topk(candidates, dim=-1, sorted=True).values
    vocab_size = scores.shape[1]
    top_k = torch.tensor([row.top_k for row in filters], device=scores.device)
    top_p = torch.tensor([row.top_p for row in filters], dtype=torch.float64, device=scores.device)
    within = torch.arange(candidates, device=scores.device) < top_k[:, None]
    bounded = ordered.masked_fill(~within, -math.inf)
    total = torch.where(top_k < vocab_size, bounded.logsumexp(-1), scores.logsumexp(-1))
    mass = (bounded - total[:, None]).exp().cumsum(dim=-1, dtype=torch.float64)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
    kept = within & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    last = kept.sum(dim=-1) - 1
    threshold = ordered.gather(1, last[:, None])[:, 0]
    settled = (top_k < vocab_size) | (last < candidates - 1)
    return threshold, settled


def logprobs(
    logits: Tensor, rows: list[int], token_ids: list[int], wanted: list[int]
) -> list[TokenLogprob]:
    """Log-probabilities of raw `logits` [n, V] in `rows`: each sampled token's and the best."""
    if not rows:
        return []
    picked = logits[rows].float()
    normaliser = picked.logsumexp(dim=-1, keepdim=True)
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    sampled = (picked.gather(1, tokens) - normaliser)[:, 0].tolist()
    best = picked.topk(min(max(wanted), picked.shape[1]), dim=-1, sorted=True)
    values, ids = (best.values - normaliser).tolist(), best.indices.tolist()
    return [
        TokenLogprob(value, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for value, row_ids, row_values, count in zip(sampled, ids, values, wanted, strict=True)
    ]


def _flat_index(
    scores: Tensor, entries: Sequence[tuple[int, NDArray[np.int64]]]
) -> tuple[Tensor, Tensor]:
    """Row and column index tensors of all `(row, columns)` entries, one after the other."""
    columns = np.concatenate([ids for _, ids in entries])
    rows = np.repeat([row for row, _ in entries], [len(ids) for _, ids in entries])
    return torch.from_numpy(rows).to(scores.device), torch.from_numpy(columns).to(scores.device)


def _like(scores: Tensor, values: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(values).to(scores.device, scores.dtype)
