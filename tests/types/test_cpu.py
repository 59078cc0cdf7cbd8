from __future__ import annotations

import os
from pathlib import Path

import pytest

from lookonce import config
from lookonce.config import _dtype
from lookonce.types.cpu import BF16_FLAGS, cpu_flags, cpu_quota, usable_cores


@pytest.mark.parametrize(
    ("line", "has_bf16"),
    [
        ("flags\t\t: fpu avx2 fma", False),
        ("flags\t\t: avx512f avx512_bf16", True),
        ("flags\t\t: avx512f amx_bf16 amx_tile", True),
        ("Features\t: fp asimd", False),
        ("Features\t: fp asimd bf16 i8mm", True),
    ],
)
def test_flags_of_x86_and_arm(tmp_path: Path, line: str, has_bf16: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    assert bool(cpu_flags(cpuinfo) & BF16_FLAGS) == has_bf16


@pytest.mark.parametrize(
    ("has_bf16", "device", "expected"),
    [(False, "cpu", "float32"), (True, "cpu", "bfloat16"), (False, "cuda", "bfloat16")],
)
def test_auto_is_the_fastest_type_of_the_hardware(
    has_bf16: bool, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "cpu_multiplies_bf16", lambda: has_bf16)
    assert _dtype("auto", device) == expected


# --- cores --------------------------------------------------------------------------------------

QUOTAS = [
    ({}, None),
    ({"cpu.max": "max 100000"}, None),
    ({"cpu.max": "200000 100000"}, 2.0),
    ({"cpu.max": "odd"}, None),
    ({"cpu.max": "100000 0"}, None),
    # version 2 on a machine whose groups are all seen: what is around the own group counts, too
    ({"own": "0::/pods/a/b", "pods/a/cpu.max": "150000 100000", "pods/a/b/cpu.max": "max 1"}, 1.5),
    ({"own": "0::/pods/a", "pods/cpu.max": "300000 100000", "pods/a/cpu.max": "1 1"}, 1.0),
    ({"own": "0::/pods/a", "pods/other/cpu.max": "1 1"}, None),
    ({"own": "0::/../b", "b/cpu.max": "1 1", "cpu.max": "400000 100000"}, 4.0),
    # version 1, by the folder of the controller and by its short name
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
    (
        {
            "own": "5:memory:/x\n4:cpu,cpuacct:/docker/c\n1:name=systemd:/docker/c",
            "cpu,cpuacct/docker/c/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/docker/c/cpu.cfs_period_us": "100000",
        },
        0.5,
    ),
]


def files_of(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content + "\n")


@pytest.mark.parametrize(("files", "cores"), QUOTAS)
def test_the_quota_is_the_smallest_of_the_own_control_groups(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    files_of(tmp_path, files)
    quota = cpu_quota(tmp_path, tmp_path / "own")
    assert (None if quota is None else quota.cores) == cores


@pytest.mark.parametrize(
    ("runs_on", "quota", "usable"),
    [
        (8, "max 100000", 8),
        (8, "400000 100000", 4),
        (8, "390000 100000", 3),
        (8, "50000 100000", 1),
        (2, "400000 100000", 2),
    ],
)
def test_no_more_cores_are_usable_than_the_quota_lets_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_on: int, quota: str, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(runs_on)))
    files_of(tmp_path, {"cpu.max": quota})
    assert usable_cores(tmp_path, tmp_path / "own") == usable


def test_groups_with_quotas_are_told_apart(tmp_path: Path) -> None:
    files_of(tmp_path, {"a/cpu.max": "1 1", "b/cpu.max": "1 1"})
    groups = []
    for group in ("a", "b", "a"):
        quota = cpu_quota(tmp_path / group, tmp_path / "own")
        assert quota is not None
        groups.append(quota.group)
    assert groups[0] == groups[2] != groups[1]
