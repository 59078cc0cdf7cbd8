"""Attention on the CPU: the C++ kernel in place over the pages, or plain torch without it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from lookonce.model.attention.backend import AttentionCall, AttentionFeatures, AttentionMetadata
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.kv_pages import LayerPages

logger = logging.getLogger(__name__)

KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def _load_kernel() -> tuple[Callable[..., None] | None, str]:
    """The compiled function, or None and why it is not there."""
    try:
        from lookonce.model.attention._paged import paged_attention
    except ImportError as error:
        return None, str(error)
    return paged_attention, ""


_kernel, _why_missing = _load_kernel()


def kernel_available() -> bool:
    """Whether the C++ kernel was built for this machine."""
    return _kernel is not None


class KernelBackend:
    """The C++ kernel: every feature, fp32 and bf16, decode and prefill alike.

    It is used for chunks of any length: measured (`lookonce bench attention`), it is ahead of
    gathering keys for torch's SDPA from single tokens to chunks of thousands.
    """

    name = "cpu"
    default_block_size = 16
    block_size_multiple = 1

    def supports(self, features: AttentionFeatures) -> bool:
        return features.dtype in KERNEL_DTYPES

    def forward(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        call: AttentionCall,
    ) -> Tensor:
        if _kernel is None:
            raise RuntimeError("the attention kernel is not built")
        _check(layer, query, key, value, metadata)
        keys, values = layer
        tokens, num_heads, head_dim = query.shape
        output = torch.empty((tokens, num_heads, head_dim), dtype=query.dtype)
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        visible_end = metadata.visible_end
        query_token, query_head, _ = query.stride()
        key_token, key_head, _ = key.stride()
        value_token, value_head, _ = value.stride()
        _kernel(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            metadata.query_start.data_ptr(),
            metadata.kv_lens.data_ptr(),
            metadata.block_tables.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            0 if visible_end is None else visible_end.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            query_token,
            query_head,
            key_token,
            key_head,
            value_token,
            value_head,
            metadata.block_tables.stride(0),
            metadata.num_sequences,
            num_heads,
            key.shape[1],
            head_dim,
            keys.shape[1],
            keys.shape[0],
            call.sliding_window or 0,
            call.scale,
            call.softcap or 0.0,
            torch.get_num_threads(),
            query.dtype == torch.bfloat16,
        )
        return output


def cpu_backend() -> KernelBackend | ReferenceBackend:
    """The kernel where it was built; otherwise torch, said once."""
    if kernel_available():
        return KernelBackend()
    logger.warning(
        "attention runs in plain torch, several times slower: the C++ kernel is missing (%s)",
        _why_missing,
    )
    return ReferenceBackend()


def _check(
    layer: LayerPages, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata
) -> None:
    """The kernel trusts these; it checks slots, blocks and lengths itself."""
    keys, values = layer
    tokens, _, head_dim = query.shape
    fitting = (tokens, *keys.shape[2:])
    if key.shape != fitting or value.shape != fitting or keys.shape != values.shape:
        raise ValueError(f"keys {key.shape} and values {value.shape} do not fit {keys.shape}")
    if head_dim != fitting[2]:
        raise ValueError(f"queries of head size {head_dim} do not fit pages of {fitting[2]}")
    if tokens != metadata.num_tokens:
        raise ValueError(f"{tokens} queries, {metadata.num_tokens} tokens in the metadata")
    if not query.dtype == key.dtype == value.dtype == keys.dtype == values.dtype:
        raise ValueError(f"queries are {query.dtype}, pages {keys.dtype}")
    if not query.stride(2) == key.stride(2) == value.stride(2) == 1:
        raise ValueError("head vectors must be contiguous")
