"""Traces and `gen_ai.server` histograms of requests: noted while they run, told when they end.

    traceparent ─▶ Tracer.begin ─▶ RequestTrace ◀─ ServingContext (prompts, answers)
                                        │ at the end of the response
                                   Tracer.end ─▶ FinishedTrace ─▶ `otlp.OtlpExporter`'s thread

The engine's times come with the first delta of each prompt (`PrefillTimes`, the same clock), so the
engine knows nothing of traces. Spans are put together when a request has ended, and encoded in the
exporter's thread. Media hosts are strangers: what is fetched from them gets no `traceparent`.

Context as W3C Trace Context says (Recommendation of 2021-11-23): `traceparent` and `tracestate` in,
`traceresponse` (level 2, draft) out.
"""

from __future__ import annotations

import random
import re
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from lookonce.frontend.generation import PromptGeneration
from lookonce.frontend.receipt import reuse_receipt
from lookonce.server.http.headers import header
from lookonce.types.counts import Counts, Values

if TYPE_CHECKING:
    from lookonce.server.routes.serving_base import ServingContext

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
TRACESTATE_MEMBER = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
MAX_TRACESTATE = 512
MAX_MEMBERS = 32
MAX_MEDIA_SPANS = 32
"""Media items of a request that get spans of their own."""
PROVIDER = "lookonce"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "generate_content",
}
"""Path → `gen_ai.operation.name`; other requests are traced without it."""

Attributes = dict[str, Any]


@dataclass(slots=True)
class Span:
    """Times are `time.monotonic()`; `parent` is another span of the trace, None for the root."""

    name: str
    begun: float
    ended: float
    parent: Span | None = None
    attributes: Attributes = field(default_factory=dict)
    span_id: int = 0


@dataclass(slots=True)
class RequestTrace:
    """One request that is being served."""

    trace_id: int
    span_id: int
    parent_id: int
    """The caller's span; 0: none."""
    sampled: bool
    tracestate: str
    begun: float
    serving: ServingContext | None = None
    """Set by routes that generate."""

    @property
    def response_header(self) -> bytes:
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, self.sampled)


@dataclass(slots=True)
class FinishedTrace:
    trace: RequestTrace
    spans: list[Span]
    """The root first; parents before their children."""
    failed: bool


class Tracer:
    """One for each API process of a server with `--otlp-endpoint`.

    `ratio` of the traces that begin here are sampled; those that a caller began are if the caller
    says so. `submit` takes finished ones.
    """

    def __init__(
        self, counts: Counts, submit: Callable[[FinishedTrace], None], *, ratio: float = 1.0
    ) -> None:
        self._submit = submit
        self._below = int(ratio * 2**64)
        self._random = random.Random()
        self._histograms = GenAIHistograms(counts)

    def begin(self, scope: Scope) -> RequestTrace:
        now = time.monotonic()
        found = TRACEPARENT.fullmatch(header(scope, b"traceparent"))
        span_id = self._random.getrandbits(64) or 1
        if found is not None and _is_valid(found):
            sampled = bool(int(found[4], 16) & 1)
            return RequestTrace(
                trace_id=int(found[2], 16),
                span_id=span_id,
                parent_id=int(found[3], 16),
                sampled=sampled,
                tracestate=_tracestate(header(scope, b"tracestate")),
                begun=now,
            )
        trace_id = self._random.getrandbits(128) or 1
        sampled = trace_id & (2**64 - 1) < self._below
        return RequestTrace(trace_id, span_id, 0, sampled, "", now)

    def end(self, trace: RequestTrace, scope: Scope, status: int, error: str | None) -> None:
        """The response is sent. `error`: the class of what the request failed with."""
        ended = time.monotonic()
        operation = OPERATIONS.get(scope["path"])
        if trace.serving is not None and operation is not None:
            self._histograms.observe(trace, operation, error, ended)
        if trace.sampled and "principal" in scope["state"]:  # strangers send no spans anywhere
            spans = spans_of(trace, scope, operation, status, ended, error)
            self._submit(FinishedTrace(trace, spans, failed=error is not None))


