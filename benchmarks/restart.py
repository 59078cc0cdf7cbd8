"""`lookonce bench restart`: how long a killed engine or API process is missed.

    /health      seconds from the kill until /health is answered with 503 or refused, or answered by
                 the process that took the killed one's place; a probe waits as long as it must
    told         what /health answered then: a status, or "refused"
    served       seconds from the kill until a completion is answered again
    plain start  seconds from the command to /ready of this server, before
    parts        what the new process did meanwhile, as in `lookonce bench start`

Processes are killed one at a time, by SIGKILL, on a server that has nothing to do.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.report import Report, median, publish
from benchmarks.running_server import RunningServer, running_server, set_environment
from benchmarks.start import API, ENGINE, STAGES, process_began, read_events
from lookonce.errors import UnavailableError

ROUNDS = 3
POLL_SECONDS = 0.01
PATIENCE = 180.0
NAMES = {"engine": ENGINE, "api 0": API}


@dataclass(frozen=True, slots=True)
class Missed:
    """How long a killed process was missed; seconds since the kill."""

    killed: float
    """Seconds since the epoch."""
    noticed: float
    """When /health said so."""
    told: str
    served: float
    """When a completion was answered."""


def _told(url: str, path: str) -> str:
    """What is answered: a status, "refused", or "silence"."""
    try:
        return str(httpx.get(url + path, timeout=PATIENCE).status_code)
    except httpx.TimeoutException:
        return "silence"
    except httpx.HTTPError:
        return "refused"


def _is_served(url: str) -> bool:
    body = {"prompt": "a", "max_tokens": 1, "temperature": 0}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def kill_and_wait(server: RunningServer, name: str) -> Missed:
    """Kill a process. Raises `UnavailableError` where it never comes back."""
    pid = server.process(NAMES[name])
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    told, noticed = "", 0.0
    while time.time() - killed < PATIENCE:
        if not noticed:
            told = _told(server.url, "/health")
            if told != "200" or server.processes(NAMES[name]) not in ([], [pid]):
                noticed = time.time() - killed
        if noticed and _told(server.url, "/ready") == "200" and _is_served(server.url):
            return Missed(killed, noticed, told, time.time() - killed)
        time.sleep(POLL_SECONDS)
    raise UnavailableError(f"the {name} process did not come back")


def parts_since(server: RunningServer, name: str, killed: float) -> list[tuple[str, float, float]]:
    """The stages of the new process: from, to, in seconds since the kill."""
    events = read_events(server.log.read_text())
    events[name, NAMES[name]] = process_began(server.process(NAMES[name]))
    found = []
    for process, stage, *between in STAGES:
        if process == name and all((name, event) in events for event in between):
            begin, end = (events[name, event] - killed for event in between)
            if end > 0:
                found.append((stage, begin, end))
    return found


def measure(server: RunningServer, rounds: int) -> list[Report]:
    plain = server.ready - server.commanded
    columns = ("killed", "/health s", "told", "served s", "plain start s", "beyond it s")
    report = Report("restart", columns)
    parts = Report("restart (parts)", ("process", "stage", "from s", "to s", "seconds"))
    for name in NAMES:
        runs = [kill_and_wait(server, name) for _ in range(rounds)]
        noticed = median([run.noticed for run in runs])
        served = median([run.served for run in runs])
        told = ", ".join(sorted({run.told for run in runs}))
        report.add(name, noticed, told, served, plain, served - plain)
        for stage, begin, end in parts_since(server, name, runs[-1].killed):
            parts.add(name, stage, begin, end, end - begin)
    report.notes.append(f"median of {rounds} kills each; SIGKILL, nothing else to do")
    return [report, parts]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lookonce bench restart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="kills of each process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of `lookonce serve`, MODEL first, after --")
    given = parser.parse_args(arguments)
    set_environment()
    with running_server(given.options) as server:
        reports = measure(server, given.rounds)
    publish(reports, given.json)
    return 0
