"""`lookonce bench fairness`: what one tenant's attacks cost another one.

    alone     the other tenant's p99 with half of the machine's cores, and nobody else
    attacked  its p99 with the whole machine, while the attacker does what the row says
    ratio     of the two: 2 or less is fair
    samples   requests that the attacked p99 is of
    attempts  of the attack, each second: how often all its threads together did what it does
    waited    seconds of each second in which threads of API process and engine could have run, but
              had no core: they wait for each other, the attackers' processes and whatever else runs
    memory    of the API process and the engine: after the attack over before

p99 is the nearest rank: of 200 samples the third slowest, so that one moment in which the machine
did something else is not the figure; of fewer than 100 it is the slowest one and says little.
Alone, server and client have one half of the cores (of two: one core, on which all processes take
turns), and the same requests are asked. This is measured before each attack, on a server of its
own, and p99 is that of all these requests: of one such measurement it differs from run to run by
twice, as the slowest requests of a few seconds are the machine's own.

The attack "none" is the whole machine with nobody else: its ratio is what the others are to be
compared with. What of it is the machine's own is noted: how long two processes take that answer
each other as a server and its client do, and for how much of their time the hypervisor gave a core
to other guests.

The other tenant asks for text, a known picture, a new picture, and text with a new grammar, one
after another, once every thread of the attack has begun. Memory is that of a server at rest again.
`--cost` measures what sharing costs instead: the tokens that the attacker is generated, with nobody
else and beside the other tenant, who asks as above.

The attackers stand in for other machines: their process runs where nobody else would (on Linux it
has the policy SCHED_IDLE, which, unlike a low priority, makes nobody wait for the end of a slice of
its time), so that their own CPU time is not the server's. With `--before FOLDER` the code of
another checkout is attacked in turn with this one.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from PIL import Image

from benchmarks.pictures import encoded_picture, variant
from benchmarks.report import Report, publish, write_json
from benchmarks.running_server import (
    START_SECONDS,
    RunningServer,
    memory_bytes,
    running_server,
    set_environment,
    waiting_seconds,
)
from lookonce.errors import UnavailableError

ATTACKER, OTHER = "attacker", "other"
"""Tenants; their keys are their names."""
KEYS = [word for name in (ATTACKER, OTHER) for word in ("--api-key", f"{name}:{name}")]
KINDS = ("text", "known picture", "new picture", "grammar")
PROCESSES = {"API": "lookonce.server.process", "engine": "lookonce.engine.process"}
HEAD = b" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer attacker\r\n"
POST = b"POST /v1/completions" + HEAD + b"Content-Type: application/json\r\n"
SIDE = 6900
LEAST_SECONDS = 8.0
MOST_SECONDS = 120.0
"""Of one measurement: code that is taken over by an attack would be asked for hours."""
ENOUGH = 200
"""Samples of each kind."""
REST_SECONDS = 60.0
"""For a server to be at rest after an attack."""
REST = ("num_requests_running", "num_requests_waiting", "media_waiting")
"""Metrics that are 0 then."""
SETTLED_SECONDS = 3.0
"""An API process looks once a second whether it rests."""
KEPT_CONNECTIONS = 2
"""That of the other tenant, and the one that asks for the metrics."""
COST_SECONDS = 10.0
NOBODY = "none"
EXCHANGES, ANSWERS, ANSWER_SECONDS = 1000, 8, 0.0003
GENERATING = ("many requests", "long answers")
"""Attacks whose tokens are counted."""
POLL_SECONDS = 0.1
BIND_ADDRESS_NO_PORT = 24
"""Linux's `IP_BIND_ADDRESS_NO_PORT`, which Python's `socket` has since 3.12."""
_numbers = count()


@dataclass
class Latencies:
    """Seconds of one tenant's requests, by kind, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    wrong: int = 0

    def p99(self, kind: str) -> float:
        ordered = sorted(self.seconds[kind])
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def add(self, other: Latencies) -> None:
        for kind in KINDS:
            self.seconds[kind] += other.seconds[kind]
        self.wrong += other.wrong


