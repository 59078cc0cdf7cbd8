from __future__ import annotations

import pytest
import torch

from benchmarks.micro import Load, Shape, measure
from lookonce.model.attention.cpu import kernel_available

SHAPE = Shape("tiny", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.skipif(not kernel_available(), reason="the C++ kernel is not built")
@pytest.mark.parametrize("load", [Load(3, 1, 20), Load(2, 7, 0), Load(2, 5, 18)])
def test_the_ways_agree_and_each_gets_a_figure(load: Load) -> None:
    figures = measure(SHAPE, load, torch.float32, seconds=0.0)
    assert len(figures) == 3
    assert all(figure > 0 for figure in figures)
