"""Traces of requests, without OpenTelemetry: contexts, sampling, spans, histograms."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType

import pytest

from lookonce.config import ApiKey, key_digest
from lookonce.errors import BadRequestError, RequestFailedError
from lookonce.server.tracing import FinishedTrace, Span, Tracer, histogram_points
from lookonce.types.counts import Counts

TRACING = ("lookonce.server.tracing", "lookonce.server.otlp")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collected(list[FinishedTrace]):
    """What a tracer has submitted."""

    def __init__(self, ratio: float = 1.0) -> None:
        super().__init__()
        self.counts = Counts()
        self.tracer = Tracer(self.counts, self.append, ratio=ratio)

    def spans(self) -> list[Span]:
        (trace,) = self
        return trace.spans


def traced(site, ratio: float = 1.0) -> Collected:
    collected = Collected(ratio)
    site.services.tracer = collected.tracer
    return collected


def test_a_request_is_one_trace_and_its_answer_names_it(on_site):
    async def scenario(site):
        collected = traced(site)
        answer = await site.chat()
        (finished,) = collected
        version, trace_id, span_id, flags = answer.headers["traceresponse"].split("-")
        assert (version, flags) == ("00", "01")
        assert int(trace_id, 16) == finished.trace.trace_id
        assert int(span_id, 16) == finished.trace.span_id == finished.spans[0].span_id
        assert finished.spans[0].name.startswith("chat ")
        assert not finished.failed

    on_site(scenario)


def test_a_caller_s_trace_goes_on(on_site):
    async def scenario(site):
        collected = traced(site, ratio=0.0)
        headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
        body = {"prompt": "hello"}
        answer = await site.client.post("/v1/completions", json=body, headers=headers)
        (finished,) = collected
        assert finished.trace.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
        assert finished.trace.parent_id == 0xB7AD6B7169203331
        assert finished.trace.tracestate == "vendor=1"
        assert answer.headers["traceresponse"].split("-")[1] == PARENT.split("-")[1]

    on_site(scenario)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("vendor=1", "vendor=1"),
        ("a=1 , tenant@vendor=x y,\t,b=2", "a=1,tenant@vendor=x y,b=2"),
        ("a=" + "x" * 256, "a=" + "x" * 256),
        ("a=" + "x" * 257, ""),
        ("a=1,Upper=2", ""),
        ("a=1,no member", ""),
        ("a=é", ""),
        (",".join(f"a{n}=1" for n in range(33)), ""),
        (",".join(f"a{n}={'x' * 50}" for n in range(12)), ""),
    ],
)
def test_a_caller_s_state_goes_on_where_it_is_well_formed(on_site, given, kept):
    async def scenario(site):
        collected = traced(site)
        headers = {"traceparent": PARENT, "tracestate": given.encode()}
        await site.client.post("/v1/completions", json={"prompt": "hello"}, headers=headers)
        assert collected[0].trace.tracestate == kept

    on_site(scenario)


@pytest.mark.parametrize(
    "given",
    [
        PARENT.replace("00-", "ff-", 1),
        PARENT + "-more",
        PARENT.upper(),
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "nonsense",
    ],
)
def test_a_context_that_is_none_begins_a_new_trace(on_site, given):
    async def scenario(site):
        collected = traced(site)
        await site.client.post(
            "/v1/completions", json={"prompt": "hello"}, headers={"traceparent": given}
        )
        assert collected[0].trace.parent_id == 0
        assert collected[0].trace.trace_id != 0x0AF7651916CD43DD8448EB211C80319C

    on_site(scenario)


def test_a_later_version_of_the_context_is_read_as_far_as_known(on_site):
    async def scenario(site):
        collected = traced(site)
        later = PARENT.replace("00-", "01-", 1) + "-more"
        await site.client.post(
            "/v1/completions", json={"prompt": "hello"}, headers={"traceparent": later}
        )
        assert collected[0].trace.parent_id == 0xB7AD6B7169203331

    on_site(scenario)


def test_the_caller_decides_about_sampling_and_the_ratio_about_the_rest(on_site):
    async def scenario(site):
        collected = traced(site, ratio=1.0)
        unsampled = PARENT[:-2] + "00"
        await site.client.post(
            "/v1/completions", json={"prompt": "hello"}, headers={"traceparent": unsampled}
        )
        assert collected == []
        site.services.tracer = Tracer(Counts(), collected.append, ratio=0.25)
        for _ in range(200):
            await site.client.post("/detokenize", json={"tokens": [65]})
        assert 20 <= len(collected) <= 90  # 50 expected; 5 standard deviations are 31

    on_site(scenario)


@contextmanager
def calls_of_tracing() -> Iterator[Counter[str]]:
    """Counts the functions of traces that are called inside, by name."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__") in TRACING:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def test_nothing_of_traces_is_called_without_a_tracer(on_site):
    async def scenario(site):
        with calls_of_tracing() as calls:
            for stream in (False, True):
                answer = await site.chat(stream=stream)
                assert "traceresponse" not in answer.headers
        assert not calls
        traced(site)
        with calls_of_tracing() as calls:
            await site.chat()
        assert calls["begin"] == calls["end"] == calls["spans_of"] == 1

    on_site(scenario)


