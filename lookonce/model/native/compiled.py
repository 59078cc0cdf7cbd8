"""Chooses, at import, which build of the CPU kernels this process uses.

setup.py compiles the same sources once for each variant; the fastest one that this CPU can run is
loaded, or the one that the environment variable LOOKONCE_CPU_KERNELS names. Where none is, torch
computes the same, several times slower.
"""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from lookonce.errors import ConfigError
from lookonce.types.cpu import KERNEL_VARIANTS, cpu_flags, kernels_fault
from lookonce.types.cpu import KERNELS_VARIABLE as VARIABLE
from lookonce.types.cpu import NO_KERNELS as NONE
from lookonce.types.cpu import X86_64 as X86_64

logger = logging.getLogger(__name__)

VARIANTS = KERNEL_VARIANTS


class Kernels(Protocol):
    """One compiled module. Every call raises `ValueError` for tensors that do not fit together."""

    multiplies_bf16: int
    """Whether bf16 is multiplied as such; else it is widened to float32 first."""

    def paged_attention(self, *step: Tensor | float | None) -> None: ...
    def make(self, model: tuple[object, ...], layers: tuple[object, ...], /) -> object: ...
    def adapt(self, decoder: object, layers: tuple[object, ...], /) -> object: ...
    def run(self, decoder: object, *step: object) -> int: ...
    def attend_windows(self, *windows: Tensor | float) -> None: ...
    def argmax(self, scores: Tensor, /) -> list[int]: ...
    def draw(self, scores: Tensor, parameters: Tensor, places: Tensor, /) -> list[int]: ...
    def norm_rows(self, *norm: Tensor | float) -> None: ...
    def linear_rows(self, *product: Tensor | int | None) -> None: ...
    def gate_rows(self, *gate: Tensor | int) -> None: ...


class Choice(NamedTuple):
    variant: str = NONE
    kernels: Kernels | None = None
    why: str = ""
    """Why it is this one."""
    is_wrong: bool = False
    """`LOOKONCE_CPU_KERNELS` names what cannot be had."""


def runnable(flags: frozenset[str]) -> list[str]:
    """The variants that a CPU with these flags can run, the fastest first."""
    return [variant for variant, needed in VARIANTS.items() if needed <= flags]


def load(variant: str) -> Kernels:
    """Raises `ImportError` for a variant that was not compiled."""
    name = f"lookonce.model.native._native_{variant.replace('-', '_')}"
    return cast(Kernels, import_module(name))


def choose(forced: str | None, flags: frozenset[str]) -> Choice:
    """The variant to use on a CPU with these flags; `forced` names one, or "none"."""
    if forced == NONE:
        return Choice(why=f"{VARIABLE}=none")
    if forced:
        return _forced(forced, flags)
    missing = []
    for variant in runnable(flags):
        try:
            return Choice(variant, load(variant), "the fastest that this CPU can run")
        except ImportError as error:
            missing.append(str(error))
    return Choice(why="; ".join(missing) or "this CPU can run no variant")


def _forced(variant: str, flags: frozenset[str]) -> Choice:
    fault = kernels_fault(variant, flags)
    if fault is not None:
        return Choice(why=fault, is_wrong=True)
    try:
        return Choice(variant, load(variant), f"{VARIABLE} says so")
    except ImportError as error:
        return Choice(why=f"{VARIABLE}={variant}: it was not compiled ({error})", is_wrong=True)


def openmp_runtimes(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The files of OpenMP runtimes that this process has mapped; none where Linux does not say."""
    try:
        found = re.findall(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so\S*", maps.read_text())
    except OSError:
        return []
    return sorted(set(found))


@cache
def report() -> None:
    """Log the choice, and whether more than one OpenMP runtime is there; once in a process.

    Raises `ConfigError` if `LOOKONCE_CPU_KERNELS` names what cannot be had.
    """
    if chosen.is_wrong:
        raise ConfigError(chosen.why)
    logger.info("CPU kernels: %s (%s)", chosen.variant, chosen.why)
    runtimes = openmp_runtimes()
    if len(runtimes) > 1:
        logger.warning(
            "%d OpenMP runtimes are loaded, whose threads compete for the cores: %s",
            len(runtimes),
            ", ".join(runtimes),
        )


chosen = choose(os.environ.get(VARIABLE), cpu_flags())
kernels = chosen.kernels
