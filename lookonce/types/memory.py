"""The C library's memory."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def give_memory_back() -> None:
    """Return what was freed to the system, where the C library can (glibc's `malloc_trim`)."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
