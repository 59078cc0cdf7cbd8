"""A kept load is compared again without a server."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.twin import WARM_UP, Kept, main, replay
from lookonce.errors import ConfigError
from lookonce.simulate.prices import Prices
from lookonce.simulate.trace import read_trace


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
