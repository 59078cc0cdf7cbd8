"""What the CPU of this machine can do, as Linux tells it."""

from __future__ import annotations

from functools import cache
from pathlib import Path


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the first CPU can do and Linux lets it; empty where Linux does not say."""
    try:
        with cpuinfo.open() as lines:
            line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


BF16_FLAGS = frozenset(("amx_bf16", "avx512_bf16", "bf16"))
"""Of CPUs that multiply bf16, on x86-64 and on ARM, as Linux names them."""


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions that multiply bf16; where it is not told, it has none."""
    return bool(BF16_FLAGS & cpu_flags())
