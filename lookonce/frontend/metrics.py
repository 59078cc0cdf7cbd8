"""Prometheus metrics of one API process: what it counts itself, and what other components count.

Other components (renderer, directory, engine) are read when `/metrics` is asked for: a source is a
function that answers `{name: value}`, where a name may carry label values as `name:a,b`. Names have
no prefix inside LookOnce; `Metrics.exposition` adds `lookonce_`, and `vllm:` where asked for.

What the process counts itself is plain numbers, written on its event loop alone: they are counted
for every token, and prometheus_client's own counters, which any thread may use, take ten times as
long.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

Counts = Mapping[str, float]
Source = Callable[[], Counts]
LATENCY_BUCKETS = (
    .001, .0025, .005, .01, .02, .04, .06, .08, .1, .15, .25, .5, .75, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip


class Metrics:
    """The metrics of one API process; `vllm_names` adds each under vLLM's name too."""

    def __init__(self, served_name: str, vllm_names: bool = False) -> None:
        self.sources: list[Source] = []
        """Figures of this process that other components count."""
        self.time_to_first_token = _seconds(
            "time_to_first_token", "From a request's arrival to its first token"
        )
        self.inter_token_latency = _seconds(
            "inter_token_latency", "Between one sample's deliveries of tokens"
        )
        self.request_latency = _seconds(
            "e2e_request_latency", "From a request's arrival to its last token"
        )
        self.render = _seconds("render", "Media, template and tokens of one prompt")
        self.success = TotalByLabel(
            "lookonce_request_success", "Requests answered completely", "finished_reason"
        )
        self.prompt_tokens = Total("lookonce_prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = Total("lookonce_generation_tokens", "Tokens generated")
        self._own: tuple[Counted, ...] = (
            self.time_to_first_token,
            self.inter_token_latency,
            self.request_latency,
            self.render,
            self.success,
            self.prompt_tokens,
            self.generation_tokens,
        )
        self._served_name = served_name
        self._vllm_names = vllm_names

    def local_families(self) -> list[Metric]:
        """Everything counted in this process."""
        counts: dict[str, float] = {}
        for source in self.sources:
            for name, value in source().items():
                counts[name] = counts.get(name, 0) + value
        return [*(counted.family() for counted in self._own), *_families(counts)]

    def exposition(self, local: Iterable[Metric], engine: Counts) -> bytes:
        """The text of `/metrics`: `local` families (of all API processes) and the engine's."""
        families = [*local, *_families(engine)]
        if self._vllm_names:
            families += [alias for f in families for alias in self._vllm_alias(f)]
        return generate_latest(_Fixed(families))

    def _vllm_alias(self, family: Metric) -> Iterable[Metric]:
        name = family.name.removeprefix("lookonce_")
        described = COUNTED_ELSEWHERE.get(name) or COUNTED_ELSEWHERE.get(f"{name}_total")
        vllm = VLLM_NAMES.get(name) if described is None else described.vllm
        if vllm is not None:
            alias = Metric(f"vllm:{vllm.removesuffix('_total')}", family.documentation, family.type)
            for sample in family.samples:
                suffix = sample.name.removeprefix(family.name)
                labels = {"model_name": self._served_name, **sample.labels}
                alias.add_sample(alias.name + suffix, labels, sample.value)
            yield alias


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A collector of families that are already collected."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def _seconds(name: str, text: str) -> Durations:
    return Durations(f"lookonce_{name}_seconds", text, LATENCY_BUCKETS)


def _families(counts: Counts) -> list[Metric]:
    """The described figures among `counts`, as Prometheus families."""
    found: dict[str, Metric] = {}
    for key, value in sorted(counts.items()):
        name, _, label_values = key.partition(":")
        described = COUNTED_ELSEWHERE.get(name)
        if described is None:
            continue
        if name not in found:
            found[name] = _family(name, described)
        values = label_values.split(",") if described.label else []
        found[name].add_metric(values, value)  # type: ignore[attr-defined]
    return list(found.values())


def _family(name: str, described: MetricInfo) -> Metric:
    labels = described.label.split(",") if described.label else []
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(f"lookonce_{name}", described.help, labels=labels)


# --- counters ------------------------------------------------------------------------------------


class Counted(Protocol):
    def family(self) -> Metric:
        """What was counted so far."""


class Total:
    """A counter."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self._value += amount

    def family(self) -> Metric:
        return CounterMetricFamily(self._name, self._text, self._value)


class TotalByLabel:
    """A counter with one label; a label value appears once it is counted."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self._name, self._text, self._label = name, text, label
        self._values: dict[str, float] = {}

    def inc(self, value: str) -> None:
        self._values[value] = self._values.get(value, 0.0) + 1.0

    def family(self) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in self._values.items():
            family.add_metric([value], count)
        return family


class Durations:
    """A histogram of seconds over `bounds`, which ascend."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def time(self) -> _Timing:
        """A block whose duration is observed, however it ends."""
        return _Timing(self)

    def family(self) -> Metric:
        buckets: list[tuple[str, float]] = []
        below = 0
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            below += count
            buckets.append((name, float(below)))
        return HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class _Timing:
    def __init__(self, durations: Durations) -> None:
        self._durations = durations

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._durations.observe(time.perf_counter() - self._started)


# --- what other components count ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetricInfo:
    help: str
    label: str | None = None
    """Label names, separated by commas."""
    vllm: str | None = None
    """The name of the same metric in vLLM, without its prefix."""


COUNTED_ELSEWHERE: dict[str, MetricInfo] = {
    "mm_cache_queries_total": MetricInfo(
        "Media parts looked up in the processor cache", vllm="mm_cache_queries_total"
    ),
    "mm_cache_hits_total": MetricInfo(
        "Media parts that caused no processing", vllm="mm_cache_hits_total"
    ),
    "mm_cache_overtaking_hits_total": MetricInfo(
        "Hits settled at once while other media waited for decoding workers", label="modality"
    ),
    "mm_cache_waiting_hits_total": MetricInfo(
        "Hits that waited for decoding workers, having joined what these did for others",
        label="modality",
    ),
    "mm_cache_evictions_total": MetricInfo("Items the processor cache dropped for room"),
    "mm_cache_bytes": MetricInfo("Bytes of items the API processes list in the processor cache"),
    "mm_store_bytes": MetricInfo("Bytes of items the engine holds, each counted once"),
    "mm_store_listed_bytes": MetricInfo("Bytes the engine accounts to the API processes' lists"),
    "mm_slab_bytes": MetricInfo("Bytes of shared memory in slabs, in use or free"),
    "mm_slabs": MetricInfo("Slabs of shared memory, in use or free"),
    "mm_slab_leases_total": MetricInfo("Slabs the engine made; constant in steady state"),
    "mm_slab_refusals_total": MetricInfo("Slabs asked for that the engine had no room for"),
    "mm_slab_grants_total": MetricInfo("Slabs given to writers of processed media"),
    "mm_slab_reuses_total": MetricInfo("Those that held an item before, so that writing is fast"),
    "mm_slab_waits_total": MetricInfo("Slabs that a writer had to wait for"),
    "mm_slab_fallbacks_total": MetricInfo("Arrays sent in messages for want of a slab"),
    "mm_store_requests": MetricInfo("Requests the engine holds items for"),
    "mm_cache_resends_total": MetricInfo("Items the engine should have held and asked for again"),
    "mm_cache_asks_total": MetricInfo("Items the engine asked for after their references came"),
    "encoder_cache_queries_total": MetricInfo("Encoder outputs looked up"),
    "encoder_cache_hits_total": MetricInfo("Encoder outputs found"),
    "encoder_cache_bytes": MetricInfo("Bytes of encoder outputs held"),
    "encoder_cache_holders": MetricInfo("Sequences that hold encoder outputs"),
    "encoder_cache_host_bytes": MetricInfo("Bytes of encoder outputs kept in host memory"),
    "encoder_cache_restores_total": MetricInfo("Encoder outputs brought back from host memory"),
    "encoder_prefetches_total": MetricInfo("Media items encoded before a chunk needed them"),
    "encoder_runs_total": MetricInfo("Media items the encoder was run on"),
    "prefix_cache_queries_total": MetricInfo(
        "Prompt tokens looked up in the prefix cache", vllm="prefix_cache_queries_total"
    ),
    "prefix_cache_hits_total": MetricInfo(
        "Prompt tokens found in the prefix cache", vllm="prefix_cache_hits_total"
    ),
    "external_prefix_cache_queries_total": MetricInfo(
        "Prompt tokens the device did not hold, while there were external KV tiers",
        vllm="external_prefix_cache_queries_total",
    ),
    "external_prefix_cache_matched_total": MetricInfo("Of those, tokens external KV tiers held"),
    "external_prefix_cache_hits_total": MetricInfo(
        "Of those, tokens loaded and used", vllm="external_prefix_cache_hits_total"
    ),
    "kv_tier_lookups_total": MetricInfo("Tokens looked up in a KV tier", label="tier"),
    "kv_tier_hits_total": MetricInfo("Tokens found in a KV tier", label="tier"),
    "kv_tier_loaded_tokens_total": MetricInfo("Tokens loaded from a KV tier", label="tier"),
    "kv_tier_loaded_bytes_total": MetricInfo("Bytes loaded from a KV tier", label="tier"),
    "kv_tier_load_seconds_total": MetricInfo("Seconds spent reading a KV tier", label="tier"),
    "kv_tier_stored_tokens_total": MetricInfo("Tokens stored in a KV tier", label="tier"),
    "kv_tier_stored_bytes_total": MetricInfo("Bytes stored in a KV tier", label="tier"),
    "kv_tier_store_seconds_total": MetricInfo("Seconds spent writing a KV tier", label="tier"),
    "kv_tier_dropped_stores_total": MetricInfo("Blocks a KV tier could not take", label="tier"),
    "kv_tier_held_bytes": MetricInfo("Bytes a KV tier holds, as far as known", label="tier"),
    "kv_tier_queue_bytes": MetricInfo("Bytes waiting to be stored in a KV tier", label="tier"),
    "kv_tier_breaker_state": MetricInfo(
        "0: the KV tier is in use, 1: on trial, 2: left alone after failures", label="tier"
    ),
    "kv_tier_failures_total": MetricInfo("Failures of a KV tier", label="tier,reason"),
    "kv_transfer_queue_bytes": MetricInfo("Bytes on the device waiting to be copied to KV tiers"),
    "kv_transfer_dropped_stores_total": MetricInfo("Blocks dropped before any KV tier was asked"),
    "kv_transfer_blocks_held": MetricInfo("KV blocks that transfers keep from being reused"),
    "kv_transfer_blocks_quarantined": MetricInfo(
        "Of those, blocks of requests that have ended or given up"
    ),
    "kv_transfer_requests_loading": MetricInfo("Requests waiting for external KV tiers"),
    "kv_transfer_unknown_completions_total": MetricInfo(
        "Answers of KV tiers for requests that had ended"
    ),
    "num_preemptions_total": MetricInfo(
        "Sequences preempted and recomputed", vllm="num_preemptions_total"
    ),
    "media_fetches_total": MetricInfo("Media fetched or read", label="modality"),
    "media_queued_total": MetricInfo("Media the decoding workers' queue took", label="modality"),
    "media_waiting": MetricInfo("Media that wait for a decoding worker"),
    "media_refused_total": MetricInfo(
        "Media refused before any decoding worker saw them", label="reason"
    ),
    "media_workers_lost_total": MetricInfo(
        "Decoding workers killed, or ended, before their job was done", label="reason"
    ),
    "media_decodes_total": MetricInfo("Media decoded", label="modality"),
    "media_processed_total": MetricInfo("Media run through the processor", label="modality"),
    "readonly_media_fetches_total": MetricInfo(
        "Media fetched for render and tokenize routes", label="modality"
    ),
    "readonly_media_decodes_total": MetricInfo(
        "Media decoded for render and tokenize routes", label="modality"
    ),
    "readonly_media_processed_total": MetricInfo(
        "Media processed for render and tokenize routes", label="modality"
    ),
    "num_requests_running": MetricInfo("Sequences being computed", vllm="num_requests_running"),
    "num_requests_waiting": MetricInfo(
        "Requests waiting to be computed", vllm="num_requests_waiting"
    ),
    "kv_cache_usage_ratio": MetricInfo(
        "Share of KV blocks in use, 0 to 1", vllm="kv_cache_usage_perc"
    ),
}
"""Every figure that other components count; figures with other names are not exported."""


VLLM_NAMES = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_success": "request_success",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
}
"""Families counted in `Metrics` → vLLM's name of the same metric."""
