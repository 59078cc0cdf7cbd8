from __future__ import annotations

import pytest
import torch

from benchmarks.attention import (
    AttentionLoad,
    AttentionShape,
    measure,
    measure_long,
    measure_product,
)
from lookonce.model.attention.cpu import kernel_available

SHAPE = AttentionShape("tiny", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.skipif(not kernel_available(), reason="the C++ kernel is not built")
@pytest.mark.parametrize(
    "load", [AttentionLoad(3, 1, 20), AttentionLoad(2, 7, 0), AttentionLoad(2, 5, 18)]
)
def test_the_ways_agree_and_each_gets_a_figure(load: AttentionLoad) -> None:
    figures = measure(SHAPE, load, torch.float32, seconds=0.0)
    assert len(figures) == 3
    assert all(figure > 0 for figure in figures)


@pytest.mark.skipif(not kernel_available(), reason="the C++ kernel is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_get_figures_and_the_number_of_threads_stays(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    with torch.inference_mode():
        figures = measure_long(SHAPE, AttentionLoad(1, 3, 20_000), dtype, seconds=0.0)
    assert len(figures) == 4
    assert all(figure > 0 for figure in figures)
    assert torch.get_num_threads() == before


def test_products_get_figures() -> None:
    assert all(figure > 0 for figure in measure_product(64, 48, 16, seconds=0.0))
