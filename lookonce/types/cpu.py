"""How many cores this process may use, and what they can do, as Linux tells it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted: version 2 itself, or a folder for each controller."""
OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """The CPU time that a control group may take together."""

    cores: float
    """CPU seconds a second."""
    group: int
    """Inode of the group's directory: processes for which it is the same share the quota."""


def usable_cores(cgroups: Path | None = None, own: Path = OWN_CGROUPS) -> int:
    """Cores that this process may use: those it may run on, and no more than the quota of its
    container, rounded down: threads that exceed it are stopped for the rest of each period."""
    count, quota = len(affinity()), cpu_quota(cgroups, own)
    return count if quota is None else max(1, min(count, int(quota.cores)))


def affinity() -> frozenset[int]:
    """Numbers of the cores that this process may run on; all where the system cannot say."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(cgroups: Path | None = None, own: Path = OWN_CGROUPS) -> CpuQuota | None:
    """The smallest quota of this process's control group and those that it is in, as far as they
    are mounted under `cgroups` (None: `CGROUPS`); None if there is none. `own` lists the groups of
    this process."""
    found = (_quota_of(directory) for directory in _groups(cgroups or CGROUPS, own))
    return min((quota for quota in found if quota is not None), key=_cores_of, default=None)


def _cores_of(quota: CpuQuota) -> float:
    return quota.cores


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Directories of the groups, of both versions. A container may see its own group as the root,
    whatever the path says."""
    yield cgroups
    yield cgroups / "cpu"
    try:
        lines = own.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Kernels list controllers in another order than mounts do; `cpu` is a link to these.
        for mounted in {controllers, "cpu" if controllers else ""}:
            directory = cgroups / mounted
            for name in path.split("/"):
                if name == "..":  # outside of what is mounted here
                    break
                directory /= name
                yield directory


def _quota_of(directory: Path) -> CpuQuota | None:
    quota, _, period = first_line(directory / "cpu.max").partition(" ")
    if not quota:
        quota = first_line(directory / "cpu.cfs_quota_us")
        period = first_line(directory / "cpu.cfs_period_us")
    if not (quota.isdecimal() and period.isdecimal() and int(quota) and int(period)):
        return None  # "max" or -1: none
    try:
        group = directory.stat().st_ino
    except OSError:  # it was removed meanwhile
        return None
    return CpuQuota(int(quota) / int(period), group)


def first_line(file: Path) -> str:
    """Of a file in which the system tells something; empty where there is none."""
    try:
        return file.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""


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
