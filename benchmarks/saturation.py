"""How known pictures and `/health` fare while new 4K pictures keep every decoding worker busy.

Every request asks for more tokens than the model has, which is refused once its prompt is rendered:
so what is measured is the API process, reading and parsing the body, recognising the picture and
building the prompt. A picture is made new for free by a `cache_salt` of its own.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from benchmarks.pictures import data_url, encoded_picture
from benchmarks.report import Report, median, percentile
from benchmarks.serving import RunningServer, running_server
from lookonce.errors import UnavailableError

NUM_FLOODERS = 12
"""Requests with a new picture at any time: more than there are workers, so that some wait."""
NUM_SAMPLES = 120
PAUSE = 0.02
"""Seconds between two samples: what is measured must not load the server itself."""


class _Prompts:
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


class _Connection:
    def __init__(self, server: RunningServer) -> None:
        self._http = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)

    def health(self) -> bool:
        return self._asked("GET", "/health", None) == 200

    def chat(self, body: bytes) -> int:
        return self._asked("POST", "/v1/chat/completions", body)

    def render(self, body: bytes) -> bool:
        """Whether the request came as far as it should."""
        return self.chat(body) == 400

    def _asked(self, method: str, path: str, body: bytes | None) -> int:
        self._http.request(method, path, body, {"Content-Type": "application/json"})
        response = self._http.getresponse()
        response.read()
        return response.status

    def close(self) -> None:
        self._http.close()


@contextmanager
def _flood(server: RunningServer, prompts: _Prompts) -> Iterator[None]:
    """New pictures without end, while the block runs."""
    stop, numbers = threading.Event(), itertools.count()

    def send() -> None:
        connection = _Connection(server)
        while not stop.is_set():
            connection.render(prompts.body(f"new {next(numbers)}"))
        connection.close()

    threads = [threading.Thread(target=send) for _ in range(NUM_FLOODERS)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)  # until every worker is busy and a queue has formed
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _samples(once: Callable[[], bool]) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    for _ in range(NUM_SAMPLES):
        started = time.perf_counter()
        if not once():
            raise UnavailableError("the server did not answer as it should")
        taken.append((time.perf_counter() - started) * 1e3)
        time.sleep(PAUSE)
    return taken


def _measure(
    server: RunningServer, known: Sequence[tuple[str, _Prompts]]
) -> dict[str, list[float]]:
    connection = _Connection(server)
    found = {"/health": _samples(connection.health)}
    for name, prompts in known:
        body = prompts.body()
        found[name] = _samples(lambda body=body: connection.render(body))  # type: ignore[misc]
    connection.close()
    return found


def saturation_report() -> Report:
    """One row per kind of request: idle, and while the pool is saturated."""
    known = [
        (f"known {size} JPEG", _Prompts(encoded_picture(size, "JPEG")))
        for size in ("1024", "1080p", "4K")
    ]
    report = Report(
        "look (saturated)",
        ("request", "idle p50 ms", "idle p95 ms", "busy p50 ms", "busy p95 ms", "p95 ratio"),
    )
    with running_server() as server:
        for _, prompts in known:
            _keep(server, prompts)
        idle = _measure(server, known)
        before, started = server.metrics(), time.perf_counter()
        with _flood(server, known[-1][1]):
            busy = _measure(server, known)
        seconds, after = time.perf_counter() - started, server.metrics()
    for name, calm in idle.items():
        p95 = percentile(calm, 95), percentile(busy[name], 95)
        report.add(name, median(calm), p95[0], median(busy[name]), p95[1], p95[1] / p95[0])
    report.notes += _notes({name: after[name] - before.get(name, 0.0) for name in after}, seconds)
    return report


def _notes(moved: Mapping[str, float], seconds: float) -> list[str]:
    """What the server's counters say about the time it was busy; nothing is under way any more."""
    hits, overtaking = moved["mm_cache_hits_total"], moved["mm_cache_overtaking_hits_total"]
    waiting = moved["mm_cache_waiting_hits_total"]
    return [
        f"{NUM_SAMPLES} samples each; busy: {NUM_FLOODERS} requests with a new 4K JPEG at any time "
        f"({moved['media_decodes_total'] / seconds:.1f} decoded per second)",
        f"of {hits:.0f} hits {overtaking:.0f} were settled while misses waited for workers, and "
        f"{waiting:.0f} waited for workers",
    ]


def _keep(server: RunningServer, prompts: _Prompts) -> None:
    """Only what is sent to the engine is listed: ask once for real."""
    connection = _Connection(server)
    if connection.chat(prompts.body(max_tokens=1)) != 200:
        raise UnavailableError("the server did not answer as it should")
    connection.close()
