"""A fleet simulated in windows, by several processes, is the same fleet."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.errors import ConfigError, UnavailableError
from lookonce.simulate.engine import EngineSpec
from lookonce.simulate.prices import Prices
from lookonce.simulate.shards import LocalShard, ProcessShard, Window
from lookonce.simulate.simulation import (
    MOST_COMPARED,
    ROUTERS,
    FleetSpec,
    Outcome,
    Sent,
    Simulation,
    shares,
)
from lookonce.simulate.trace import GENERATORS, Shape, TraceRequest
from lookonce.types.kv import parse_tier_spec

SMALL = EngineSpec(kv_cache_bytes=1 << 26)
SHAPE = Shape(requests=60, rate=30.0, turns=3, pictures=4, think_seconds=1.0, output_tokens=12)


def figures(outcome: Outcome) -> dict[str, float | int | None]:
    """All but the number of events, which are messages' too."""
    return {name: value for name, value in outcome.figures().items() if name != "events"}


def told(sent: Sent) -> tuple[object, ...]:
    return (
        sent.number,
        sent.engine.name,
        sent.first_token,
        sent.ended,
        sent.cached_tokens,
        sent.encoder_runs,
        sent.processed,
        sent.failed,
    )


def in_shards(
    requests: list[TraceRequest], spec: FleetSpec, prices: Prices, count: int
) -> tuple[Outcome, list[tuple[object, ...]]]:
    ended: list[Sent] = []
    simulation = Simulation(msgspec.structs.replace(spec, processes=2), prices, ended.append)
    followed = simulation.router.followed and spec.engines > 1
    shards = [
        LocalShard(spec.engine, prices, range(at, spec.engines, count), followed=followed)
        for at in range(count)
    ]
    outcome = simulation.run_in_shards(requests, shards)
    simulation.check_integrity()
    for shard in shards:
        shard.group.check_integrity()
    return outcome, [told(each) for each in ended]


def together(
    requests: list[TraceRequest], spec: FleetSpec, prices: Prices
) -> tuple[Outcome, list[tuple[object, ...]]]:
    ended: list[Sent] = []
    outcome = Simulation(spec, prices, ended.append).run(requests)
    return outcome, [told(each) for each in ended]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", GENERATORS)
def test_engines_in_shards_do_the_same(name: str, router: str) -> None:
    spec = FleetSpec(engines=5, router=router, engine=SMALL)
    requests = list(GENERATORS[name](SHAPE))
    one, all_one = together(requests, spec, Prices())
    other, all_other = in_shards(requests, spec, Prices(), 3)
    assert all_one == all_other
    assert figures(one) == pytest.approx(figures(other), rel=1e-12)
    assert one.requests == len(requests)


@pytest.mark.parametrize("name", ["zipf", "agents"])
def test_a_fleet_of_which_only_the_likely_engines_are_compared_does_the_same(name: str) -> None:
    spec = FleetSpec(engines=MOST_COMPARED + 6, engine=SMALL)
    requests = list(GENERATORS[name](replace(SHAPE, requests=300, rate=300.0)))
    assert together(requests, spec, Prices())[1] == in_shards(requests, spec, Prices(), 3)[1]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([0.02, 3.0, 300.0]),
    lag=st.floats(1e-4, 0.02),
    route=st.sampled_from([0.0, 0.003]),
    count=st.integers(1, 4),
    spread=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=9).map(sorted),
)
def test_they_do_whatever_the_lag_the_rate_and_the_spread(
    seed: int, rate: float, lag: float, route: float, count: int, spread: list[float]
) -> None:
    prices = Prices(
        first_token=lag,
        route=route,
        prompt_token=2e-5,
        spread=tuple(spread),
        idle=((0.0, 0.0), (0.1, 2e-3)),
    )
    shape = Shape(requests=25, rate=rate, turns=3, pictures=2, output_tokens=9, seed=seed)
    spec = FleetSpec(engines=4, engine=SMALL)
    requests = list(GENERATORS["conversations"](shape))
    assert together(requests, spec, prices)[1] == in_shards(requests, spec, prices, count)[1]


def test_a_first_token_that_comes_sooner_than_its_price_is_in_time() -> None:
    prices = Prices(first_token=5e-3, prompt_token=2e-5, spread=(0.05, 1.0, 3.0))
    spec = FleetSpec(engines=4, router="least_loaded", engine=SMALL)
    requests = list(GENERATORS["conversations"](replace(SHAPE, requests=300, rate=300.0)))
    assert together(requests, spec, prices)[1] == in_shards(requests, spec, prices, 3)[1]


def test_another_process_does_the_same() -> None:
    spec = FleetSpec(engines=6, engine=SMALL)
    prices = Prices(spread=(0.5, 1.0, 4.0))
    requests = list(GENERATORS["zipf"](SHAPE))
    one = Simulation(spec, prices).run(requests)
    other = Simulation(msgspec.structs.replace(spec, processes=2), prices).run(requests)
    assert figures(one) == pytest.approx(figures(other), rel=1e-12)
    assert np.array_equal(one.first_token, other.first_token)


def test_a_process_that_ends_is_an_error() -> None:
    shard = ProcessShard(SMALL, Prices(), [0], followed=False)
    shard.close()
    with pytest.raises(UnavailableError, match="a process of the simulation has ended"):
        shard.begin(Window(1.0, []))


def test_every_engine_is_of_one_process() -> None:
    for engines, processes in [(1, 2), (7, 2), (1000, 2), (1000, 5)]:
        numbers = shares(engines, processes)
        assert len(numbers) == processes
        assert sorted(number for each in numbers for number in each) == list(range(engines))


@pytest.mark.parametrize(
    ("engine", "prices", "told"),
    [
        (EngineSpec(kv_tiers=(parse_tier_spec("valkey://somewhere"),)), Prices(), "tier valkey"),
        (EngineSpec(), Prices(first_token=0.0), "takes no time"),
    ],
)
def test_what_only_one_process_can_simulate_is_refused(
    engine: EngineSpec, prices: Prices, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Simulation(FleetSpec(engines=2, engine=engine, processes=2), prices)