def test_spans_follow_one_another_from_the_request_to_its_end(on_site):
    async def scenario(site):
        collected = traced(site)
        await site.chat(stream=True)
        root, *below = collected.spans()
        direct = [span for span in below if span.parent is root]
        assert [span.name for span in direct] == ["render", "engine"]  # this engine tells no times
        assert root.begun <= direct[0].begun
        for before, after in pairwise(direct):
            assert before.ended == after.begun
        assert direct[-1].ended <= root.ended
        told = root.attributes
        assert told["gen_ai.operation.name"] == "chat"
        assert told["gen_ai.response.finish_reasons"] == ["stop"]
        assert told["gen_ai.usage.output_tokens"] == len(site.engine.answer) + 1
        assert told["lookonce.prefix_cached_tokens"] == 2
        assert told["http.response.status_code"] == 200

    on_site(scenario)


def test_a_refused_request_s_trace_says_why(on_site):
    async def scenario(site):
        collected = traced(site)
        answer = await site.chat(temperature=-1)
        assert answer.status_code == 400
        assert collected[0].failed
        assert collected.spans()[0].attributes["error.type"] == BadRequestError.__name__

    on_site(scenario)


def test_a_stream_that_breaks_is_a_failed_trace(on_site):
    async def scenario(site):
        collected = traced(site)
        site.engine.failure = RequestFailedError("broken")
        await site.chat(stream=True)
        root = collected.spans()[0]
        assert root.attributes["error.type"] == "RequestFailedError"
        assert root.attributes["http.response.status_code"] == 200

    on_site(scenario)


def test_strangers_leave_no_spans(on_site):
    async def scenario(site):
        collected = traced(site)
        await site.client.get("/health")
        assert collected == []
        site.services.keys.replace((ApiKey(key_digest("k")),))
        assert (await site.chat()).status_code == 401
        assert collected == []

    on_site(scenario)


def test_paths_that_clients_invent_are_not_in_spans(on_site):
    async def scenario(site):
        collected = traced(site)
        await site.client.post("/v1/secret-canary", json={})
        root = collected.spans()[0]
        assert "canary" not in repr((root.name, root.attributes))

    on_site(scenario)


def test_durations_are_counted_by_operation_and_error(on_site):
    async def scenario(site):
        collected = traced(site)
        await asyncio.gather(*(site.chat() for _ in range(3)))
        site.engine.refusal = RequestFailedError("no")
        await site.chat()
        points = {
            (n, o, e): sum(v[:-1]) for n, o, e, v in histogram_points(collected.counts.read())
        }
        assert points["gen_ai.server.request.duration", "chat", ""] == 3
        assert points["gen_ai.server.request.duration", "chat", "RequestFailedError"] == 1

    on_site(scenario)


def test_the_header_is_what_w3c_says():
    collected = Collected()
    scope = {"headers": [(b"traceparent", PARENT.encode())]}
    header = collected.tracer.begin(scope).response_header.decode()
    assert re.fullmatch(r"00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-01", header)
