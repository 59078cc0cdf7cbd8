"""`lookonce simulate`: what is tried, what is told, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lookonce.cli.simulate import Asked, run_simulate, specs_of
from lookonce.errors import ConfigError
from lookonce.simulate.prices import NANO_PRICES, read_prices
from lookonce.simulate.recommendation import Costs, recommend
from lookonce.simulate.simulation import FleetSpec, Outcome


def outcome(engines: int, p99: float, failed: int = 0) -> Outcome:
    return Outcome(
        spec=FleetSpec(engines=engines),
        requests=1,
        failed=failed,
        first_token=np.array([p99]),
        per_token=np.array([0.1]),
    )


def test_every_combination_is_simulated_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Asked(
        trace="conversations",
        engines="1,2",
        router="price,round_robin",
        kv_tier=("none", "host:1GB"),
        shape=("requests=12", "turns=3"),
        target_p99=1e6,
        json_file=tmp_path / "figures.json",
        plot=tmp_path / "plot.svg",
    )
    assert run_simulate(asked) == 0
    told = json.loads((tmp_path / "figures.json").read_text())
    assert len(told["runs"]) == 6, "one engine needs no router"
    assert all(run["requests"] == 12 and run["failed"] == 0 for run in told["runs"])
    assert told["recommendation"].startswith("Take 1 engine, KV 1 GiB: p99 first token ")
    assert told["recommendation"] in capsys.readouterr().out
    assert (tmp_path / "plot.svg").read_text().count("<polyline") == 12


def test_figures_have_nothing_that_tiers_are_asked_with(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    tier = "valkey://somebody:canary@tier.example:6379"
    assert (
        run_simulate(Asked(trace="fresh", kv_tier=(tier,), shape=("requests=2",), json_file=path))
        == 0
    )
    assert "tier.example" in path.read_text()
    assert "canary" not in path.read_text()


def test_per_engine_grows_the_trace_with_the_fleet(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run_simulate(
        Asked(trace="fresh", engines="1,3", shape=("requests=5",), per_engine=True, json_file=path)
    )
    assert [run["requests"] for run in json.loads(path.read_text())["runs"]] == [5, 15]


def test_the_memory_of_each_process_is_told(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run_simulate(
        Asked(trace="fresh", engines="2", processes=2, shape=("requests=5",), json_file=path)
    )
    (told,) = json.loads(path.read_text())["runs"]
    assert len(told["resident_bytes"]) == 2


def test_a_fleet_has_no_more_processes_than_engines() -> None:
    found = specs_of(Asked(trace="fresh", engines="1,4", processes=2))
    assert [(spec.engines, spec.processes) for spec in found] == [(1, 1), (4, 2)]


def test_what_one_process_alone_can_simulate_is_refused_before_anything_runs() -> None:
    asked = Asked(trace="fresh", engines="2", kv_tier=("none", "valkey://somewhere"), processes=2)
    with pytest.raises(ConfigError, match="share the tier valkey"):
        run_simulate(asked)


def test_prompts_are_found_in_whole_blocks(tmp_path: Path) -> None:
    """Two requests with one beginning of 512 tokens, of which whole blocks are found."""
    trace, path = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    asked = {"input_length": 600, "output_length": 2}
    lines = (
        json.dumps({"timestamp": 60_000 * number, "hash_ids": [1, 2 + number], **asked})
        for number in range(2)
    )
    trace.write_text("\n".join(lines))
    found = {}
    for size in (None, 48, 300):
        run_simulate(Asked(trace=str(trace), block_size=size, json_file=path))
        (told,) = json.loads(path.read_text())["runs"]
        found[size] = told["prefix_hit_rate"] * 1200
    assert found == pytest.approx({None: 512, 48: 480, 300: 300})


def test_the_cheapest_that_is_quick_enough_is_taken() -> None:
    found = [outcome(2, 3.0), outcome(4, 0.9), outcome(6, 0.5), outcome(3, 0.8, failed=1)]
    line = recommend(found, Costs(), 1.0)
    assert line.startswith("Take 4 engines, price, KV 1 GiB: p99 first token 0.9 s, 33% cheaper")
    assert recommend(found, Costs(), 0.1).startswith("None of these answers every request")
    assert recommend(found, Costs(), None) == ""


def test_the_prices_that_ship_can_be_read() -> None:
    assert read_prices(NANO_PRICES).block_size == 16


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"router": "best"}, "--router: there is no 'best'"),
        ({"engines": "some"}, "--engines: numbers separated by commas"),
        ({"engines": "0"}, "--engines: numbers above 0"),
        ({"shape": ("size=3",)}, "--set: there is no 'size'"),
        ({"shape": ("rate=fast",)}, "--set: rate is a number"),
        ({"shape": ("rate=0",)}, "--set: rate is above 0"),
        ({"kv_tier": ("attic",)}, "--kv-tier: 'attic' is none of"),
        ({"speed": 0.0}, "--speed is above 0"),
        ({"trace": "/nowhere", "shape": ()}, "/nowhere cannot be read"),
        ({"prices": Path("/nowhere")}, "/nowhere cannot be read"),
        ({"json_file": Path("/nowhere/x")}, "--json: /nowhere/x cannot be written"),
        ({"plot": Path("/")}, "--plot: / cannot be written"),
    ],
)
def test_what_is_wrong_is_named(given: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_simulate(Asked(**{"trace": "fresh", "shape": ("requests=1",), **given}))


def test_a_price_that_there_is_not_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text('{"stepp": 1}')
    with pytest.raises(ConfigError, match="stepp"):
        read_prices(file)
    file.write_text('{"step": -1}')
    with pytest.raises(ConfigError, match="step is -1"):
        read_prices(file)


def test_one_engine_is_simulated_once() -> None:
    assert len(specs_of(Asked(trace="fresh", engines="1,2", router="price,round_robin"))) == 3
