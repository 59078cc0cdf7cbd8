from __future__ import annotations

import ctypes
import mmap
import time

import torch
from torch import Tensor

from lookonce.model.kv_pages import HUGE_PAGE, AheadMapper, KVPages, PageCopier
from lookonce.types.kv import KVLayout

LIBC = ctypes.CDLL(None)
LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def mapped_bytes(page: Tensor) -> int:
    """How much of it takes memory."""
    flags = ctypes.create_string_buffer(page.nbytes // mmap.PAGESIZE)
    assert LIBC.mincore(page.data_ptr(), page.nbytes, flags) == 0
    return sum(flag & 1 for flag in flags.raw) * mmap.PAGESIZE


def test_pages_are_mapped_a_huge_page_ahead_of_the_blocks_that_are_written() -> None:
    pages = KVPages(KVLayout(2, 16, 2, 64, "float32"), 2048)
    mapper = AheadMapper(pages)
    assert not any(map(mapped_bytes, pages.pages))
    in_first = HUGE_PAGE // (pages.pages[0].nbytes // 2048)
    for last, huge_pages in ((3, 2), (in_first - 1, 2), (in_first + 1, 3)):
        mapper.reach([1, last, 0])
        while min(map(mapped_bytes, pages.pages)) < huge_pages * HUGE_PAGE:
            time.sleep(0.001)
        assert max(map(mapped_bytes, pages.pages)) < (huge_pages + 2) * HUGE_PAGE
    pages.pages[0].fill_(1)
    mapper.reach([2047])
    while min(map(mapped_bytes, pages.pages)) < pages.pages[0].nbytes:
        time.sleep(0.001)
    assert pages.pages[0].min() == 1
    assert not pages.pages[1].any()


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
