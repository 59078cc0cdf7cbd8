from __future__ import annotations

import torch

from lookonce.model.kv_pages import KVPages, PageCopier
from lookonce.types.kv import KVLayout


def test_every_layer_has_zeroed_pages_of_its_own() -> None:
    pages = KVPages(KVLayout(3, 16, 2, 64, "bfloat16"), 5)
    assert [page.shape for layer in pages.layers for page in layer] == [(5, 16, 2, 64)] * 6
    pages.layers[1].keys.fill_(1)
    assert sum(page.any().item() for layer in pages.layers for page in layer) == 1


def test_a_block_costs_what_block_bytes_says() -> None:
    layout = KVLayout(3, 16, 2, 64, "float32")
    assert KVPages(layout, 5).num_bytes == 5 * layout.block_bytes


def test_shared_pages_are_held_once_and_copied_as_one() -> None:
    layout = KVLayout(3, 16, 1, 24, "float32", shared=True)
    assert 2 * layout.block_bytes == KVLayout(3, 16, 1, 24, "float32").block_bytes
    assert layout.describe() != KVLayout(3, 16, 1, 24, "float32").describe()
    pages, others = KVPages(layout, 5), KVPages(layout, 4)
    assert pages.num_bytes == 5 * layout.block_bytes
    for number, layer in enumerate(pages.layers):
        assert layer.keys.data_ptr() == layer.values.data_ptr()
        layer.keys.copy_(torch.arange(layer.keys.numel()).view(layer.keys.shape) + number)
    copied = memoryview(bytearray(2 * layout.block_bytes))
    PageCopier(pages).gather([4, 1], copied)
    PageCopier(others).scatter([0, 3], copied)
    for layer, other in zip(pages.layers, others.layers, strict=True):
        assert torch.equal(other.values[[0, 3]], layer.values[[4, 1]])
