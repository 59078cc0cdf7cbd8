"""The compiled draw takes the token that torch takes, but where rounding decides."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lookonce.model import logits_processors
from lookonce.model.logits_processors import FAILED, NO_TOP_K, RowFilter
from lookonce.model.native import compiled

pytestmark = [
    pytest.mark.usefixtures("each_build"),
    pytest.mark.skipif(compiled.kernels is None, reason="the draw is not compiled here"),
]

FILTERS = st.builds(
    RowFilter,
    temperature=st.sampled_from([1e-3, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from([NO_TOP_K, 1, 2, 7, 64, 65, 400]),
    top_p=st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
SEEDS = st.integers(0, 2**64 - 1)
SIZES = st.sampled_from([1, 7, 8, 255, 256, 257, 700, 5000])


def drawn(scores: torch.Tensor, filters: list[RowFilter | None], seed: int = 0) -> list[int]:
    rows = range(len(filters))
    tokens = logits_processors.draw_on_host(scores, filters, [seed] * len(filters), list(rows))
    assert tokens is not None
    return tokens


def left_by(scores: torch.Tensor, row: RowFilter) -> np.ndarray:
    """What the filter leaves of one row, by torch: probabilities, up to a factor."""
    probs = torch.softmax(scores[None] / np.float32(row.temperature), dim=-1)
    probs = logits_processors._apply_min_p(probs, [row])
    return logits_processors._apply_top_k_top_p(probs, [row])[0].double().numpy()


@given(SIZES, st.integers(0, 2**32), st.sampled_from([0.1, 2.0, 20.0]), FILTERS, SEEDS)
def test_the_token_is_where_the_uniform_number_falls(size, source, spread, row, seed):
    """Within a tolerance for sums, and for a threshold that two neighbours may straddle."""
    scores = torch.randn(size, generator=torch.Generator().manual_seed(source)) * spread
    [token] = drawn(scores[None], [row], seed)
    kept = left_by(scores, row)
    uniform = float(logits_processors.uniforms([seed], [0])[0])
    running = np.concatenate([[0.0], np.cumsum(kept)]) / kept.sum()
    near = np.sort(np.unique(kept[kept > 0]))[:2]  # the smallest kept, and the next
    slack = 2e-6 + (near[0] / kept.sum() if row.top_p < 1 or row.min_p else 0)
    assert running[token] - slack <= uniform <= running[token + 1] + slack


@given(arrays(np.float32, 300, elements=st.sampled_from([0.0, 1.0, 2.0])), FILTERS, SEEDS)
def test_equals_are_kept_or_left_together(values, row, seed):
    """Every token that can come is one that torch keeps, also where many are equally likely."""
    scores = torch.from_numpy(values)
    kept = left_by(scores, row)
    tokens = [drawn(scores[None], [row], seed ^ i)[0] for i in range(5)]
    assert all(kept[token] > 0 for token in tokens)


def test_uniform_numbers_are_those_of_the_other_way():
    """Of equally likely tokens it is the one at the uniform number, for rows, seeds and places."""
    size, seeds, at = 1000, [0, 5, 2**64 - 1, 2**63], [0, 1, 70_000, 3]
    uniform = logits_processors.uniforms(seeds, at)
    row = RowFilter(1.0, NO_TOP_K, 1.0, 0.0)
    tokens = logits_processors.draw_on_host(torch.zeros(4, size), [row] * 4, seeds, at)
    assert tokens == [int(number * size) for number in uniform]


@given(st.lists(st.sampled_from(["greedy", "random", "nan", "infinite", "nothing"]), min_size=1))
def test_rows_are_drawn_each_by_itself(kinds):
    """Greedy rows among others get their likeliest token, a broken one fails alone."""
    scores = torch.randn(len(kinds), 513, generator=torch.Generator().manual_seed(len(kinds)))
    row = RowFilter(1.0, 3, 0.9, 0.0)
    filters = [None if kind == "greedy" else row for kind in kinds]
    for i, kind in enumerate(kinds):
        if kind == "nan":
            scores[i, 512] = math.nan
        elif kind == "infinite":
            scores[i, 0] = math.inf
        elif kind == "nothing":
            scores[i] = -math.inf
    best = scores.nan_to_num(-math.inf).topk(3).indices.tolist()
    for i, token in enumerate(drawn(scores, filters)):
        expected = {"greedy": best[i][:1], "random": best[i]}.get(kinds[i], [FAILED])
        assert token in expected


def test_masked_tokens_never_come():
    scores = torch.full((64, 300), -math.inf)
    scores[:, [3, 299]] = 0.0
    row = RowFilter(5.0, NO_TOP_K, 1.0, 0.0)
    assert set(drawn(scores, [row] * 64)) == {3, 299}


def test_what_does_not_fit_is_refused():
    kernels = compiled.kernels
    assert kernels is not None
    scores, places = torch.zeros(2, 5), torch.zeros(2, 2, dtype=torch.int64)
    right = torch.tensor([[1.0, 1.0, 1.0, 0.0]] * 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        kernels.draw(scores, right.float(), places)
    with pytest.raises(ValueError, match="parameters"):
        kernels.draw(scores, right[:1], places)
    with pytest.raises(ValueError, match="top-k"):
        kernels.draw(scores, right * torch.tensor([1.0, 0.0, 1.0, 1.0]).double(), places)
    with pytest.raises(ValueError, match="scores"):
        kernels.draw(torch.zeros(2, 0), right, places)
