"""The paged key and value memory of every layer of one model.

    layers[i].keys    [num_blocks, block_size, Hkv, D]
    layers[i].values  [num_blocks, block_size, Hkv, D]

Block `b` holds the same tokens in every layer. Position `p` of a sequence with block table `table`
lives in block `table[p // block_size]`, row `p % block_size`; `slot = block * block_size + row`.
Which block belongs to whom is the scheduler's business: nothing here knows sequences.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookonce.types.kv import KVLayout


class LayerPages(NamedTuple):
    """One layer's pages, each [num_blocks, block_size, Hkv, D], contiguous."""

    keys: Tensor
    values: Tensor


def block_bytes(
    *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes one block takes in all layers, keys and values together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


class KVPages:
    """Allocated once; zeroed, so that a masked read of an unwritten row is never NaN.

    On a CPU the operating system hands out zeroed memory page by page as it is first touched, so a
    large pool costs nothing until it is used.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.layers = tuple(
            LayerPages(_zeros(shape, dtype, device), _zeros(shape, dtype, device))
            for _ in range(num_layers)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages of all layers."""
        return sum(page.nbytes for layer in self.layers for page in layer)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # `torch.zeros` would write every byte now: a second per GiB or more at start.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class PageCopier:
    """Implements `types.ports.KVPageCopier`; used by worker threads beside the step thread.

    PyTorch releases the interpreter while it copies. On CUDA all threads share the default stream,
    so a copy comes after the steps enqueued before it and before those enqueued after it.
    """

    def __init__(self, pages: KVPages) -> None:
        keys = pages.layers[0].keys
        self._pages = [page for layer in pages.layers for page in layer]
        self._device = keys.device
        self._dtype = keys.dtype
        self.layout = KVLayout(
            num_layers=pages.num_layers,
            block_size=pages.block_size,
            num_kv_heads=keys.shape[2],
            head_dim=keys.shape[3],
            dtype=str(keys.dtype).removeprefix("torch."),
        )

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
        """NumPy assigns rows by index three times as fast as PyTorch does."""
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
