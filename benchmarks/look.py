"""`lookonce bench look`: what a picture costs when it is known, when it is new, without the cache.

    API CPU ms    CPU time of the API process per request, all its threads (not its decoding
                  workers), median
    parse ms      of it, reading the body and parsing its JSON: what the same body costs when it is
                  refused right after parsing
    beyond ms     the rest: base64, hash and lookup of the pictures, and all that any request costs
                  (the row without a picture shows that part)
    TTFT ms       from sending the request to the first streamed text, median
    decodes, processed, encoder runs      per request

Further tables: parsing a body in this process (JSON straight from bytes, then base64); the time to
first text of known pictures beside a peer's; what streaming costs the API process per request and
per token; known pictures and `/health` while new pictures keep every decoding worker busy.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pybase64

from benchmarks.load_generator import Arrivals, run_load
from benchmarks.pictures import data_url, encoded_picture, variant
from benchmarks.report import Report, median, percentile, write_json
from benchmarks.running_server import RunningServer, cpu_seconds, running_server, set_environment
from lookonce.errors import UnavailableError
from lookonce.frontend.requests import ChatRequest

PICTURES = (("1080p", "JPEG"), ("1080p", "PNG"), ("4K", "JPEG"), ("4K", "PNG"))
PEER_FIRST_TEXT_MS = {("1024", "JPEG"): 34.0, ("2048", "JPEG"): 94.0, ("2048", "PNG"): 320.0}
"""Milliseconds another server needs for a picture it knows, with a model of 8 M parameters."""
COUNTS = (1, 8, 30)
MAX_BODY_BYTES = 80_000_000
REPEATS = 15


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench look", description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--device", default="cpu", help="of the servers; default: cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    set_environment()
    reports = []
    for make in (
        parsing_report,
        lambda: first_text_report(options.repeats, options.device),
        lambda: requests_report(options.counts, options.repeats, options.device),
        lambda: streams_report(options.device),
        lambda: saturation_report(options.device),
    ):
        reports.append(make())
        reports[-1].show()
    write_json(options.json, reports)
    return 0


# --- Parsing -------------------------------------------------------------------------------------


def parsing_report() -> Report:
    """Parsing and base64-decoding bodies in this process, medians of 15."""
    report = Report("look (body)", ("body MB", "JSON ms", "base64 ms", "together ms"))
    decoder = msgspec.json.Decoder(ChatRequest)
    for megabytes in (1, 10):
        picture = bytes(range(256)) * (megabytes * 1_000_000 * 3 // 4 // 256)
        body = json.dumps(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": data_url(picture)}}],
                    }
                ]
            }
        ).encode()
        text = data_url(picture).partition(",")[2]
        parse, decode = [], []
        for _ in range(15):
            started = time.perf_counter()
            decoder.decode(body)
            parsed = time.perf_counter()
            pybase64.b64decode(text, validate=True)
            parse.append((parsed - started) * 1e3)
            decode.append((time.perf_counter() - parsed) * 1e3)
        both = [a + b for a, b in zip(parse, decode, strict=True)]
        report.add(len(body) / 1e6, median(parse), median(decode), median(both))
    return report


# --- Known pictures beside a peer ----------------------------------------------------------------


def first_text_report(repeats: int, device: str) -> Report:
    """Known pictures, one per prompt, in order of size; every question is new."""
    report = Report("look (first text)", ("known picture", "TTFT ms", "peer ms", "share"))
    with running_server(["--device", device]) as server:
        asker = Asker(server)
        for (size, file_format), theirs in PEER_FIRST_TEXT_MS.items():
            pictures = [encoded_picture(size, file_format)]
            asker.cost([asker.body(pictures)] * 2)
            ours = asker.cost([asker.body(pictures) for _ in range(repeats)]).ttft_ms
            report.add(f"{size} {file_format}", ours, theirs, ours / theirs)
    report.notes.append("nano; the peer's figures are its own machine's, with a model of 8 M")
    return report


# --- Known and new pictures, and without the cache -----------------------------------------------


def requests_report(counts: Sequence[int], repeats: int, device: str) -> Report:
    """One row per kind of picture, number of pictures and state of the cache."""
    costs = ("API CPU ms", "parse ms", "beyond ms", "TTFT ms")
    columns = ("picture", "pictures", "cache", *costs, "decodes", "processed", "encoder runs")
    report = Report("look", columns)
    report.notes.append(f"nano, one request at a time, {repeats} a row (misses and off: 3)")
    limits = ["--device", device, "--limit-mm-per-prompt", f"image={max(counts)}"]
    with (
        running_server(limits) as cached,
        running_server([*limits, "--mm-processor-cache-gb", "0"]) as uncached,
    ):
        on, off = Asker(cached), Asker(uncached)
        _add_rows(report, (on, off), "(none)", b"", 0, repeats)
        for size, file_format in PICTURES:
            encoded = encoded_picture(size, file_format)
            for count in counts:
                if count * len(encoded) * 4 / 3 > MAX_BODY_BYTES:
                    report.notes.append(f"{size} {file_format} x {count}: the body is too large")
                    continue
                _add_rows(report, (on, off), f"{size} {file_format}", encoded, count, repeats)
    return report


def _add_rows(
    report: Report,
    askers: tuple[Asker, Asker],
    name: str,
    encoded: bytes,
    count: int,
    repeats: int,
) -> None:
    on, off = askers
    known = [variant(encoded, number) for number in range(count)]
    few = min(repeats, 3)
    on.cost([on.body(known)] * 2)
    parse = on.cost([on.body(known, refused=True)] * repeats).api_ms
    modes = [("hit", on.cost([on.body(known) for _ in range(repeats)]))]
    if count:
        off.cost([off.body(known)])
        new = [_new_pictures(encoded, count, run) for run in range(few)]
        modes.append(("miss", on.cost([on.body(pictures) for pictures in new])))
        modes.append(("off", off.cost([off.body(known) for _ in range(few)])))
    for mode, cost in modes:
        report.add(name, count, mode, *_cells(cost, parse))


def _new_pictures(encoded: bytes, count: int, run: int) -> list[bytes]:
    return [variant(encoded, 1000 * count + 100 * run + number) for number in range(count)]


def _cells(cost: RequestCost, parse: float) -> tuple[float, ...]:
    beyond = cost.api_ms - parse
    counted = (cost.decodes, cost.processed, cost.encoder_runs)
    return cost.api_ms, parse, beyond, cost.ttft_ms, *counted


SETTLE = 0.005
"""Seconds to wait after an answer, so that its last work counts for its own request."""
COUNTERS = ("media_decodes_total", "media_processed_total", "encoder_runs_total")


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Per request: medians of times, means of counters."""

    api_ms: float
    ttft_ms: float
    decodes: float
    processed: float
    encoder_runs: float


