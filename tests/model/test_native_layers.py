"""Compiled norms and gates say what torch says of the same numbers in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from lookonce.model.native import compiled
from lookonce.model.native.layers import rms_norm, silu_gate

pytestmark = pytest.mark.usefixtures("each_build")
DTYPES = ((torch.float32, 1e-5), (torch.bfloat16, 8e-3))


def noise(*shape: int, seed: int) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def torch_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(hidden.float(), weight.shape, weight.float(), 1e-6)


def torch_gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate) * up


def agree(found: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float) -> None:
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 99), st.sampled_from(DTYPES))
def test_norms(count: int, width: int, seed: int, kind: tuple[torch.dtype, float]) -> None:
    dtype, tolerance = kind
    hidden, weight = noise(count, width, seed=seed).to(dtype), noise(width, seed=1).to(dtype)
    agree(rms_norm(hidden, weight, 1e-6), torch_norm(hidden, weight), dtype, tolerance)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 99), st.sampled_from(DTYPES))
def test_gates(count: int, width: int, seed: int, kind: tuple[torch.dtype, float]) -> None:
    dtype, tolerance = kind
    gate_up = noise(count, 2 * width, seed=seed).to(dtype)
    agree(silu_gate(gate_up), torch_gate(gate_up), dtype, tolerance)


def test_large_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[1e4, -1e4, 90.0, -90.0] * 8 + [2.0] * 32])
    agree(silu_gate(gate_up), torch_gate(gate_up), torch.float32, 1e-5)


@pytest.mark.parametrize("compute", [lambda x: rms_norm(x, torch.ones(32), 1e-6), silu_gate])
def test_what_is_not_a_number_stays_in_its_row(compute: Callable[[Tensor], Tensor]) -> None:
    hidden = noise(4, 32, seed=0)
    hidden[2, 5] = float("nan")
    broken = compute(hidden).isnan().any(dim=1)
    assert broken.tolist() == [False, False, True, False]


def test_views_and_many_rows_and_threads() -> None:
    wide, weight = noise(600, 48, seed=3), noise(24, seed=4)
    view = wide[:, ::2]
    torch.set_num_threads(2)
    try:
        agree(rms_norm(view, weight, 1e-6), torch_norm(view, weight), torch.float32, 1e-5)
        agree(
            rms_norm(wide[:, :24], weight, 1e-6),
            torch_norm(wide[:, :24], weight),
            torch.float32,
            1e-5,
        )
        agree(silu_gate(wide), torch_gate(wide), torch.float32, 1e-5)
    finally:
        torch.set_num_threads(1)


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        rms_norm(noise(2, 32, seed=0), torch.ones(16), 1e-6)


def test_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "kernels", None)
    hidden, weight = noise(3, 20, seed=0), noise(20, seed=1)
    agree(rms_norm(hidden, weight, 1e-6), torch_norm(hidden, weight), torch.float32, 1e-5)
    agree(silu_gate(hidden), torch_gate(hidden), torch.float32, 1e-5)
