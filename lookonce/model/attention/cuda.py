"""Paged attention on NVIDIA GPUs through torch's variable-length flash attention.

Written from torch 2.13's source (`torch.nn.attention.varlen`) and not yet run on a GPU. It relies
on:

* pages [num_pages, page_size, Hkv, D] with an int32 block table and `seqused_k`, and a page size
  that FlashAttention-2 takes: a multiple of 256;
* running sums of both query and key lengths: FlashAttention-2 needs both, although a block table
  makes those of the keys redundant;
* causal masks and windows aligned to the end of the keys; a window is (keys to the left, keys to
  the right), so `sliding_window` W, which counts the token itself, is (W - 1, 0);
* `num_splits=1` turns split-KV off: results do not depend on the batch, and no row is left
  unwritten.

Models with softcap, sinks or bidirectional items use the reference backend.
Nothing here reads a device tensor back or allocates by data: a decode step can be captured in a
CUDA graph whose metadata stays in `AttentionMetadataBuilder`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn_out

from lookonce.model.attention.backend import AttentionCall, AttentionFeatures, AttentionMetadata
from lookonce.model.attention.reference import write_pages
from lookonce.model.kv_pages import LayerPages

MAX_HEAD_DIM = 256
"""The largest head size of FlashAttention-2."""


class VarlenBackend:
    """fp16 and bf16; full and sliding-window causal attention."""

    name = "varlen"
    default_block_size = 256
    block_size_multiple = 256
    is_capturable = True

    def supports(self, features: AttentionFeatures) -> bool:
        plain = not (features.softcap or features.sinks or features.bidirectional)
        half = features.dtype in (torch.float16, torch.bfloat16)
        return plain and half and features.head_dim <= MAX_HEAD_DIM and features.head_dim % 8 == 0

    def forward(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        call: AttentionCall,
    ) -> Tensor:
        if call.softcap is not None or call.sinks is not None or metadata.visible_end is not None:
            raise ValueError("softcap, sinks and bidirectional items need the reference backend")
        write_pages(layer, key, value, metadata.slot_mapping)
        query = query.contiguous()
        output = torch.empty_like(query)
        varlen_attn_out(
            output,
            query,
            layer.keys,
            layer.values,
            metadata.query_start,
            metadata.kv_start,
            metadata.max_query_len,
            metadata.max_kv_len,
            scale=call.scale,
            window_size=(-1, 0) if call.sliding_window is None else (call.sliding_window - 1, 0),
            enable_gqa=True,
            seqused_k=metadata.kv_lens,
            block_table=metadata.block_tables,
            num_splits=1,
        )
        return output
