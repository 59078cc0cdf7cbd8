"""Print how the package `lookonce` of a checkout is built: files, lines, imports, names, circles.

    python tools/structure.py [FOLDER] [--walk] [--verbose] [--json FILE]

FOLDER is the root of a checkout, of an older commit too; by default the one this file lies in.
`lookonce/bench` is left out of all figures, and so are empty `__init__.py` files. With `--walk` the
server of that checkout is started with the embedded model, and the functions are counted that run
in its processes while it answers one chat request with a picture. Functions that also run while
the server is idle (heartbeats, waiting loops) are left out.
"""

from __future__ import annotations

import argparse
import ast
import base64
import http.client
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image

PACKAGE = "lookonce"
LEFT_OUT = "bench"
COMPILED = (".c", ".cc", ".cpp", ".cu", ".h", ".hpp")

MEAN_IMPORTS_GOAL = 3.4
FAN_OUT_GOAL = 15
DOUBLE_NAMES_GOAL = 3
PARAMETERS_GOAL = 6
WALK_HEADING = "## The way of one request"
WALK_FILES_GOAL = 45

QUIET_SECONDS = 3
"""Media workers still warm up after readiness; the start is over when all processes were idle for
so many seconds."""
QUIET_CPU_SECONDS = 0.2
"""CPU time all processes together take in a second in which they count as idle."""
IDLE_SECONDS = 10.0
END_SECONDS = 0.5
"""From the end of the answer until the engine has released what the request held."""
NOTHING, REQUEST, IDLE = 0, 1, 2
"""What is recorded; `structure_hook` reads it."""
SERVER_TIMEOUT = 600.0
"""Seconds for the start and for the answer: recording makes every function call slower."""


@dataclass(frozen=True)
class Module:
    """One Python file of the package."""

    name: str
    """Dotted; a package's `__init__.py` has the package's name."""
    path: str
    """Relative to the root of the checkout."""
    lines: int
    tree: ast.Module
    is_package: bool

    @property
    def folder(self) -> str:
        """The folder below the package that it lies in; "." for the package's own files."""
        parts = Path(self.path).parts
        return parts[1] if len(parts) > 2 else "."


@dataclass(frozen=True)
class Size:
    """How many files, and their lines."""

    files: int
    lines: int


@dataclass(frozen=True)
class Structure:
    """The figures that the source alone gives. Places are `path:line`."""

    total: Size
    folders: dict[str, Size]
    left_out: Size
    compiled: Size
    mean_imports: float
    fan_out: dict[str, int]
    """Own modules imported by each file, most first."""
    double_names: dict[str, list[str]]
    """Public class names defined more than once, and where."""
    long_constructors: dict[str, int]
    """Parameters besides self of each `__init__` with more than six, by place and class."""
    circles: list[list[str]]
    """Modules that import each other, directly or through others."""


@dataclass(frozen=True)
class Step:
    """A function that ran, in one process, while a request ran."""

    process: str
    path: str
    line: int
    function: str


@dataclass(frozen=True)
class Walk:
    """The named functions of the package that ran, in any process, for one request."""

    size: Size
    """Of the files those functions lie in."""
    functions: int
    processes: dict[str, int]
    """Files by process."""
    steps: list[Step]
    """In the order of first calls."""


def read_modules(root: Path) -> list[Module]:
    """All modules of the package but empty `__init__.py` files; `bench` included."""
    modules = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        source = path.read_text()
        is_package = path.name == "__init__.py"
        if is_package and not source.strip():
            continue
        relative = path.relative_to(root)
        parts = relative.parent.parts if is_package else relative.with_suffix("").parts
        name, lines = ".".join(parts), len(source.splitlines())
        modules.append(Module(name, str(relative), lines, ast.parse(source), is_package))
    return modules


def imported(module: Module, known: set[str]) -> set[str]:
    """The modules in `known` that `module` imports anywhere: in functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in known else base)
    return (found & known) - {module.name}


def _base(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name of what `from … import` names."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])


def find_circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other: the strongly connected components larger than one."""
    reached = {name: _reachable(name, imports) for name in imports}
    found = {
        tuple(sorted({other for other in reached[name] if name in reached.get(other, ())}))
        for name in imports
        if name in reached[name]
    }
    return [list(circle) for circle in sorted(found)]


def _reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


def class_places(modules: list[Module]) -> dict[str, list[str]]:
    """Where each public class name is defined."""
    places = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{module.path}:{node.lineno}")
    return places


def constructors(modules: list[Module]) -> Iterator[tuple[str, int]]:
    """Place and class of each `__init__`, and its parameters besides self and `*args`."""
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    given = item.args
                    number = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                    yield f"{module.path}:{item.lineno} {node.name}", number


