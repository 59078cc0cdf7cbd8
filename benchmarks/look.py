"""`lookonce bench look`: what a picture costs when it is known, when it is new, without the cache.

    API CPU ms    CPU time of the API process per request, all its threads (not its decoding
                  workers), median
    parse ms      of it, reading the body and parsing its JSON: what the same body costs when it is
                  refused right after parsing
    beyond ms     the rest: base64, hash and lookup of the pictures, and all that any request costs
                  (the row without a picture shows that part)
    TTFT ms       from sending the request to the first streamed text, median
    decodes, processed, encoder runs      per request

A first table parses a body in-process: JSON straight from bytes, then base64. One shows the time to
first text of known pictures beside a peer's, one what streaming costs the API process per request
and per token (`streams`). A last one shows known pictures while new ones keep
every decoding worker busy (`saturation`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pybase64

from benchmarks.asking import Asker, Cost
from benchmarks.pictures import data_url, encoded_picture, variant
from benchmarks.report import Report, median, write_json
from benchmarks.saturation import saturation_report
from benchmarks.serving import running_server, set_environment
from benchmarks.streams import streams_report
from lookonce.frontend.requests import ChatRequest

PICTURES = (("1080p", "JPEG"), ("1080p", "PNG"), ("4K", "JPEG"), ("4K", "PNG"))
PEER_FIRST_TEXT_MS = {("1024", "JPEG"): 34.0, ("2048", "JPEG"): 94.0, ("2048", "PNG"): 320.0}
"""What another server needs from request to first text of a picture it knows, its model of 8 M."""
COUNTS = (1, 8, 30)
MAX_BODY_BYTES = 80_000_000
REPEATS = 15


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


def first_text_report(repeats: int) -> Report:
    """Known pictures, one per prompt, in order of size; every question is new."""
    report = Report("look (first text)", ("known picture", "TTFT ms", "peer ms", "share"))
    with running_server() as server:
        asker = Asker(server)
        for (size, file_format), theirs in PEER_FIRST_TEXT_MS.items():
            pictures = [encoded_picture(size, file_format)]
            asker.cost([asker.body(pictures)] * 2)
            ours = asker.cost([asker.body(pictures) for _ in range(repeats)]).ttft_ms
            report.add(f"{size} {file_format}", ours, theirs, ours / theirs)
    report.notes.append("nano; the peer's figures are its own machine's, with a model of 8 M")
    return report


def requests_report(counts: Sequence[int], repeats: int) -> Report:
    """One row per kind of picture, number of pictures and state of the cache."""
    columns = (
        "picture", "pictures", "cache", "API CPU ms", "parse ms", "beyond ms", "TTFT ms",
        "decodes", "processed", "encoder runs",
    )  # fmt: skip
    report = Report("look", columns)
    report.notes.append(f"nano, one request at a time, {repeats} a row (misses and off: 3)")
    limits = ["--limit-mm-per-prompt", f"image={max(counts)}"]
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


def _cells(cost: Cost, parse: float) -> tuple[float, ...]:
    beyond = cost.api_ms - parse
    counted = (cost.decodes, cost.processed, cost.encoder_runs)
    return cost.api_ms, parse, beyond, cost.ttft_ms, *counted


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
        lambda: first_text_report(options.repeats),
        lambda: requests_report(options.counts, options.repeats),
        streams_report,
        saturation_report,
    ):
        reports.append(make())
        reports[-1].show()
    if options.json is not None:
        write_json(options.json, reports)
    return 0
