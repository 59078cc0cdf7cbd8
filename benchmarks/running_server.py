"""A server for benchmarks: the processes that a user runs, on this machine, and their CPU time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from lookonce.errors import UnavailableError

START_SECONDS = 300.0
POLL_SECONDS = 0.01
SETTLE_SECONDS = 0.05
"""In which a server has finished what a scrape or an answer leaves behind."""
URL = re.compile(r"http://[0-9.]+:[0-9]+|(?<= on )unix:/\S+")
_METRIC = re.compile(r"^(?P<name>\w+)(?P<labels>\{[^}]*\})? (?P<value>\S+)$")


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    """`http://HOST:PORT`; of a server with `--uds`, `unix:PATH`."""
    pid: int
    """Process id of the supervisor."""
    log: Path
    """What its processes have written to stdout and stderr."""
    commanded: float
    """When it was started, seconds since the epoch."""
    ready: float
    """When it printed its URL, seconds since the epoch."""

    def process(self, module: str) -> int:
        """The pid of the first descendant that runs `python -m module`. Raises
        `UnavailableError`."""
        return one_descendant(self.pid, module)

    def processes(self, module: str) -> list[int]:
        """The pids of all descendants that run `python -m module`."""
        return descendants(self.pid, module)

    def cpu_seconds(self) -> tuple[float, float, float]:
        """CPU seconds so far of the API process, its media workers, and the engine process."""
        api = self.process("lookonce.server.process")
        workers = self.processes("lookonce.render.media.worker")
        engine = self.process("lookonce.engine.process")
        return cpu_seconds(api), sum(map(cpu_seconds, workers)), cpu_seconds(engine)

    def metrics(self) -> dict[str, float]:
        """Metric name (without prefix) → value, summed over labels."""
        totals: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            found = _METRIC.match(line)
            if found is not None:
                name = found["name"].removeprefix("lookonce_")
                totals[name] = totals.get(name, 0.0) + float(found["value"])
        return totals

    def ask(
        self, client: httpx.Client, path: str, body: Mapping[str, object], counted: Sequence[str]
    ) -> tuple[float, ...]:
        """Ask once: its milliseconds, the CPU milliseconds of `cpu_seconds`, and how much each
        metric of `counted` has grown. Raises `httpx.HTTPStatusError` for a refusal."""
        encoded = json.dumps(body).encode()
        counts = self.metrics()
        time.sleep(SETTLE_SECONDS)  # the scrape is no part of it
        before = self.cpu_seconds()
        started = time.perf_counter()
        response = client.post(f"{self.url}{path}", content=encoded)
        took = time.perf_counter() - started
        response.raise_for_status()
        spent = [(now - then) * 1e3 for now, then in zip(self.cpu_seconds(), before, strict=True)]
        after = self.metrics()
        return (took * 1e3, *spent, *(after[name] - counts[name] for name in counted))


@contextmanager
def running_server(options: Sequence[str] = ()) -> Iterator[RunningServer]:
    """Run `lookonce serve` with these options on a free port until the block ends.

    Raises `UnavailableError` with the end of its log when it does not become ready.
    """
    with running_command(["-m", "lookonce.cli.main", "serve", *options, "--port", "0"]) as server:
        yield server


@contextmanager
def running_command(arguments: Sequence[str]) -> Iterator[RunningServer]:
    """Run a Python command that prints its server's URL when ready, until the block ends.

    Raises `UnavailableError` with the end of its log when it does not become ready.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, *arguments]
        commanded = time.time()
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            url = _served_url(process, log)
            yield RunningServer(url, process.pid, log, commanded, time.time())
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _served_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that the server prints once `/ready` says yes. Raises `UnavailableError`."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = URL.search(log.read_text())
        if found is not None:
            return found.group()
        time.sleep(POLL_SECONDS)
    raise UnavailableError(f"the server did not become ready:\n{log.read_text()[-2000:]}")


def descendants(pid: int, module: str) -> list[int]:
    """The pids of all descendants of a process that run `python -m module`."""
    found, parents = [], [pid]
    while parents:
        children = _children(parents.pop())
        parents += children
        found += [child for child in children if module in _command_line(child)]
    return found


def one_descendant(pid: int, module: str) -> int:
    """The lowest pid of `descendants`. Raises `UnavailableError` if there is none."""
    for found in sorted(descendants(pid, module)):
        return found
    raise UnavailableError(f"no process runs {module}")


def memory_bytes(pid: int, *kinds: str) -> int:
    """Memory of a process, these kinds of it together, as Linux tells them apart: `Rss` is all that
    is in use, `Pss` divides pages among those who share them; `Pss_Anon`, `Pss_Shmem`."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    if not sizes.keys() >= set(kinds):
        raise UnavailableError(f"the system does not tell the memory of process {pid}")
    return sum(int(sizes[kind][0]) * 1024 for kind in kinds)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads that a process has now, as the kernel's scheduler counts them."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def waiting_seconds(pid: int) -> float:
    """Seconds in which threads that a process has now could have run, but no core was free."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


def machine_cpu_seconds() -> float:
    """CPU seconds of all processes, and of the kernel, since the machine was started."""
    user, nice, system, _idle, _iowait, *interrupts = Path("/proc/stat").read_text().split()[1:8]
    ticks = sum(map(int, (user, nice, system, *interrupts)))
    return ticks / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid:
                found.append(int(entry.name))
    return sorted(found)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def set_environment() -> None:
    """Give numeric libraries one thread in this process and those it starts."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
