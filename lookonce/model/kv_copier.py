"""Whole KV blocks between the device's pages and host memory, for the external tiers.

A block's bytes outside are `[layer, k or v, row, head, dim]`: all of it in one piece, while on the
device each layer's keys and values lie apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lookonce.model.kv_pages import KVPages
from lookonce.types.kv import KVLayout


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
