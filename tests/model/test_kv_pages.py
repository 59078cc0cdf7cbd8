from __future__ import annotations

import torch

from lookonce.model.kv_pages import KVPages, block_bytes


def test_every_layer_has_zeroed_pages_of_its_own() -> None:
    pages = KVPages(3, 5, 16, 2, 64, torch.bfloat16)
    assert [page.shape for layer in pages.layers for page in layer] == [(5, 16, 2, 64)] * 6
    pages.layers[1].keys.fill_(1)
    assert sum(page.any().item() for layer in pages.layers for page in layer) == 1


def test_a_block_costs_what_block_bytes_says() -> None:
    pages = KVPages(3, 5, 16, 2, 64, torch.float32)
    cost = block_bytes(
        num_layers=3, block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float32
    )
    assert pages.num_bytes == 5 * cost
