"""Log-probabilities of prompt tokens: each is judged by the logits after the one before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lookonce.model.input_batch import SequenceTable
from lookonce.model.logits_processors import prompt_logprobs
from lookonce.types.request import PromptLogprob
from lookonce.types.step import NewSequence, ScheduledSequence

SLICE_ELEMENTS = 1 << 24
"""Logits that exist at a time, whatever the vocabulary and the chunk: 64 MiB."""


class _Asked(NamedTuple):
    num_prompt_tokens: int
    wanted: int


class _Part(NamedTuple):
    """Rows `[first, first + len(token_ids))` of a step predict these tokens."""

    seq_id: int
    first: int
    token_ids: Tensor
    wanted: int


class PromptScores:
    """Knows which sequences asked, and scores what a step computes of their prompts."""

    def __init__(self, table: SequenceTable, vocab_size: int) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._asked: dict[int, _Asked] = {}

    def learn(self, new: NewSequence) -> None:
        """Samples share their prompt: the first tells. One that has generated has told."""
        wanted = new.sampling.prompt_logprobs
        if wanted is None or new.sample_index or len(new.token_ids) > new.num_prompt_tokens:
            return
        self._asked[new.seq_id] = _Asked(new.num_prompt_tokens, wanted)

    def forget(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._asked.pop(seq_id, None)

    def parts(self, chunks: Sequence[ScheduledSequence]) -> list[_Part]:
        """What there is to score in a step; nearly always nothing."""
        if not self._asked:
            return []
        parts, row = [], 0
        for chunk in chunks:
            asked = self._asked.get(chunk.seq_id)
            if asked is not None:
                last = min(chunk.start + chunk.num_tokens, asked.num_prompt_tokens - 1)
                known = self._table.tokens[self._table.row_of(chunk.seq_id)]
                token_ids = torch.from_numpy(known[chunk.start + 1 : last + 1].astype("int64"))
                if len(token_ids):
                    parts.append(_Part(chunk.seq_id, row, token_ids, asked.wanted))
            row += chunk.num_tokens
        return parts

    def score(
        self, hidden: Tensor, parts: Iterable[_Part], predict: Callable[[Tensor], Tensor]
    ) -> dict[int, list[PromptLogprob]]:
        """Of the last hidden states [T, H] of a step; `predict` makes logits [n, V] of them."""
        size = max(1, SLICE_ELEMENTS // self._vocab_size)
        scored: dict[int, list[PromptLogprob]] = {}
        for part in parts:
            entries = scored[part.seq_id] = []
            for start in range(0, len(part.token_ids), size):
                token_ids = part.token_ids[start : start + size].to(hidden.device)
                first = part.first + start
                logits = predict(hidden[first : first + len(token_ids)])
                entries += prompt_logprobs(logits, token_ids, part.wanted)
        return scored
