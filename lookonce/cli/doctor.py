"""`lookonce doctor`: what this machine has, what will be slow on it, and why.

Without `gpu` nothing here imports torch. Every check is a function that returns findings.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import lookonce
from lookonce.cli.preflight import num_cuda_devices, torch_has_cuda
from lookonce.config import GIB
from lookonce.render.media.sandbox import LANDLOCK_CREATE_RULESET, LANDLOCK_VERSION
from lookonce.types.cpu import (
    BF16_FLAGS,
    CGROUPS,
    KERNEL_VARIANTS,
    affinity,
    cpu_flags,
    cpu_quota,
    first_line,
)
from lookonce.types.network import connection_error

State = Literal["ok", "slow", "bad"]
NEEDED_PYTHON = (3, 11)
MIN_DESCRIPTORS = 4096
MIN_MEMORY = 4 * GIB
MIN_DISK = 10 * GIB
EXTRAS = (
    ("documents", "pypdfium2", "reading PDF files"),
    ("film", "av", "reading films"),
    ("gguf", "gguf", "reading GGUF"),
    ("events", "pyzmq", "reading events of the caches"),
    ("otel", "opentelemetry-sdk", "sending traces"),
    ("fleet", "ray", "serving a fleet"),
)
"""Name of an extra, its package, and what it is for."""
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    state: State
    """"slow": it works, with less speed or less safety; "bad": something cannot work."""
    found: str
    advice: str = ""
    """What it means and what to do; empty where all is well."""


def run_doctor(*, gpu: bool, as_json: bool) -> int:
    """Print all findings; the exit status is 1 if one is bad."""
    findings = examine(gpu=gpu)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print("\n".join(report(findings)))
    return int(any(finding.state == "bad" for finding in findings))


def examine(*, gpu: bool = False) -> list[Finding]:
    found = [finding for check in CHECKS for finding in check()]
    return found + (list(check_gpu()) if gpu else [])


def report(findings: list[Finding]) -> Iterator[str]:
    """The lines of the report, and a summary."""
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        yield f"{finding.state:4}  {finding.subject:{width}}  {finding.found}"
        if finding.advice:
            yield f"      {'':{width}}  {finding.advice}"
    slow = sum(finding.state == "slow" for finding in findings)
    bad = sum(finding.state == "bad" for finding in findings)
    yield ""
    yield f"{bad} bad, {slow} slow, {len(findings) - bad - slow} ok"


def check_versions() -> Iterator[Finding]:
    python = platform.python_version()
    if sys.version_info < NEEDED_PYTHON:
        yield Finding("Python", "bad", python, "Python 3.11 or newer is needed.")
    else:
        yield Finding("Python", "ok", f"{python}, LookOnce {lookonce.__version__}")
    for package in ("torch", "transformers"):
        try:
            yield Finding(package, "ok", version(package))
        except PackageNotFoundError:
            yield Finding(package, "bad", "not installed", "Install LookOnce again: `make setup`.")


def check_extras() -> Iterator[Finding]:
    """What can be installed beside LookOnce."""
    for extra, package, use in EXTRAS:
        try:
            yield Finding(extra, "ok", f"{use} ({package} {version(package)})")
        except PackageNotFoundError:
            yield Finding(extra, "ok", f"not {use}", f"pip install 'lookonce[{extra}]'")


def check_cores(
    proc: Path = PROC, cgroup: Path = CGROUPS, cores: frozenset[int] | None = None
) -> Iterator[Finding]:
    """Cores this process may use, less what a container's quota takes, and who else uses them."""
    cores = affinity() if cores is None else cores
    usable = float(len(cores))
    found = f"{len(cores)} that this process may use"
    quota = cpu_quota(cgroup, proc / "self" / "cgroup")
    if quota is not None and quota.cores < usable:
        usable = quota.cores
        found += f", {usable:g} by the quota of the container"
    if usable < 2:
        yield Finding("cores", "slow", found, "Decoding of media and the model take turns.")
    else:
        yield Finding("cores", "ok", found)
    load = first_line(proc / "loadavg").partition(" ")[0]
    if load and float(load) > usable:
        advice = "Other programs use the cores, too: answers will take longer."
        yield Finding("load", "slow", f"{float(load):g} on {usable:g} cores", advice)


def check_kernels(flags: frozenset[str] | None = None) -> Iterator[Finding]:
    """The compiled kernels that this CPU can run, and whether they were built."""
    flags = cpu_flags() if flags is None else flags
    native = Path(lookonce.__file__).parent / "model" / "native"
    can_run = [name for name, needed in KERNEL_VARIANTS.items() if needed <= flags]
    built = [name for name in can_run if any(native.glob(f"_native_{name.replace('-', '_')}.*so"))]
    if not built:
        why = "none was compiled" if can_run else "this CPU can run none"
        advice = (
            "Torch computes instead, several times slower: install a C++ compiler, then "
            "`make setup` again."
        )
        yield Finding("CPU kernels", "slow", why, advice)
    elif built[0] != can_run[0]:
        advice = f"{can_run[0]} would be faster, but was not compiled: a newer compiler has it."
        yield Finding("CPU kernels", "slow", built[0], advice)
    else:
        yield Finding("CPU kernels", "ok", f"{built[0]}, the fastest that this CPU can run")
    if flags and not flags & BF16_FLAGS:
        yield Finding(
            "bf16", "slow", "widened to float32", "This CPU does not multiply it: keep float32."
        )
    elif flags:
        advice = "--dtype bfloat16 answers new pictures faster than the default, float32."
        yield Finding("bf16", "ok", "multiplied by this CPU", advice)


