"""Attention on the CPU."""

from __future__ import annotations

from lookonce.model.attention.reference import ReferenceBackend


class CpuBackend(ReferenceBackend):
    name = "cpu"
