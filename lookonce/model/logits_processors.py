"""The arithmetic of sampling: stateless functions on logits [rows, V], and records of one row.

Top-k, top-p and min-p each keep the tokens that are at least as likely as a threshold, which
depends on the row's own values alone. Equal logits (common with bf16 weights) are all kept, so
results never depend on the order in which a sort leaves ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lookonce.model.device import StepReads, to_device
from lookonce.model.native import compiled
from lookonce.types.request import PromptLogprob, TokenLogprob
from lookonce.types.sampling import SamplingParams, TokenRules

FAILED = -1
"""The token of a row that failed, for example because its logits are not finite."""

NUCLEUS_CANDIDATES = (64, 2048, 2**15, 2**31)
"""How many of the largest probabilities top-p ranks: the first number, and the next if too few."""

NO_TOP_K = 2**31 - 1
NONE_UNTOLD: Mapping[int, Tensor] = MappingProxyType({})

BLOCK = 256
"""Tokens per block where a large vocabulary is searched block by block."""


class TokenCounts:
    """The distinct tokens of a sequence and how often it generated each; grows by doubling."""

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
        """The counts for these penalties; None without any.

        Only the repetition penalty counts the prompt. Media placeholders may have ids outside the
        vocabulary, which are left out.
        """
        repetition = params.repetition_penalty != 1.0
        if not (repetition or params.presence_penalty or params.frequency_penalty):
            return None
        prompt = np.asarray(prompt_ids if repetition else [], np.int64)
        prompt = prompt[(prompt >= 0) & (prompt < vocab_size)]
        return cls(prompt, np.asarray(output_ids, np.int64).tolist())

    def add_prompt(self, token_ids: NDArray[np.int32]) -> None:
        """Count tokens that were given, not generated."""
        for token in np.unique(token_ids).tolist():
            self._count(token, 0.0)

    def add_output(self, token: int) -> None:
        self._count(token, 1.0)

    def _count(self, token: int, times: float) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            room = max(16, slot)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[slot] = token
        self._counts[slot] += times

    @property
    def ids(self) -> NDArray[np.int64]:
        """[m] distinct tokens of prompt and output."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """[m] how often each was generated; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._slots)]


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The tokens that a request names, inside the vocabulary, each once and in order: made once for
    all samples and steps, since clients may name the whole vocabulary."""

    ends: NDArray[np.int64]
    """End-of-sequence and stop tokens."""
    allowed: NDArray[np.int64] | None
    """The only tokens that may come; None: all."""
    biased: NDArray[np.int64]
    biases: NDArray[np.float32]
    """Of `biased`."""

    @classmethod
    def of(cls, params: SamplingParams, eos: Sequence[int], vocab_size: int) -> NamedTokens:
        biased = _known(tuple(params.logit_bias or ()), vocab_size)
        values = params.logit_bias or {}
        return cls(
            ends=_known((*eos, *params.stop_token_ids), vocab_size),
            allowed=_known(params.allowed_token_ids, vocab_size)
            if params.allowed_token_ids
            else None,
            biased=biased,
            biases=np.array([values[token] for token in biased.tolist()], np.float32),
        )


def _known(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    return np.array(sorted({t for t in token_ids if 0 <= t < vocab_size}), np.int64)


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Temperature, top-k, top-p and min-p of one row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def parameters(self) -> tuple[float, float, float, float]:
        """Of the compiled `draw`."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @classmethod
    def from_params(cls, params: SamplingParams) -> RowFilter:
        top_k = params.top_k if params.top_k > 0 else NO_TOP_K
        return cls(max(params.temperature, 1e-5), top_k, params.top_p, params.min_p)


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