@dataclass(frozen=True)
class Attacked:
    """One measurement. `waited` and `attempts`: each second."""

    name: str
    code: str
    seen: Latencies
    attempts: float
    waited: float
    memory: dict[str, float]
    """After the attack over before."""


# --- the tenant that is measured ------------------------------------------------------------------


class Other:
    """Asks one request after another."""

    def __init__(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {OTHER}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=120)
        self._picture = encoded_picture("512", "JPEG")

    def ask(self, rounds: int, seconds: float = 0.0) -> Latencies:
        """So many requests of each kind, and for so many seconds at least; `MOST_SECONDS` at most,
        and one of each."""
        found, began_all = Latencies(), time.monotonic()
        done = 0
        while not done or (
            (done < rounds or time.monotonic() - began_all < seconds)
            and time.monotonic() - began_all < MOST_SECONDS
        ):
            for kind in KINDS:
                path, body = self._request(kind)
                began = time.monotonic()
                found.wrong += self._status(path, body) != 200
                found.seconds[kind].append(time.monotonic() - began)
            done += 1
        return found

    def _status(self, path: str, body: dict[str, Any]) -> int:
        """0: no answer."""
        try:
            return self._client.post(path, json=body).status_code
        except httpx.HTTPError:
            return 0

    def _request(self, kind: str) -> tuple[str, dict[str, Any]]:
        if kind == "text":
            return "/v1/completions", {"prompt": "a red", "max_tokens": 8}
        if kind == "grammar":
            regex = f"[a-z]{{3}}{next(_numbers)}"
            body = {"prompt": "a red", "max_tokens": 8, "structured_outputs": {"regex": regex}}
            return "/v1/completions", body
        picture = self._picture if kind == "known picture" else variant(self._picture, _fresh())
        return "/v1/chat/completions", chat(picture)


def _fresh() -> int:
    return time.monotonic_ns()


def chat(picture: bytes) -> dict[str, Any]:
    url = "data:image/jpeg;base64," + base64.b64encode(picture).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}


# --- the attacks ----------------------------------------------------------------------------------

Attack = Callable[[httpx.Client, str, int], None]
"""(client, URL, thread) → one attempt."""


def grammars(client: httpx.Client, url: str, thread: int) -> None:
    """Schemas that take seconds to compile, each another one."""
    patterns = [f"^[a-z]{{1,{length}}}$" for length in range(1, 51)] * 50
    name = _fresh()
    texts = {f"p{name}x{i}": {"type": "string", "pattern": p} for i, p in enumerate(patterns)}
    schema = {"type": "object", "properties": texts}
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": schema}}
    client.post("/v1/completions", json=body)


def scan_bombs(client: httpx.Client, url: str, thread: int) -> None:
    client.post("/v1/chat/completions", json=chat(variant(_PICTURES["bomb"], _fresh())))


def large_pictures(client: httpx.Client, url: str, thread: int) -> None:
    client.post("/v1/chat/completions", json=chat(variant(_PICTURES["large"], _fresh())))


def long_texts(client: httpx.Client, url: str, thread: int) -> None:
    """White space: how many tokens it has is known only once it is tokenized."""
    client.post("/v1/completions", json={"prompt": " " * (100_000 - thread), "max_tokens": 1})


def many_requests(client: httpx.Client, url: str, thread: int) -> None:
    body = {"prompt": [5 + _fresh() % 200] * 1500, "max_tokens": 64, "ignore_eos": True}
    client.post("/v1/completions", json=body)


def long_answers(client: httpx.Client, url: str, thread: int) -> None:
    """More answers at once than the engine computes side by side."""
    body = {"prompt": "a", "n": 16, "max_tokens": 2000, "ignore_eos": True, "temperature": 1}
    client.post("/v1/completions", json=body)


