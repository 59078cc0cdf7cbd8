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
import math
import mmap
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookonce.types.kv import KVLayout


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
