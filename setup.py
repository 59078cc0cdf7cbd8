"""The one part of the build that pyproject.toml cannot state: the optional C++ attention kernel."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "lookonce.model.attention._paged",
            sources=["lookonce/model/attention/paged.cpp"],
            extra_compile_args=["-O3", "-march=native", "-std=c++17", "-fopenmp", "-ffast-math"],
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        )
    ]
)
