"""`lookonce bench film`: a window that slides over a film, one frame a step.

A client asks about the last 64 frames of a film again and again, each time one frame further. It
sends the window as a list of frames (`data:video/jpeg`).

    the same film    the server knows all frames of a window but the new one
    named            as the same film, but frames that were sent before are named by their `uuid`,
                     and the new one alone is sent
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
Frames are named where a frame is an item by itself: a pair that was never sent has no name.
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
ONE_BY_ONE = ("InternVL",)
"""A frame is an item by itself."""
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
    """All ways in turn, so that they meet the same machine."""
    rows: dict[str, list[tuple[float, ...]]] = {"the same film": [], "resent": []}
    if name in ONE_BY_ONE:
        rows["named"] = []
    film = [encoded_frame(number) for number in range(window + steps + 2)]
    other = [encoded_frame(500_000 + number) for number in range(window + steps + 2)]
    for step in range(steps + 2):
        ways: dict[str, str | list[dict[str, str]]] = {
            "the same film": joined(film[step : step + window])
        }
        if name in ONE_BY_ONE:
            ways["named"] = named(other, step, window)
        new = [encoded_frame(1_000_000 + window * step + number) for number in range(window)]
        ways["resent"] = joined(new)
        for way, url in ways.items():
            figures = ask(server, url)
            if step >= 2:
                rows[way].append(figures)
    for way, found in rows.items():
        report.add(f"{name}, {way}", *map(median, zip(*found, strict=True)))


def joined(frames: Sequence[bytes]) -> str:
    """A data URL of a list of frames."""
    listed = ",".join(base64.b64encode(frame).decode() for frame in frames)
    return f"data:video/jpeg;base64,{listed}"


def named(film: Sequence[bytes], step: int, window: int) -> list[dict[str, str]]:
    """The window of a step; only frames that were in no window before have bytes."""
    begin = 0 if step == 0 else step + window - 1
    return [
        {"uuid": f"frame {number}"}
        if number < begin
        else {"uuid": f"frame {number}", "url": joined([film[number]])}
        for number in range(step, step + window)
    ]


def ask(server: RunningServer, url: str | list[dict[str, str]]) -> tuple[float, ...]:
    """One step: the figures of the columns. `url`: a film's, or its frames."""
    film = {"type": "video_url", "video_url": {"url": url, "fps": 2}}
    content = [film, {"type": "text", "text": "What is new?"}]
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
