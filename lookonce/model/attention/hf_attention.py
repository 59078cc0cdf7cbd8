"""Paged attention as an attention implementation of transformers' models.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention` in every attention
layer. No mask function is registered under that name, so transformers builds no mask. The step's
metadata and pages are in a context variable, which is set around the model's forward. Without it
attention is plain SDPA: for a vision encoder that shares the text model's config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lookonce.model.attention.backend import AttentionCall, ForwardContext
from lookonce.model.kv_pages import LayerPages

ATTENTION_NAME = "lookonce_paged"
CAUSAL_LAYER = "lookonce_causal"
"""Attribute of attention modules: whether items are causal here, though not in other layers."""
LATENT = "lookonce_latent"
"""Attribute of attention modules: the `LatentAttention` of those that keep compressed keys."""


def set_text_attention(model: Any, name: str) -> None:
    """Let the text model of a transformers model use this attention, and its encoders what they do.

    A config that is its text model's own and has parts for encoders is told so part by part.
    """
    text = model.config.get_text_config(decoder=True)
    parts = {part: getattr(model.config, part, None) for part in model.config.sub_configs}
    named = next((part for part, config in parts.items() if config is text), None)
    if text is model.config and any(parts.values()):
        model.set_attn_implementation({"": name})
    elif named is None and model.config.is_encoder_decoder:
        # `get_text_config` has made a copy. An encoder with its own config keeps its attention; one
        # that shares the decoder's gets plain SDPA, since it runs outside of steps.
        model.set_attn_implementation({"": name})
    elif named is not None:
        model.set_attn_implementation({named: name})
    elif text is not model.config:
        model.set_attn_implementation({"text_config": name})
    else:
        model.set_attn_implementation(name)


_context: ContextVar[ForwardContext | None] = ContextVar("paged_forward_context", default=None)


@contextmanager
def paged_forward_context(context: ForwardContext) -> Iterator[None]:
    """In this block attention reads and writes the context's pages as its metadata says."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def in_paged_forward() -> bool:
    """Whether attention reads and writes pages now."""
    return _context.get() is not None


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
    """query and key [1, H, T, D] after rope, value [1, Hkv, T, Dv ≤ D] → [1, T, Hq, Dv].

    The pages hold D numbers per value too: narrower values are padded with zeros. Pages may have
    more heads or wider ones than a layer (`_as_in_pages`). With latents (`latent`) the query is
    changed to theirs first, and the output back.
    """
    context = _context.get()
    if context is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    is_causal = getattr(module, "is_causal", True)
    if not is_causal and context.cross is not None:
        return context.cross.attend(module.layer_idx, query, scale), None
    if attention_mask is not None or not is_causal:
        raise ValueError("paged attention is causal self-attention and takes no mask")
    latent = getattr(module, LATENT, None)
    if latent is not None:
        query = latent.query(query)
    width = value.shape[-1]
    if width != key.shape[-1]:
        value = pad(value, (0, key.shape[-1] - width))
    pages = context.kv_pages.by_number[module.layer_idx]
    if isinstance(pages, LayerPages) and pages.keys.shape[2:] != (key.shape[1], key.shape[3]):
        query, key, value = _as_in_pages(pages, query, key, value)
    metadata = context.metadata
    if metadata.visible_end is not None and getattr(module, CAUSAL_LAYER, False):
        metadata = dataclasses.replace(metadata, visible_end=None)
    output = context.backend.forward(
        pages,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        metadata,
        AttentionCall(scale, sliding_window or None, softcap, s_aux),
    )
    output = output[..., :width].unsqueeze(0)
    return output if latent is None else latent.output(output), None


def _as_in_pages(
    pages: LayerPages, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layer with fewer or narrower heads than the pages: heads of keys and values repeated,
    which leaves each to its queries, and all three padded with zeros, which changes no score."""
    heads, width = pages.keys.shape[2:]
    repeats = heads // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    query, key, value = (pad(each, (0, width - each.shape[-1])) for each in (query, key, value))
    return query, key, value


AttentionInterface.register(ATTENTION_NAME, paged_attention)
