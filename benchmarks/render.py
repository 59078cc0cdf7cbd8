"""`lookonce bench render`: what `/render` and `/tokenize` cost beside the picture's own work.

API CPU ms      CPU time of the API process per request
worker CPU ms   CPU time of its decoding workers per request
picture CPU ms  CPU time to decode and process that picture in this process with the same code
beyond ms       API and workers less picture: reading, parsing, hashing, pictures' headers, the way
                to a worker and back, template, tokenizer, the answer
decodes         pictures decoded per request
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path

import httpx

from benchmarks.pictures import data_url, encoded_picture, variant
from benchmarks.report import Report, median, publish
from benchmarks.running_server import RunningServer, cpu_seconds, running_server, set_environment
from lookonce.config import NANO_FOLDER, MediaConfig
from lookonce.render.media.processing import MediaJob, Processing, ProcessingSettings

RENDER, TOKENIZE = "/v1/chat/completions/render", "/tokenize"
PICTURES = (("1024", "JPEG", 1), ("2048", "PNG", 1), ("720p", "JPEG", 4))
"""Size, format, and how many a request has."""
REPEATS = 15
DECODES = "readonly_media_decodes_total"


class _Meter:
    """Sends bodies to one server, one at a time, and reads the CPU time that they cost it."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._api = server.process("lookonce.server.process")
        self._workers = server.processes("lookonce.render.media.worker")
        self._http = httpx.Client(base_url=server.url, timeout=300)

    def cost(self, path: str, bodies: Sequence[bytes]) -> tuple[float, float, float]:
        """Per request: median CPU milliseconds of API process and workers, and mean decodes."""
        costs = []
        before = self._server.metrics().get(DECODES, 0.0)
        for body in bodies:
            api, workers = cpu_seconds(self._api), self._worker_seconds()
            self._http.post(path, content=body).raise_for_status()
            costs.append((cpu_seconds(self._api) - api, self._worker_seconds() - workers))
        decodes = self._server.metrics().get(DECODES, 0.0) - before
        api_ms, worker_ms = (median(column) * 1e3 for column in zip(*costs, strict=True))
        return api_ms, worker_ms, decodes / len(bodies)

    def _worker_seconds(self) -> float:
        return sum(map(cpu_seconds, self._workers))


def _body(pictures: Sequence[bytes]) -> bytes:
    content: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures
    ]
    content.append({"type": "text", "text": "What is in the picture?"})
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def _picture_ms(pictures: Sequence[bytes], model: str) -> float:
    """Median CPU milliseconds to decode and process one of the pictures."""
    media = MediaConfig()
    processing = Processing(
        ProcessingSettings(model, "float32", media.max_image_pixels, media.max_audio_seconds)
    )
    processing.run(MediaJob("image", pictures[0]))
    found = []
    for picture in pictures:
        started = time.thread_time()
        processing.run(MediaJob("image", picture))
        found.append((time.thread_time() - started) * 1e3)
    return median(found)


def render_report(repeats: int, model: str) -> Report:
    """For each route and picture one row with new pictures, one with a repeated picture."""
    times = ("API CPU ms", "worker CPU ms", "picture CPU ms", "beyond ms")
    report = Report(
        "render",
        ("route", "pictures", "are", *times, "decodes"),
        notes=[f"medians of {repeats} requests, one at a time; model: {Path(model).name}"],
    )
    with running_server([model]) as server:
        meter = _Meter(server)
        for size, file_format, number in PICTURES:
            encoded = encoded_picture(size, file_format)
            variants = (variant(encoded, each) for each in count())
            shown = f"{size} {file_format}" if number == 1 else f"{number} x {size} {file_format}"
            for path in (RENDER, TOKENIZE):
                new = [list(islice(variants, number)) for _ in range(repeats)]
                own = _picture_ms([pictures[0] for pictures in new], model)
                for state, bodies in (
                    ("new", [_body(pictures) for pictures in new]),
                    ("repeated", [_body(new[0])] * repeats),
                ):
                    api, workers, decodes = meter.cost(path, bodies)
                    work = own * decodes
                    beyond = api + workers - work
                    name = path.rpartition("/")[2]
                    report.add(name, shown, state, api, workers, work, beyond, decodes)
    return report


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench render", description=__doc__)
    parser.add_argument("--model", default=str(NANO_FOLDER), help="a folder with pictures")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    set_environment()
    report = render_report(given.repeats, given.model)
    publish([report], given.json)
    return 0
