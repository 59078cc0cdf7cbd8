"""What is judged before anything loads: mistakes cost a second, and one line.

Nothing here imports torch. Each function raises `ConfigError` naming the option.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from lookonce.config import GIB, Config
from lookonce.errors import ConfigError
from lookonce.types.cpu import KERNELS_VARIABLE, cpu_flags, kernels_fault
from lookonce.types.kv import TierSpec
from lookonce.types.network import connection_error

TIER_SECONDS = 1.0
"""A tier that does not take a connection in so long does not answer."""
TORCH_CUDA = re.compile(r"^cuda\b[^=]*= *(.*)$", re.MULTILINE)


def check_machine(config: Config) -> None:
    """What the machine and its neighbours must have for this configuration."""
    check_device(config.model.device, config.model.tensor_parallel_size)
    check_kernels(os.environ.get(KERNELS_VARIABLE))
    check_memory(config)
    for spec in config.kv.tiers:
        check_tier(spec)
    for spec in config.encoder.tiers:
        check_tier(spec, "--encoder-tier")


def check_device(device: str, num_ranks: int = 1) -> None:
    """Whether there is the CUDA device that is asked for, or one for each rank."""
    if device == "cpu":
        return
    if not torch_has_cuda():
        raise ConfigError(
            f"--device {device}: the installed torch is built without CUDA; install one with it, "
            "or use --device cpu"
        )
    count = num_cuda_devices()
    if count == 0:
        raise ConfigError(
            f"--device {device}: this machine has no CUDA device that the NVIDIA driver shows; "
            "use --device cpu"
        )
    _, _, number = device.partition(":")
    if number and (not number.isdecimal() or int(number) >= count):
        raise ConfigError(f"--device {device}: there are cuda:0 to cuda:{count - 1}")
    if count < num_ranks:
        raise ConfigError(
            f"--tensor-parallel {num_ranks}: this machine has {count} CUDA devices, and each rank "
            "needs one"
        )


def check_kernels(forced: str | None) -> None:
    """Whether this CPU can run the kernels that `LOOKONCE_CPU_KERNELS` names."""
    fault = kernels_fault(forced, cpu_flags()) if forced else None
    if fault is not None:
        raise ConfigError(fault)


def torch_has_cuda() -> bool:
    """Read from torch's source: importing it takes seconds. True where that cannot be told."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    try:
        version = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return True
    found = TORCH_CUDA.search(version)
    return found is None or found[1].strip() != "None"


def num_cuda_devices() -> int:
    """By the driver, of those that `CUDA_VISIBLE_DEVICES` leaves; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def check_memory(config: Config) -> None:
    """Whether caches that lie in the machine's memory can hold what is asked for."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_host = {"--encoder-cache-host-gb": config.encoder.host_cache_bytes}
    if config.model.device == "cpu":
        on_host["--kv-cache-gb"] = config.kv.cache_bytes
        on_host["--encoder-cache-gb"] = config.encoder.cache_bytes
        on_host["--state-cache-gb"] = config.kv.state_cache_bytes
    for option, tiers in (("--kv-tier", config.kv.tiers), ("--encoder-tier", config.encoder.tiers)):
        for tier in tiers:
            if tier.kind == "host":
                on_host[f"{option} host"] = tier.capacity_bytes
    for option, nbytes in on_host.items():
        if nbytes > memory:
            raise ConfigError(
                f"{option}: {nbytes / GIB:.1f} GiB, but this machine has {memory / GIB:.1f} GiB of "
                "memory"
            )


def check_length(config: Config) -> None:
    """Whether the model, whose folder is local by now, can have sequences of `--max-model-len`.

    The engine knows a model's length exactly; this is the most that its files could mean.
    """
    wanted = config.model.max_model_len
    if wanted is None:
        return
    model = _model_config(config)
    stated = [n for n in _numbers(model, "max_position_embeddings") if n >= 1]
    factor = max(1.0, *_numbers(model, "factor"), 0.0)
    if stated and wanted > max(stated) * factor:
        raise ConfigError(
            f"--max-model-len is at most {int(max(stated) * factor)} for this model, got {wanted}"
        )


def check_ranks(config: Config) -> None:
    """Whether the model's attention heads can be divided by `--tensor-parallel`, before as many
    processes are started.

    The engine knows all that must be divisible; this judges what is plain from the model's files,
    of its text model alone: encoders have no heads of keys and values of their own.
    """
    size = config.model.tensor_parallel_size
    stated = [] if size == 1 else list(_attention_heads(_model_config(config)))
    if stated and all(heads % size for heads in stated):
        each = " and ".join(str(heads) for heads in sorted(set(stated)))
        raise ConfigError(f"--tensor-parallel {size}: the model has {each} attention heads")


def _model_config(config: Config) -> Any:
    """What config.json has; empty where it cannot be read, which the loader says."""
    try:
        return msgspec.json.decode((Path(config.model.folder) / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}


def _attention_heads(part: Any) -> Iterator[int]:
    """Of each mapping, at any depth, that names heads of keys and values beside them."""
    if isinstance(part, dict):
        heads = part.get("num_attention_heads")
        if "num_key_value_heads" in part and isinstance(heads, int):
            yield heads
        for each in part.values():
            yield from _attention_heads(each)


def _numbers(part: Any, name: str) -> Iterator[float]:
    """The values of `name` at any depth."""
    if isinstance(part, list):
        for each in part:
            yield from _numbers(each, name)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key == name and isinstance(value, int | float):
                yield value
            yield from _numbers(value, name)


def check_tier(spec: TierSpec, option: str = "--kv-tier") -> None:
    """Whether a tier on the network takes connections, and a folder can be written."""
    if spec.kind == "disk" and spec.path is not None:
        _check_folder(Path(spec.path), option)
    elif spec.kind == "valkey" and spec.path is not None:
        _check_socket(spec.path, option)
    elif spec.kind in ("valkey", "lmcache"):
        where = f"{spec.kind}://{spec.host}:{spec.port}"
        if reason := connection_error(spec.host or "", spec.port, TIER_SECONDS):
            raise ConfigError(f"{option}: {where} does not answer: {reason}")


def _check_socket(path: str, option: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(TIER_SECONDS)
        try:
            probe.connect(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"{option}: valkey://{path} does not answer: {reason}") from None


def _check_folder(folder: Path, option: str) -> None:
    """A folder that is not there is made, as the tier would."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: {folder} cannot be written")
