from __future__ import annotations

from lookonce.model.kv_pages import KVPages
from lookonce.types.kv import KVLayout


def test_every_layer_has_zeroed_pages_of_its_own() -> None:
    pages = KVPages(KVLayout(3, 16, 2, 64, "bfloat16"), 5)
    assert [page.shape for layer in pages.layers for page in layer] == [(5, 16, 2, 64)] * 6
    pages.layers[1].keys.fill_(1)
    assert sum(page.any().item() for layer in pages.layers for page in layer) == 1


def test_a_block_costs_what_block_bytes_says() -> None:
    layout = KVLayout(3, 16, 2, 64, "float32")
    assert KVPages(layout, 5).num_bytes == 5 * layout.block_bytes
