"""The one part of the build that pyproject.toml cannot state: optional compiled code.

The attention kernel is compiled for the CPU it is built on (it refuses to load on a lesser one).
Without a compiler the package installs without both, and plain torch and NumPy do their work.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "lookonce.model.attention._paged",
            sources=["lookonce/model/attention/paged.cpp"],
            depends=[
                "lookonce/model/attention/vectors.h",
                "lookonce/model/attention/problem.h",
                "lookonce/model/attention/chunk.h",
            ],
            extra_compile_args=["-O3", "-march=native", "-std=gnu++17", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        ),
        Extension(
            "lookonce.model._decode_inputs",
            sources=["lookonce/model/decode_inputs.c"],
            extra_compile_args=["-O2"],
            optional=True,
        ),
    ]
)
