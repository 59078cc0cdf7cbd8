"""Sends traces and metrics by OTLP over HTTP; the one module that imports OpenTelemetry.

It does so only when `--otlp-endpoint` is given. `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`,
`OTEL_RESOURCE_ATTRIBUTES` and the like are read by OpenTelemetry itself.

A thread takes finished traces from a queue, makes spans and posts them; when the collector is slow
or gone the queue overflows, which is counted, and nothing else suffers. The first API process also
posts the metrics of all processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

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
BATCH_SECONDS = 1.0
METRICS_MILLISECONDS = 15_000
"""Between posts of metrics, where `OTEL_METRIC_EXPORT_INTERVAL` does not say."""
POST_SECONDS = 5.0
"""For one post, with its repetitions."""
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
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
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
        self._spans = OTLPSpanExporter(f"{base}/v1/traces", timeout=POST_SECONDS)
        self._metrics = OTLPMetricExporter(f"{base}/v1/metrics", timeout=POST_SECONDS)
        self._dropped = counts.count(DROPPED)
        self._queue: queue.Queue[FinishedTrace | None] = queue.Queue(MAX_WAITING)
        self._started = time.time_ns()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def submit(self, trace: FinishedTrace) -> None:
        """Queue a trace; called on the event loop, and never waits."""
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self._dropped.add()

    def close(self) -> None:
        """Post what is queued, as long as one post takes."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=POST_SECONDS)
        self._thread.join(2 * POST_SECONDS)
        self._spans.shutdown()
        self._metrics.shutdown()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._next_batch()
            if not batch:
                continue
            try:
                self._spans.export(self._made(batch))
            except Exception:
                logger.exception("traces could not be sent")

    def _next_batch(self) -> tuple[list[FinishedTrace], bool]:
        """Waits for the first trace, then for more up to `BATCH_SECONDS`; and whether to end."""
        batch: list[FinishedTrace] = []
        deadline = float("inf")
        while len(batch) < BATCH:
            left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            try:
                trace = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if trace is None:
                return batch, True
            batch.append(trace)
            if len(batch) == 1:
                deadline = time.monotonic() + BATCH_SECONDS
        return batch, False

    def _made(self, batch: list[FinishedTrace]) -> list[Any]:
        """OpenTelemetry's spans of these traces."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.span import TraceState
        from opentelemetry.trace.status import Status, StatusCode

        flags = TraceFlags(TraceFlags.SAMPLED)
        offset = time.time_ns() - time.monotonic_ns()
        made = []
        for finished in batch:
            trace = finished.trace
            state = TraceState.from_header([trace.tracestate]) if trace.tracestate else None
            contexts: dict[int, SpanContext] = {}
            for number, span in enumerate(finished.spans):
                span_id = span.span_id or _child_id(trace.span_id, number)
                own = SpanContext(trace.trace_id, span_id, False, flags, state)
                contexts[id(span)] = own
                parent = None if span.parent is None else contexts[id(span.parent)]
                if span.parent is None and trace.parent_id:
                    parent = SpanContext(trace.trace_id, trace.parent_id, True, flags, state)
                failed = finished.failed and span.parent is None
                made.append(
                    ReadableSpan(
                        span.name,
                        own,
                        parent,
                        self._resource,
                        span.attributes,
                        kind=SpanKind.SERVER if span.parent is None else SpanKind.INTERNAL,
                        instrumentation_scope=self._scope,
                        status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
                        start_time=int(span.begun * 1e9) + offset,
                        end_time=int(span.ended * 1e9) + offset,
                    )
                )
        return made

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


def _child_id(root: int, number: int) -> int:
    """A span id that is different for each span of a trace; splitmix64 of both."""
    mixed = (root + number * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) or 1