def many_values(client: httpx.Client, url: str, thread: int) -> None:
    """Chats that take long to convert and to render, with JSON within JSON: as many values as are
    converted at all."""
    call = {"name": "f", "arguments": json.dumps([[]] * 28_000)}
    calls = [{"id": "x", "type": "function", "function": call}]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "a"}]
    client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})


def headers(client: httpx.Client, url: str, thread: int) -> None:
    """Headers without end, and connections that come and go."""
    with connection(url, thread) as link:
        link.sendall(b"GET /version" + HEAD)
        for _ in range(100):
            link.sendall(b"X: y\r\n" * 10_000)


def connections(client: httpx.Client, url: str, thread: int) -> None:
    for _ in range(20):
        with connection(url, thread):
            pass


def abandoned_bodies(client: httpx.Client, url: str, thread: int) -> None:
    with connection(url, thread) as link:
        link.sendall(POST + b"Content-Length: 20000000\r\n\r\n" + b"a" * 4_000_000)


@contextmanager
def connection(url: str, thread: int) -> Iterator[socket.socket]:
    """From an address of this thread's own; on Linux all of 127/8 are this machine's.

    The port is chosen when it connects. While it is bound the kernel would look for one that no
    earlier connection had, of which there soon is none, and would keep a core for that.
    """
    where = urlsplit(url)
    with socket.socket() as link:
        link.settimeout(30)
        link.setsockopt(socket.IPPROTO_IP, BIND_ADDRESS_NO_PORT, 1)
        link.bind((f"127.0.0.{2 + thread}", 0))
        link.connect((where.hostname, where.port))
        yield link


ATTACKS: dict[str, tuple[Attack, int]] = {
    "grammars": (grammars, 8),
    "scan bombs": (scan_bombs, 8),
    "large pictures": (large_pictures, 8),
    "long texts": (long_texts, 8),
    "headers": (headers, 8),
    "connections": (connections, 8),
    "many requests": (many_requests, 32),
    "long answers": (long_answers, 8),
    "many values": (many_values, 8),
    "abandoned bodies": (abandoned_bodies, 8),
}
"""Name → what each of so many threads does again and again."""


def large_picture() -> bytes:
    """47.6 megapixels in some 100 KB."""
    buffer = io.BytesIO()
    Image.new("L", (SIDE, SIDE), 90).save(buffer, "JPEG", progressive=True)
    return buffer.getvalue()


def scan_bomb(picture: bytes, scans: int = 600) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    last = picture.rindex(b"\xff\xda")
    return picture[:-2] + picture[last:-2] * scans + b"\xff\xd9"


_PICTURES: dict[str, bytes] = {}


def _attack(name: str, url: str, begun: Semaphore, attempts: MutableSequence[int]) -> None:
    """In a process of its own, until it is killed. Each thread releases `begun` once, and counts
    its attempts in its place of `attempts`."""
    run_where_nobody_else_would()
    large = large_picture()
    _PICTURES.update(large=large, bomb=scan_bomb(large))
    attempt, threads = ATTACKS[name]

    def go_on(number: int) -> None:
        auth = {"Authorization": f"Bearer {ATTACKER}"}
        with httpx.Client(base_url=url, headers=auth, timeout=60) as client:
            begun.release()
            while True:
                with suppress(OSError, httpx.HTTPError):
                    attempt(client, url, number)
                attempts[number] += 1

    for number in range(threads):
        threading.Thread(target=go_on, args=(number,)).start()


def run_where_nobody_else_would() -> None:
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


@contextmanager
def attacked(name: str, url: str) -> Iterator[Callable[[], int]]:
    """Within the block every thread of the attack has begun. Gives what tells how many attempts
    there were so far."""
    if name == NOBODY:
        yield lambda: 0
        return
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Semaphore(0)
    attempts = spawn.RawArray("Q", ATTACKS[name][1])
    process = spawn.Process(target=_attack, args=(name, url, begun, attempts))
    process.start()
    try:
        for _ in range(ATTACKS[name][1]):
            if not begun.acquire(timeout=START_SECONDS):
                raise UnavailableError(f"the attack {name} has not begun")
        yield lambda: sum(attempts)
    finally:
        process.kill()
        process.join()


