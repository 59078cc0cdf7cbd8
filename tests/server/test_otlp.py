"""Traces on their way to a collector: one that is slow, gone, or asks for patience."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lookonce.server.otlp import DROPPED, MAX_WAITING, OtlpExporter
from lookonce.server.tracing import FinishedTrace, RequestTrace, Span
from lookonce.types.counts import Counts
from tests.support.otlp_collector import Collector

pytest.importorskip("opentelemetry.sdk")


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a collector."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def trace(number: int) -> FinishedTrace:
    now = time.monotonic()
    begun = RequestTrace(number + 1, 7, 0x99, True, "vendor=1", now)
    root = Span(
        "chat nano", now, now + 2, None, {"n": 1, "part": 0.5, "yes": True, "all": ["a"]}, 7
    )
    return FinishedTrace(begun, [root, Span("decode", now + 1, now + 2, root)], failed=True)


def dropped(counts: Counts) -> float:
    found = counts.read().get(DROPPED)
    return 0.0 if found is None else sum(found.numbers)


def test_spans_arrive_with_their_fields() -> None:
    with Collector() as collector:
        exporter = OtlpExporter(collector.url, Counts(), 0)
        exporter.submit(trace(0))
        exporter.close()
        root, below = collector.spans
    assert root.attributes == {"n": 1, "part": 0.5, "yes": True, "all": ["a"]}
    assert (root.trace_id, root.span_id, root.parent_id) == (
        f"{1:032x}",
        f"{7:016x}",
        f"{0x99:016x}",
    )
    assert (below.trace_id, below.parent_id) == (root.trace_id, root.span_id)
    assert root.failed
    assert not below.failed
    assert root.tracestate == "vendor=1"
    assert root.seconds == pytest.approx(2, abs=1e-6)
    assert abs(root.begun - time.time()) < 60


def test_traces_that_nobody_takes_are_counted() -> None:
    counts = Counts()
    exporter = OtlpExporter("http://127.0.0.1:9", counts, 0)
    for number in range(MAX_WAITING + 5):
        exporter.submit(trace(number))
    exporter.close()
    assert dropped(counts) == MAX_WAITING + 5


class Talkative(BaseHTTPRequestHandler):
    """Answers 200 with up to 64 MiB."""

    protocol_version = "HTTP/1.1"
    num_sent = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(64 << 20))
        self.end_headers()
        with suppress(ConnectionError):
            while Talkative.num_sent < 64 << 20:
                Talkative.num_sent += self.wfile.write(bytes(1 << 16))

    def log_message(self, *_: object) -> None:
        pass


def test_a_collector_that_answers_much_is_not_listened_to() -> None:
    with serving(Talkative) as url:
        exporter = OtlpExporter(url, Counts(), 0)
        assert exporter._traces.post(b"", threading.Event()) is None
        exporter.close()
    assert Talkative.num_sent < 32 << 20  # what the sockets hold


class Patience(BaseHTTPRequestHandler):
    """Answers the statuses of `statuses` in turn, then 200."""

    statuses: list[int] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.statuses.pop(0) if self.statuses else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def patience() -> Iterator[str]:
    with serving(Patience) as url:
        yield url


@pytest.mark.parametrize(("statuses", "lost"), [([503], 0), ([400], 1)])
def test_a_post_is_repeated_where_the_collector_says_so(
    patience: str, statuses: list[int], lost: int
) -> None:
    Patience.statuses = list(statuses)
    counts = Counts()
    exporter = OtlpExporter(patience, counts, 0)
    assert exporter._traces.post(b"", threading.Event()) == ("status 400" if lost else None)
    assert not Patience.statuses
    Patience.statuses = [400] * lost
    exporter.submit(trace(0))
    exporter.close()
    assert dropped(counts) == lost
