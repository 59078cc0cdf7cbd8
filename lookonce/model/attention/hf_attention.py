"""The hook through which transformers' models attend over our pages.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention` in every attention
layer. No mask function is registered under that name, so transformers builds no mask. What the step
looks like travels in a context variable that the runner sets around the forward; outside such a
context (a vision tower that shares the text model's config) attention is plain SDPA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lookonce.model.attention.backend import AttentionBackend, AttentionCall, AttentionMetadata
from lookonce.model.kv_pages import KVPages

ATTENTION_NAME = "lookonce_paged"


class ForwardContext(NamedTuple):
    metadata: AttentionMetadata
    backend: AttentionBackend
    kv_pages: KVPages


_context: ContextVar[ForwardContext | None] = ContextVar("paged_forward_context", default=None)


@contextmanager
def paged_forward_context(
    metadata: AttentionMetadata, backend: AttentionBackend, kv_pages: KVPages
) -> Iterator[None]:
    """Attention inside this block reads and writes `kv_pages` as `metadata` says."""
    token = _context.set(ForwardContext(metadata, backend, kv_pages))
    try:
        yield
    finally:
        _context.reset(token)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D], after rope → [1, T, Hq, D]."""
    context = _context.get()
    if context is None:
        return _dense_attention(module, query, key, value, attention_mask, scaling, kwargs)
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ValueError("paged attention is causal self-attention and takes no mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = context.backend.forward(
        context.kv_pages.layers[module.layer_idx],
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        context.metadata,
        AttentionCall(scale, sliding_window or None, softcap, s_aux),
    )
    return output.unsqueeze(0), None


def _dense_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return output, None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
