"""`lookonce bench` finds the benchmarks of a checkout, and says where they are elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELP_THEN_CHILD = """\
import subprocess, sys
sys.path.insert(0, {root!r})
from lookonce.cli.main import main
sys.argv = ["lookonce", "bench", "warmup", "--help"]
try:
    main()
except SystemExit as ended:
    assert ended.code == 0
child = "import benchmarks.warmup, sys; print('child of', benchmarks.warmup.__file__)"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""


def run(arguments: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={**rest, **environment},
    )


def test_a_checkout_s_benchmarks_and_their_processes_are_found_from_any_folder(
    tmp_path: Path,
) -> None:
    done = run(["-c", HELP_THEN_CHILD.format(root=str(ROOT))], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage: lookonce bench warmup" in done.stdout
    assert f"child of {ROOT}" in done.stdout


def test_without_them_one_line_says_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "lookonce").symlink_to(ROOT / "lookonce")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("another package of this name")
    command = ["-m", "lookonce.cli.main", "bench", "engine"]
    done = run(command, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "benchmarks/ of LookOnce's source" in done.stderr