class Asker:
    """Asks a server about pictures over one connection, and reads what that costs it."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._api = server.process("lookonce.server.process")
        self._http = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)
        self._asked = 0

    def body(self, pictures: Sequence[bytes], *, refused: bool = False) -> bytes:
        """A request with a new question. `refused`: one that is refused right after parsing."""
        self._asked += 1
        parts = [{"type": "image_url", "image_url": {"url": data_url(p)}} for p in pictures]
        question = {"type": "text", "text": f"What is in picture {self._asked}?"}
        return json.dumps(
            {
                "messages": [{"role": "user", "content": [*parts, question]}],
                "temperature": -1 if refused else 0,
                "max_tokens": 2,
                "stream": True,
            }
        ).encode()

    def cost(self, bodies: Sequence[bytes]) -> RequestCost:
        """Send the bodies one at a time. Raises `UnavailableError` for an unexpected status."""
        before = self._server.metrics()
        waits, cpu = [], []
        for body in bodies:
            used = cpu_seconds(self._api)
            waits.append(self._first_text(body) * 1e3)
            time.sleep(SETTLE)
            cpu.append((cpu_seconds(self._api) - used) * 1e3)
        after = self._server.metrics()
        counted = [(after.get(n, 0.0) - before.get(n, 0.0)) / len(bodies) for n in COUNTERS]
        return RequestCost(median(cpu), median(waits), *counted)

    def _first_text(self, body: bytes) -> float:
        """Seconds from sending to the first streamed text, or to the refusal."""
        started, first = time.perf_counter(), 0.0
        self._http.request("POST", "/v1/chat/completions", body)
        response = self._http.getresponse()
        while line := response.readline():
            if not first and _has_text(line):
                first = time.perf_counter() - started
        response.read()  # empty, but only this frees the connection for the next request
        if response.status not in (200, 400):
            raise UnavailableError(f"the server answered {response.status}")
        return first or time.perf_counter() - started


def _has_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:]).get("choices")
    return bool(choices and choices[0]["delta"].get("content"))


# --- Streams -------------------------------------------------------------------------------------

CONCURRENCY = (1, 8, 32)
SHORT, LONG = 2, 32
"""Tokens per answer; the cost of a token is the difference between both."""
REQUESTS = 96
ROUNDS = 5
"""Short and long answers take turns, since a machine's speed changes; medians count."""
_numbers = itertools.count()


