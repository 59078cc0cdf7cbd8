"""The compiled argmax and NumPy's say the same, also of what is not a number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from lookonce.model import logits_processors
from lookonce.model.logits_processors import FAILED
from lookonce.model.native import compiled

SCORES = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan])
)


pytestmark = pytest.mark.usefixtures("each_build")


@pytest.mark.skipif(compiled.kernels is None, reason="argmax is not compiled here")
@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=70), elements=SCORES))
def test_both_ways_agree(scores: np.ndarray) -> None:
    found = logits_processors.argmax_on_host(torch.from_numpy(scores))
    assert found == logits_processors._argmax_in_place(scores)


def test_the_first_of_equals_is_taken() -> None:
    scores = torch.zeros(2, 50)
    scores[0, [7, 33]] = 1.0
    assert logits_processors.argmax_on_host(scores) == [7, 0]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_that_is_no_distribution_fails_alone(broken: float) -> None:
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    scores[1, 49] = broken
    tokens = logits_processors.argmax_on_host(scores)
    assert tokens[1] == FAILED
    assert tokens[::2] == scores[::2].argmax(dim=1).tolist()


def test_rows_of_a_wider_tensor() -> None:
    scores = torch.randn(4, 60)[:, :30]
    assert logits_processors.argmax_on_host(scores) == scores.argmax(dim=1).tolist()
