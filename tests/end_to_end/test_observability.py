"""What whoever runs a server sees of it: logs without anything of clients, an audit, traces."""

from __future__ import annotations

import base64
import fcntl
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chaos import of_kind
from tests.support.drawing import encoded, image_part, picture
from tests.support.live_server import LiveServer, until
from tests.support.otlp_collector import CollectedSpan, Collector, TraceStore
from tests.support.phoenix import COMMAND as PHOENIX
from tests.support.phoenix import running_phoenix

HAS_OTEL = find_spec("opentelemetry") is not None and find_spec("opentelemetry.sdk") is not None
needs_otel = pytest.mark.skipif(not HAS_OTEL, reason="opentelemetry-sdk is not installed")

KEY, ADMIN, INJECTOR = "Canary-key-4711", "Canary-admin-4712", "Canary-inject-4713"
CANARY = "canary"
COLLECTOR_KEY = "collectors-canary"
"""In everything that clients send below, in any case of letters."""
FETCH_SECONDS = 1.0
ATTEMPTS = 5
"""Requests of which one must be at the server for 95 % of the time that its client sees."""
PICTURE = encoded(picture(("red", "circle")))


class SlowPictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(FETCH_SECONDS)
        self.send_response(200)
        self.send_header("content-type", "image/png")
        self.send_header("content-length", str(len(PICTURE)))
        self.end_headers()
        self.wfile.write(PICTURE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def pictures() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowPictures)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collecting:
        yield collecting


@pytest.fixture(scope="module")
def live(collector, tmp_path_factory) -> Iterator[LiveServer]:
    """A server that logs all it can, as JSON, and is traced where OpenTelemetry is there."""
    media = tmp_path_factory.mktemp("canary-media")
    (media / "canary-file.png").write_bytes(PICTURE)
    (media / "canary-broken.png").write_bytes(b"canary, no picture")
    options = [
        *("--log-format", "json", "--log-level", "debug", "--allow-private-media"),
        *("--allowed-local-media-path", str(media)),
        *("--api-key", f"team:{KEY}", "--api-key", f"ops:{ADMIN}:admin"),
        *("--api-key", f"feeder:{INJECTOR}:inject"),
    ]
    if HAS_OTEL:
        options += ["--otlp-endpoint", collector.url]
    env = {
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-collector-key={COLLECTOR_KEY}",
    }
    with LiveServer(*options, env=env) as server:
        server.media = media  # type: ignore[attr-defined]
        yield server


def post(live: LiveServer, path: str, body: Any, key: str = KEY, **headers: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", **headers}
    return httpx.post(live.url + path, json=body, headers=headers, timeout=60)


def lines(live: LiveServer) -> list[dict[str, Any]]:
    """Every line on stderr; what is on stdout is the line with the URL."""
    return [json.loads(line) for line in live.output if not line.startswith("Serving ")]


def events(live: LiveServer, name: str) -> list[dict[str, Any]]:
    return [line for line in lines(live) if line.get("event") == name]


# --- logs -------------------------------------------------------------------------------------


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "canary prompt text"}
    return {"messages": [{"role": "user", "content": [*parts, text]}], "max_tokens": 4, **fields}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def with_canaries(live: LiveServer, pictures: str) -> list[tuple[str, Any]]:
    """Requests that are served and that fail in every place we know, each full of canaries."""
    chats = "/v1/chat/completions"
    media = live.media  # type: ignore[attr-defined]
    return [
        (chats, chat()),
        (chats, chat(stream=True, user="canary", metadata={"Canary-1": "canary"})),
        (chats, chat(image_part(picture(("blue", "square"))))),
        (chats, chat(image(data_url(b"canary" * 20)))),
        (chats, chat(image(data_url(b"\x89PNG\r\n\x1a\ncanary" + b"canary" * 200)))),
        (chats, chat(image(f"file://{media}/canary-file.png"))),
        (chats, chat(image(f"file://{media}/canary-broken.png"))),
        (chats, chat(image(f"file://{media}/no-canary-file.png"))),
        (chats, chat(image("file:///etc/canary"))),
        (chats, chat(image(f"{pictures}/canary.png?signature=canary"))),
        (chats, chat(image("http://127.0.0.1:1/canary.png?signature=canary"))),
        (chats, chat(image("http://canary.invalid/canary.png"))),
        (chats, chat(image("canary://x"))),
        (chats, chat(stop=["canary"], structured_outputs={"regex": "canary("})),
        (chats, chat(response_format={"type": "json_schema", "json_schema": {"canary-2": 1}})),
        (chats, chat(tools=[{"type": "function", "function": {"name": "canary canary"}}])),
        (chats, chat(model="canary")),
        (chats, chat(temperature="canary", **{"Canary-3": "canary"})),
        (chats, chat(chat_template_kwargs={"canary": "canary"})),
        ("/v1/completions", {"prompt": "canary " * 9000}),
        ("/v1/responses", {"input": "canary", "instructions": "canary", "max_output_tokens": 3}),
        ("/tokenize", {"prompt": "canary"}),
        ("/v1/canary?canary=1", {"Canary-5": "canary"}),
        ("/v1/models/canary", {}),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"Canary-4": "canary"}}),
        (
            "/inference/v1/media_cache",
            {
                "mm_hashes": {"image": ["canary" * 8]},
                "kwargs_data": {"image": [base64.b64encode(b"canary" * 50).decode()]},
            },
        ),
        ("/inference/v1/abort_requests", {"request_ids": ["canary"]}),
    ]


