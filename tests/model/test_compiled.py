"""Which build of the CPU kernels is used, what it says of that, and what wrong calls become."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lookonce.errors import ConfigError
from lookonce.model.native import compiled
from lookonce.model.native.compiled import (
    Choice,
    choose,
    cpu_flags,
    openmp_runtimes,
    runnable,
)

FAST = ["avx512-bf16", "avx512", "avx2", "x86-64-v2"]
NEEDS_KERNELS = pytest.mark.skipif(compiled.kernels is None, reason="nothing is compiled here")


@pytest.fixture
def on_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant of x86-64 is compiled, under its name instead of a module."""
    monkeypatch.setattr(compiled, "VARIANTS", compiled.X86_64)
    monkeypatch.setattr(compiled, "load", lambda variant: f"module {variant}")


@pytest.fixture(autouse=True)
def unreported() -> Iterator[None]:
    compiled.report.cache_clear()
    yield
    compiled.report.cache_clear()


def in_child(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: what ends it must not end the tests."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.usefixtures("on_x86_64")
class TestChoice:
    @pytest.mark.parametrize("variant", FAST)
    def test_the_fastest_that_the_cpu_can_run(self, variant: str) -> None:
        flags = compiled.X86_64[variant]
        assert runnable(flags) == FAST[FAST.index(variant) :]
        found = choose(None, flags)
        assert (found.variant, found.kernels) == (variant, f"module {variant}")

    def test_one_flag_missing_is_a_lesser_variant(self) -> None:
        assert choose(None, compiled.X86_64["avx512"] - {"avx512vl"}).variant == "avx2"

    def test_one_is_forced(self) -> None:
        assert choose("x86-64-v2", compiled.X86_64["avx512"]).variant == "x86-64-v2"

    def test_none_is_forced(self) -> None:
        found = choose("none", compiled.X86_64["avx2"])
        assert found == Choice(why="LOOKONCE_CPU_KERNELS=none")

    @pytest.mark.parametrize(
        ("forced", "message"),
        [
            ("avx1024", "must be one of avx512-bf16, avx512, avx2, x86-64-v2, none, got 'avx1024'"),
            ("avx512", "LOOKONCE_CPU_KERNELS=avx512: this CPU cannot run it"),
        ],
        ids=["unknown", "not for this CPU"],
    )
    def test_what_cannot_be_had_is_an_error_of_the_configuration(
        self, forced: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = choose(forced, compiled.X86_64["avx2"])
        assert found.kernels is None
        monkeypatch.setattr(compiled, "chosen", found)
        with pytest.raises(ConfigError, match=message):
            compiled.report()

    def test_a_variant_that_was_not_compiled_leaves_its_place_to_the_next(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiled, "load", without("avx2"))
        assert choose(None, compiled.X86_64["avx2"]).variant == "x86-64-v2"
        assert choose("avx2", compiled.X86_64["avx2"]).is_wrong

    def test_without_any_compiled_variant_the_reason_is_said(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiled, "load", without("avx2", "x86-64-v2"))
        found = choose(None, compiled.X86_64["avx2"])
        assert (found.kernels, found.is_wrong) == (None, False)
        assert found.why == "no module avx2; no module x86-64-v2"

    def test_a_cpu_that_can_run_none(self) -> None:
        assert choose(None, frozenset({"sse2"})).why == "this CPU can run no variant"


def without(*missing: str):
    def load(variant: str) -> str:
        if variant in missing:
            raise ImportError(f"no module {variant}")
        return f"module {variant}"

    return load


def test_flags_are_those_of_the_first_cpu(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t\t: x\nflags\t: sse9\n")
    assert cpu_flags(cpuinfo) == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "missing") == frozenset()


@NEEDS_KERNELS
def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        compiled.report()
        compiled.report()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines == [f"CPU kernels: {compiled.chosen.variant} ({compiled.chosen.why})"]


REPORTS = """
import ctypes, logging, os, sys
import torch  # once: it takes a process two seconds
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
for number, (variant, library) in enumerate(zip(sys.argv[1::2], sys.argv[2::2])):
    print("process", number, file=sys.stderr, flush=True)
    pid = os.fork()
    if pid == 0:
        os.environ.update({"LOOKONCE_CPU_KERNELS": variant} if variant else {})
        from lookonce.model.native import compiled
        if library:
            ctypes.CDLL(library)
        compiled.report()
        sys.stderr.flush()
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit("it failed")
"""


FORCED = [*runnable(cpu_flags()), "none"]


@pytest.fixture(scope="module")
def second_runtime(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A copy of the OpenMP runtime, or "" where none is told of."""
    runtimes = openmp_runtimes()
    if not runtimes:
        return ""
    second = tmp_path_factory.mktemp("openmp") / "libgomp-second.so.1"
    second.write_bytes(Path(runtimes[0]).read_bytes())
    return str(second)


@pytest.fixture(scope="module")
def reports(second_runtime: str) -> list[list[str]]:
    """What `report` logs in a new process for each of `FORCED`, and in one more, where nothing is
    forced and another OpenMP runtime is loaded."""
    child = in_child(REPORTS, *(word for each in FORCED for word in (each, "")), "", second_runtime)
    assert child.returncode == 0, child.stderr
    told: list[list[str]] = []
    for line in child.stderr.splitlines():
        if line == f"process {len(told)}":
            told.append([])
        else:
            told[-1].append(line)
    return told


def test_no_variant_brings_an_openmp_runtime(reports: list[list[str]]) -> None:
    reasons = [f"LOOKONCE_CPU_KERNELS{'=none' if run == 'none' else ' says so'}" for run in FORCED]
    assert reports[:-1] == [
        [f"INFO CPU kernels: {run} ({why})"] for run, why in zip(FORCED, reasons, strict=True)
    ]


def test_a_second_openmp_runtime_is_a_warning(
    reports: list[list[str]], second_runtime: str
) -> None:
    if not second_runtime:
        pytest.skip("no OpenMP runtime is told of here")
    warnings = [line for line in reports[-1] if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "2 OpenMP runtimes are loaded" in warnings[0]
    assert second_runtime in warnings[0]


def test_runtimes_are_told_by_their_names(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    names = ("libgomp.so.1", "libgomp-a34b3233.so.1.0.0", "libiomp5.so", "libomp.so", "libompl.so")
    maps.write_text("".join(f"7f00-7f01 r-xp 0 08:01 5 /lib/{name}\n" for name in names) * 2)
    assert openmp_runtimes(maps) == sorted(f"/lib/{name}" for name in names[:-1])


FAILING_ALLOCATION = """
import resource, torch
from lookonce.model.attention.cpu import KernelBackend
from lookonce.model.attention.reference import ReferenceBackend
from tests.support.model.attention_world import Problem, build

# What a thread needs for its queries and scores is 40 MB, and the answer 12 MB.
scene = build(Problem([(96, 0)], group=1, head_dim=1 << 15, block_size=96, dtype=torch.bfloat16))
small = build(Problem([(96, 0)]))
limits = resource.getrlimit(resource.RLIMIT_AS)
for threads in (2, 1):
    torch.set_num_threads(threads)
    before = small.run(KernelBackend())  # threads are there, and their stacks
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (30 << 20), limits[1]))
    try:
        scene.run(KernelBackend())
    except MemoryError:
        print("raised with", threads)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert torch.equal(small.run(KernelBackend()), before)
difference = scene.run(KernelBackend()).float() - scene.run(ReferenceBackend()).float()
assert difference.abs().max() < 0.1
print("goes on")
"""


@NEEDS_KERNELS
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory like this")
def test_memory_that_runs_out_in_a_thread_is_an_exception_of_the_call() -> None:
    child = in_child(FAILING_ALLOCATION, OMP_NUM_THREADS="2")
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["raised with 2", "raised with 1", "goes on"]


@NEEDS_KERNELS
class TestWrongCalls:
    """Each would have read or written memory that is not the tensors'."""

    def test_too_few_arguments(self) -> None:
        with pytest.raises(TypeError, match="expected 5 arguments, got 1"):
            kernels().norm_rows(torch.ones(2, 3))

    def test_what_is_no_tensor(self) -> None:
        with pytest.raises(TypeError, match="scores is not a tensor"):
            kernels().argmax(140_000_000_000)  # type: ignore[arg-type]

    def test_another_type(self) -> None:
        with pytest.raises(ValueError, match="scores is not of float32"):
            kernels().argmax(torch.ones(2, 3, dtype=torch.float64))

    def test_another_layout(self) -> None:
        with pytest.raises(ValueError, match="scores must be contiguous"):
            kernels().argmax(torch.ones(3, 2).T)

    def test_another_size(self) -> None:
        with pytest.raises(ValueError, match=r"hidden of \[2, 3\]: its sizes do not fit"):
            kernels().norm_rows(torch.ones(2, 3), torch.ones(4), torch.ones(2, 3), 1e-6, 1)

    def test_an_output_that_is_too_small(self) -> None:
        with pytest.raises(ValueError, match="output is of another size"):
            kernels().gate_rows(torch.ones(4, 6), torch.ones(2, 3), 1)

    def test_an_output_of_another_type(self) -> None:
        with pytest.raises(ValueError, match="output is not of float32"):
            kernels().gate_rows(torch.ones(4, 6), torch.ones(4, 3, dtype=torch.bfloat16), 1)

    def test_a_decoder_of_something_else(self) -> None:
        with pytest.raises(TypeError, match="expected a tuple of the model"):
            kernels().make((), ())


def kernels() -> compiled.Kernels:
    assert compiled.kernels is not None
    return compiled.kernels
