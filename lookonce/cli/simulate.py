"""`lookonce simulate TRACE`: what a trace's requests would meet on so many engines, and what that
costs. Every combination of the options given is one simulation, in virtual time."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from lookonce.config import GIB
from lookonce.errors import ConfigError
from lookonce.simulate.engine import EngineSpec
from lookonce.simulate.plots import write_plots
from lookonce.simulate.prices import NANO_PRICES, read_prices
from lookonce.simulate.recommendation import Costs, cost_of, name_of, recommend
from lookonce.simulate.simulation import ROUTERS, FleetSpec, Outcome, Simulation, check_spec
from lookonce.simulate.trace import GENERATORS, Shape, TraceRequest, read_trace
from lookonce.types.kv import parse_tier_spec

COLUMNS = {
    "first_token_p50": "first token p50, s",
    "first_token_p99": "p99, s",
    "per_token_p50": "per token p50, ms",
    "per_token_p99": "p99, ms",
    "prefix_hit_rate": "prompt found",
    "external_hit_rate": "of tiers",
    "encoder_runs_per_medium": "encoder runs a medium",
    "busy": "busy",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says, unchecked; lists are separated by commas."""

    trace: str
    engines: str = "1"
    router: str = "price"
    kv_cache_gb: str = "1"
    kv_tier: tuple[str, ...] = ()
    encoder_tier: tuple[str, ...] = ()
    prices: Path | None = None
    shape: tuple[str, ...] = ()
    per_engine: bool = False
    max_requests: int | None = None
    speed: float = 1.0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int | None = None
    encoder_cache_gb: float = 0.5
    target_p99: float | None = None
    engine_cost: float = 1.0
    host_gb_cost: float = 0.005
    processes: int = 1
    json_file: Path | None = None
    plot: Path | None = None


def run_simulate(asked: Asked) -> int:
    """Simulate, print and write what was asked for; the exit status. Raises `ConfigError`."""
    _check_files(asked)
    prices = read_prices(asked.prices or NANO_PRICES)
    if asked.block_size is not None:
        prices = msgspec.structs.replace(prices, block_size=asked.block_size)
    requests = requests_of(asked)
    outcomes = []
    specs = specs_of(asked)
    for spec in specs:
        check_spec(spec, prices)  # before any of them takes its time
    for spec in specs:
        began = time.perf_counter()
        outcome = Simulation(spec, prices).run(requests(spec))
        outcomes.append((outcome, time.perf_counter() - began))
    _print_table(outcomes)
    costs = Costs(engine=asked.engine_cost, host_gb=asked.host_gb_cost)
    found = [outcome for outcome, _ in outcomes]
    line = recommend(found, costs, asked.target_p99)
    if line:
        print(line)
    if asked.json_file is not None:
        told = {
            "prices": prices.measured_on,
            "runs": [
                {
                    "config": _config_of(outcome.spec),
                    "cost": cost_of(outcome.spec, costs),
                    "wall_seconds": seconds,
                    "resident_bytes": outcome.resident_bytes,
                    **outcome.figures(),
                }
                for outcome, seconds in outcomes
            ],
            "recommendation": line or None,
        }
        asked.json_file.write_text(json.dumps(told, indent=1) + "\n")
    if asked.plot is not None:
        write_plots(asked.plot, {name_of(outcome.spec): outcome for outcome in found})
    return 0


def _config_of(spec: FleetSpec) -> dict[str, Any]:
    """As JSON has it, without what tiers are asked with."""
    told: dict[str, Any] = msgspec.to_builtins(spec)
    for tier in (*told["engine"]["kv_tiers"], *told["engine"]["encoder_tiers"]):
        del tier["username"], tier["password"]
    return told


def _check_files(asked: Asked) -> None:
    """Before anything is simulated, which may take an hour."""
    for option, path in (("--json", asked.json_file), ("--plot", asked.plot)):
        if path is None:
            continue
        written = path if path.exists() else path.parent
        if path.is_dir() or not os.access(written, os.W_OK):
            raise ConfigError(f"{option}: {path} cannot be written")