# --- measuring ------------------------------------------------------------------------------------


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Within the block, processes that are started may use these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def server_of(checkout: Path | None) -> Iterator[RunningServer]:
    """A server with the code of a checkout; None: this one's. `python -m` looks for modules in the
    current folder first."""
    with ExitStack() as stack:
        with chdir(checkout or Path.cwd()):
            server = stack.enter_context(running_server(KEYS))
        yield server


def resident(server: RunningServer) -> dict[str, int]:
    return {kind: memory_bytes(server.process(module), "Rss") for kind, module in PROCESSES.items()}


def waiting(server: RunningServer) -> float:
    """Seconds so far."""
    return sum(waiting_seconds(server.process(module)) for module in PROCESSES.values())


def wait_until_at_rest(server: RunningServer) -> None:
    """Until nothing of the attack is left: no request, no queued item, no connection but the one
    that asks. Goes on after `REST_SECONDS`, since code before may never be."""
    end = time.monotonic() + REST_SECONDS
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            metrics = server.metrics()
            busy = any(metrics.get(name, 0) for name in REST)
            if not busy and metrics.get("http_connections", 0) <= KEPT_CONNECTIONS:
                return
        time.sleep(POLL_SECONDS)


def settled_memory(server: RunningServer) -> dict[str, int]:
    """Of a server at rest, once it has given back for `SETTLED_SECONDS` no more."""
    now, since = resident(server), time.monotonic()
    end = since + REST_SECONDS
    while time.monotonic() - since < SETTLED_SECONDS and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        before, now = now, resident(server)
        if any(now[kind] < before[kind] for kind in now):
            since = time.monotonic()
    return now


def measure(checkout: Path | None, name: str, rounds: int) -> Attacked:
    with server_of(checkout) as server:
        other = Other(server.url)
        other.ask(5)
        before = settled_memory(server)
        with attacked(name, server.url) as attempts:
            waited, tried, began = waiting(server), attempts(), time.monotonic()
            seen = other.ask(rounds, LEAST_SECONDS)
            seconds = time.monotonic() - began
            waited, tried = (waiting(server) - waited) / seconds, attempts() - tried
        wait_until_at_rest(server)
        after = settled_memory(server)
    return Attacked(
        name,
        "this" if checkout is None else "before",
        seen,
        attempts=tried / seconds,
        waited=waited,
        memory={kind: after[kind] / before[kind] for kind in PROCESSES},
    )


def add_rows(report: Report, found: Attacked, alone: Latencies) -> None:
    """One for each kind of request."""
    for kind in KINDS:
        p99 = found.seen.p99(kind)
        report.add(
            found.name, found.code, kind, 1000 * alone.p99(kind), 1000 * p99,
            p99 / alone.p99(kind), len(found.seen.seconds[kind]), found.seen.wrong,
            found.attempts, found.waited, found.memory["API"], found.memory["engine"],
        )  # fmt: skip


