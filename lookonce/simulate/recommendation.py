"""Which of several simulated fleets to take: the cheapest whose first tokens come in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookonce.config import GIB
from lookonce.simulate.simulation import FleetSpec, Outcome

LEAST_SAVED = 0.01
"""A share of the cost that is worth telling of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """In one unit of the reader's: what an engine costs beside its memory for tiers."""

    engine: float = 1.0
    host_gb: float = 0.005
    """Of each GiB of host memory or disk of an engine's tiers."""


def name_of(spec: FleetSpec) -> str:
    """As `6 engines, price, KV 1 GiB, host 12 GiB`."""
    engines = f"{spec.engines} engine{'s' * (spec.engines > 1)}"
    told = [engines, *([spec.router] if spec.engines > 1 else [])]
    told.append(f"KV {spec.engine.kv_cache_bytes / GIB:g} GiB")
    for tier in spec.engine.kv_tiers:
        size = f" {tier.capacity_bytes / GIB:.3g} GiB" if tier.capacity_bytes else ""
        told.append(f"{tier.kind}{size}")
    return ", ".join(told)


def cost_of(spec: FleetSpec, costs: Costs) -> float:
    tiers = sum(tier.capacity_bytes for tier in spec.engine.kv_tiers) / GIB
    return spec.engines * (costs.engine + costs.host_gb * tiers)


def recommend(outcomes: Sequence[Outcome], costs: Costs, target_p99: float | None) -> str:
    """A line that names the cheapest fleet with a p99 first token within `target_p99` seconds and
    no failed request, and how much cheaper it is than the next one that does otherwise: of another
    number of engines, or of other tiers. Empty where nothing is asked for."""
    if target_p99 is None:
        return ""
    fitting = [each for each in outcomes if fits(each, target_p99)]
    if not fitting:
        best = min(outcomes, key=lambda each: each.figures()["first_token_p99"] or float("inf"))
        told = best.figures()["first_token_p99"]
        least = "nothing is answered" if told is None else f"the least is {told:.3g} s"
        return (
            f"None of these answers every request with a p99 first token within {target_p99:g} s: "
            f"{least}, with {name_of(best.spec)}."
        )
    fitting.sort(key=lambda each: (cost_of(each.spec, costs), each.figures()["first_token_p99"]))
    best = fitting[0]
    p99 = best.figures()["first_token_p99"]
    line = f"Take {name_of(best.spec)}: p99 first token {p99:.3g} s"
    cost = cost_of(best.spec, costs)
    others = [each for each in fitting if cost_of(each.spec, costs) > cost * 1.0001]
    if others:
        saved = 1.0 - cost / cost_of(others[0].spec, costs)
        if saved >= LEAST_SAVED:
            line += f", {saved:.0%} cheaper than {name_of(others[0].spec)}"
    return line + "."


def fits(outcome: Outcome, target_p99: float) -> bool:
    p99 = outcome.figures()["first_token_p99"]
    return p99 is not None and p99 <= target_p99 and not outcome.failed