def check_memory(proc: Path = PROC, cgroup: Path = CGROUPS) -> Iterator[Finding]:
    """Memory that is free, by the machine and by the container."""
    sizes = {
        name: int(rest.split()[0]) * 1024
        for name, colon, rest in (
            line.partition(":") for line in _text(proc / "meminfo").splitlines()
        )
        if colon and rest.split()
    }
    if not sizes:
        return
    free, whole = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    found = f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free"
    limit = first_line(cgroup / "memory.max")
    if limit.isdecimal() and int(limit) < whole:
        left = int(limit) - int(first_line(cgroup / "memory.current") or 0)
        free = min(free, left)
        found += f"; the container may have {int(limit) / GIB:.1f} GiB, {left / GIB:.1f} are left"
    if free < MIN_MEMORY:
        advice = "Set --kv-cache-gb, --encoder-cache-gb and --mm-processor-cache-gb to what fits."
        yield Finding("memory", "slow", found, advice)
    else:
        yield Finding("memory", "ok", found)


def check_limits(descriptors: int | None = None) -> Iterator[Finding]:
    """Limits of this process; the soft one of descriptors is raised by the server itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if descriptors is None else descriptors
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        advice = "Each connection takes one: raise the hard limit (`ulimit -Hn`)."
        yield Finding("descriptors", "slow", f"at most {hard}", advice)
    else:
        most = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
        yield Finding("descriptors", "ok", most)


def check_confinement(proc: Path = PROC) -> Iterator[Finding]:
    """What confines the media workers, which read what strangers send."""
    if sys.platform != "linux":
        advice = "Media workers are confined on Linux alone: serve nobody you do not trust."
        yield Finding("confinement", "slow", f"none on {sys.platform}", advice)
        return
    missing = []
    if "Seccomp" not in _text(proc / "self" / "status"):
        missing.append("seccomp")
    if _landlock_version() < 1:
        missing.append("Landlock")
    if missing:
        advice = "Media workers run without it: a weakness of a decoder reaches further."
        yield Finding("confinement", "slow", f"no {' and no '.join(missing)}", advice)
    else:
        yield Finding("confinement", "ok", "seccomp and Landlock")


def check_disk() -> Iterator[Finding]:
    """Where models from the hub are kept."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    place = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free in {folder}"
    if not os.access(place, os.W_OK):
        yield Finding("models", "slow", found, "It cannot be written: set HF_HOME to pull models.")
    elif free < MIN_DISK:
        yield Finding("models", "slow", found, "Larger models do not fit: set HF_HOME elsewhere.")
    else:
        yield Finding("models", "ok", found)


def check_port(port: int = 8000) -> Iterator[Finding]:
    if connection_error("127.0.0.1", port, 0.5) is None:
        yield Finding("port", "ok", f"{port} is in use", "`lookonce ps` says by which server.")
    else:
        yield Finding("port", "ok", f"{port} is free")


def check_cuda() -> Iterator[Finding]:
    devices, built = num_cuda_devices(), torch_has_cuda()
    if devices and not built:
        advice = "The installed torch is built without CUDA: install one with it."
        yield Finding("CUDA", "slow", f"{devices} devices that torch cannot use", advice)
    elif devices:
        yield Finding("CUDA", "ok", f"{devices} devices", "--device cuda; --gpu tries the first.")
    else:
        advice = "Models of more than some billion parameters will be slow."
        yield Finding("CUDA", "slow", "no device: the CPU computes", advice)


def check_gpu() -> Iterator[Finding]:
    """A product of matrices on the first CUDA device."""
    if find_spec("torch") is None or not torch_has_cuda() or not num_cuda_devices():
        yield Finding("GPU", "bad", "none that torch can use", "See CUDA above.")
        return
    import torch

    try:
        ones = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        right = bool(((ones @ ones) == 256).all())
        free, whole = torch.cuda.mem_get_info()
    except RuntimeError as error:
        yield Finding("GPU", "bad", str(error).splitlines()[0], "See the driver and its log.")
        return
    name = torch.cuda.get_device_name()
    memory = f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free"
    if right:
        yield Finding("GPU", "ok", f"{name}, {memory}")
    else:
        yield Finding("GPU", "bad", f"{name} multiplies wrongly", "Do not serve from it.")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_versions,
    check_extras,
    check_cores,
    check_kernels,
    check_memory,
    check_limits,
    check_confinement,
    check_disk,
    check_port,
    check_cuda,
)


def _landlock_version() -> int:
    """Of the kernel's Landlock; less than 1 where there is none."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    return int(call(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION))


def _text(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
