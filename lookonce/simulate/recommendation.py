"""Which of several simulated fleets to take: the cheapest whose first tokens come in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookonce.config import GIB
from lookonce.simulate.simulation import FleetSpec, Outcome, percentile

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
    told += [f"{tier.kind} for outputs" for tier in spec.engine.encoder_tiers]
    return ", ".join(told)


def cost_of(spec: FleetSpec, costs: Costs) -> float:
    listed = (*spec.engine.kv_tiers, *spec.engine.encoder_tiers)
    tiers = sum(tier.capacity_bytes for tier in listed) / GIB
    return spec.engines * (costs.engine + costs.host_gb * tiers)


def recommend(outcomes: Sequence[Outcome], costs: Costs, target_p99: float | None) -> str:
    """A line that names the cheapest fleet with a p99 first token within `target_p99` seconds and
    no failed request, and how much cheaper it is than the next one that does otherwise: of another
    number of engines, or of other tiers. Empty where nothing is asked for."""
    if target_p99 is None:
        return ""
    fitting = [each for each in outcomes if fits(each, target_p99)]
    if not fitting:
        best = min(outcomes, key=p99_of)
        least = f"the least is {p99_of(best):.3g} s, with {name_of(best.spec)}"
        return (
            f"None of these answers every request with a p99 first token within {target_p99:g} s: "
            f"{least}."
        )
    fitting.sort(key=lambda each: (cost_of(each.spec, costs), p99_of(each)))
    best = fitting[0]
    line = f"Take {name_of(best.spec)}: p99 first token {p99_of(best):.3g} s"
    cost = cost_of(best.spec, costs)
    others = [each for each in fitting if cost_of(each.spec, costs) > cost * 1.0001]
    if others:
        saved = 1.0 - cost / cost_of(others[0].spec, costs)
        if saved >= LEAST_SAVED:
            line += f", {saved:.0%} cheaper than {name_of(others[0].spec)}"
    return line + "."


def p99_of(outcome: Outcome) -> float:
    """Seconds; infinite where nothing was answered."""
    p99 = percentile(outcome.first_token, 99)
    return float("inf") if p99 is None else p99


def fits(outcome: Outcome, target_p99: float) -> bool:
    return p99_of(outcome) <= target_p99 and not outcome.failed
