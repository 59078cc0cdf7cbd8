"""Sends traces and metrics by OTLP over HTTP; the one module that imports OpenTelemetry.

It does so only when `--otlp-endpoint` is given. `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES` and
what is about metrics are read by OpenTelemetry itself, `OTEL_EXPORTER_OTLP_…` of traces here.

A thread encodes finished traces once a second and posts them; when the collector is slow or gone
they are dropped, which is counted, and nothing else suffers. The first API process also posts the
metrics of all processes.

Traces are encoded straight into OpenTelemetry's messages: its SDK's spans and their encoder take
five times as long, which a server of text would feel.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx
from prometheus_client.core import Metric

from lookonce import __version__
from lookonce.errors import LookOnceError
from lookonce.server.tracing import (
    HISTOGRAMS,
    PROVIDER,
    FinishedTrace,
    Tracer,
    histogram_points,
)
from lookonce.types.counts import Counts, Values

if TYPE_CHECKING:
    from lookonce.server.services import Services

logger = logging.getLogger("lookonce.server")

MAX_WAITING = 4096
"""Finished traces that wait for the collector; later ones are dropped and counted."""
BATCH = 64
"""Traces of one post."""
BATCH_SECONDS = 1.0
"""Between looks for finished traces."""
METRICS_MILLISECONDS = 15_000
"""Between posts of metrics, where `OTEL_METRIC_EXPORT_INTERVAL` does not say."""
POST_SECONDS = 5.0
"""For one post, with its repetitions."""
RETRY_SECONDS = 0.5
"""Before the first repetition; twice as long before each further one."""
RETRIED = frozenset({429, 502, 503, 504})
"""Statuses after which OTLP says to try again."""
MAX_ANSWER = 64 * 1024
"""Bytes of a collector's answer that are read; nothing in it is needed."""
SERVER_SPAN, INTERNAL_SPAN, ERROR = 2, 1, 2
SAMPLED, KNOWS_REMOTE, IS_REMOTE = 0x1, 0x100, 0x200
"""OTLP's numbers for kinds of spans, for a status, and of its span flags."""
DROPPED = "otlp_traces_dropped_total"


@asynccontextmanager
async def exporting(services: Services, index: int) -> AsyncIterator[None]:
    """Traces of this process, and from process 0 the metrics of all, go to the collector inside."""
    otlp = services.config.otlp
    if otlp.endpoint is None:
        yield
        return
    exporter = OtlpExporter(otlp.endpoint, services.metrics.counts, index)
    services.tracer = Tracer(services.metrics.counts, exporter.submit, ratio=otlp.sample_ratio)
    served = services.config.model.served_name
    posting = asyncio.create_task(_post_metrics(services, exporter, served)) if index == 0 else None
    try:
        yield
    finally:
        services.tracer = None
        if posting is not None:
            posting.cancel()
            with suppress(asyncio.CancelledError):
                await posting
            await _post_once(services, exporter, served)
        await asyncio.to_thread(exporter.close)


async def _post_metrics(services: Services, exporter: OtlpExporter, served: str) -> None:
    seconds = _metrics_seconds()
    while True:
        await asyncio.sleep(seconds)
        await _post_once(services, exporter, served)


def _metrics_seconds() -> float:
    asked = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    return (float(asked) if asked.isdecimal() else METRICS_MILLISECONDS) / 1000


async def _post_once(services: Services, exporter: OtlpExporter, served: str) -> None:
    """Never raises: what one post lacked, descriptors say, the next one may have."""
    try:
        engine = await services.engine.stats()
    except LookOnceError:
        engine = {}
    try:
        sums = await services.summed_counts()
        families = services.metrics.all_families(services.metrics.families(sums), engine)
        await asyncio.to_thread(exporter.post_metrics, families, sums, served)
    except Exception:
        logger.exception("metrics could not be read")


