"""Asks a running server about pictures, one request at a time, and reads what that costs it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.pictures import data_url
from benchmarks.report import median
from benchmarks.serving import RunningServer, cpu_seconds
from lookonce.errors import UnavailableError

SETTLE = 0.005
"""Seconds after an answer until its last work is done: it counts for the request it belongs to."""
COUNTERS = ("media_decodes_total", "media_processed_total", "encoder_runs_total")


@dataclass(frozen=True, slots=True)
class Cost:
    """Per request: medians of times, means of counters."""

    api_ms: float
    ttft_ms: float
    decodes: float
    processed: float
    encoder_runs: float


class Asker:
    """One client of one server, on one connection."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._api = server.process("lookonce.server.process")
        self._http = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)
        self._asked = 0

    def body(self, pictures: Sequence[bytes], *, refused: bool = False) -> bytes:
        """A request with a question never asked before; `refused`: right after it is parsed."""
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

    def cost(self, bodies: Sequence[bytes]) -> Cost:
        """Raises `UnavailableError` when the server does not answer as it should."""
        before = self._server.metrics()
        waits, cpu = [], []
        for body in bodies:
            used = cpu_seconds(self._api)
            waits.append(self._first_text(body) * 1e3)
            time.sleep(SETTLE)
            cpu.append((cpu_seconds(self._api) - used) * 1e3)
        after = self._server.metrics()
        counted = [(after.get(n, 0.0) - before.get(n, 0.0)) / len(bodies) for n in COUNTERS]
        return Cost(median(cpu), median(waits), *counted)

    def _first_text(self, body: bytes) -> float:
        """Seconds from sending to the first streamed text, or to the refusal."""
        started, first = time.perf_counter(), 0.0
        self._http.request("POST", "/v1/chat/completions", body)
        response = self._http.getresponse()
        while line := response.readline():
            if not first and _has_text(line):
                first = time.perf_counter() - started
        response.read()  # nothing is left, but only this tells the connection so
        if response.status not in (200, 400):
            raise UnavailableError(f"the server answered {response.status}")
        return first or time.perf_counter() - started


def _has_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:]).get("choices")
    return bool(choices and choices[0]["delta"].get("content"))
