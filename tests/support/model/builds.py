"""The compiled kernels as other CPUs get them, run here where this one can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lookonce.model.native import compiled

VARIANTS = tuple(compiled.VARIANTS) or ("none",)
"""Vectors of 16, 8 and 4 lanes on x86-64; those of x86-64-v2 are as wide as those of ARM."""


@contextmanager
def in_use(variant: str) -> Iterator[None]:
    """Everything that calls compiled kernels calls this variant's.

    Skips, by name, one that this CPU cannot run or that was not compiled.
    """
    if variant not in compiled.runnable(compiled.cpu_flags()):
        pytest.skip(f"this CPU cannot run the {variant} kernels")
    try:
        kernels = compiled.load(variant)
    except ImportError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "kernels", kernels)
        yield