def _tracestate(given: str) -> str:
    """The header as it goes on; empty where it is not well-formed, as the Recommendation says."""
    members = [member for each in given.split(",") if (member := each.strip(" \t"))]
    valid = len(given) <= MAX_TRACESTATE and len(members) <= MAX_MEMBERS
    if not valid or not all(map(TRACESTATE_MEMBER.fullmatch, members)):
        return ""
    return ",".join(members)


def _is_valid(found: re.Match[str]) -> bool:
    known = found[1] != "ff" and (found[1] != "00" or found[5] is None)
    return known and int(found[2], 16) > 0 and int(found[3], 16) > 0


# --- spans ----------------------------------------------------------------------------------------


def spans_of(
    trace: RequestTrace,
    scope: Scope,
    operation: str | None,
    status: int,
    ended: float,
    error: str | None,
) -> list[Span]:
    """The root, and one after another below it what the request waited for.

    For each prompt: `render` (with `media.fetch`, `media.wait`, `media.decode`, `media.process`),
    `transfer`, `queue`, `prefill` (with `encode`), `decode`.
    """
    known = scope["path"] in scope["app"].paths
    route = scope["path"] if known else "(other)"
    serving = trace.serving
    name = f"{scope['method']} {route}"
    if operation is not None and serving is not None:
        name = f"{operation} {serving.model}"
    root = Span(name, trace.begun, ended, None, {}, trace.span_id)
    root.attributes = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": status,
        "lookonce.request_id": scope["state"]["request_id"],
    }
    if tenant := scope["state"]["principal"].tenant:
        root.attributes["lookonce.tenant"] = tenant
    if error is not None:
        root.attributes["error.type"] = error
    spans = [root]
    if serving is not None:
        root.attributes |= _answer_attributes(serving, operation)
        for generation in serving.generations:
            spans += _prompt_spans(generation, root, serving.arrival)
    return spans


def _answer_attributes(serving: ServingContext, operation: str | None) -> Attributes:
    """The `gen_ai` conventions, and the totals of the reuse receipt."""
    generations = serving.generations
    attributes: Attributes = {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": serving.model,
        "gen_ai.response.model": serving.model,
        "gen_ai.response.id": serving.request_id,
        "gen_ai.request.stream": serving.stream,
        "gen_ai.usage.output_tokens": sum(each.completion_tokens for each in generations),
    }
    if operation is not None:
        attributes["gen_ai.operation.name"] = operation
    if not generations:
        return attributes
    sampling = generations[0].sampling
    attributes |= {
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.max_tokens": sampling.max_tokens or 0,
        "gen_ai.request.choice.count": sampling.n,
    }
    if reasons := [reason for each in generations for reason in each.reasons]:
        attributes["gen_ai.response.finish_reasons"] = reasons
    receipt = reuse_receipt(generations)
    cached = receipt.prefix_cached_tokens + receipt.external_cached_tokens
    return attributes | {
        "gen_ai.usage.input_tokens": receipt.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "lookonce.prefix_cached_tokens": receipt.prefix_cached_tokens,
        "lookonce.external_cached_tokens": receipt.external_cached_tokens,
        "lookonce.media_items": len(receipt.items),
        "lookonce.media_items_processed": sum(i.processor in _MADE for i in receipt.items),
        "lookonce.media_items_encoded": sum(i.encoder == "miss" for i in receipt.items),
    }


_MADE = frozenset({"miss", "bypass"})