def half_of_cores() -> set[int]:
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[: max(1, len(cores) // 2)])


def measured_alone(rounds: int) -> Latencies:
    with on_cores(half_of_cores()), server_of(None) as server:
        other = Other(server.url)
        other.ask(5)
        return other.ask(rounds, LEAST_SECONDS)


# --- the machine ----------------------------------------------------------------------------------


def exchanges() -> str:
    """What two processes take for an exchange: one asks, the other answers `ANSWERS` times and
    computes for a while before each, as an engine does before a token."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_answer, args=(theirs,))
    process.start()
    theirs.close()
    _exchange(ours)  # it has begun
    stolen, began_all = stolen_seconds(), time.monotonic()
    found = sorted(_exchange(ours) for _ in range(EXCHANGES))
    taken = (stolen_seconds() - stolen) / (time.monotonic() - began_all)
    ours.close()
    process.join()
    p50, p99 = (found[math.ceil(share * len(found)) - 1] for share in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, {100 * taken:.1f} % of the time taken away"


def _exchange(link: Connection) -> float:
    """Its milliseconds."""
    began = time.monotonic()
    link.send_bytes(b"ask")
    for _ in range(ANSWERS):
        link.recv_bytes()
        _compute(ANSWER_SECONDS / 2)
    return 1000 * (time.monotonic() - began)


def _answer(link: Connection) -> None:
    with suppress(EOFError, OSError):
        while link.recv_bytes():
            for _ in range(ANSWERS):
                _compute(ANSWER_SECONDS)
                link.send_bytes(b"token")


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def stolen_seconds() -> float:
    """Of all cores, since the machine was started, in which the hypervisor ran something else; 0
    where the system does not tell."""
    with suppress(OSError, IndexError):
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    return 0.0


# --- what it costs --------------------------------------------------------------------------------


def generated(server: RunningServer, seconds: float) -> float:
    """Tokens a second, of all tenants; the other one's are a few hundred in all."""
    began, before = time.monotonic(), server.metrics()["generation_tokens_total"]
    time.sleep(seconds)
    number = server.metrics()["generation_tokens_total"] - before
    return number / (time.monotonic() - began)


def measure_cost(checkout: Path | None, name: str, report: Report) -> None:
    """One row: what the attacker gets."""
    with server_of(checkout) as server, ThreadPoolExecutor(1) as thread:
        other = Other(server.url)
        other.ask(5)
        with attacked(name, server.url):
            time.sleep(COST_SECONDS / 2)
            alone = generated(server, COST_SECONDS)
            asking = thread.submit(other.ask, 1, 1.5 * COST_SECONDS)
            time.sleep(COST_SECONDS / 4)
            beside = generated(server, COST_SECONDS)
            asking.result()
    report.add(name, "this" if checkout is None else "before", alone, beside, beside / alone)


def report_cost(names: Sequence[str], before: Path | None, file: Path | None) -> None:
    report = Report("fairness", ("attack", "code", "tokens/s alone", "beside", "ratio"))
    for name in names:
        if before is not None:
            measure_cost(before, name, report)
        measure_cost(None, name, report)
        write_json(file, [report])
    publish([report], file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="lookonce bench fairness")
    parser.add_argument(
        "--attack", action="append", choices=(NOBODY, *ATTACKS), help="only this; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=ENOUGH, help="requests of each kind")
    parser.add_argument("--before", type=Path, help="another checkout, attacked in turn")
    parser.add_argument("--cost", action="store_true", help="what the attacker gets instead")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    set_environment()
    if given.cost:
        report_cost(given.attack or GENERATING, given.before, given.json)
        return
    columns = (
        "attack", "code", "asked", "alone ms", "attacked ms", "ratio", "samples",
        "errors", "attempts/s", "waited", "API memory", "engine memory",
    )  # fmt: skip
    with on_cores(half_of_cores()):
        notes = [f"two processes on half of the cores: {exchanges()}"]
    notes.append(f"two processes on all cores: {exchanges()}")
    alone, measured = Latencies(), list[Attacked]()
    for name in given.attack or (NOBODY, *ATTACKS):
        alone.add(measured_alone(given.rounds))
        if given.before is not None:
            measured.append(measure(given.before, name, given.rounds))
        measured.append(measure(None, name, given.rounds))
        samples = min(len(seconds) for seconds in alone.seconds.values())
        asked = f"p99; alone: {samples} requests of each kind, with half of the cores"
        report = Report("fairness", columns, notes=[asked, *notes])
        for found in measured:
            add_rows(report, found, alone)
        write_json(given.json, [report])  # what there is, should it be ended before
    publish([report], given.json)


if __name__ == "__main__":
    main()
