from __future__ import annotations

from pathlib import Path

import pytest

from lookonce import config
from lookonce.config import _dtype
from lookonce.types.cpu import BF16_FLAGS, cpu_flags


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
