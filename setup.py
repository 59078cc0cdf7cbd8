"""The part of the build that pyproject.toml cannot state: optional compiled code.

The CPU kernels are built once for each variant of CPU, side by side, and never for the CPU they are
built on: lookonce/model/native/compiled.py chooses among them when it is imported. Without a
compiler the package installs without any of it: torch, NumPy and Python do the work.

With `LOOKONCE_COMPILE=0` nothing is compiled: `make setup` has compiled it before, while it
installed the libraries.
"""

import os
import platform
from copy import copy

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ATTENTION, NATIVE = "lookonce/model/attention", "lookonce/model/native"
HEADERS = [
    f"{ATTENTION}/{name}.h"
    for name in ("arguments", "chunk", "problem", "step", "threads", "units", "vectors")
] + [f"{NATIVE}/{name}.h" for name in ("linear", "lora", "decoder", "rows", "sampling", "windows")]
X86_64 = {
    "x86_64_v2": ["-march=x86-64-v2"],
    "avx2": ["-march=x86-64-v3", "-mtune=znver3"],
    "avx512": ["-march=x86-64-v4", "-mtune=icelake-server"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mtune=sapphirerapids"],
}
"""Each runs on every CPU of its level and is tuned for one that servers have: otherwise AVX2 is up
to a tenth slower there."""
# GCC 12 warns of its own AVX-512 headers.
COMMON = ["-fvisibility=hidden", "-Wno-maybe-uninitialized", "-Wno-psabi"]
AARCH64 = {"aarch64": ["-march=armv8-a"]}
VARIANTS = {"x86_64": X86_64, "amd64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}


def kernels(variant: str, flags: list[str]) -> Extension:
    return Extension(
        f"lookonce.model.native._native_{variant}",
        sources=[f"{NATIVE}/module.cpp"],
        depends=[*HEADERS, "setup.py"],
        define_macros=[("MODULE_NAME", f"_native_{variant}")],
        extra_compile_args=["-O3", "-g0", "-std=gnu++17", "-pthread", *COMMON, *flags],
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )


def helper(name: str, source: str) -> Extension:
    return Extension(name, sources=[source], extra_compile_args=["-O2", "-g0"], optional=True)


class BuildInFolders(build_ext):
    """Compiles extensions beside each other, one source file into a folder for each."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        builder = copy(self)
        builder.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(builder, ext)


def extensions() -> list[Extension]:
    if os.environ.get("LOOKONCE_COMPILE") == "0":
        return []
    variants = VARIANTS.get(platform.machine().lower(), {})
    return [
        *(kernels(*variant) for variant in variants.items()),
        helper("lookonce.model._decode_inputs", "lookonce/model/decode_inputs.c"),
        helper("lookonce.core._columns", "lookonce/core/columns.c"),
    ]


setup(cmdclass={"build_ext": BuildInFolders}, ext_modules=extensions())
