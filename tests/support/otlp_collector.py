"""A collector: takes OTLP over HTTP, decodes it with OpenTelemetry's own messages, and keeps it."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, Self


@dataclass
class CollectedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begun: float
    """Seconds since 1970."""
    ended: float
    attributes: dict[str, Any]
    failed: bool
    tracestate: str

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


class TraceStore(Protocol):
    """Where a test finds the spans that came."""

    def trace(self, trace_id: str) -> list[CollectedSpan]: ...


@dataclass
class Collector:
    """`url` is its endpoint; `spans` and `metrics` (name → the newest message) are what came."""

    spans: list[CollectedSpan] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    keys: set[str | None] = field(default_factory=set)
    """Of the header `x-collector-key` of each post."""

    def __enter__(self) -> Self:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.keys.add(self.headers["x-collector-key"])
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        if path == "/v1/traces":
            self.spans += _spans(body)
        else:
            self.metrics |= _metrics(body)

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


def _spans(body: bytes) -> list[CollectedSpan]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest.FromString(body)
    return [
        CollectedSpan(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            begun=span.start_time_unix_nano / 1e9,
            ended=span.end_time_unix_nano / 1e9,
            attributes={each.key: _value(each.value) for each in span.attributes},
            failed=span.status.code == 2,
            tracestate=span.trace_state,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _metrics(body: bytes) -> dict[str, Any]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    request = ExportMetricsServiceRequest.FromString(body)
    return {
        metric.name: metric
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
