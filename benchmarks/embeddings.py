"""`lookonce bench embeddings`: an input with a picture, new and embedded before.

    new picture      a picture and a text that were never seen
    known picture    the same picture with another text
    again            the same picture and text as just before
    new text         a text alone; as many tokens as the picture's text
    text again

    ms               from sending the request to its whole answer, median
    API CPU ms       CPU time of the API process, all its threads, median
    workers CPU ms   of its media workers
    engine CPU ms    of the engine process
    decodes, encoder runs, results held      per request

The kinds are asked in turn, so that they meet the same machine.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.pictures import data_url, distinct_pictures
from benchmarks.report import Report, median, write_json
from benchmarks.running_server import RunningServer, running_server, set_environment
from tests.support.model_folders.make import make_folder

REPEATS = 15
WARM_UP = 2
COUNTED = ("media_decodes_total", "encoder_runs_total", "pooled_cache_hits_total")
COLUMNS = (
    "input",
    "ms",
    "API CPU ms",
    "workers CPU ms",
    "engine CPU ms",
    "decodes",
    "encoder runs",
    "results held",
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench embeddings", description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--picture", default="1024 JPEG")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    set_environment()
    gc.disable()  # of this process: what making a folder imported takes 15 ms to go through
    report = Report("embeddings", COLUMNS)
    report.notes.append(
        f"a random Qwen2.5-VL of two layers, last token; a picture is {options.picture}"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make_folder("qwen2_5_vl", path)
        with (
            running_server([str(path), "--pooling", "last"]) as server,
            httpx.Client(timeout=300) as client,
        ):
            rows = measure(server, client, options.repeats, options.picture)
    for name, found in rows.items():
        report.add(name, *map(median, zip(*found, strict=True)))
    report.show()
    write_json(options.json, [report])
    return 0


def measure(
    server: RunningServer, client: httpx.Client, repeats: int, picture: str
) -> Mapping[str, list[tuple[float, ...]]]:
    """Figures of each request, by the kind of its input."""
    size, file_format = picture.split()
    rows: dict[str, list[tuple[float, ...]]] = {}
    for turn, made in enumerate(distinct_pictures(repeats + WARM_UP, size, file_format)):
        url = data_url(made)
        for name, body in inputs(turn, url):
            figures = server.ask(client, "/v1/embeddings", body, COUNTED)
            if turn >= WARM_UP:
                rows.setdefault(name, []).append(figures)
    return rows


def inputs(turn: int, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and bodies of one turn's requests."""
    image = {"type": "image_url", "image_url": {"url": url}}
    for name, picture, text in (
        ("new picture", image, f"page {turn}"),
        ("known picture", image, f"the other side of page {turn}"),
        ("again", image, f"the other side of page {turn}"),
        ("new text", None, f"a page without a picture, {turn}"),
        ("text again", None, f"a page without a picture, {turn}"),
    ):
        part = {"type": "text", "text": text}
        content = [picture, part] if picture else [part]
        yield name, {"messages": [{"role": "user", "content": content}]}
