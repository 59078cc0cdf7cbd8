"""`lookonce bench restart`: how long a killed engine or API process is missed.

    /health      seconds from the kill until /health says 503, or is refused or not answered
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
from pathlib import Path

import httpx

from benchmarks.report import Report, median, publish
from benchmarks.running_server import RunningServer, running_server, set_environment
from benchmarks.start import API, ENGINE, STAGES, process_began, read_events
from lookonce.errors import UnavailableError

ROUNDS = 3
POLL_SECONDS = 0.01
PROBE_TIMEOUT = 0.25
"""Seconds after which a probe counts as not answered."""
PATIENCE = 180.0
NAMES = {"engine": ENGINE, "api 0": API}


def _status(url: str, path: str, timeout: float = PROBE_TIMEOUT) -> int:
    """HTTP status; 0: no answer in time, or no connection."""
    try:
        return httpx.get(url + path, timeout=timeout).status_code
    except httpx.HTTPError:
        return 0


def _is_served(url: str) -> bool:
    body = {"prompt": "a", "max_tokens": 1, "temperature": 0}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def kill_and_wait(server: RunningServer, name: str) -> tuple[float, float, float]:
    """Kill a process. When that was (seconds since the epoch), and seconds until /health said so,
    and until a completion was answered. Raises `UnavailableError` where it never is again."""
    pid = server.process(NAMES[name])
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    noticed: float | None = None
    while time.time() - killed < PATIENCE:
        probed = time.time()
        if noticed is None and _status(server.url, "/health") != 200:
            noticed = probed - killed
        if noticed is not None and _status(server.url, "/ready") == 200 and _is_served(server.url):
            return killed, noticed, time.time() - killed
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
    columns = ("killed", "/health s", "served s", "plain start s", "beyond it s")
    report = Report("restart", columns)
    parts = Report("restart (parts)", ("process", "stage", "from s", "to s", "seconds"))
    for name in NAMES:
        runs = [kill_and_wait(server, name) for _ in range(rounds)]
        noticed, served = (median([run[index] for run in runs]) for index in (1, 2))
        report.add(name, noticed, served, plain, served - plain)
        last = runs[-1]
        for stage, begin, end in parts_since(server, name, last[0]):
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
