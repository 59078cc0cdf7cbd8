"""The compiled module, or None: no compiler where it was installed, or built for another CPU."""

from __future__ import annotations

try:
    from lookonce.model.native import _native
except ImportError:
    _native = None  # type: ignore[assignment]

__all__ = ["_native"]
