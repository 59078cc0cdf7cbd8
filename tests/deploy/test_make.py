"""`make test-cuda` with programs that note how they are called and end as a test says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" | cut -c1-60 >> "$CALLS"
case "$*" in
  *is_available*) exit "$FOUND";;
  *bench*look*) exit 0;;
  *) exit "$REST";;
esac
"""


@pytest.fixture
def make_test_cuda(tmp_path: Path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("python", "lookonce"):
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"

    def run(*, found: int, rest: int) -> tuple[int, str, list[str]]:
        """Exit status, what is printed, and which programs ran after the search for a GPU."""
        calls.write_text("")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(
            ["make", "test-cuda", f"BIN={tmp_path}", "STAMP=", "TEST_DEVICE=cuda"],
            cwd=ROOT,
            env={**kept, "CALLS": str(calls), "FOUND": str(found), "REST": str(rest)},
            capture_output=True,
            text=True,
            check=False,
        )
        _, *later = calls.read_text().splitlines()
        return done.returncode, done.stdout + done.stderr, later

    return run


def test_what_follows_a_failure_is_run_and_the_failures_are_named(make_test_cuda):
    status, printed, ran = make_test_cuda(found=0, rest=1)
    assert status != 0
    assert "failed: doctor tests bench-engine bench-serve" in printed
    assert len(ran) == 5
    status, printed, ran = make_test_cuda(found=0, rest=0)
    assert (status, len(ran)) == (0, 5)


def test_without_a_gpu_it_is_skipped_by_name_and_without_torch_it_fails(make_test_cuda):
    status, printed, ran = make_test_cuda(found=3, rest=0)
    assert (status, ran) == (0, [])
    assert "skipped, torch finds no NVIDIA GPU" in printed
    status, printed, ran = make_test_cuda(found=1, rest=0)
    assert (status != 0, ran) == (True, [])
    assert "torch cannot be imported" in printed
