"""`lookonce bench tracing`: what traces cost a server of text.

One server with --otlp-endpoint answers rounds of requests whose caller decides in `traceparent`:

    unsampled   the request is noted and counted in histograms; no span is made
    sampled     all its spans are made and sent to a collector in this process

Rounds of both kinds follow one another in turn, so what differs between two servers is in neither
ratio. CPU time is that of the API process, which traces, until the collector has every trace of the
round; its ratio is of API process and engine, which does nothing for traces, together. What an
unsampled request costs more than one of a server without traces is measured by the same calls in
this process: `noting`. Without --otlp-endpoint nothing is called (`tests/server/test_tracing.py`).
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.load_generator import Arrivals, run_load
from benchmarks.report import Report, median, publish
from benchmarks.running_server import RunningServer, cpu_seconds, running_server, set_environment
from benchmarks.workloads import RequestShape, text
from lookonce.errors import UnavailableError
from lookonce.server.tracing import Tracer
from lookonce.types.counts import Counts

API, ENGINE = "lookonce.server.process", "lookonce.engine.process"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"
FLAGS = {"unsampled": "00", "sampled": "01"}
TRACE_SECONDS = 30.0
"""For the traces of a round to reach the collector."""
NOTED = 20_000
"""Requests that `noting` is measured with."""


class Collector:
    """Takes everything; counts the traces that came when it is asked."""

    def __init__(self) -> None:
        bodies: list[bytes] = []
        self._bodies = bodies

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()
                if self.path == "/v1/traces":
                    bodies.append(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait_for(self, num_traces: int) -> None:
        """Until so many traces have come since the last call. Raises `UnavailableError`."""
        deadline, found = time.monotonic() + TRACE_SECONDS, 0
        while found < num_traces:
            while self._bodies:
                found += _num_traces(self._bodies.pop())
            if time.monotonic() > deadline:
                raise UnavailableError(f"{found} of {num_traces} traces came")
            time.sleep(0.01)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _num_traces(body: bytes) -> int:
    """Spans of the kind SERVER, of which a request has one."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportTraceServiceRequest.FromString(body)
    scopes = (scope for each in message.resource_spans for scope in each.scope_spans)
    return sum(span.kind == 2 for scope in scopes for span in scope.spans)


@contextmanager
def collector() -> Iterator[Collector]:
    taking = Collector()
    try:
        yield taking
    finally:
        taking.close()


@dataclass(frozen=True, slots=True)
class Round:
    """CPU times are milliseconds per request."""

    tokens_per_second: float
    api_cpu: float
    engine_cpu: float


def measured(
    server: RunningServer, taking: Collector, given: argparse.Namespace, kind: str, number: int
) -> Round:
    first = number * given.requests
    shape = RequestShape("nano", output_tokens=given.tokens, first=first, body={"model": None})
    work = text(shape, given.requests, 0)
    headers = {"traceparent": TRACEPARENT + FLAGS[kind]}
    processes = [server.process(API), server.process(ENGINE)]
    before = [cpu_seconds(pid) for pid in processes]
    arrivals = Arrivals(concurrency=given.clients)
    result = run_load(server.url, [], work.bodies, arrivals, headers=headers)
    taking.wait_for(given.requests if kind == "sampled" else 0)
    api, engine = (cpu_seconds(pid) - was for pid, was in zip(processes, before, strict=True))
    if len(result.answered) != given.requests:
        raise UnavailableError(f"{given.requests - len(result.answered)} requests failed")
    each = 1000 / given.requests
    return Round(given.requests * given.tokens / result.seconds, api * each, engine * each)


def noting() -> float:
    """CPU milliseconds that a traced server spends on every request, sampled or not."""
    header = (b"traceparent", (TRACEPARENT + FLAGS["unsampled"]).encode())
    scope: dict[str, Any] = {
        "path": "/v1/chat/completions",
        "method": "POST",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json"), header],
        "state": {},
    }
    now = time.monotonic()
    generation: Any = SimpleNamespace(
        times=SimpleNamespace(computed=now),
        ended=now + 1.0,
        completion_tokens=64,
        sampling=SimpleNamespace(n=1),
    )
    serving: Any = SimpleNamespace(generations=[generation])
    tracer = Tracer(Counts(), lambda trace: None)
    began = time.thread_time()
    for _ in range(NOTED):
        trace = tracer.begin(scope)
        trace.serving = serving
        _ = trace.response_header
        tracer.end(trace, scope, 200, None)
    return (time.thread_time() - began) / NOTED * 1000


def report(given: argparse.Namespace) -> Report:
    columns = ("requests", "tokens/s", "ratio", "API CPU ms/request", "CPU ratio")
    found = Report("tracing", columns)
    rounds: dict[str, list[Round]] = {kind: [] for kind in FLAGS}
    with (
        collector() as taking,
        running_server([*given.options, "--otlp-endpoint", taking.url]) as server,
    ):
        for number in range(given.rounds + 1):
            for place, kind in enumerate(list(FLAGS)[:: 1 if number % 2 else -1]):
                one = measured(server, taking, given, kind, 2 * number + place)
                if number:  # the first round warms up
                    rounds[kind].append(one)
    plain = rounds["unsampled"]
    noted, api = noting(), median([each.api_cpu for each in plain])
    whole = api + median([each.engine_cpu for each in plain])
    found.add("noting", None, None, noted, 1 + noted / (whole - noted))
    for kind, listed in rounds.items():
        rates = [each.tokens_per_second for each in listed]
        ratios = [a / b.tokens_per_second for a, b in zip(rates, plain, strict=True)]
        cpu = median([each.api_cpu for each in listed])
        found.add(kind, median(rates), median(ratios), cpu, 1 + (cpu - api) / whole)
    found.notes.append(
        f"{given.rounds} rounds of {given.requests} requests of {given.tokens} tokens, "
        f"{given.clients} clients; medians of the rounds, and of ratios of neighbours; "
        f"{whole:.3g} ms of CPU a request without spans"
    )
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lookonce bench tracing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=80, help="of a round")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of `lookonce serve`, MODEL first, after --")
    given = parser.parse_args(arguments)
    set_environment()
    publish([report(given)], given.json)
    return 0
