"""What the CPU of this machine can do, as Linux tells it."""

from __future__ import annotations

import platform
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


_V2 = frozenset(("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"))
_AVX2 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_AVX512 = _AVX2 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
X86_64 = {
    "avx512-bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": _AVX2,
    "x86-64-v2": _V2,
}
"""Builds of the CPU kernels, the fastest first, and what each needs: flags as Linux names them."""
AARCH64: dict[str, frozenset[str]] = {"aarch64": frozenset()}
KERNEL_VARIANTS = {"x86_64": X86_64, "amd64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}.get(
    platform.machine().lower(), {}
)
"""Those for this kind of machine."""
KERNELS_VARIABLE = "LOOKONCE_CPU_KERNELS"
"""The environment variable that names one of them, or "none"."""
NO_KERNELS = "none"


def kernels_fault(forced: str, flags: frozenset[str]) -> str | None:
    """Why a CPU with these flags cannot use what `LOOKONCE_CPU_KERNELS` names; None: it can."""
    if forced != NO_KERNELS and forced not in KERNEL_VARIANTS:
        known = ", ".join((*KERNEL_VARIANTS, NO_KERNELS))
        return f"{KERNELS_VARIABLE} must be one of {known}, got {forced!r}"
    if not KERNEL_VARIANTS.get(forced, frozenset()) <= flags:
        return f"{KERNELS_VARIABLE}={forced}: this CPU cannot run it"
    return None


BF16_FLAGS = frozenset(("amx_bf16", "avx512_bf16", "bf16"))
"""Of CPUs that multiply bf16, on x86-64 and on ARM, as Linux names them."""


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions that multiply bf16; where it is not told, it has none."""
    return bool(BF16_FLAGS & cpu_flags())
