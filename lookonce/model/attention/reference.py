"""Attention in plain torch with every feature on any device; other backends are tested against it.

Keys and values of one sequence after the other are gathered from the pages. It serves models whose
features a faster backend lacks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lookonce.model.attention.backend import AttentionCall, AttentionFeatures, AttentionMetadata
from lookonce.model.kv_pages import LayerPages


def write_pages(layer: LayerPages, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values [T, Hkv, D] to the slots `slot_mapping` [T]."""
    layer.keys.flatten(0, 1).index_copy_(0, slot_mapping, key.to(layer.keys.dtype))
    layer.values.flatten(0, 1).index_copy_(0, slot_mapping, value.to(layer.values.dtype))


class ReferenceBackend:
    """torch's SDPA over gathered keys; explicit softmax for softcap or sinks."""

    name = "reference"
    default_block_size = 16
    block_size_multiple = 1
    is_capturable = False

    def supports(self, features: AttentionFeatures) -> bool:
        return True

    def forward(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        call: AttentionCall,
    ) -> Tensor:
        write_pages(layer, key, value, metadata.slot_mapping)
        output = query.new_empty(query.shape)
        start = 0
        for index, (length, total) in enumerate(
            zip(metadata.query_lens, metadata.context_lens, strict=True)
        ):
            rows = slice(start, start + length)
            blocks = metadata.block_tables[index, : -(-total // layer.keys.shape[1])]
            output[rows] = _attend(
                query[rows],
                layer.keys[blocks].flatten(0, 1)[:total].to(query.dtype),
                layer.values[blocks].flatten(0, 1)[:total].to(query.dtype),
                visibility(metadata, index, start, call.sliding_window),
                call,
            )
            start += length
        return output


def visibility(
    metadata: AttentionMetadata, index: int, start: int, sliding_window: int | None
) -> Tensor | None:
    """[query_len, kv_len] which keys each token of sequence `index` sees; None: all.

    `start` is the sequence's first row.
    """
    length, total = metadata.query_lens[index], metadata.context_lens[index]
    windowed = sliding_window is not None and sliding_window < total
    if length == 1 and not windowed:
        return None
    device = metadata.kv_lens.device
    positions = torch.arange(total - length, total, device=device)[:, None]
    keys = torch.arange(total, device=device)[None]
    if metadata.visible_end is None:
        seen = keys <= positions
    else:
        seen = keys < metadata.visible_end[start : start + length, None]
    if sliding_window is not None:
        seen &= keys > positions - sliding_window
    return seen


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    call: AttentionCall,
) -> Tensor:
    """query [Q, Hq, D], keys and values [L, Hkv, D], seen [Q, L] → [Q, Hq, D]."""
    query, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (query, keys, values))
    if call.softcap is None and call.sinks is None:
        output = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, scale=call.scale, enable_gqa=True
        )
    else:
        output = _explicit_attend(query, keys, values, seen, call)
    return output[0].transpose(0, 1)


def _explicit_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    call: AttentionCall,
) -> Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = (query @ keys.transpose(-1, -2)).float() * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if call.sinks is None:
        weights = scores.softmax(-1)
    else:
        column = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return weights.to(query.dtype) @ values
