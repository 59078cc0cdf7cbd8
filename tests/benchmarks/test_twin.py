"""Prices are found again from what requests took, and a kept load is compared without a server."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.load_generator import RequestOutcome
from benchmarks.prices import (
    ANSWERED,
    SHORT_PROMPT,
    Asked,
    Kinds,
    alone_at_the_server,
    request_prices,
)
from benchmarks.twin import WARM_UP, Kept, main, replay
from lookonce.errors import ConfigError
from lookonce.simulate.prices import Prices
from lookonce.simulate.trace import read_trace

TRUE = Prices(
    step=5e-4,
    prompt_row=1e-3,
    prompt_token=1e-4,
    prompt_pair=5e-8,
    short_prompt=SHORT_PROMPT,
    long_prompt_row=4e-3,
    long_prompt_token=8e-5,
    encode_item=2e-2,
    request=1.5e-3,
    end=5e-4,
    request_token=3e-6,
    request_item=8e-4,
    request_byte=1e-8,
    first_token=2e-3,
    stream_token=1e-4,
    process_item=3e-3,
    process_pixel=1e-8,
    encode_threads=1.0,
)


def asked(prompt: float, cached: float = 0, picture: float = 0, pixels: float = 0) -> Asked:
    """What a kind of requests would take at these prices; `picture`: its bytes."""
    new, items = prompt - cached, int(picture > 0)
    seconds = TRUE.of_request(int(prompt), items, int(picture)) + TRUE.first_token + TRUE.step
    seconds += TRUE.prompt_pair * new * (cached + (new + 1) / 2)
    if new > SHORT_PROMPT:
        seconds += TRUE.long_prompt_row + TRUE.long_prompt_token * new
    else:
        seconds += TRUE.prompt_row + TRUE.prompt_token * new
    if pixels:
        seconds += TRUE.encode_item + TRUE.of_processing(int(pixels), 0)
    api = TRUE.request + TRUE.end + 2 * TRUE.stream_token
    return Asked(seconds, api, seconds, prompt, cached, items, picture)


def test_prices_of_requests_are_found_again() -> None:
    known = (
        *(asked(prompt) for prompt in (18, 34, 58, 100, 188, 448)),
        *(asked(500, cached) for cached in (480, 448, 384)),
        *(asked(172, 160, picture) for picture in (48_000, 144_000)),
    )
    streamed = known[0].api_cpu + (ANSWERED - 2) * TRUE.stream_token
    longer = Asked(0.0, streamed, 0.0, 18, 0)
    new = {
        "512": asked(81, picture=48_000, pixels=512 * 512),
        "1024": asked(81, picture=144_000, pixels=1024 * 1024),
    }
    start = Prices(
        step=TRUE.step,
        prompt_row=TRUE.prompt_row,
        encode_step=0.0,
        encode_item=TRUE.encode_item,
        short_prompt=SHORT_PROMPT,
    )
    found, report = request_prices(Kinds(known, new, longer), start)
    for name, value in msgspec.structs.asdict(TRUE).items():
        if isinstance(value, float) and not name.endswith("threads"):
            got = getattr(found, name)
            assert got == pytest.approx(value, rel=1e-3, abs=1e-12), name
    assert len(report.rows) == len(known)


def test_requests_that_waited_for_another_are_no_measure() -> None:
    times = [(0.0, 1.0), (0.5, 1.2), (1.3, 1.4), (1.41, 1.5), (1.45, 1.6)]
    outcomes = [RequestOutcome(asked=begun, ended=ended) for begun, ended in times]
    assert [each.asked for each in alone_at_the_server(outcomes)] == [0.0, 1.3, 1.41]


def test_a_kept_load_is_compared_again(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 200 * n, "input_length": 40 + n, "output_length": 5}
        for n in range(WARM_UP + 9)
    ]
    log = tmp_path / "requests-5.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)) + "\n")
    prices = tmp_path / "prices.json"
    prices.write_bytes(msgspec.json.encode(Prices()))
    _, first, per_token = replay(read_trace(log), Prices(), WARM_UP)
    assert len(first) == 9
    counted = dict.fromkeys(
        (
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "encoder_runs_total",
            "media_processed_total",
        ),
        1.0,
    )
    kept = Kept([2 * each for each in first], per_token, 0, 0.1, counted)
    (tmp_path / "client-5.json").write_bytes(msgspec.json.encode(kept))
    told = tmp_path / "told.json"
    asked_for = ["--replay", str(tmp_path), "--prices", str(prices), "--json", str(told)]
    assert main(asked_for) == 0
    report = json.loads(told.read_text())
    off = {row["figure"]: row["off %"] for row in report["rows"]}
    assert off["first token p50 ms"] == pytest.approx(-50)
    assert off["each token p99 ms"] == pytest.approx(0)


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_bytes(msgspec.json.encode(Prices()))
    with pytest.raises(ConfigError, match="no logs"):
        main(["--replay", str(tmp_path), "--prices", str(prices)])
