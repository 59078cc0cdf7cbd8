"""Attention on the CPU: the C++ kernel in place over the pages, or plain torch without it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from lookonce.model.attention.backend import AttentionCall, AttentionFeatures, AttentionMetadata
from lookonce.model.attention.probe import PROBE_TOKENS, probe_metadata, probe_pages
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.kv_pages import LayerPages

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference to torch's answer to a probe, relative to its largest value, for each type
that the kernel computes."""


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
        return features.dtype in TOLERANCE

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


def cpu_backend(features: AttentionFeatures) -> KernelBackend | ReferenceBackend:
    """The kernel where it was built and says what torch says; otherwise torch, said once."""
    kernel = KernelBackend()
    if not kernel.supports(features):
        return ReferenceBackend()
    fault = f"is missing ({_why_missing})" if _kernel is None else _find_fault(kernel, features)
    if fault is None:
        return kernel
    logger.warning("attention runs in plain torch, several times slower: the C++ kernel %s", fault)
    return ReferenceBackend()


@torch.inference_mode()
def _find_fault(kernel: KernelBackend, features: AttentionFeatures) -> str | None:
    """Compilers and CPUs differ: what is wrong on this one must be noticed here."""
    found, expected = (_probe(backend, features) for backend in (kernel, ReferenceBackend()))
    difference, largest = (found - expected).abs().max(), expected.abs().max()
    if difference <= TOLERANCE[features.dtype] * largest:
        return None
    return f"differs from it by {difference:g}"


def _probe(backend: KernelBackend | ReferenceBackend, features: AttentionFeatures) -> Tensor:
    """Random heads [T, 4, D] attend over two KV heads; the same at every call, in float32."""
    dtype, head_dim = features.dtype, features.head_dim
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(PROBE_TOKENS, 8, head_dim, generator=generator).to(dtype)
    query, key, value = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    layer = probe_pages(1, 2, head_dim, dtype).layers[0]
    call = AttentionCall(
        head_dim**-0.5,
        sliding_window=5 if features.sliding_window else None,
        softcap=2.0 if features.softcap else None,
        sinks=torch.linspace(-1, 1, 4) if features.sinks else None,
    )
    return backend.forward(layer, query, key, value, probe_metadata(), call).float()


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
