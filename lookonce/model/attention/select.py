"""Selects the attention backend for a model on a device, and its block size."""

from __future__ import annotations

import torch

from lookonce.errors import ConfigError
from lookonce.model.attention.backend import AttentionBackend, AttentionFeatures
from lookonce.model.attention.cpu import cpu_backend
from lookonce.model.attention.reference import ReferenceBackend


def select_backend(device: torch.device | str, features: AttentionFeatures) -> AttentionBackend:
    """The fastest backend on `device` with every feature that the model needs."""
    if torch.device(device).type == "cpu":
        return cpu_backend(features)
    fast = _cuda_backend()
    return fast if fast.supports(features) else ReferenceBackend()


def _cuda_backend() -> AttentionBackend:
    # torch's varlen attention imports its compiler: over a second that only a GPU repays.
    from lookonce.model.attention.cuda import VarlenBackend

    return VarlenBackend()


def resolve_block_size(backend: AttentionBackend, requested: int | None) -> int:
    """`requested`, or the backend's default if None. Raises `ConfigError` for a bad size."""
    if requested is None:
        return backend.default_block_size
    if requested < 1 or requested % backend.block_size_multiple:
        raise ConfigError(
            f"--block-size must be a multiple of {backend.block_size_multiple} for the "
            f"{backend.name} attention backend, got {requested}"
        )
    return requested