def measure(root: Path) -> Structure:
    """The figures of the checkout at `root`."""
    everything = read_modules(root)
    modules = [module for module in everything if module.folder != LEFT_OUT]
    # Compiled modules are known by their stubs.
    stubs = (path.relative_to(root).with_suffix("") for path in (root / PACKAGE).rglob("*.pyi"))
    known = {module.name for module in everything} | {".".join(stub.parts) for stub in stubs}
    imports = {module.name: imported(module, known) for module in modules}
    fan_out = Counter({module.path: len(imports[module.name]) for module in modules})
    folders: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        folders[module.folder].append(module)
    compiled = [path for path in (root / PACKAGE).rglob("*") if path.suffix in COMPILED]
    places = class_places(modules)
    # Who imports the package itself wants `__version__`, not what it exports lazily.
    inner = {name: others - {PACKAGE} for name, others in imports.items()}
    return Structure(
        total=_size(modules),
        folders={name: _size(folders[name]) for name in sorted(folders)},
        left_out=_size([module for module in everything if module.folder == LEFT_OUT]),
        compiled=Size(len(compiled), sum(len(p.read_text().splitlines()) for p in compiled)),
        mean_imports=sum(fan_out.values()) / max(1, len(modules)),
        fan_out=dict(fan_out.most_common()),
        double_names={name: where for name, where in sorted(places.items()) if len(where) > 1},
        long_constructors={
            where: number for where, number in constructors(modules) if number > PARAMETERS_GOAL
        },
        circles=find_circles(inner),
    )


def _size(modules: list[Module]) -> Size:
    return Size(len(modules), sum(module.lines for module in modules))


def walk(root: Path) -> Walk:
    """Start the server at `root`, send it one picture, and read what ran meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recording").write_bytes(b"\0")
        server = _start_server(root, folder)
        try:
            url = _wait_ready(server)
            _wait_quiet(folder)
            _record(folder, IDLE)
            time.sleep(IDLE_SECONDS)
            _record(folder, REQUEST)
            _ask(url)
            time.sleep(END_SECONDS)
            _record(folder, NOTHING)
        finally:
            server.terminate()
            server.wait()
        return read_walk(root, folder)


def _start_server(root: Path, folder: Path) -> subprocess.Popen[str]:
    hook = Path(__file__).resolve().parent / "structure_hook"
    path = os.pathsep.join([str(hook), str(root), os.environ.get("PYTHONPATH", "")])
    walking = {"STRUCTURE_WALK": str(folder), "STRUCTURE_PACKAGE": str(root / PACKAGE)}
    command = [sys.executable, "-m", f"{PACKAGE}.cli.main", "serve", "nano", "--port", "0"]
    return subprocess.Popen(
        [*command, "--engine-stall-timeout", str(SERVER_TIMEOUT)],
        cwd=root,
        env={**os.environ, **walking, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def _wait_ready(server: subprocess.Popen[str]) -> str:
    """The server's host and port, which it prints when /ready is answered with 200."""
    assert server.stdout is not None
    killer = threading.Timer(SERVER_TIMEOUT, server.kill)
    killer.start()
    try:
        for line in server.stdout:
            if found := re.search(r"http://(\S+)", line):
                return found[1]
    finally:
        killer.cancel()
    raise SystemExit("the server did not start")


def _wait_quiet(folder: Path) -> None:
    quiet, deadline = 0, time.monotonic() + SERVER_TIMEOUT
    while quiet < QUIET_SECONDS and time.monotonic() < deadline:
        before = _cpu_seconds(folder)
        time.sleep(1)
        quiet = quiet + 1 if _cpu_seconds(folder) - before < QUIET_CPU_SECONDS else 0


def _cpu_seconds(folder: Path) -> float:
    """What the recorded processes that still run have taken."""
    ticks = 0
    for file in folder.glob("*.txt"):
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{file.stem}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _record(folder: Path, what: int) -> None:
    with open(folder / "recording", "r+b") as file:  # not a new file: the processes map this one
        file.write(bytes([what]))


def _ask(url: str) -> None:
    """Ask about a picture and read the answer as it comes."""
    picture = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(picture, "PNG")
    data_url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": data_url}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    body = {"model": "nano", "stream": True, "messages": [{"role": "user", "content": content}]}
    connection = http.client.HTTPConnection(url, timeout=SERVER_TIMEOUT)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    if response.status != 200 or b"[DONE]" not in answer:
        raise SystemExit(f"the picture was not answered: {response.status} {answer!r}")


def read_walk(root: Path, folder: Path) -> Walk:
    timed: list[tuple[int, Step]] = []
    idle: set[Step] = set()
    for file in folder.glob("*.txt"):
        process, *lines = file.read_text().splitlines() or [""]  # a forked process that ran nothing
        for line in lines:
            when, what, first_line, function, where = line.split("\t")
            if function.rpartition(".")[2].startswith("<"):
                continue  # lambdas and comprehensions
            path = str(Path(where).relative_to(root))
            step = Step(_process_name(process), path, int(first_line), function)
            if int(what) == IDLE:
                idle.add(step)
            else:
                timed.append((int(when), step))
    ordered = (step for _, step in sorted(timed, key=lambda item: item[0]))
    steps = [step for step in dict.fromkeys(ordered) if step not in idle]
    paths = {step.path for step in steps}
    by_process = Counter(process for process, _ in {(s.process, s.path) for s in steps})
    return Walk(
        size=Size(len(paths), sum(len((root / path).read_text().splitlines()) for path in paths)),
        functions=len({(step.path, step.line) for step in steps}),
        processes=dict(sorted(by_process.items())),
        steps=steps,
    )


