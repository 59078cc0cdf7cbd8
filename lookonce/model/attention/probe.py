"""A small step on which two ways of computing are compared before the faster one is trusted.

It is a decode over keys of before and a prompt, so that compiled attention goes both its ways:
straight from the pages for few rows per KV head, in matrix products for many. No count of keys or
rows is a multiple of a vector or a tile.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lookonce.model.attention.backend import AttentionMetadata
from lookonce.model.kv_pages import KVPages, kv_layout
from lookonce.model.step_inputs import AttentionMetadataBuilder

PROBE_TOKENS = 22
_CONTEXT, _PROMPT = 9, PROBE_TOKENS - 1
"""Keys of the decode, its own among them, and of the prompt."""
_BLOCK_SIZE = 16
_TABLES = np.array([[1, 0], [2, 0]], np.int32)


def probe_pages(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> KVPages:
    """Pages for the step, with random keys and values of before; every call gives the same."""
    layout = kv_layout(num_layers, _BLOCK_SIZE, num_kv_heads, head_dim, dtype)
    pages = KVPages(layout, 3, device)
    generator = torch.Generator().manual_seed(0)
    for layer in pages.layers:
        for tensor in layer:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pages


def probe_metadata(device: torch.device | str = "cpu") -> AttentionMetadata:
    buffers = AttentionMetadataBuilder(
        max_num_seqs=2,
        max_num_tokens=PROBE_TOKENS,
        max_blocks_per_seq=_TABLES.shape[1],
        block_size=_BLOCK_SIZE,
        device=device,
    )
    return buffers.build([1, _PROMPT], [_CONTEXT, _PROMPT], _TABLES, num_decodes=1)


def probe_positions(axes: int) -> Tensor:
    """The position ids of the step: [1, T], or [axes, 1, T] with multi-axis rope."""
    positions = torch.cat((torch.tensor([_CONTEXT - 1]), torch.arange(_PROMPT))).unsqueeze(0)
    return positions if axes == 1 else positions.expand(axes, 1, -1)