class TokenRuleState:
    """`TokenRules` of one sequence, and what it has generated."""

    def __init__(self, rules: TokenRules, output_ids: Sequence[int], vocab_size: int) -> None:
        self.rules = rules
        self._output = [int(token) for token in output_ids]
        self._only = self._known(rules.only, vocab_size)
        self._suppressed = self._known(rules.suppressed, vocab_size)
        self._suppressed_first = self._known(rules.suppressed_first, vocab_size)
        self._latest_time: int | None = None
        """The last timestamp that was written."""
        for token in self._output:
            self._note_time(token)

    @staticmethod
    def _known(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64] | None:
        return _known(token_ids, vocab_size) if token_ids else None

    def take(self, token: int) -> None:
        self._output.append(token)
        self._note_time(token)

    def _note_time(self, token: int) -> None:
        begin = self.rules.timestamp_begin
        if begin is not None and token >= begin:
            self._latest_time = token

    def apply(self, scores: Tensor) -> None:
        """Set the scores [V] of tokens that may not come next to -inf, in place."""
        if self._only is not None:
            only = to_device(self._only, scores.device)
            kept = scores[only]
            scores.fill_(-math.inf)
            scores[only] = kept
        if self._suppressed_first is not None and not self._output:
            scores[to_device(self._suppressed_first, scores.device)] = -math.inf
        if self._suppressed is not None:
            scores[to_device(self._suppressed, scores.device)] = -math.inf
        begin = self.rules.timestamp_begin
        if begin is not None and 0 < begin < len(scores):
            self._apply_timestamps(scores, begin)

    def _apply_timestamps(self, scores: Tensor, begin: int) -> None:
        """As transformers' `WhisperTimeStampLogitsProcessor`; `begin - 1` says "no timestamps"."""
        output = self._output
        scores[begin - 1] = -math.inf
        last = bool(output) and output[-1] >= begin
        penultimate = len(output) < 2 or output[-2] >= begin
        if last and penultimate:
            scores[begin:] = -math.inf
        elif last:
            scores[: self.rules.text_end] = -math.inf
        if (latest := self._latest_time) is not None:
            earliest = latest if last and not penultimate else latest + 1
            scores[begin:earliest] = -math.inf
        if not output:
            scores[:begin] = -math.inf
            if self.rules.max_initial_timestamp is not None:
                scores[begin + self.rules.max_initial_timestamp + 1 :] = -math.inf
        logprobs = scores.log_softmax(dim=-1)
        is_time = logprobs[begin:].logsumexp(dim=-1) > logprobs[:begin].max()
        scores[:begin].masked_fill_(is_time, -math.inf)


def argmax(scores: Tensor) -> Tensor:
    """[n, V] → n tokens; `FAILED` where the largest is NaN or infinite."""
    if scores.is_cpu:
        return torch.tensor(argmax_on_host(scores), dtype=torch.long)
    highest, best = scores.max(dim=-1)
    return torch.where(highest.isfinite(), best, FAILED)


def argmax_on_host(scores: Tensor) -> list[int]:
    """`argmax` of scores on a CPU."""
    if compiled.kernels is not None and _is_plain(scores):
        return compiled.kernels.argmax(scores)
    return _argmax_in_place(scores.numpy())


def _is_plain(scores: Tensor) -> bool:
    return scores.dtype is torch.float32 and scores.is_contiguous() and scores.numel() > 0


def _argmax_in_place(scores: NDArray[np.float32]) -> list[int]:
    """By NumPy, quicker on a CPU than three operations of torch; its argmax finds NaN too."""
    best = scores.argmax(axis=1).tolist()
    finite = (math.isfinite(row[token]) for row, token in zip(scores, best, strict=True))
    return [token if is_finite else FAILED for token, is_finite in zip(best, finite, strict=True)]