def streams_report(device: str) -> Report:
    """One row per number of concurrent streams."""
    columns = ("streams", "API us/request", "API us/token", "tok/s")
    report = Report("look (streams)", columns)
    report.notes.append(
        f"nano, streamed text; a request: {SHORT} tokens; a token: by answers of {SHORT} and {LONG}"
    )
    with running_server(["--device", device]) as server:
        _stream_load(server, 8, LONG)
        for concurrency in CONCURRENCY:
            rounds = [
                (_stream_load(server, concurrency, SHORT), _stream_load(server, concurrency, LONG))
                for _ in range(ROUNDS)
            ]
            short = statistics.median(short for (short, _), _ in rounds)
            long = statistics.median(long for _, (long, _) in rounds)
            rate = statistics.median(rate for _, (_, rate) in rounds)
            report.add(concurrency, short, (long - short) / (LONG - SHORT), rate)
    return report


def _stream_load(server: RunningServer, concurrency: int, tokens: int) -> tuple[float, float]:
    """Microseconds of the API process per request, and tokens per second."""
    api = server.process("lookonce.server.process")
    bodies = [_stream_body(tokens) for _ in range(max(REQUESTS, 4 * concurrency))]
    used = cpu_seconds(api)
    result = run_load(server.url, [], bodies, Arrivals(concurrency))
    used = cpu_seconds(api) - used
    if len(result.answered) < len(bodies):
        raise UnavailableError("the server did not answer every request")
    return used / len(bodies) * 1e6, tokens * len(bodies) / result.seconds


