"""`lookonce bench look`: what a picture costs when it is known, when it is new, without the cache.

    API CPU ms    CPU time of the API process per request (its decoding workers are not in it)
    parse ms      of it, reading and parsing the body: what the same body costs when it is refused
                  right after parsing
    TTFT ms       from sending the request to the first streamed text, median
    decodes       pictures decoded per request

A first table parses a body in-process: JSON straight from bytes, then base64. A last one shows
known pictures while new ones keep every decoding worker busy (`saturation`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pybase64

from lookonce.bench.pictures import data_url, encoded_picture, variant
from lookonce.bench.report import Report, median, write_json
from lookonce.bench.saturation import saturation_report
from lookonce.bench.serving import RunningServer, cpu_seconds, running_server, set_environment
from lookonce.server.protocol import ChatRequest

PICTURES = (
    ("1024", "JPEG"),
    ("2048", "JPEG"),
    ("2048", "PNG"),
    ("1080p", "JPEG"),
    ("1080p", "PNG"),
    ("4K", "JPEG"),
    ("4K", "PNG"),
)
COUNTS = (1, 8, 30)
MAX_BODY_BYTES = 80_000_000
REPEATS = 7


@dataclass(frozen=True, slots=True)
class _Cost:
    api_ms: float
    ttft_ms: float
    decodes: float


class _Client:
    """Sends bodies to one server and reads what they cost it."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._api = server.process("lookonce.server.process")
        self._http = httpx.Client(base_url=server.url, timeout=300)
        self._asked = 0

    def body(self, pictures: Sequence[bytes], *, refused: bool = False) -> bytes:
        """A request with a question never asked before."""
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

    def cost(self, bodies: Sequence[bytes]) -> _Cost:
        """Per request, one at a time."""
        decodes = self._server.metrics().get("media_decodes_total", 0.0)
        cpu = cpu_seconds(self._api)
        waits = [self._first_text(body) for body in bodies]
        cpu = cpu_seconds(self._api) - cpu
        decodes = self._server.metrics().get("media_decodes_total", 0.0) - decodes
        return _Cost(cpu * 1e3 / len(bodies), median(waits) * 1e3, decodes / len(bodies))

    def _first_text(self, body: bytes) -> float:
        started = time.perf_counter()
        with self._http.stream("POST", "/v1/chat/completions", content=body) as response:
            if response.status_code == 400:
                response.read()
                return time.perf_counter() - started
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0]["delta"].get("content"):
                        return time.perf_counter() - started
        return time.perf_counter() - started


def parsing_report() -> Report:
    """Parsing and base64-decoding bodies, in this process, median of 15."""
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


def requests_report(counts: Sequence[int], repeats: int) -> Report:
    """One row per kind of picture, number of pictures and state of the cache."""
    report = Report(
        "look",
        (
            "picture",
            "pictures",
            "cache",
            "API CPU ms",
            "parse ms",
            "beyond ms",
            "TTFT ms",
            "decodes",
        ),
        notes=[f"nano, per request, one at a time, {repeats} requests a row"],
    )
    limits = ["--limit-mm-per-prompt", f"image={max(counts)}"]
    with (
        running_server(limits) as cached,
        running_server([*limits, "--mm-processor-cache-gb", "0"]) as uncached,
    ):
        on, off = _Client(cached), _Client(uncached)
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
    clients: tuple[_Client, _Client],
    name: str,
    encoded: bytes,
    count: int,
    repeats: int,
) -> None:
    on, off = clients
    known = [variant(encoded, number) for number in range(count)]
    parse = on.cost([on.body(known, refused=True)] * repeats).api_ms
    on.cost([on.body(known)])
    off.cost([off.body(known)])
    new = [
        [variant(encoded, 1000 * count + 100 * run + number) for number in range(count)]
        for run in range(min(repeats, 3))
    ]
    modes = (
        ("hit", on.cost([on.body(known) for _ in range(repeats)])),
        ("miss", on.cost([on.body(pictures) for pictures in new])),
        ("off", off.cost([off.body(known) for _ in range(min(repeats, 3))])),
    )
    for mode, cost in modes:
        beyond = cost.api_ms - parse
        report.add(name, count, mode, cost.api_ms, parse, beyond, cost.ttft_ms, cost.decodes)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench look", description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    set_environment()
    reports = []
    for make in (
        parsing_report,
        lambda: requests_report(options.counts, options.repeats),
        saturation_report,
    ):
        reports.append(make())
        reports[-1].show()
    if options.json is not None:
        write_json(options.json, reports)
    return 0