def _prompt_spans(generation: PromptGeneration, root: Span, arrival: float) -> list[Span]:
    asked = generation.started or root.ended
    render = Span("render", arrival, asked, root)
    render.attributes = {"lookonce.prompt_tokens": generation.rendered.num_tokens}
    spans = [render, *_media_spans(generation, render)]
    if not generation.started:
        return spans
    times, ended = generation.times, generation.ended or root.ended
    if times is None:
        return [*spans, Span("engine", asked, ended, root)]
    # Clocks of one machine agree, but a scheduler that was given another one would not.
    received = min(max(times.received, asked), ended)
    admitted = min(max(times.admitted, received), ended)
    computed = min(max(times.computed, admitted), ended)
    prefill = Span("prefill", admitted, computed, root)
    stats = generation.reuse_stats
    if stats is not None:
        prefill.attributes = {
            "lookonce.prefix_cached_tokens": stats.prefix_cached_tokens,
            "lookonce.external_cached_tokens": stats.external_cached_tokens,
        }
    spans += [
        Span("transfer", asked, received, root),
        Span("queue", received, admitted, root),
        prefill,
    ]
    if times.encode_ended and stats is not None:
        missed = [i for i, outcome in enumerate(stats.encoder) if outcome == "miss"]
        encode = Span("encode", times.encode_begun, times.encode_ended, prefill)
        encode.attributes = {"lookonce.media_items": len(missed)}
        spans.append(encode)
    decode = Span("decode", computed, ended, root)
    decode.attributes = {"gen_ai.usage.output_tokens": generation.completion_tokens}
    return [*spans, decode]


def _media_spans(generation: PromptGeneration, render: Span) -> list[Span]:
    spans: list[Span] = []
    stats = generation.reuse_stats
    for number, item in enumerate(generation.rendered.items[:MAX_MEDIA_SPANS]):
        about: Attributes = {
            "lookonce.media.modality": item.modality,
            "lookonce.media.hash": item.media_hash.hex()[:16],
            "lookonce.media.processor": item.outcome,
        }
        if stats is not None and number < len(stats.encoder):
            about["lookonce.media.encoder"] = stats.encoder[number]
        if item.fetched is not None:
            spans.append(Span("media.fetch", *item.fetched, render, about))
        if item.made is None:
            continue
        begun, ended = item.made
        processed = max(begun, ended - item.process_ms / 1000)
        decoded = max(begun, processed - item.decode_ms / 1000)
        spans.append(Span("media.wait", begun, decoded, render, about))
        if item.decode_ms or item.process_ms:
            spans.append(Span("media.decode", decoded, processed, render, about))
            spans.append(Span("media.process", processed, ended, render, about))
    return spans


# --- histograms -----------------------------------------------------------------------------------

_DURATION = tuple(0.01 * 2**exponent for exponent in range(14))
_FIRST = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_EACH = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1.0, 2.5)  # fmt: skip
HISTOGRAMS = {
    "gen_ai.server.request.duration": (_DURATION, "From a request's arrival to its last byte"),
    "gen_ai.server.time_to_first_token": (_FIRST, "From a request's arrival to its first token"),
    "gen_ai.server.time_per_output_token": (_EACH, "Between tokens after the first"),
}
"""Name → bounds in seconds, as the conventions advise, and description."""


class GenAIHistograms:
    """`gen_ai.server.*` of one API process, in its `Counts`: name, `:`, operation, `,`, error."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def observe(self, trace: RequestTrace, operation: str, error: str | None, ended: float) -> None:
        labels = f"{operation},{error or ''}"
        self._observe("gen_ai.server.request.duration", labels, ended - trace.begun)
        if error is not None or trace.serving is None:
            return
        for generation in trace.serving.generations:
            times = generation.times
            if times is None or not generation.ended:
                continue
            first = times.computed - trace.begun
            self._observe("gen_ai.server.time_to_first_token", labels, first)
            more = generation.completion_tokens - generation.sampling.n
            if more > 0:
                each = (generation.ended - times.computed) * generation.sampling.n / more
                self._observe("gen_ai.server.time_per_output_token", labels, each)

    def _observe(self, name: str, labels: str, seconds: float) -> None:
        bounds = HISTOGRAMS[name][0]
        values = self._counts.values(f"{name}:{labels}", len(bounds) + 2)
        values[bisect_left(bounds, seconds)] += 1.0
        values[-1] += seconds


def histogram_points(sums: dict[str, Values]) -> list[tuple[str, str, str, tuple[float, ...]]]:
    """(name, operation, error, numbers as of `metrics.Durations`) of all that was counted."""
    found = []
    for key, values in sums.items():
        name, _, labels = key.partition(":")
        if name in HISTOGRAMS:
            operation, _, error = labels.partition(",")
            found.append((name, operation, error, values.numbers))
    return found