def requests_of(asked: Asked) -> Callable[[FleetSpec], Iterable[TraceRequest]]:
    """Gives the requests of a file, or of a generator by its name, which are made as they are
    needed. Raises `ConfigError`."""
    if asked.speed <= 0:
        raise ConfigError(f"--speed is above 0, got {asked.speed}")
    if asked.trace in GENERATORS:
        shape = _shape(asked.shape)

        def generated(spec: FleetSpec) -> Iterable[TraceRequest]:
            times = spec.engines if asked.per_engine else 1
            larger = replace(shape, requests=shape.requests * times, rate=shape.rate * times)
            made = GENERATORS[asked.trace](larger)
            return _faster(itertools.islice(made, asked.max_requests), asked.speed)

        return generated
    if asked.shape or asked.per_engine:
        raise ConfigError(f"--set and --per-engine are of generators: {', '.join(GENERATORS)}")
    found = read_trace(Path(asked.trace), max_requests=asked.max_requests)
    return lambda spec: _faster(found, asked.speed)


def _faster(requests: Iterable[TraceRequest], speed: float) -> Iterable[TraceRequest]:
    if speed == 1.0:
        return requests
    replaced = msgspec.structs.replace
    return (replaced(each, arrival=each.arrival / speed) for each in requests)


def _shape(given: tuple[str, ...]) -> Shape:
    """`NAME=NUMBER` each. Raises `ConfigError`."""
    default = Shape()
    kinds = {each.name: type(getattr(default, each.name)) for each in fields(Shape)}
    values: dict[str, Any] = {}
    for text in given:
        name, _, number = text.partition("=")
        name = name.replace("-", "_")
        if name not in kinds:
            raise ConfigError(f"--set: there is no {name!r}; there are {', '.join(kinds)}")
        try:
            values[name] = kinds[name](number)
        except ValueError:
            raise ConfigError(f"--set: {name} is a number, got {number!r}") from None
        if values[name] < 0 or (values[name] == 0 and name not in ("seed", "zipf")):
            raise ConfigError(f"--set: {name} is above 0, got {number}")
    return replace(default, **values)


def specs_of(asked: Asked) -> list[FleetSpec]:
    """Every combination of engines, routers, cache sizes and tiers. Raises `ConfigError`."""
    routers = asked.router.split(",")
    for router in routers:
        if router not in ROUTERS:
            raise ConfigError(f"--router: there is no {router!r}; there are {', '.join(ROUTERS)}")
    tiers = [() if text == "none" else (parse_tier_spec(text),) for text in asked.kv_tier] or [()]
    found = []
    for engines, router, gigabytes, chain in itertools.product(
        _numbers("--engines", asked.engines, int),
        routers,
        _numbers("--kv-cache-gb", asked.kv_cache_gb, float),
        tiers,
    ):
        engine = EngineSpec(
            kv_cache_bytes=int(gigabytes * GIB),
            encoder_cache_bytes=int(asked.encoder_cache_gb * GIB),
            max_num_seqs=asked.max_num_seqs,
            max_num_batched_tokens=asked.max_num_batched_tokens,
            kv_tiers=chain,
            encoder_tiers=tuple(
                parse_tier_spec(text, "--encoder-tier") for text in asked.encoder_tier
            ),
        )
        spec = FleetSpec(
            engines=int(engines),
            router=router if engines > 1 else routers[0],
            engine=engine,
            processes=min(asked.processes, int(engines)),
        )
        if spec not in found:  # one engine needs no router
            found.append(spec)
    return found


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: numbers separated by commas, got {text!r}") from None
    if not all(0 < number < 1e6 for number in found):
        raise ConfigError(f"{option}: numbers above 0, got {text!r}")
    return list(map(float, found)) if kind is float else found


def _print_table(outcomes: list[tuple[Outcome, float]]) -> None:
    table = Table(title="lookonce simulate", title_justify="left")
    table.add_column("fleet")
    for heading in (*COLUMNS.values(), "took, s"):
        table.add_column(heading, justify="right")
    for outcome, seconds in outcomes:
        figures = outcome.figures()
        cells = [_cell(name, figures[name]) for name in COLUMNS]
        table.add_row(name_of(outcome.spec), *cells, f"{seconds:.1f}")
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)


def _cell(name: str, value: float | int | None) -> str:
    if value is None:
        return "-"
    if name.startswith("per_token"):
        return f"{1e3 * value:.2f}"
    if name.endswith("rate") or name == "busy":
        return f"{value:.1%}"
    return str(value) if isinstance(value, int) else f"{value:.3g}"
