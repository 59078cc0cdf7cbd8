"""`lookonce bench tracing`: what traces cost a server of text.

    off         a server without --otlp-endpoint
    off again   another one, to show what ratios of equals are on this machine
    sampled     every request is traced, and sent to a collector in this process that reads it and
                keeps nothing

All three run at once and are loaded in turn, many times; a ratio compares rounds that follow one
another. CPU seconds are those of the API process, which traces, and of the engine.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.load_generator import Arrivals, run_load
from benchmarks.report import Report, median, publish
from benchmarks.running_server import RunningServer, cpu_seconds, running_server, set_environment
from benchmarks.workloads import RequestShape, text
from lookonce.errors import UnavailableError

PROCESSES = ("lookonce.server.process", "lookonce.engine.process")
SERVERS = ("off", "off again", "sampled")


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    """The URL of a collector that takes everything."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def measured(server: RunningServer, given: argparse.Namespace, first: int) -> tuple[float, float]:
    """Generated tokens per second, and CPU seconds of API process and engine per 1,000 requests."""
    shape = RequestShape("nano", output_tokens=given.tokens, first=first, body={"model": None})
    work = text(shape, given.requests, 0)
    processes = [server.process(name) for name in PROCESSES]
    before = sum(map(cpu_seconds, processes))
    result = run_load(server.url, [], work.bodies, Arrivals(concurrency=given.clients))
    used = sum(map(cpu_seconds, processes)) - before
    if len(result.answered) != given.requests:
        raise UnavailableError(f"{given.requests - len(result.answered)} requests failed")
    return given.requests * given.tokens / result.seconds, used / given.requests * 1000


def report(given: argparse.Namespace) -> Report:
    found = Report("tracing", ("server", "tokens/s", "ratio", "CPU s/1,000 requests", "CPU ratio"))
    rates: dict[str, list[float]] = {name: [] for name in SERVERS}
    costs: dict[str, list[float]] = {name: [] for name in SERVERS}
    with ExitStack() as stack:
        url = stack.enter_context(collector())
        options = {name: list(given.options) for name in SERVERS}
        options["sampled"] += ["--otlp-endpoint", url]
        servers = {name: stack.enter_context(running_server(options[name])) for name in SERVERS}
        for number in range(given.rounds + 1):
            for name in SERVERS[number % 3 :] + SERVERS[: number % 3]:
                rate, cost = measured(servers[name], given, number * given.requests)
                if number:  # the first round warms up
                    rates[name].append(rate)
                    costs[name].append(cost)
    for name in SERVERS:
        ratio = median([a / b for a, b in zip(rates[name], rates["off"], strict=True)])
        dear = median([a / b for a, b in zip(costs[name], costs["off"], strict=True)])
        found.add(name, median(rates[name]), ratio, median(costs[name]), dear)
    found.notes.append(
        f"{given.rounds} rounds of {given.requests} requests of {given.tokens} tokens, "
        f"{given.clients} clients; medians of the rounds"
    )
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lookonce bench tracing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=160, help="of a round")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of `lookonce serve`, MODEL first, after --")
    given = parser.parse_args(arguments)
    set_environment()
    publish([report(given)], given.json)
    return 0
