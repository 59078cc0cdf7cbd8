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
from typing import NamedTuple

import torch
from torch import Tensor


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
