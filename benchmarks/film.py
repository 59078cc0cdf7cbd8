"""`lookonce bench film`: a window that slides over a film, one frame a step.

A client asks about the last 64 frames of a film again and again, each time one frame further. It
sends the window as a list of frames (`data:video/jpeg`).

    the same film    the server knows all frames of a window but the new one
    resent           every step shows frames that were never shown: what each step costs an engine
                     that takes the film as one item

    API CPU ms       CPU time of the API process per step, all its threads, median
    workers CPU ms   of its media workers
    engine CPU ms    of the engine process
    body MB          what the client sends per step
    frames           decoded and processed per step, as the receipt says
    encoder runs     items per step that the engine encoded

Qwen2.5-VL takes frames in pairs, so a window that moves by one frame has other pairs than the one
before: its pairs are those of two steps ago. The first two windows are left out of the figures.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from benchmarks.report import Report, median, write_json
from benchmarks.running_server import RunningServer, running_server, set_environment
from tests.support.model_folders.make import make_folder

WINDOW = 64
STEPS = 12
CONTEXT = 32_768
"""Tokens; those of the small folders have fewer than a window."""
SIZE = (448, 336)
KINDS = {"Qwen2.5-VL": "qwen2_5_vl", "Qwen3-VL": "qwen3_vl", "InternVL": "media:internvl"}
COLUMNS = (
    "model, film",
    "API CPU ms",
    "workers CPU ms",
    "engine CPU ms",
    "step ms",
    "body MB",
    "frames",
    "encoder runs",
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench film", description=__doc__)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    set_environment()
    report = Report("film", COLUMNS)
    report.notes.append(
        f"windows of {options.window} frames of {SIZE[0]} x {SIZE[1]} (JPEG), {options.steps} "
        "steps of one frame each; random models of two layers, one token per answer; medians"
    )
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            make_folder(KINDS[name], path)
            lengthen(path)
            with running_server([str(path)]) as server:
                measure(server, name, report, options.window, options.steps)
    report.show()
    write_json(options.json, [report])
    return 0


def lengthen(folder: Path) -> None:
    """Give a folder's model a context of `CONTEXT` tokens."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))


def measure(server: RunningServer, name: str, report: Report, window: int, steps: int) -> None:
    """Both ways in turn, so that they meet the same machine."""
    rows: dict[str, list[tuple[float, ...]]] = {"the same film": [], "resent": []}
    film = [encoded_frame(number) for number in range(window + steps + 2)]
    for step in range(steps + 2):
        new = [encoded_frame(1_000_000 + window * step + number) for number in range(window)]
        for way, frames in (("the same film", film[step : step + window]), ("resent", new)):
            figures = ask(server, frames)
            if step >= 2:
                rows[way].append(figures)
    for way, found in rows.items():
        report.add(f"{name}, {way}", *map(median, zip(*found, strict=True)))


def ask(server: RunningServer, frames: Sequence[bytes]) -> tuple[float, ...]:
    """One step: the figures of the columns."""
    listed = ",".join(base64.b64encode(frame).decode() for frame in frames)
    url = {"url": f"data:video/jpeg;base64,{listed}", "fps": 2}
    content = [{"type": "video_url", "video_url": url}, {"type": "text", "text": "What is new?"}]
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 1,
            "temperature": 0,
            "reuse_receipt": True,
        }
    ).encode()
    before = server.cpu_seconds()
    runs = server.metrics()["encoder_runs_total"]
    started = time.perf_counter()
    response = httpx.post(f"{server.url}/v1/chat/completions", content=body, timeout=300)
    took = time.perf_counter() - started
    response.raise_for_status()
    spent = [(now - then) * 1e3 for now, then in zip(server.cpu_seconds(), before, strict=True)]
    found = response.json()["reuse_receipt"]["film_frames"]
    encoded = server.metrics()["encoder_runs_total"] - runs
    return (*spent, took * 1e3, len(body) / 1e6, float(found["processed"]), encoded)


def encoded_frame(number: int) -> bytes:
    """A smooth picture as JPEG; every number has another one."""
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize(SIZE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    return file.getvalue()
