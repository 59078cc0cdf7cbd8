from __future__ import annotations

import pytest
import torch

from benchmarks.attention import AttentionLoad, AttentionShape, measure
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
