"""`lookonce bench start`: from the command to `/ready`, and the first requests after it.

    from, to    seconds since the command was given; processes start side by side
    CPU         CPU seconds of each process until `/ready`, which other load disturbs less
    ratio       the first request over the median of later requests of its kind

Stages are read from the server's log, the start times of processes from the kernel.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx

from benchmarks.report import Report, median, publish
from benchmarks.running_server import RunningServer, cpu_seconds, running_server, set_environment
from benchmarks.workloads import RequestShape, Workload, new, text
from lookonce.errors import UnavailableError

LATER = 9
_LINE = re.compile(
    r"(?P<at>\S+ \S+,\d{3}) INFO (?P<process>engine|api 0|server|fork server): (?P<words>.*)"
)

ENGINE, API = "lookonce.engine.process", "lookonce.server.process"
FORK_SERVER = "lookonce.ipc.fork_server"
STAGES = (
    ("engine", "interpreter, imports", ENGINE, "loading "),
    ("engine", "weights, tokenizer of the warm-up", "loading ", "serving "),
    ("engine", "warm-up", "serving ", "the engine serves"),
    ("fork server", "interpreter, imports, warm-up", FORK_SERVER, "ready to fork"),
    ("api 0", "fork", API, "opening "),
    ("api 0", "tokenizer, templates, media worker", "opening ", "the renderer is ready"),
    ("api 0", "warm-up", "the renderer is ready", "warmed up"),
)
"""Process, stage, and the two events that the stage lies between. An event is the module of a
process, which stands for its start, or how a line of its log begins (its last such line)."""
Events = dict[tuple[str, str], float]
"""(Process, event of `STAGES`) → seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Start:
    """One observed start; times are seconds since the epoch."""

    commanded: float
    ready: float
    events: Events
    cpu: dict[str, float]
    """Process → CPU seconds until ready."""


def read_events(log: str) -> Events:
    """The last time that each line named by `STAGES` was written."""
    beginnings = {event for _, _, *events in STAGES for event in events}
    found = {}
    for match in map(_LINE.match, log.splitlines()):
        if match is None:
            continue
        process = "engine" if match["process"] == "server" else match["process"]
        at = datetime.strptime(match["at"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        for event in beginnings:
            if match["words"].startswith(event):
                found[process, event] = at
    return found


def breakdown(start: Start) -> Report:
    """One row per stage. Raises `UnavailableError` where the log lacks an event."""
    report = Report("start", ("process", "stage", "from s", "to s", "seconds"))
    first = start.events["engine", ENGINE]
    report.add("supervisor", "interpreter, imports, options", 0.0, *[first - start.commanded] * 2)
    for process, stage, *events in STAGES:
        try:
            begin, end = (start.events[process, event] - start.commanded for event in events)
        except KeyError as missing:
            raise UnavailableError(f"the log says nothing of {missing}") from None
        report.add(process, stage, begin, end, end - begin)
    whole = start.ready - start.commanded
    report.add("all", "until /ready says yes", 0.0, whole, whole)
    used = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in start.cpu.items())
    report.notes.append(f"CPU until then: {used}; {sum(start.cpu.values()):.2f} s in all")
    return report


def _start_of(server: RunningServer) -> Start:
    """How a running server started."""
    modules = {"engine": ENGINE, "fork server": FORK_SERVER, "api 0": API}
    pids = {name: server.process(module) for name, module in modules.items()}
    cpu = {name: cpu_seconds(pid) for name, pid in pids.items()}
    events = read_events(server.log.read_text())
    for name, module in modules.items():
        events[name, module] = process_began(pids[name])
    return Start(server.commanded, server.ready, events, cpu)


def process_began(pid: int) -> float:
    """When a process was started: seconds since the epoch, to a hundredth of a second."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / 100


def first_requests(url: str, later: int) -> Report:
    """One row for the first text request, one for the first picture, each beside later ones."""
    report = Report("start (first requests)", ("kind", "first ms", "later ms", "ratio"))
    plain = {"model": None, "stream": False, "stream_options": None}
    shape = RequestShape("", output_tokens=4, body=plain)
    with httpx.Client(base_url=url, timeout=300) as client:
        client.get("/ready")  # opens the connection
        for work in (text(shape, later + 1, 0), new(shape, later + 1, 0)):
            first, *others = _latencies(client, work)
            steady = median(others)
            report.add(work.name, first, steady, first / steady)
    report.notes.append(f"1024 px JPEGs, new in every request; median of {later} later ones")
    return report


def _latencies(client: httpx.Client, work: Workload) -> list[float]:
    """Milliseconds, one request at a time."""
    found = []
    for body in work.bodies:
        started = time.perf_counter()
        client.post("/v1/chat/completions", content=body).raise_for_status()
        found.append((time.perf_counter() - started) * 1e3)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lookonce bench start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--later", type=int, default=LATER, help="requests after the first")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of `lookonce serve`, MODEL first, after --")
    given = parser.parse_args(arguments)
    set_environment()
    with running_server(given.options) as server:
        reports = [breakdown(_start_of(server)), first_requests(server.url, given.later)]
    publish(reports, given.json)
    return 0
