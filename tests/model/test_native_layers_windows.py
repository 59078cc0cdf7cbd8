"""Window attention by compiled code equals attention over each window alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from lookonce.model.native.layers import attend_windows, attends_windows

pytestmark = [
    pytest.mark.skipif(
        not attends_windows(torch.empty(0)), reason="window attention is not compiled here"
    ),
    pytest.mark.usefixtures("each_build"),
]
DTYPES = (
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 1e-2, id="bfloat16"),
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rope_of(rows: int, dim: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    angles = noise(rows, dim // 2, seed=seed)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [S, heads, D]; written out as transformers does."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def expected(qkv: Tensor, cos: Tensor, sin: Tensor, bounds: list[int], scale: float) -> Tensor:
    """[S, heads * D], window by window, in float64."""
    query, key, value = qkv.double().unbind(1)
    query, key = turned(query, cos.double(), sin.double()), turned(key, cos.double(), sin.double())
    windows = [
        functional.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1),
            key[begin:end].transpose(0, 1),
            value[begin:end].transpose(0, 1),
            scale=scale,
        ).transpose(0, 1)
        for begin, end in itertools.pairwise(bounds)
        if begin < end
    ]
    return torch.cat(windows).flatten(1)


def agree(qkv: Tensor, bounds: list[int], tolerance: float, scale: float = 0.3) -> None:
    if not attends_windows(qkv):
        pytest.skip("this CPU does not multiply bf16")
    cos, sin = rope_of(qkv.shape[0], qkv.shape[-1])
    found = attend_windows(qkv, cos, sin, torch.tensor(bounds), scale)
    assert found.dtype == qkv.dtype
    difference = (found.double() - expected(qkv, cos, sin, bounds, scale)).abs().max()
    assert difference <= tolerance * qkv.abs().max()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(any),
    heads=st.integers(1, 3),
    half=st.integers(1, 41),
    seed=st.integers(0, 99),
)
def test_any_windows(lengths: list[int], heads: int, half: int, seed: int) -> None:
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    agree(noise(bounds[-1], 3, heads, 2 * half, seed=seed), bounds, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("dim", [40, 64, 80])
def test_a_window_of_many_chunks(dtype: torch.dtype, tolerance: float, dim: int) -> None:
    agree(noise(700, 3, 2, dim).to(dtype), [0, 700], tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_windows_of_odd_lengths(dtype: torch.dtype, tolerance: float) -> None:
    agree(noise(130, 3, 2, 36).to(dtype), [0, 1, 64, 127, 130], tolerance)


def test_scores_that_are_far_apart_do_not_overflow() -> None:
    agree(100 * noise(300, 3, 1, 32), [0, 300], 1e-4)


def test_more_threads_compute_the_same() -> None:
    qkv, bounds = noise(300, 3, 2, 32), torch.tensor([0, 100, 300])
    cos, sin = rope_of(300, 32)
    alone = attend_windows(qkv, cos, sin, bounds, 0.2)
    torch.set_num_threads(2)
    try:
        together = attend_windows(qkv, cos, sin, bounds, 0.2)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, together)


def test_what_is_not_a_number_stays_in_its_window() -> None:
    qkv = noise(20, 3, 1, 16)
    qkv[3] = float("nan")
    found = attend_windows(qkv, *rope_of(20, 16), torch.tensor([0, 8, 20]), 0.2)
    assert found[:8].isnan().all()
    assert found[8:].isfinite().all()


@pytest.mark.parametrize("bounds", [[0, 10], [1, 20], [0, 12, 8, 20], [0, 21]])
def test_windows_that_do_not_cover_the_rows_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="do not cover"):
        attend_windows(noise(20, 3, 1, 16), *rope_of(20, 16), torch.tensor(bounds), 0.2)


def test_bf16_is_refused_where_the_cpu_does_not_multiply_it() -> None:
    qkv = noise(20, 3, 1, 16).bfloat16()
    if attends_windows(qkv):
        pytest.skip("this CPU multiplies bf16")
    with pytest.raises(ValueError, match="bf16"):
        attend_windows(qkv, *rope_of(20, 16), torch.tensor([0, 20]), 0.2)


def test_rope_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="rope"):
        attend_windows(noise(20, 3, 1, 16), *rope_of(19, 16), torch.tensor([0, 20]), 0.2)