def _stream_body(tokens: int) -> bytes:
    return json.dumps(
        {
            "messages": [{"role": "user", "content": f"What is the number {next(_numbers)}?"}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()


# --- Known pictures while new ones keep every worker busy ----------------------------------------

NUM_NEW_AT_ONCE = 12
"""Concurrent requests with a new picture: more than there are workers, so that some wait."""
NUM_SAMPLES = 120
PAUSE = 0.02
"""Seconds between two samples, so that sampling itself does not load the server."""


def saturation_report(device: str) -> Report:
    """One row per kind of request: idle, and while every worker decodes new 4K pictures.

    Every request asks for more tokens than the model has, which is refused once its prompt is
    rendered. So what is measured is the API process: reading and parsing the body, looking up the
    picture, building the prompt. A `cache_salt` of its own makes a picture new for free.
    """
    known = [
        (f"known {size} JPEG", _PicturePrompt(encoded_picture(size, "JPEG")))
        for size in ("1024", "1080p", "4K")
    ]
    report = Report(
        "look (saturated)",
        ("request", "idle p50 ms", "idle p95 ms", "busy p50 ms", "busy p95 ms", "p95 ratio"),
    )
    with running_server(["--device", device]) as server:
        for _, prompts in known:
            _make_known(server, prompts)
        idle = _measure_all(server, known)
        before, started = server.metrics(), time.perf_counter()
        with _sending_new_pictures(server, known[-1][1]):
            busy = _measure_all(server, known)
        seconds, after = time.perf_counter() - started, server.metrics()
    for name, calm in idle.items():
        p95 = percentile(calm, 95), percentile(busy[name], 95)
        report.add(name, median(calm), p95[0], median(busy[name]), p95[1], p95[1] / p95[0])
    report.notes += _saturation_notes(
        {name: after[name] - before.get(name, 0.0) for name in after}, seconds
    )
    return report


def _saturation_notes(moved: Mapping[str, float], seconds: float) -> list[str]:
    """What the server's counters say about the busy time, which has ended."""
    hits, overtaking = moved["mm_cache_hits_total"], moved["mm_cache_overtaking_hits_total"]
    waiting = moved["mm_cache_waiting_hits_total"]
    return [
        f"{NUM_SAMPLES} samples each; busy: {NUM_NEW_AT_ONCE} requests with a new 4K JPEG at any "
        f"time ({moved['media_decodes_total'] / seconds:.1f} decoded per second)",
        f"of {hits:.0f} hits {overtaking:.0f} were settled while misses waited for workers, and "
        f"{waiting:.0f} waited for workers",
    ]


def _make_known(server: RunningServer, prompts: _PicturePrompt) -> None:
    """Let the engine hold the picture: only media of a request that is computed are listed."""
    connection = _Client(server)
    if connection.chat(prompts.body(max_tokens=1)) != 200:
        raise UnavailableError("the server did not answer as it should")
    connection.close()


def _measure_all(
    server: RunningServer, known: Sequence[tuple[str, _PicturePrompt]]
) -> dict[str, list[float]]:
    connection = _Client(server)
    found = {"/health": _sample_ms(connection.health)}
    for name, prompts in known:
        body = prompts.body()
        found[name] = _sample_ms(lambda body=body: connection.render(body))  # type: ignore[misc]
    connection.close()
    return found


def _sample_ms(once: Callable[[], bool]) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    for _ in range(NUM_SAMPLES):
        started = time.perf_counter()
        if not once():
            raise UnavailableError("the server did not answer as it should")
        taken.append((time.perf_counter() - started) * 1e3)
        time.sleep(PAUSE)
    return taken


@contextmanager
def _sending_new_pictures(server: RunningServer, prompts: _PicturePrompt) -> Iterator[None]:
    """Send new pictures without pause while the block runs."""
    stop, numbers = threading.Event(), itertools.count()

    def send() -> None:
        connection = _Client(server)
        while not stop.is_set():
            connection.render(prompts.body(f"new {next(numbers)}"))
        connection.close()

    threads = [threading.Thread(target=send) for _ in range(NUM_NEW_AT_ONCE)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)  # every worker is busy and a queue has formed
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class _PicturePrompt:
    """Chat requests with one picture."""

    def __init__(self, picture: bytes) -> None:
        content = [
            {"type": "image_url", "image_url": {"url": data_url(picture)}},
            {"type": "text", "text": "What is in the picture?"},
        ]
        messages = json.dumps([{"role": "user", "content": content}])
        self._rest = f'"messages":{messages}}}'.encode()

    def body(self, salt: str = "known", max_tokens: int = 1_000_000) -> bytes:
        return f'{{"cache_salt":"{salt}","max_tokens":{max_tokens},'.encode() + self._rest


class _Client:
    def __init__(self, server: RunningServer) -> None:
        self._http = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)

    def health(self) -> bool:
        return self._asked("GET", "/health", None) == 200

    def chat(self, body: bytes) -> int:
        return self._asked("POST", "/v1/chat/completions", body)

    def render(self, body: bytes) -> bool:
        """Whether the request was refused after its prompt was rendered."""
        return self.chat(body) == 400

    def _asked(self, method: str, path: str, body: bytes | None) -> int:
        self._http.request(method, path, body, {"Content-Type": "application/json"})
        response = self._http.getresponse()
        response.read()
        return response.status

    def close(self) -> None:
        self._http.close()
