"""bf16 products by widened weights: float32 sums, rounded once, whatever the sizes of blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lookonce.model import bf16_products
from lookonce.model.bf16_products import MIN_ROWS, add_linear, linear, widen_products


@pytest.fixture(autouse=True)
def cpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bf16_products, "cpu_multiplies_bf16", lambda: False)
    with torch.inference_mode():
        yield


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded_once(exact: Tensor, found: Tensor) -> None:
    """Nothing is further from the exact answer than bf16's rounding of it, and a little."""
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)


@given(
    rows=st.integers(1, 30), width=st.integers(1, 40), outputs=st.integers(1, 50),
    block=st.sampled_from([64, 1000, 4 << 20]), biased=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_sizes_and_blocks(
    rows: int, width: int, outputs: int, block: int, biased: bool, seed: int
) -> None:
    x, weight, hidden = noise(rows, width, seed=seed), noise(outputs, width), noise(rows, outputs)
    bias = noise(outputs, seed=7) if biased else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(bf16_products, "cpu_multiplies_bf16", lambda: False)
        patch.setattr(bf16_products, "MIN_ROWS", 1)
        patch.setattr(bf16_products, "BLOCK_BYTES", block)
        patch.setattr(bf16_products, "BLOCK_ROWS", 7)
        rounded_once(exact, linear(x, weight, bias))
        rounded_once(exact + hidden.double(), add_linear(hidden, x, weight, bias))


def test_control_sums_that_are_rounded_are_noticed() -> None:
    x, weight = noise(8, 600), noise(5, 600)
    halves = linear(x[:, :300], weight[:, :300]) + linear(x[:, 300:], weight[:, 300:])
    with pytest.raises(AssertionError):
        rounded_once(x.double() @ weight.double().T, halves)


def test_leading_dimensions_stay() -> None:
    x, weight = noise(2, 3, 4, 16), noise(5, 16)
    assert linear(x, weight).shape == (2, 3, 4, 5)


def test_no_more_than_a_block_of_weights_is_widened_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(bf16_products, "BLOCK_BYTES", 4 * 64 * 10)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: sizes.append(a[0][0]) or empty(*a, **k))
    linear(noise(MIN_ROWS, 64), noise(95, 64))
    assert sizes == [10]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 4, stride=4)
        self.linear = nn.Linear(8, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.linear(self.convolution(pixels).flatten(2).transpose(1, 2))


def test_layers_of_a_model_are_replaced_and_compute_the_same() -> None:
    model = Model().to(torch.bfloat16)
    pixels = noise(2, 3, 16, 16)
    plain, exact = model(pixels), Model()
    exact.load_state_dict(model.state_dict())
    assert widen_products(model) == 2
    assert widen_products(model) == 0
    found = model(pixels)
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)
    expected = exact(pixels.float())
    assert (found.float() - expected).abs().max() < 2e-2
    wide = pixels.float()
    assert torch.equal(model.float()(wide), expected)


def test_a_cpu_that_multiplies_bf16_keeps_its_own_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bf16_products, "cpu_multiplies_bf16", lambda: True)
    assert widen_products(Model()) == 0
    monkeypatch.setattr(bf16_products, "_product", None)
    linear(noise(8, 16), noise(5, 16))
