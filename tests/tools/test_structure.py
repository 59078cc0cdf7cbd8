"""The structure report counts what it says it counts, on packages small enough to count by eye."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import structure
from tools.structure import Size, Step, Walk, documented_walk, measure, misplaced

SCRIPT = Path(structure.__file__)


@pytest.fixture
def checkout(tmp_path):
    """A function that writes files of the package, by path below it, and gives the checkout."""

    def write(files: dict[str, str]) -> Path:
        for name, source in files.items():
            path = tmp_path / "lookonce" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return tmp_path

    return write


def test_files_and_lines_are_counted_by_folder_without_benchmarks_and_empty_inits(checkout):
    found = measure(
        checkout(
            {
                "__init__.py": "version = 1\n",
                "top.py": "a = 1\nb = 2\n",
                "core/__init__.py": "\n",
                "core/one.py": "a = 1\n",
                "core/deep/two.py": "a = 1\n\nb = 2\n",
                "core/fast.c": "int a;\nint b;\n",
                "core/_fast.pyi": "a: int\n",
                "bench/load.py": "a = 1\n",
            }
        )
    )
    assert found.folders == {".": Size(2, 3), "core": Size(2, 4)}
    assert found.total == Size(4, 7)
    assert found.left_out == Size(1, 1)
    assert found.compiled == Size(1, 2)


def test_every_import_of_an_own_module_counts_once(checkout):
    found = measure(
        checkout(
            {
                "core/__init__.py": "",
                "core/_fast.pyi": "a: int\n",
                "core/one.py": "",
                "core/two.py": "",
                "core/user.py": (
                    "from typing import TYPE_CHECKING\n"
                    "import os, lookonce.core.one\n"
                    "from lookonce.core import one, _fast\n"
                    "from lookonce.core.one import something\n"
                    "from lookonce.unknown import nothing\n"
                    "if TYPE_CHECKING:\n"
                    "    from ..types import Name\n"
                    "def late():\n"
                    "    from . import two\n"
                ),
                "types/__init__.py": "Name = str\n",
            }
        )
    )
    # lookonce.core.one, lookonce.core._fast, lookonce.types, lookonce.core.two
    assert found.fan_out == {
        "lookonce/core/user.py": 4,
        "lookonce/core/one.py": 0,
        "lookonce/core/two.py": 0,
        "lookonce/types/__init__.py": 0,
    }
    assert found.mean_imports == 1.0


def test_the_largest_fan_out_comes_first(checkout):
    found = measure(
        checkout(
            {
                "a.py": "",
                "b.py": "import lookonce.a",
                "c.py": "import lookonce.a\nimport lookonce.b",
            }
        )
    )
    assert list(found.fan_out.items())[:2] == [("lookonce/c.py", 2), ("lookonce/b.py", 1)]


def test_public_class_names_defined_twice_are_listed_with_their_places(checkout):
    found = measure(
        checkout(
            {
                "a.py": "class Same: ...\nclass _Hidden: ...\nclass Alone: ...\n",
                "b.py": "class Outer:\n    class Same: ...\nclass _Hidden: ...\n",
                "bench/c.py": "class Alone: ...\n",
            }
        )
    )
    assert found.double_names == {"Same": ["lookonce/a.py:1", "lookonce/b.py:2"]}


def test_constructors_with_more_than_six_parameters_besides_self_are_listed(checkout):
    found = measure(
        checkout(
            {
                "core/a.py": (
                    "class Six:\n"
                    "    def __init__(self, a, b, c, d, *, e, f): ...\n"
                    "class Seven:\n"
                    "    def __init__(self, a, b, /, c, d, *rest, e, f, g): ...\n"
                    "class Value:\n"
                    "    a: int; b: int; c: int; d: int; e: int; f: int; g: int\n"
                )
            }
        )
    )
    assert found.long_constructors == {"lookonce/core/a.py:4 Seven": 7}


def test_circles_are_found_and_chains_are_not(checkout):
    found = measure(
        checkout(
            {
                "__init__.py": "def late():\n    import lookonce.a\n",
                "a.py": "import lookonce.b",
                "b.py": "def late():\n    import lookonce.c",
                "c.py": "import lookonce.a\nimport lookonce.d",
                "d.py": "from lookonce import version",
                "x.py": "import lookonce.y",
                "y.py": "from lookonce import x",
            }
        )
    )
    assert found.circles == [
        ["lookonce.a", "lookonce.b", "lookonce.c"],
        ["lookonce.x", "lookonce.y"],
    ]


def test_the_script_prints_the_table_and_writes_the_figures(checkout, tmp_path):
    root = checkout({"a.py": "import lookonce.b\n", "b.py": ""})
    file = tmp_path / "figures.json"
    ran = subprocess.run(
        [sys.executable, SCRIPT, root, "--json", file], capture_output=True, text=True, check=True
    )
    assert "Own modules imported per file: 0.50" in ran.stdout
    assert "Import circles: 0" in ran.stdout
    assert json.loads(file.read_text())["fan_out"] == {"lookonce/a.py": 1, "lookonce/b.py": 0}


def test_a_folder_without_the_package_is_refused(tmp_path):
    ran = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert ran.returncode == 2
    assert f"no lookonce in {tmp_path}" in ran.stderr


def recorded_walk(root: Path, recorded: Path, *, recording: bool) -> Walk:
    """What is recorded of `lookonce.a` at `root`, whose argument is the file that says whether to
    record; at its start `recording`."""
    recorded.mkdir()
    (recorded / "recording").write_bytes(bytes([recording]))
    subprocess.run(
        [sys.executable, "-m", "lookonce.a", recorded / "recording"],
        env={
            "PYTHONPATH": f"{SCRIPT.parent / 'structure_hook'}:{root}",
            "STRUCTURE_WALK": str(recorded),
            "STRUCTURE_PACKAGE": str(root / "lookonce"),
        },
        cwd=root,
        check=True,
        timeout=60,
    )
    return structure.read_walk(root, recorded)


def test_the_hook_records_functions_of_the_package_while_it_is_told_to(checkout, tmp_path):
    root = checkout(
        {
            "a.py": (
                "import sys\n"
                "def early(): pass\n"
                "def inner(): [x for x in 'ab']\n"
                "def loop():\n"
                "    inner()\n"
                "    inner()\n"
                "early()\n"
                "file = open(sys.argv[1], 'r+b', buffering=0)\n"
                "file.write(b'\\1')\n"
                "loop()\n"
            )
        }
    )
    way = recorded_walk(root, tmp_path / "recorded", recording=False)
    assert [(step.process, step.line, step.function) for step in way.steps] == [
        ("a", 4, "loop"),
        ("a", 3, "inner"),
    ]
    assert way.size == Size(1, 10)


def test_the_hook_records_what_forked_processes_run(checkout, tmp_path):
    """Under the name that they took, whatever their descriptors are made."""
    root = checkout(
        {
            "a.py": (
                "import os, sys\n"
                "def begun(): pass\n"
                "def forked(): pass\n"
                "begun()\n"
                "if os.fork() == 0:\n"
                "    sys.argv = ['lookonce.b']\n"
                "    for low in range(3, 20):\n"
                "        os.dup2(2, low)\n"
                "    begun()\n"
                "    forked()\n"
                "    os._exit(0)\n"
                "os.wait()\n"
            )
        }
    )
    way = recorded_walk(root, tmp_path / "recorded", recording=True)
    assert {(step.process, step.function) for step in way.steps} == {
        ("a", "begun"),
        ("b", "begun"),
        ("b", "forked"),
    }


def test_the_documented_way_is_compared_with_what_ran() -> None:
    page = (
        "## The way of one request\n`other.py`: `left_out`\n**Part**\n"
        "1. `a/b.py`: `One.first`, `second`; `a/c.py`: `third` tells.\n\n"
        "## Next\n`a/d.py`: `fourth`"
    )
    named = documented_walk(page)
    assert named == [
        ("lookonce/a/b.py", "One.first"),
        ("lookonce/a/b.py", "second"),
        ("lookonce/a/c.py", "third"),
    ]
    ran = [Step("p", path, 1, function) for path, function in named]
    assert misplaced(named, [*ran, ran[0]]) == []
    assert misplaced(named, [ran[0], ran[2]]) == ["lookonce/a/b.py: second did not run"]
    assert misplaced(named, [ran[2], *ran[:2]]) == [
        "lookonce/a/c.py: third ran before the function named before it"
    ]
