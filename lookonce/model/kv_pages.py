"""The paged key and value memory of every layer of one model.

    layers[i].keys    [num_blocks, block_size, Hkv, D]
    layers[i].values  [num_blocks, block_size, Hkv, D]

With latents (`attention.latent`) keys and values are the same memory.

Block `b` holds the same tokens in every layer. Position `p` of a sequence with block table `table`
lives in block `table[p // block_size]`, row `p % block_size`; `slot = block * block_size + row`.
The scheduler assigns blocks to sequences; these classes know no sequences.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookonce.types.kv import KVLayout

HUGE_PAGE = 2 << 20
MADV_POPULATE_WRITE = 23
"""Linux: map pages for writing, and leave what is in them."""
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class LayerPages(NamedTuple):
    """One layer's pages, each [num_blocks, block_size, Hkv, D], contiguous."""

    keys: Tensor
    values: Tensor


def kv_layout(
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    shared: bool = False,
) -> KVLayout:
    """The layout of one block of `dtype`. `shared`: keys are the values as well."""
    dtype_name = str(dtype).removeprefix("torch.")
    return KVLayout(num_layers, block_size, num_kv_heads, head_dim, dtype_name, shared)


class KVPages:
    """All layers' pages, allocated once and zeroed: a masked read of an unwritten row is not NaN.

    On a CPU the operating system maps zeroed memory page by page at the first touch, so a large
    pool takes no memory before it is used.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        layer_numbers: Sequence[int] | None = None,
    ) -> None:
        """`layer_numbers`: which of a decoder's layers have keys and values; None: all."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        shape = (num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        dtype = getattr(torch, layout.dtype)
        self.pages = tuple(zeros(shape, dtype, device) for _ in range(layout.num_pages))
        """Of each layer, one after the other, what `KVLayout` says that a block holds."""
        keys, values = self.pages, self.pages
        if not layout.shared:
            keys, values = self.pages[::2], self.pages[1::2]
        self.layers = tuple(LayerPages(*pair) for pair in zip(keys, values, strict=True))
        self._numbers = layer_numbers

    @cached_property
    def by_number(self) -> Sequence[LayerPages] | Mapping[int, LayerPages]:
        """The pages of each layer that has any, by its number in the decoder."""
        if self._numbers is None:
            return self.layers
        return dict(zip(self._numbers, self.layers, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages of all layers."""
        return sum(page.nbytes for page in self.pages)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeroed memory of which a CPU maps what is touched."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # `torch.zeros` would write every byte now: a second per GiB or more at start.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class AheadMapper:
    """Lets the system map pages on a CPU in a thread, before steps write to them.

    Blocks that were never used are taken in the order of their ids, so that all layers come to the
    end of a huge page in the same step. That step would wait until the system has cleared the next
    one for each of them: 8 of them took 37 ms on a virtual machine. One huge page of each layer is
    mapped ahead; what is in pages does not change. Where the system cannot do that (Linux below
    5.14), steps wait as before.
    """

    def __init__(self, pages: KVPages) -> None:
        self._pages = pages.pages
        self._block_bytes = self._pages[0].nbytes // pages.num_blocks
        on_cpu = sys.platform == "linux" and self._pages[0].device.type == "cpu"
        is_large = on_cpu and self._pages[0].nbytes > HUGE_PAGE
        self._next_block: float = 0 if is_large else math.inf
        """The first for which more has to be mapped."""
        self._mapped = 0
        """Bytes of each layer that are, or are being mapped."""

    def reach(self, block_ids: Sequence[int]) -> None:
        """The next step writes to these blocks. Called by one thread."""
        last = max(block_ids)
        if last < self._next_block:
            return
        huge_pages = last * self._block_bytes // HUGE_PAGE + 1
        self._next_block = huge_pages * HUGE_PAGE // self._block_bytes + 1
        start, self._mapped = self._mapped, (huge_pages + 1) * HUGE_PAGE
        thread = threading.Thread(target=self._map, args=(start, self._mapped), daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be had
            thread.start()

    def _map(self, start: int, end: int) -> None:
        for offset in range(start, end, HUGE_PAGE):
            for page in self._pages:
                length = min(HUGE_PAGE, page.nbytes - offset)
                if length <= 0:
                    continue
                if _libc.madvise(page.data_ptr() + offset, length, MADV_POPULATE_WRITE):
                    self._next_block = math.inf
                    return


class PageCopier:
    """Implements `types.ports.KVPageCopier`; used by worker threads beside the step thread.

    Host memory holds each block as one piece `[layer, k or v, row, head, dim]`; on the device each
    layer's keys and values lie apart. PyTorch releases the interpreter while it copies. On CUDA all
    threads share the default stream, so a copy comes after the steps enqueued before it and before
    those enqueued after it.
    """

    def __init__(self, pages: KVPages) -> None:
        self._pages = list(pages.pages)
        self._device = self._pages[0].device
        self._dtype = self._pages[0].dtype
        self.layout = pages.layout

    @torch.inference_mode()
    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        target = self._blocks(out, len(block_ids))
        ids = torch.tensor(block_ids, device=self._device)
        for index, page in enumerate(self._pages):
            if self._device.type == "cpu":
                torch.index_select(page, 0, ids, out=target[:, index])  # no copy between
            else:
                target[:, index].copy_(page.index_select(0, ids))

    @torch.inference_mode()
    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
        if self._device.type == "cpu":
            self._scatter_bytes(block_ids, data)
            return
        source = self._blocks(data, len(block_ids))
        ids = torch.tensor(block_ids, device=self._device)
        for index, page in enumerate(self._pages):
            page.index_copy_(0, ids, source[:, index].to(self._device))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _scatter_bytes(self, block_ids: Sequence[int], data: memoryview) -> None:
        """By NumPy, which assigns rows by index three times as fast as PyTorch."""
        source = np.frombuffer(data, dtype=np.uint8).reshape(len(block_ids), len(self._pages), -1)
        ids = list(block_ids)
        for index, page in enumerate(self._pages):
            page.view(len(page), -1).view(torch.uint8).numpy()[ids] = source[:, index]

    def _blocks(self, buffer: memoryview, num_blocks: int) -> Tensor:
        """[num_blocks, layer x (k, v), row, head, dim] over the buffer, without a copy."""
        layout = self.layout
        shape = (num_blocks, len(self._pages), layout.block_size, layout.num_kv_heads)
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        return flat.view(self._dtype).view(*shape, layout.head_dim)