def block(scores: Tensor, blocked: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    """Set the scores of (row, token ids) to -inf, in place."""
    if not blocked:
        return
    rows, ids = _flat_index(scores, blocked)
    scores[rows, ids] = -math.inf


def keep_only(scores: Tensor, kept: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    """Set the scores of all tokens but (row, token ids) to -inf in these rows, in place."""
    for row, token_ids in kept:
        ids = to_device(token_ids, scores.device)
        values = scores[row, ids]
        scores[row] = -math.inf
        scores[row, ids] = values


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a row with one bit per token, in whole words of 32 bits."""
    return -(-vocab_size // 32) * 4


def allow_only(scores: Tensor, rows: list[int], allowed: NDArray[np.uint8]) -> None:
    """Set the scores of all but the allowed tokens of `rows` to -inf, in place.

    `allowed` [len(rows), mask_bytes(V)]: bit `t % 8` of byte `t // 8` is token `t`.
    """
    device, vocab_size = scores.device, scores.shape[1]
    packed = to_device(allowed, device)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    forbidden = (packed[:, :, None] & bits).flatten(1)[:, :vocab_size] == 0
    at = to_device(np.array(rows), device)
    scores.index_copy_(0, at, scores.index_select(0, at).masked_fill_(forbidden, -math.inf))


def add_bias(scores: Tensor, biased: Sequence[tuple[int, NamedTokens]]) -> None:
    """Add each row's biases, in place."""
    if not biased:
        return
    rows, ids = _flat_index(scores, [(row, tokens.biased) for row, tokens in biased])
    scores[rows, ids] += _like(scores, np.concatenate([tokens.biases for _, tokens in biased]))


def penalise(
    scores: Tensor,
    penalised: list[tuple[int, SamplingParams, TokenCounts]],
    untold: Mapping[int, Tensor] = NONE_UNTOLD,
) -> None:
    """Apply repetition (prompt and output), frequency and presence (output) penalties, in place.

    `untold`: row → a token [] on the device that the row has generated and its counts lack.
    """
    if not penalised:
        return
    late = [each for each in penalised if each[0] in untold]
    rows, ids = _flat_index(scores, [(row, counts.ids) for row, _, counts in penalised])
    sizes = [len(counts.ids) for _, _, counts in penalised] + [1] * len(late)
    counts = _like(scores, np.concatenate([c.counts for _, _, c in penalised]))
    if late:
        rows, ids, counts = _with_untold(rows, ids, counts, [row for row, _, _ in late], untold)
    repetition, frequency, presence = (
        _like(scores, np.repeat(np.asarray(values, np.float32), sizes))
        for values in zip(
            *(
                (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
                for _, p, _ in (*penalised, *late)
            ),
            strict=True,
        )
    )
    values = scores[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    scores[rows, ids] = values


def _with_untold(
    rows: Tensor, ids: Tensor, counts: Tensor, late: list[int], untold: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, tokens and counts [m + late] after each row of `late` has generated its untold token.

    Such a token may be among its row's already: then both entries have its count, and so the same
    score is written twice.
    """
    late_rows = to_device(np.array(late), rows.device)
    tokens = torch.stack([untold[row] for row in late])
    same = (rows == late_rows[:, None]) & (ids == tokens[:, None])  # [late, m]
    counts = counts + same.sum(dim=0)
    before = (same * counts).sum(dim=1)
    own = torch.where(same.any(dim=1), before, torch.ones_like(before))
    return torch.cat([rows, late_rows]), torch.cat([ids, tokens]), torch.cat([counts, own])


def draw_on_host(
    scores: Tensor, filters: Sequence[RowFilter | None], seeds: Sequence[int], at: Sequence[int]
) -> list[int] | None:
    """`draw` of scores on a CPU, and `argmax` of the rows without a filter; None where it is not
    compiled. `seeds` and `at` are as for `uniforms`."""
    if compiled.kernels is None or not scores.is_cpu or not _is_plain(scores):
        return None
    parameters = np.array([_GREEDY if row is None else row.parameters for row in filters])
    places = np.array([seeds, at], np.uint64).T.copy().view(np.int64)
    return compiled.kernels.draw(scores, torch.from_numpy(parameters), torch.from_numpy(places))


_GREEDY = (0.0, 1.0, 1.0, 0.0)


def draw(scores: Tensor, filters: list[RowFilter], uniform: NDArray[np.float64]) -> Tensor:
    """One token per row of `scores` [n, V]; `FAILED` where they hold NaN or infinity."""
    cold = np.asarray([1 / row.temperature for row in filters], np.float32)
    probs = torch.softmax(scores * _like(scores, cold)[:, None], dim=-1)
    probs = _apply_top_k_top_p(_apply_min_p(probs, filters), filters)
    tokens = _inverse_cdf(probs, to_device(uniform, scores.device))
    # Anything not finite among a row's scores has made its whole softmax NaN.
    return torch.where(probs[:, 0].isfinite(), tokens, FAILED)


def _inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids [n] where the running sum of `probs` [n, V], in id order, passes `uniform` [n].

    In a large vocabulary first the block is found, then the token within it: running sums are the
    slowest pass of all, and this way they run over a few hundred numbers.
    """
    vocab_size = probs.shape[1]
    if vocab_size <= 2 * BLOCK:
        return _pick(probs, uniform)[0]
    padded = functional.pad(probs, (0, -vocab_size % BLOCK)) if vocab_size % BLOCK else probs
    blocks = padded.view(len(probs), -1, BLOCK)
    block, rest = _pick(blocks.sum(dim=-1), uniform)
    inside = blocks[torch.arange(len(block), device=block.device), block]
    return block * BLOCK + _pick(inside, rest)[0]


def _pick(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The entry [n] that each uniform number falls on, and its place in that entry, in [0, 1)."""
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniform * running[:, -1]
    # right=True skips entries of weight 0: their running sum equals the one before.
    index = torch.searchsorted(running, target[:, None], right=True)
    index.clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index).double()
    rest = (target[:, None] - running.gather(1, index) + weight) / weight
    return index[:, 0], rest[:, 0].clamp_(0.0, 1.0 - 2.0**-52)


def _apply_min_p(probs: Tensor, filters: list[RowFilter]) -> Tensor:
    """Zero the probabilities below min-p times the largest."""
    if not any(row.min_p for row in filters):
        return probs
    share = _like(probs, np.asarray([row.min_p for row in filters], np.float32))
    return _cut(probs, share * probs.amax(dim=-1))


def _apply_top_k_top_p(probs: Tensor, filters: list[RowFilter]) -> Tensor:
    vocab_size = probs.shape[1]
    narrowed = [i for i, row in enumerate(filters) if row.top_k < vocab_size or row.top_p < 1]
    if not narrowed:
        return probs
    if len(narrowed) == len(filters):
        return _cut(probs, _find_thresholds(probs, filters))
    at = to_device(np.array(narrowed), probs.device)
    found = _find_thresholds(probs.index_select(0, at), [filters[i] for i in narrowed])
    return _cut(probs, probs.new_zeros(len(filters)).index_copy_(0, at, found))


def _cut(probs: Tensor, threshold: Tensor) -> Tensor:
    return probs.masked_fill(probs < threshold[:, None], 0.0)


def _find_thresholds(probs: Tensor, filters: list[RowFilter]) -> Tensor:
    """Each row's smallest kept probability [n], found by ranking as few tokens as possible.

    Whether a few are enough shows in the values, which only a CPU can look at in between: on any
    other device all tokens are ranked, unless every row has a top-k.
    """
    vocab_size = probs.shape[1]
    limited = [row.top_k for row in filters if row.top_k < vocab_size]
    largest_k = max(limited, default=1)
    if not probs.is_cpu:
        enough = largest_k if len(limited) == len(filters) else vocab_size
        return _thresholds(probs, filters, enough)[0]
    threshold = probs.new_zeros(len(filters))
    rows = list(range(len(filters)))
    for count in NUCLEUS_CANDIDATES:
        candidates = min(vocab_size, max(largest_k, count))
        found, settled = _thresholds(probs[rows], [filters[i] for i in rows], candidates)
        threshold[rows] = found
        rows = [row for row, done in zip(rows, settled.tolist(), strict=True) if not done]
        if not rows:
            break
    return threshold


def _thresholds(probs: Tensor, filters: list[RowFilter], candidates: int) -> tuple[Tensor, Tensor]:
    """Each row's smallest kept probability, and whether the `candidates` largest determine it.

    top-p keeps the fewest largest tokens whose probabilities, renormalised within the top-k, reach
    `top_p`: a token stays as long as those before it do not.
    """
    vocab_size = probs.shape[1]
    ordered = largest(probs, candidates)[0].double()
    top_k = to_device(np.array([row.top_k for row in filters]), probs.device)[:, None]
    top_p = to_device(np.array([row.top_p for row in filters]), probs.device)[:, None]
    within = torch.arange(candidates, device=probs.device) < top_k
    running = (ordered * within).cumsum(dim=-1)
    total = torch.where(top_k < vocab_size, running[:, -1:], probs.sum(dim=-1, keepdim=True))
    before = running - ordered
    kept = within & ((before < top_p * total) | (top_p >= 1))
    last = kept.sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    settled = (top_k < vocab_size) | (last < candidates - 1) | (candidates == vocab_size)
    return ordered.gather(1, last)[:, 0].to(probs.dtype), settled[:, 0]


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of each row of [n, V] and their indices, largest first.

    The `count` largest lie in the `count` blocks with the largest maxima, so in a large vocabulary
    only those blocks are ranked.
    """
    vocab_size = scores.shape[1]
    if 4 * count * BLOCK > vocab_size:
        top = scores.topk(count, dim=-1, sorted=True)
        return top.values, top.indices
    whole = vocab_size - vocab_size % BLOCK
    maxima = scores[:, :whole].reshape(len(scores), -1, BLOCK).amax(dim=-1)
    if whole < vocab_size:
        maxima = torch.cat([maxima, scores[:, whole:].amax(dim=-1, keepdim=True)], dim=-1)
    blocks = maxima.topk(count, dim=-1, sorted=False).indices
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=scores.device)).flatten(1)
    values = scores.gather(1, ids.clamp(max=vocab_size - 1))
    top = values.masked_fill(ids >= vocab_size, -math.inf).topk(count, dim=-1, sorted=True)
    return top.values, ids.gather(1, top.indices)


def logprobs(
    logits: Tensor, tokens: Tensor, wanted: list[int], reads: StepReads
) -> Callable[[], list[TokenLogprob]]:
    """Log-probabilities under `logits` [n, V] of each row's token and of `wanted` likeliest ones,
    once `reads` were waited for. `tokens` [n]; what is told of one that failed has no meaning."""
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = reads.later((logits.gather(1, tokens.clamp(min=0)[:, None]) - normaliser)[:, 0])
    values, ids = largest(logits, min(max(1, *wanted), logits.shape[1]))
    best, named = reads.later(values - normaliser), reads.later(ids)

    def told() -> list[TokenLogprob]:
        rows = zip(chosen.tolist(), named.tolist(), best.tolist(), wanted, strict=True)
        return [
            TokenLogprob(logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
            for logprob, row_ids, row_values, count in rows
        ]

    return told


def prompt_logprobs(
    logits: Tensor, token_ids: Tensor, wanted: int, reads: StepReads
) -> Callable[[], list[PromptLogprob]]:
    """Log-probability and rank of each row's token [n] (any int64), and the `wanted` likeliest,
    once `reads` were waited for."""
    vocab_size = logits.shape[1]
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    known = (token_ids >= 0) & (token_ids < vocab_size)
    score = logits.gather(1, token_ids.clamp(0, vocab_size - 1)[:, None])
    score = score.masked_fill(~known[:, None], -math.inf)
    ranks = reads.later((logits > score).sum(dim=-1).add_(1))
    chosen = reads.later((score - normaliser)[:, 0])
    values, ids = largest(logits, min(max(1, wanted), vocab_size))
    named, best = reads.later(ids[:, :wanted]), reads.later((values - normaliser)[:, :wanted])

    def told() -> list[PromptLogprob]:
        likeliest = zip(named.tolist(), best.tolist(), strict=True)
        return [
            PromptLogprob(logprob, rank, tuple(zip(row_ids, row_values, strict=True)))
            for logprob, rank, (row_ids, row_values) in zip(
                chosen.tolist(), ranks.tolist(), likeliest, strict=True
            )
        ]

    return told


def _flat_index(
    scores: Tensor, entries: Sequence[tuple[int, NDArray[np.int64]]]
) -> tuple[Tensor, Tensor]:
    """Row and column indices of all `(row, columns)` entries in order."""
    columns = np.concatenate([ids for _, ids in entries])
    rows = np.repeat([row for row, _ in entries], [len(ids) for _, ids in entries])
    return to_device(rows, scores.device), to_device(columns, scores.device)


def _like(scores: Tensor, values: NDArray[np.float32]) -> Tensor:
    return to_device(values, scores.device, scores.dtype)