def spellings(secret: str) -> set[str]:
    """The secret as it may come out: as it is, and as base64 at each of three positions."""
    found = {secret}
    for padding in range(3):
        whole = base64.b64encode(b"x" * padding + secret.encode() * 2).decode().lower()
        found.add(whole[4:14])
    return found


def test_nothing_that_clients_send_is_in_the_log_at_any_level(live, pictures):
    for path, body in with_canaries(live, pictures):
        for key in (INJECTOR, "Canary-wrong-key"):
            post(live, path, body, key, **{"X-Canary": "canary", "Cookie": "canary=canary"})
    raw = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    httpx.post(live.url + "/v1/completions", content=b'{"prompt": "canary', headers=raw)
    httpx.get(live.url + "/%0a%0dcanary", headers=raw)
    before = len(live.output)
    assert post(live, "/v1/completions", {"prompt": "end", "max_tokens": 1}).status_code == 200
    until(lambda: len(live.output) > before, 60, live.log)
    written = live.log().lower()
    # The operator's own folder and options may be named; the clients' spelling of them may not.
    for secret in (CANARY, KEY.lower(), ADMIN.lower(), INJECTOR.lower()):
        for spelling in spellings(secret):
            assert spelling not in written, [x for x in live.output if spelling in x.lower()][:3]
    assert {line["process"] for line in lines(live)} >= {"server", "engine", "api 0"}
    assert {"debug", "info", "warning"} <= {line["level"] for line in lines(live)}


def test_a_request_s_id_is_in_the_lines_of_every_process_that_serves_it(live):
    name = "my-id:4711"
    broken = image(data_url(b"\x89PNG\r\n\x1a\nno picture"))
    served = {"X-Request-Id": name}
    assert post(live, "/v1/completions", {"prompt": "x", "max_tokens": 2}, **served).is_success
    assert post(live, "/v1/chat/completions", chat(broken), **served).status_code == 422

    def processes() -> set[str]:
        return {line["process"] for line in lines(live) if line.get("request_id") == name}

    until(lambda: {"api 0", "engine"} <= processes(), 60, live.log)


def test_the_audit_says_who_did_what_and_who_was_refused_why(live):
    assert post(live, "/reset_prefix_cache", {}, ADMIN).is_success
    assert post(live, "/reset_prefix_cache", {}, KEY).status_code == 403
    assert post(live, "/v1/completions", {"prompt": 7}, "nobody").status_code == 401
    items = {"mm_hashes": {"image": ["ab" * 32]}, "kwargs_data": {"image": ["AAAA"]}}
    assert post(live, "/inference/v1/media_cache", items, INJECTOR).is_success
    assert post(live, "/inference/v1/abort_requests", {"request_ids": ["x"]}).is_success

    def found(event: str, **fields: Any) -> bool:
        return any(fields.items() <= line.items() for line in events(live, event))

    until(lambda: found("aborted", tenant="team", requests=0), 60, live.log)
    assert found("reset", tenant="ops", tier="prefix", client="127.0.0.1")
    assert found("refused", tenant="team", status=403, code="forbidden")
    assert found("refused", status=401, code="invalid_api_key", route="POST /v1/completions")
    assert found("injected", tenant="feeder", rejected=1)
    assert found("leased")
    keys = {line["key"] for line in events(live, "reset")}
    assert all(len(key) == 8 and int(key, 16) >= 0 for key in keys)


# --- traces -----------------------------------------------------------------------------------

PARENT_ID, TRACE_ID = "b7ad6b7169203331", "0af7651916cd43dd8448eb211c80319c"
STEPS = ["render", "transfer", "queue", "prefill", "decode"]


