"""The one part of the build that pyproject.toml cannot state: optional compiled code.

Attention and the native decoder are compiled for the CPU they are built on (they refuse to load on
a lesser one). Without a compiler the package installs without any of it: torch, NumPy and Python do
the work.
"""

from setuptools import Extension, setup

ATTENTION, NATIVE = "lookonce/model/attention", "lookonce/model/native"
HEADERS = [f"{ATTENTION}/{name}.h" for name in ("vectors", "problem", "chunk", "step")]
HEADERS += [f"{ATTENTION}/{name}.h" for name in ("arguments", "machine", "units")]
ARITHMETIC = {
    "extra_compile_args": ["-O3", "-march=native", "-std=gnu++17", "-fopenmp"],
    "extra_link_args": ["-fopenmp"],
    "language": "c++",
    "optional": True,
}

setup(
    ext_modules=[
        Extension(
            "lookonce.model.attention._paged",
            sources=[f"{ATTENTION}/paged.cpp"],
            depends=HEADERS,
            **ARITHMETIC,
        ),
        Extension(
            "lookonce.model.native._native",
            sources=[f"{NATIVE}/module.cpp"],
            depends=[
                *HEADERS,
                *(f"{NATIVE}/{name}.h" for name in ("linear", "decoder", "rows", "windows")),
            ],
            **ARITHMETIC,
        ),
        Extension(
            "lookonce.model._decode_inputs",
            sources=["lookonce/model/decode_inputs.c"],
            extra_compile_args=["-O2"],
            optional=True,
        ),
        Extension(
            "lookonce.core._columns",
            sources=["lookonce/core/columns.c"],
            extra_compile_args=["-O2"],
            optional=True,
        ),
    ]
)
