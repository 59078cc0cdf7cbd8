"""The compiled arithmetic as other CPUs get it: built for them, and run here where this one can."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from lookonce.model import attention, logits_processors, native
from lookonce.model.attention import cpu
from lookonce.model.native import decoder, rows, windows

OTHER_CPUS = ("x86-64", "haswell", "skylake-avx512")
"""Vectors of 4 (as on ARM), 8 and 16 lanes, none of which multiply bf16."""
# Optimised as little as vectors bear: these are compiled in every run of the tests.
_FLAGS = ("-O1", "-std=gnu++17", "-fopenmp", "-Wno-psabi", "-shared", "-fPIC")
_SOURCES = {
    "_paged": Path(attention.__path__[0]) / "paged.cpp",
    "_native": Path(native.__path__[0]) / "module.cpp",
}


class Build(NamedTuple):
    paged: ModuleType
    native: ModuleType


def build_for(machine: str, folder: Path) -> Build:
    """Skips, by name, what cannot be compiled or run here."""
    if platform.machine() != "x86_64":
        pytest.skip(f"code for {machine} does not run on {platform.machine()}")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return Build(*(_load(name, _compile(compiler, machine, folder, name)) for name in _SOURCES))


def _compile(compiler: str, machine: str, folder: Path, name: str) -> Path:
    target = folder / f"{name}-{machine}.so"
    include = sysconfig.get_paths()["include"]
    command = [compiler, *_FLAGS, f"-march={machine}", f"-I{include}", str(_SOURCES[name])]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


def _load(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = module_from_spec(spec)
    except ImportError as error:
        pytest.skip(f"{path.stem}: {error}")
    spec.loader.exec_module(module)
    return module


@contextmanager
def in_use(build: Build) -> Iterator[None]:
    """Everything that calls compiled arithmetic calls this build's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_kernel", build.paged.paged_attention)
        patch.setattr(logits_processors, "native_argmax", build.native.argmax)
        for user in (decoder, rows, windows):
            patch.setattr(user, "_native", build.native)
        yield