def documented_walk(text: str) -> list[tuple[str, str]]:
    """(file, function) of each function that docs/architecture.md names on the way of one request.

    A file in backticks is followed by its functions in backticks.
    """
    section = text.partition(WALK_HEADING)[2].partition("\n## ")[0].partition("\n**")[2]
    named, path = [], ""
    for quoted in re.findall(r"`([\w./]+)`", section):
        if quoted.endswith(".py"):
            path = f"{PACKAGE}/{quoted}"
        elif path:
            named.append((path, quoted))
    return named


def misplaced(named: list[tuple[str, str]], steps: list[Step]) -> list[str]:
    """What is wrong with the documented way: functions that did not run, or ran earlier."""
    first = {(step.path, step.function): at for at, step in reversed(list(enumerate(steps)))}
    faults, last = [], -1
    for path, function in named:
        at = first.get((path, function))
        if at is None:
            faults.append(f"{path}: {function} did not run")
        elif at < last:
            faults.append(f"{path}: {function} ran before the function named before it")
        else:
            last = at
    return faults


def _process_name(command: str) -> str:
    """`engine.process` for `-m lookonce.engine.process`."""
    found = re.search(rf"-m {PACKAGE}\.(\S+)", command)
    return found[1] if found else command


def show(found: Structure) -> None:
    """Print the table."""
    print(f"{'folder':<20} {'files':>6} {'lines':>8}")
    for name, size in found.folders.items():
        print(f"{name:<20} {size.files:>6} {size.lines:>8}")
    print(f"{'Python':<20} {found.total.files:>6} {found.total.lines:>8}")
    print(f"{'compiled sources':<20} {found.compiled.files:>6} {found.compiled.lines:>8}")
    if found.left_out.files:
        print(f"{'not counted: bench':<20} {found.left_out.files:>6} {found.left_out.lines:>8}")
    print(f"\nOwn modules imported per file: {found.mean_imports:.2f} (goal {MEAN_IMPORTS_GOAL})")
    largest = list(found.fan_out.items())[:5]
    print(f"Largest fan-out: {largest[0][1] if largest else 0} (goal {FAN_OUT_GOAL})")
    _list(f"{number:>3} {path}" for path, number in largest)
    print(f"Class names defined twice: {len(found.double_names)} (goal {DOUBLE_NAMES_GOAL})")
    _list(f"{name}: {', '.join(places)}" for name, places in found.double_names.items())
    print(
        f"Constructors with more than {PARAMETERS_GOAL} parameters:"
        f" {len(found.long_constructors)} (goal: none in core and engine)"
    )
    _list(f"{number:>3} {where}" for where, number in found.long_constructors.items())
    print(f"Import circles: {len(found.circles)}")
    _list(" ".join(circle) for circle in found.circles)


def show_walk(way: Walk, *, verbose: bool) -> None:
    print(
        f"All that runs on the way of one picture: {way.size.files} files,"
        f" {way.size.lines} lines, {way.functions} functions"
    )
    _list(f"{number:>3} files in {process}" for process, number in way.processes.items())
    if verbose:
        _list(f"{step.process} → {step.path}:{step.line} {step.function}" for step in way.steps)


def check_documentation(root: Path, way: Walk) -> int:
    """Compare the way with the one that docs/architecture.md describes; the exit status."""
    page = root / "docs" / "architecture.md"
    named = documented_walk(page.read_text()) if page.is_file() else []
    faults = misplaced(named, way.steps)
    files = {path for path, _ in named if (root / path).is_file()}
    lines = sum(len((root / path).read_text().splitlines()) for path in files)
    print(
        f"As docs/architecture.md tells it: {len(named)} functions in {len(files)} files"
        f" (goal {WALK_FILES_GOAL}) of {lines} lines, functions wrongly named: {len(faults)}"
    )
    _list(iter(faults))
    return 1 if faults else 0


def _list(lines: Iterator[str]) -> None:
    for line in lines:
        print(f"  {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description="How the package lookonce is built.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--walk", action="store_true", help="follow one picture on a real server")
    parser.add_argument("--verbose", action="store_true", help="list the functions on the way")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    given = parser.parse_args()
    root = given.folder.resolve()
    if not (root / PACKAGE).is_dir():
        parser.error(f"no {PACKAGE} in {root}")
    found = measure(root)
    show(found)
    figures, status = asdict(found), 0
    if given.walk:
        way = walk(root)
        show_walk(way, verbose=given.verbose)
        status = check_documentation(root, way)
        figures["walk"] = asdict(way)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
