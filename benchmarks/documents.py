"""`lookonce bench documents`: a PDF file that is new, sent again, and changed by a page.

    new document     a file whose pages were never seen
    again            the same file with another question
    a page changed   a file of the same pages but the last one

    ms               from sending the request to its whole answer of one token, median
    API CPU ms       CPU time of the API process, all its threads, median
    workers CPU ms   of its media workers
    engine CPU ms    of the engine process
    processed        pages whose pictures went through the processor, per request
    encoder runs     pages that the engine encoded, per request

Of a new file all pages are drawn: only then is it known which of them came before. The kinds are
asked in turn, so that they meet the same machine.
"""

from __future__ import annotations

import argparse
import base64
import gc
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from benchmarks.film import lengthen
from benchmarks.report import Report, median, write_json
from benchmarks.running_server import RunningServer, running_server, set_environment
from tests.support.model_folders.make import make_folder

PAGES = 4
REPEATS = 7
WARM_UP = 1
A5 = (420, 595)
"""Points of 1/72 inch."""
COUNTED = ("media_processed_total", "encoder_runs_total")
COLUMNS = (
    "document",
    "ms",
    "API CPU ms",
    "workers CPU ms",
    "engine CPU ms",
    "processed",
    "encoder runs",
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench documents", description=__doc__)
    parser.add_argument("--pages", type=int, default=PAGES)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    set_environment()
    gc.disable()  # of this process: what making a folder imported takes 15 ms to go through
    report = Report("documents", COLUMNS)
    report.notes.append(f"a random Qwen2.5-VL of two layers; files of {options.pages} pages of A5")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make_folder("qwen2_5_vl", path)
        lengthen(path)
        with running_server([str(path)]) as server, httpx.Client(timeout=300) as client:
            measure(server, client, report, options.pages, options.repeats)
    report.show()
    write_json(options.json, [report])
    return 0


def measure(
    server: RunningServer, client: httpx.Client, report: Report, pages: int, repeats: int
) -> None:
    rows: dict[str, list[tuple[float, ...]]] = {}
    for turn in range(repeats + WARM_UP):
        numbers = [turn * 1000 + page for page in range(pages)]
        changed = document([*numbers[:-1], turn * 1000 + 999])
        whole = document(numbers)
        for name, file in (("new document", whole), ("again", whole), ("a page changed", changed)):
            figures = ask(server, client, file, f"What is said there? {name}")
            if turn >= WARM_UP:
                rows.setdefault(name, []).append(figures)
    for name, found in rows.items():
        report.add(name, *map(median, zip(*found, strict=True)))


def ask(
    server: RunningServer, client: httpx.Client, file: bytes, question: str
) -> tuple[float, ...]:
    """One request: the figures of the columns."""
    data = f"data:application/pdf;base64,{base64.b64encode(file).decode()}"
    content = [
        {"type": "file", "file": {"filename": "report.pdf", "file_data": data}},
        {"type": "text", "text": question},
    ]
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": 1, "temperature": 0}
    return server.ask(client, "/v1/chat/completions", body, COUNTED)


def document(numbers: Sequence[int]) -> bytes:
    """A PDF file with a picture on each page; every number has a picture of its own."""
    first, *rest = (page(number) for number in numbers)
    file = io.BytesIO()
    first.save(file, "PDF", save_all=True, append_images=rest, resolution=72)
    return file.getvalue()


def page(number: int) -> Image.Image:
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (12, 9, 3), dtype=np.uint8))
    return coarse.resize(A5, Image.Resampling.BICUBIC)
