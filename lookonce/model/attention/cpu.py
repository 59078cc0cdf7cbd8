"""Attention on the CPU: the C++ kernel in place over the pages, or plain torch without it."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lookonce.model.attention.backend import AttentionCall, AttentionFeatures, AttentionMetadata
from lookonce.model.attention.probe import PROBE_TOKENS, probe_metadata, probe_pages
from lookonce.model.attention.reference import ReferenceBackend
from lookonce.model.kv_pages import LayerPages
from lookonce.model.native import compiled

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference to torch's answer to a probe, relative to its largest value, for each type
that the kernel computes."""


def kernel_available() -> bool:
    """Whether the C++ kernel is there, built for this CPU."""
    return compiled.kernels is not None


class KernelBackend:
    """The C++ kernel: every feature, fp32 and bf16, decode and prefill alike.

    It is used for chunks of any length: measured (`lookonce bench attention`), it is ahead of
    gathering keys for torch's SDPA from single tokens to chunks of thousands.
    """

    name = "cpu"
    default_block_size = 16
    block_size_multiple = 1
    is_capturable = False

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
        if compiled.kernels is None:
            raise RuntimeError("the attention kernel is not built")
        output = torch.empty(query.shape, dtype=query.dtype)
        compiled.kernels.paged_attention(
            query,
            key,
            value,
            output,
            layer.keys,
            layer.values,
            metadata.query_start,
            metadata.kv_lens,
            metadata.block_tables,
            metadata.slot_mapping,
            metadata.visible_end,
            None if call.sinks is None else call.sinks.float().contiguous(),
            call.sliding_window or 0,
            call.scale,
            call.softcap or 0.0,
            torch.get_num_threads(),
        )
        return output


def cpu_backend(features: AttentionFeatures) -> KernelBackend | ReferenceBackend:
    """The kernel where it was built and says what torch says; otherwise torch, said once.

    Raises `ConfigError` where the kernels that were asked for cannot be had.
    """
    compiled.report()
    kernel = KernelBackend()
    if not kernel.supports(features):
        return ReferenceBackend()
    if compiled.kernels is None:
        fault: str | None = f"is missing ({compiled.chosen.why})"
    else:
        fault = _find_fault(kernel, features)
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
