"""Metrics: our own counters show what prometheus_client's do, and each family is exported once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from lookonce.frontend.metrics import (
    COUNTED_ELSEWHERE,
    LATENCY_BUCKETS,
    Durations,
    Metrics,
    Total,
    TotalByLabel,
)
from lookonce.types.counts import Counts


class Shown:
    """A registry's view of some families."""

    def __init__(self, *families) -> None:
        self._families = families

    def collect(self):
        return self._families


def lines(text: bytes) -> list[str]:
    """Without when a series began, which we do not tell."""
    return [line for line in text.decode().splitlines() if "_created" not in line]


SECONDS = st.floats(0, 200) | st.sampled_from(LATENCY_BUCKETS)


@given(st.lists(SECONDS))
def test_a_histogram_of_seconds(seconds):
    counts = Counts()
    ours = Durations(counts, "took_seconds", "How long", LATENCY_BUCKETS)
    registry = CollectorRegistry()
    theirs = Histogram("took_seconds", "How long", buckets=LATENCY_BUCKETS, registry=registry)
    for each in seconds:
        ours.observe(each)
        theirs.observe(each)
    assert lines(generate_latest(Shown(ours.family(counts.read())))) == lines(
        generate_latest(registry)
    )


@given(st.lists(st.sampled_from(["stop", "length", "abort"])), st.lists(st.integers(0, 9)))
def test_totals_plain_and_by_label(reasons, amounts):
    counts = Counts()
    plain = Total(counts, "tokens", "Tokens")
    labelled = TotalByLabel(counts, "ended", "Requests", "reason")
    registry = CollectorRegistry()
    their_plain = Counter("tokens", "Tokens", registry=registry)
    their_labelled = Counter("ended", "Requests", ["reason"], registry=registry)
    for amount in amounts:
        plain.inc(amount)
        their_plain.inc(amount)
    for reason in reasons:
        labelled.inc(reason)
        their_labelled.labels(reason).inc()
    shown = generate_latest(Shown(*(each.family(counts.read()) for each in (plain, labelled))))
    assert lines(shown) == lines(generate_latest(registry))


def test_a_block_is_timed_however_it_ends():
    counts = Counts()
    took = Durations(counts, "took_seconds", "How long", [1.0])
    for _ in range(2):
        try:
            with took.time():
                raise KeyError
        except KeyError:
            pass
    count = [s.value for s in took.family(counts.read()).samples if s.name == "took_seconds_count"]
    assert count == [2]


@given(st.lists(st.tuples(SECONDS, st.integers(0, 9))))
def test_deliveries_are_counted_and_so_are_their_tokens(deliveries):
    metrics = Metrics("m")
    metrics.generation_tokens.inc(3)  # a sample's first tokens have nothing before them
    for seconds, num_tokens in deliveries:
        metrics.delivered(seconds, num_tokens)
    found = {s.name: s.value for family in metrics.families() for s in family.samples}
    assert found["lookonce_inter_token_latency_seconds_count"] == len(deliveries)
    assert found["lookonce_generation_tokens_total"] == 3 + sum(n for _, n in deliveries)
    total = found["lookonce_inter_token_latency_seconds_sum"]
    assert total == pytest.approx(sum(seconds for seconds, _ in deliveries))


def test_every_described_figure_has_a_help_text():
    for name, described in COUNTED_ELSEWHERE.items():
        assert described.help, name


def test_no_family_is_exported_twice():
    metrics = Metrics("m", vllm_names=True)
    counts = {}
    for name, described in COUNTED_ELSEWHERE.items():
        labels = described.label.split(",") if described.label else []
        counts[name + ":" * bool(labels) + ",".join(labels)] = 1.0
    lines = metrics.exposition(metrics.families(), counts).decode().splitlines()
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert sum(family.startswith("vllm:") for family in families) >= 16
