"""A kept load is compared again without a server."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.prices import write_prices
from benchmarks.twin import WARM_UP, Folder, Kept, main, replay
from lookonce.errors import ConfigError
from lookonce.simulate.prices import Prices
from lookonce.simulate.trace import read_trace

COUNTED = dict.fromkeys(
    (
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "encoder_runs_total",
        "media_processed_total",
    ),
    1.0,
)


def keep(folder: Folder, number: int, *, requests: int, slower: float) -> list[float]:
    """A round whose first tokens take so many times what `Prices()` say; these."""
    lines = [
        {"timestamp": 200 * n, "input_length": 40 + n, "output_length": 5}
        for n in range(WARM_UP + requests)
    ]
    log = folder.log(5, number)
    log.write_text("\n".join(map(json.dumps, lines)) + "\n")
    _, first, per_token = replay(read_trace(log), Prices(), WARM_UP)
    assert len(first) == requests
    real = Kept([slower * each for each in first], per_token, 0, 0.1, COUNTED)
    folder.client(5, number).write_bytes(msgspec.json.encode(real))
    return real.first_text


def told(folder: Folder, *more: str) -> dict[str, dict[str, float]]:
    path = folder.path / "told.json"
    assert main(["--replay", str(folder.path), "--json", str(path), *more]) == 0
    return {row["figure"]: row for row in json.loads(path.read_text())["rows"]}


def test_a_kept_load_is_compared_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    keep(folder, 1, requests=9, slower=2.0)
    write_prices(Prices(), tmp_path / "prices.json")
    rows = told(folder, "--prices", str(tmp_path / "prices.json"))
    assert rows["first token p50 ms"]["off %"] == pytest.approx(-50)
    assert rows["each token p99 ms"]["off %"] == pytest.approx(0)
    assert rows["encoder runs"]["real"] == 1


def test_each_round_is_simulated_by_the_prices_around_it(tmp_path: Path) -> None:
    """Where a server is slower in the last of three rounds, and prices from before it on, half of
    two rounds are simulated as slow."""
    folder = Folder(tmp_path)
    for number, seconds in enumerate((0.0, 0.0, 0.1, 0.1)):
        write_prices(Prices(first_token=seconds), folder.prices(number))
    for number in (1, 2, 3):
        keep(folder, number, requests=9, slower=1.0)
    write_prices(Prices(first_token=0.0), tmp_path / "quick.json")
    quick = told(folder, "--prices", str(tmp_path / "quick.json"))
    rows = told(folder)
    assert rows["encoder runs"]["real"] == 3
    for percent in (90, 99):
        row = f"first token p{percent} ms"
        assert rows[row]["simulated"] - quick[row]["simulated"] == pytest.approx(100, abs=5)
    assert rows["first token p50 ms"]["simulated"] < 100 + quick["first token p50 ms"]["simulated"]


def test_prices_around_a_round_must_be_there(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    keep(folder, 1, requests=9, slower=1.0)
    write_prices(Prices(), folder.prices(0))
    with pytest.raises(ConfigError, match="prices-1"):
        main(["--replay", str(tmp_path)])


def test_what_an_earlier_run_has_left_is_cleared(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for number in (1, 2):
        keep(folder, number, requests=9, slower=1.0)
        write_prices(Prices(), folder.prices(number))
    (tmp_path / "notes.txt").write_text("mine")
    assert folder.rates() == [5]
    folder.clear()
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_bytes(msgspec.json.encode(Prices()))
    with pytest.raises(ConfigError, match="no logs"):
        main(["--replay", str(tmp_path), "--prices", str(prices)])