class OtlpExporter:
    """Posts to `endpoint`/v1/traces and `endpoint`/v1/metrics."""

    def __init__(self, endpoint: str, counts: Counts, index: int) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        base = endpoint.rstrip("/")
        self._resource = Resource.create(
            {
                "service.name": PROVIDER,
                "service.version": __version__,
                "service.instance.id": f"api-{index}",
            }
        )
        self._scope = InstrumentationScope(PROVIDER, __version__)
        self._traces = TraceClient(f"{base}/v1/traces")
        self._metrics = OTLPMetricExporter(f"{base}/v1/metrics", timeout=POST_SECONDS)
        self._dropped = counts.count(DROPPED)
        self._waiting: deque[FinishedTrace] = deque()
        self._ending = threading.Event()
        self._started = time.time_ns()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def submit(self, trace: FinishedTrace) -> None:
        """Queue a trace; called on the event loop, and wakes no thread."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(trace)
        else:
            self._dropped.add()

    def close(self) -> None:
        """Post what is queued, as long as two posts take."""
        self._ending.set()
        self._thread.join(2 * POST_SECONDS)
        self._traces.close()
        self._metrics.shutdown()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._ending.wait(BATCH_SECONDS)
            while self._waiting:
                count = min(BATCH, len(self._waiting))
                self._post_traces([self._waiting.popleft() for _ in range(count)])

    def _post_traces(self, batch: list[FinishedTrace]) -> None:
        try:
            problem = self._traces.post(self._encoded(batch), self._ending)
        except Exception:
            logger.exception("traces could not be sent")
            problem = "failed"
        else:
            if problem is not None:
                logger.warning("the collector takes no traces: %s", problem)
        if problem is not None:
            self._dropped.add(len(batch))

    def _encoded(self, batch: list[FinishedTrace]) -> bytes:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        offset = time.time_ns() - time.monotonic_ns()
        scope = {
            "scope": {"name": self._scope.name, "version": self._scope.version or ""},
            "spans": [span for finished in batch for span in _span_messages(finished, offset)],
        }
        resource = {"attributes": _key_values(self._resource.attributes)}
        sent = [{"resource": resource, "scope_spans": [scope]}]
        message = trace_service_pb2.ExportTraceServiceRequest(resource_spans=sent)
        return bytes(message.SerializeToString())

    # --- metrics ------------------------------------------------------------------------------

    def post_metrics(self, families: list[Metric], sums: dict[str, Values], model: str) -> None:
        """Post all families of `/metrics`, named as there, and the `gen_ai.server` ones."""
        from opentelemetry.sdk.metrics import export

        now = time.time_ns()
        metrics = [self._metric(family, now) for family in families]
        metrics += self._gen_ai(sums, model, now)
        scope = export.ScopeMetrics(self._scope, metrics, "")
        resource = export.ResourceMetrics(self._resource, [scope], "")
        try:
            self._metrics.export(export.MetricsData([resource]))
        except Exception:
            logger.exception("metrics could not be sent")

    def _metric(self, family: Metric, now: int) -> Any:
        """A family as OpenTelemetry's metric; a collector adds `_total` to counters again."""
        from opentelemetry.sdk.metrics import export

        data: Any
        if family.type == "histogram":
            numbers = [s.value for s in family.samples if s.name.endswith("_bucket")]
            bounds = [float(s.labels["le"]) for s in family.samples if "le" in s.labels][:-1]
            counts = [b - a for a, b in zip([0.0, *numbers], numbers, strict=False)]
            total = next((s.value for s in family.samples if s.name.endswith("_sum")), 0.0)
            data = self._histogram([({}, bounds, (*counts, total))], now)
            unit = "s"
        else:
            points = [
                export.NumberDataPoint(dict(sample.labels), self._started, now, sample.value)
                for sample in family.samples
            ]
            unit = "By" if "bytes" in family.name else "1"
            if family.type == "counter":
                cumulative = export.AggregationTemporality.CUMULATIVE
                data = export.Sum(points, cumulative, is_monotonic=True)
            else:
                data = export.Gauge(points)
        return export.Metric(family.name, family.documentation, unit, data)

    def _gen_ai(self, sums: dict[str, Values], model: str, now: int) -> list[Any]:
        from opentelemetry.sdk.metrics import export

        points: dict[str, list[tuple[dict[str, str], list[float], tuple[float, ...]]]] = {}
        for name, operation, error, numbers in histogram_points(sums):
            attributes = {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
            }
            if error:
                attributes["error.type"] = error
            points.setdefault(name, []).append((attributes, list(HISTOGRAMS[name][0]), numbers))
        return [
            export.Metric(name, HISTOGRAMS[name][1], "s", self._histogram(listed, now))
            for name, listed in points.items()
        ]

    def _histogram(
        self, points: list[tuple[dict[str, str], list[float], tuple[float, ...]]], now: int
    ) -> Any:
        """Each point: attributes, bounds, and counts of each bucket followed by the sum."""
        from opentelemetry.sdk.metrics import export

        made = []
        for attributes, bounds, (*counts, total) in points:
            whole = [int(count) for count in counts]
            made.append(
                export.HistogramDataPoint(
                    attributes=attributes,
                    start_time_unix_nano=self._started,
                    time_unix_nano=now,
                    count=sum(whole),
                    sum=total,
                    bucket_counts=whole,
                    explicit_bounds=bounds,
                    min=None,  # not counted: the message leaves them out
                    max=None,
                )
            )
        return export.Histogram(made, export.AggregationTemporality.CUMULATIVE)