def streamed(live: LiveServer, body: dict[str, Any], **headers: str) -> tuple[float, str]:
    """Seconds until the last byte, and the `traceresponse`."""
    headers = {"Authorization": f"Bearer {KEY}", **headers}
    body = {**body, "stream": True, "temperature": 0}
    url = live.url + "/v1/chat/completions"
    with httpx.Client(timeout=60) as client:
        client.get(live.url + "/version")  # connects
        begun = time.monotonic()
        with client.stream("POST", url, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            assert b"[DONE]" in answer.read()
            return time.monotonic() - begun, answer.headers["traceresponse"]


def spans_of(store: TraceStore, live: LiveServer, trace_id: str) -> list[CollectedSpan]:
    until(lambda: store.trace(trace_id), 60, live.log)
    return store.trace(trace_id)


@pytest.fixture(params=["collector", "phoenix"])
def traced(request: pytest.FixtureRequest) -> tuple[LiveServer, TraceStore]:
    """A server, and where its spans go: our collector, or the one of another maker."""
    if request.param == "phoenix":
        return request.getfixturevalue("live_with_phoenix")
    return request.getfixturevalue("live"), request.getfixturevalue("collector")


@pytest.fixture(scope="module")
def live_with_phoenix(tmp_path_factory) -> Iterator[tuple[LiveServer, TraceStore]]:
    if not PHOENIX:
        pytest.skip("Arize Phoenix: `make test-otel`")
    options = ("--allow-private-media", "--api-key", f"team:{KEY}")
    with (
        running_phoenix(tmp_path_factory.mktemp("phoenix")) as phoenix,
        LiveServer(*options, "--otlp-endpoint", phoenix.url) as live,
    ):
        yield live, phoenix


@needs_otel
def test_the_spans_of_a_streamed_picture_request_add_up_to_its_latency(traced, pictures):
    live, store = traced
    for attempt in range(ATTEMPTS):
        body = chat(image(f"{pictures}/traced-{attempt}.png"), ignore_eos=True, min_tokens=300)
        body["max_tokens"] = 300
        trace_id = f"{TRACE_ID[:-1]}{attempt}"
        taken, response = streamed(live, body, traceparent=f"00-{trace_id}-{PARENT_ID}-01")
        spans = spans_of(store, live, trace_id)
        by_name = {span.name: span for span in spans}
        root = by_name["chat nano"]
        # Either may be the longer one: the client has the last byte before the server has ended.
        if root.seconds == pytest.approx(taken, rel=0.05):
            break  # on a busy machine, client and server may wait for each other's processes
    else:
        pytest.fail(f"the server was at work for {root.seconds} s of the client's {taken} s")
    assert response == f"00-{trace_id}-{root.span_id}-01"
    assert root.parent_id == PARENT_ID
    steps = [span for span in spans if span.parent_id == root.span_id]
    assert [span.name for span in steps] == STEPS
    assert all(a.ended == b.begun for a, b in pairwise(steps))
    assert sum(span.seconds for span in steps) == pytest.approx(root.seconds, rel=0.05)
    inside = {"media.fetch": "render", "media.wait": "render", "encode": "prefill"}
    inside |= {"media.decode": "render", "media.process": "render"}
    for name, parent in inside.items():
        span, above = by_name[name], by_name[parent]
        assert span.parent_id == above.span_id
        assert above.begun <= span.begun <= span.ended <= above.ended
    assert by_name["media.fetch"].seconds >= FETCH_SECONDS
    assert by_name["encode"].seconds > 0
    told = root.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.output_tokens"] == 300
    assert (told["lookonce.media_items"], told["lookonce.media_items_encoded"]) == (1, 1)
    assert told["lookonce.tenant"] == "team"
    assert CANARY not in repr(spans)


@needs_otel
def test_what_was_known_has_no_span(live, collector):
    part = image_part(picture(("green", "triangle")))
    streamed(live, chat(part))
    _, response = streamed(live, chat(part))
    trace_id = response.split("-")[1]
    spans = spans_of(collector, live, trace_id)
    names = {span.name for span in spans}
    assert names.isdisjoint({"media.fetch", "media.decode", "media.process", "encode"})
    assert names >= set(STEPS)
    cached = {span.name: span for span in spans}["chat nano"].attributes
    assert cached["gen_ai.usage.cache_read.input_tokens"] > 0


@needs_otel
def test_metrics_come_by_otlp_as_they_are_at_metrics(live, collector):
    post(live, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    until(lambda: "gen_ai.server.request.duration" in collector.metrics, 40, live.log)
    assert collector.paths == {"/v1/traces", "/v1/metrics"}
    assert collector.keys == {COLLECTOR_KEY}
    families = {name for name in collector.metrics if name.startswith("lookonce_")}
    shown = {line.split()[2] for line in live.get("/metrics").text.splitlines() if "# TYPE" in line}
    assert families == {name.removesuffix("_total") for name in shown}
    total = collector.metrics["lookonce_generation_tokens"].sum
    assert total.is_monotonic
    assert total.data_points[0].as_double > 0
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        histogram = collector.metrics[f"gen_ai.server.{name}"]
        assert histogram.unit == "s"
        for point in histogram.histogram.data_points:
            assert sum(point.bucket_counts) == point.count > 0
            assert len(point.bucket_counts) == len(point.explicit_bounds) + 1


def test_media_paths_that_hold_canaries_are_there(live):
    """The test of the log would say nothing if these files could not be read."""
    media: Path = live.media
    body = chat(image(f"file://{media}/canary-file.png"))
    assert post(live, "/v1/chat/completions", body).status_code == 200


# --- top, state and profiles --------------------------------------------------------------------


def test_top_prints_once_where_there_is_no_terminal(live):
    command = [sys.executable, "-m", "lookonce.cli.main", "top", "--url", live.url]
    env = {**os.environ, "LOOKONCE_API_KEY": ADMIN}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert f"at {live.url}: ready" in shown.stdout
    assert "processor cache" in shown.stdout
    assert "(none is served now)" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_state_and_profiles_are_for_admins(live):
    for key, status in ((KEY, 403), ("nobody", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(live.url + "/debug/state", headers=headers).status_code == status
        assert post(live, "/debug/profile", {"seconds": 1}, key).status_code == status


def folder_of(live: LiveServer) -> Path:
    """Where the server's processes keep their sockets, and files that they share."""
    for pid in live.pids(b"lookonce.server.process"):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/lookonce-" in line:
                return Path(line.split()[5]).parent
    raise AssertionError("no API process maps a file of the server's folder")


def test_there_is_one_profile_at_a_time(live):
    with (folder_of(live) / "profile.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as an API process that takes one
        refused = post(live, "/debug/profile", {"seconds": 1.0}, ADMIN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "profile_running")


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="Linux's")
def test_media_workers_do_not_take_the_core_of_who_wakes_them(live):
    assert post(live, "/v1/chat/completions", chat(image(data_url(PICTURE)))).is_success

    def policies(kind: str) -> set[int]:
        tasks = [task for pid in of_kind(live, kind) for task in os.listdir(f"/proc/{pid}/task")]
        return {os.sched_getscheduler(int(task)) for task in tasks}

    assert policies("lookonce.render.media.worker") == {os.SCHED_BATCH}
    for kind in ("lookonce.server.process", "lookonce.engine.process "):
        assert policies(kind) <= {os.SCHED_OTHER, os.SCHED_BATCH}
        (pid,) = of_kind(live, kind)
        assert os.sched_getscheduler(pid) == os.SCHED_OTHER


def test_a_profile_has_the_stacks_of_all_processes(live):
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(
            post, live, "/v1/completions", {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        )
        profile = post(live, "/debug/profile", {"seconds": 1.0}, ADMIN).json()
        assert busy.result().status_code == 200
    by_process = {each["process"]: each for each in profile["processes"]}
    assert by_process.keys() >= {"server", "engine", "api 0", "media worker"}
    assert all(each["samples"] > 0 for each in by_process.values())
    engine = " ".join(by_process["engine"]["stacks"])
    assert "StepLoop.run" in engine
    assert "input;" in engine
    assert post(live, "/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    folded = post(live, "/debug/profile", {"seconds": 0.2, "format": "folded"}, ADMIN)
    assert all(line.rpartition(" ")[2].isdigit() for line in folded.text.splitlines())


def test_torch_profiles_the_engine_s_steps(live):
    with ThreadPoolExecutor(1) as threads:
        body = {"kind": "torch", "seconds": 0.5}
        asked = threads.submit(post, live, "/debug/profile", body, ADMIN)
        until(asked.running, 60, live.log)
        while not asked.done():
            post(live, "/v1/completions", {"prompt": "x", "max_tokens": 4})
        answer = asked.result()
    assert answer.status_code == 200, answer.text
    trace = json.loads(gzip.decompress(answer.content))
    assert any(event.get("cat") == "cpu_op" for event in trace["traceEvents"])
    assert lines(live)  # torch's library has written none of its own
    too_long = post(live, "/debug/profile", {"kind": "torch", "seconds": 30}, ADMIN)
    assert too_long.status_code == 400