class TraceClient:
    """Posts encoded traces, as OpenTelemetry's environment variables say."""

    def __init__(self, url: str) -> None:
        from opentelemetry.util.re import parse_env_headers

        headers = parse_env_headers(_setting("HEADERS"), liberal=True)
        self._url = url
        self._compresses = _setting("COMPRESSION") == "gzip"
        verify: ssl.SSLContext | bool = True
        if url.startswith("https:"):
            verify = ssl.create_default_context(cafile=_setting("CERTIFICATE") or None)
            if own := _setting("CLIENT_CERTIFICATE"):
                verify.load_cert_chain(own, _setting("CLIENT_KEY") or None)
        headers["content-type"] = "application/x-protobuf"
        if self._compresses:
            headers["content-encoding"] = "gzip"
        self._client = httpx.Client(headers=headers, verify=verify, timeout=POST_SECONDS)

    def post(self, body: bytes, ending: threading.Event) -> str | None:
        """What went wrong in the end, None where nothing did; it is not repeated after `ending`."""
        if self._compresses:
            body = gzip.compress(body)
        deadline, wait = time.monotonic() + POST_SECONDS, RETRY_SECONDS
        while True:
            try:
                with self._client.stream("POST", self._url, content=body) as response:
                    status = response.status_code
                    _pass_over(response)
            except httpx.TransportError as error:
                problem = type(error).__name__
            else:
                if status < 300:
                    return None
                problem = f"status {status}"
                if status not in RETRIED:
                    return problem
            if time.monotonic() + wait > deadline or ending.wait(wait):
                return problem
            wait *= 2

    def close(self) -> None:
        self._client.close()


def _pass_over(response: httpx.Response) -> None:
    """Read what the collector says, so that the connection can be used again; of more than
    `MAX_ANSWER` bytes the rest is not read, and the connection is closed. Nothing is unpacked."""
    size = 0
    for piece in response.iter_raw():
        size += len(piece)
        if size > MAX_ANSWER:
            return


def _setting(name: str) -> str:
    """An environment variable of traces, or of all that goes by OTLP."""
    prefix = "OTEL_EXPORTER_OTLP_"
    return os.environ.get(f"{prefix}TRACES_{name}") or os.environ.get(f"{prefix}{name}", "")


# --- messages -------------------------------------------------------------------------------------


def _span_messages(finished: FinishedTrace, offset: int) -> list[dict[str, Any]]:
    """The fields of OTLP's spans. `offset`: nanoseconds from the monotonic clock to Unix time."""
    trace = finished.trace
    trace_id = trace.trace_id.to_bytes(16, "big")
    ids: dict[int, bytes] = {}
    made = []
    for number, span in enumerate(finished.spans):
        span_id = (span.span_id or _child_id(trace.span_id, number)).to_bytes(8, "big")
        ids[id(span)] = span_id
        parent, flags = b"", SAMPLED | KNOWS_REMOTE
        if span.parent is not None:
            parent = ids[id(span.parent)]
        elif trace.parent_id:
            parent, flags = trace.parent_id.to_bytes(8, "big"), flags | IS_REMOTE
        is_root = span.parent is None
        made.append(
            {
                "trace_id": trace_id,
                "span_id": span_id,
                "parent_span_id": parent,
                "trace_state": trace.tracestate,
                "flags": flags,
                "name": span.name,
                "kind": SERVER_SPAN if is_root else INTERNAL_SPAN,
                "start_time_unix_nano": int(span.begun * 1e9) + offset,
                "end_time_unix_nano": int(span.ended * 1e9) + offset,
                "attributes": _key_values(span.attributes),
                "status": {"code": ERROR} if finished.failed and is_root else {},
            }
        )
    return made


def _key_values(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"bool_value": value}
        case str():
            return {"string_value": value}
        case int():
            return {"int_value": value}
        case float():
            return {"double_value": value}
    return {"array_value": {"values": [_value(each) for each in value]}}


def _child_id(root: int, number: int) -> int:
    """A span id that is different for each span of a trace; splitmix64 of both."""
    mixed = (root + number * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) or 1
