"""Prometheus metrics of the API processes: what answers count, and what other components count.

All of it is in the `Counts` of each process, where other components (renderer, directory) write
under names of `COUNTED_ELSEWHERE`; a name may carry label values as `name:a,b`. The engine is asked
for its figures when `/metrics` is. Names have no prefix inside LookOnce; `Metrics.exposition` adds
`lookonce_`, and `vllm:` where asked for.

Numbers are written on the event loop alone: they are counted for every token, and
prometheus_client's own counters, which any thread may use, take several times as long.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lookonce.types.counts import Counts, Values
from lookonce.types.request import PrefillTimes

Figures = Mapping[str, float]
"""What the engine counts, by name."""
Sums = Mapping[str, Values]
"""What API processes count, by name."""
LATENCY_BUCKETS = (
    .001, .0025, .005, .01, .02, .04, .06, .08, .1, .15, .25, .5, .75, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip
_GENERATED = "lookonce_generation_tokens"
_SUM = len(LATENCY_BUCKETS) + 1
"""Where `Durations.values` of those buckets has its sum."""


class Metrics:
    """What answers count in one API process, and how all metrics are shown; `vllm_names` adds each
    under vLLM's name too."""

    def __init__(
        self, served_name: str, vllm_names: bool = False, counts: Counts | None = None
    ) -> None:
        self.counts = counts = Counts() if counts is None else counts
        self.time_to_first_token = _seconds(
            counts, "time_to_first_token", "From a request's arrival to its first token"
        )
        self.inter_token_latency = _seconds(
            counts, "inter_token_latency", "Between one sample's deliveries of tokens"
        )
        self.request_latency = _seconds(
            counts, "e2e_request_latency", "From a request's arrival to its last token"
        )
        self.render = _seconds(counts, "render", "Media, template and tokens of one prompt")
        self.queue = _seconds(counts, "request_queue", "From the engine's receipt to admission")
        self.prefill = _seconds(counts, "request_prefill", "From admission to the first token")
        self.decode = _seconds(counts, "request_decode", "From the first token to the last")
        self.success = TotalByLabel(
            counts, "lookonce_request_success", "Requests answered completely", "finished_reason"
        )
        self.prompt_tokens = Total(
            counts, "lookonce_prompt_tokens", "Prompt tokens of accepted requests"
        )
        self.generation_tokens = Total(counts, _GENERATED, "Tokens generated")
        self._own: tuple[Counted, ...] = (
            self.time_to_first_token,
            self.inter_token_latency,
            self.request_latency,
            self.render,
            self.queue,
            self.prefill,
            self.decode,
            self.success,
            self.prompt_tokens,
            self.generation_tokens,
        )
        self._between = self.inter_token_latency.values
        self._generated = self.generation_tokens.values
        self._served_name = served_name
        self._vllm_names = vllm_names

    def observe_phases(self, times: PrefillTimes, ended: float) -> None:
        """Count what a request whose last token came at `ended` spent in the engine."""
        self.queue.observe(times.admitted - times.received)
        self.prefill.observe(times.computed - times.admitted)
        self.decode.observe(ended - times.computed)

    def delivered(self, seconds: float, num_tokens: int) -> None:
        """Count one delivery of tokens `seconds` after the one before.

        This runs for every token, so it calls nothing and changes as few numbers as it can: nearly
        all deliveries have one token, and those are counted by `inter_token_latency` alone.
        """
        values = self._between
        values[bisect_left(LATENCY_BUCKETS, seconds)] += 1.0
        values[_SUM] += seconds
        if num_tokens != 1:
            self._generated[0] += num_tokens - 1

    def families(self, sums: Sums | None = None) -> list[Metric]:
        """What API processes have counted: `sums`, or what is in `counts`."""
        sums = self.counts.read() if sums is None else sums
        elsewhere = {name: values.numbers[0] for name, values in sums.items()}
        own = {**sums, _GENERATED: _with_deliveries(sums)}
        return [*(counted.family(own) for counted in self._own), *_families(elsewhere)]

    def all_families(self, local: Iterable[Metric], engine: Figures) -> list[Metric]:
        """`local` families (of all API processes) and the engine's."""
        return [*local, *_families(engine)]

    def exposition(self, local: Iterable[Metric], engine: Figures) -> bytes:
        """The text of `/metrics`."""
        families = self.all_families(local, engine)
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


def _with_deliveries(sums: Sums) -> Values:
    """All generated tokens: see `Metrics.delivered`."""
    deliveries = sum(sums["lookonce_inter_token_latency_seconds"].numbers[:_SUM])
    return Values((sums[_GENERATED].numbers[0] + deliveries,))


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A collector of families that are already collected."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def _seconds(counts: Counts, name: str, text: str) -> Durations:
    return Durations(counts, f"lookonce_{name}_seconds", text, LATENCY_BUCKETS)


def _families(counts: Figures) -> list[Metric]:
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
    def family(self, sums: Sums) -> Metric:
        """What all processes counted; `sums` are those of `Counts`."""


class Total:
    """A counter."""

    def __init__(self, counts: Counts, name: str, text: str) -> None:
        self._name, self._text = name, text
        self.values = counts.values(name)

    def inc(self, amount: float = 1.0) -> None:
        self.values[0] += amount

    def family(self, sums: Sums) -> Metric:
        return CounterMetricFamily(self._name, self._text, sums[self._name].numbers[0])


class TotalByLabel:
    """A counter with one label; a label value appears once it is counted."""

    def __init__(self, counts: Counts, name: str, text: str, label: str) -> None:
        self._counts, self._name, self._text, self._label = counts, name, text, label

    def inc(self, value: str) -> None:
        self._counts.values(f"{self._name}:{value}")[0] += 1.0

    def family(self, sums: Sums) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for name, values in sums.items():
            counted, _, value = name.partition(":")
            if value and counted == self._name:
                family.add_metric([value], values.numbers[0])
        return family


class Durations:
    """A histogram of seconds over `bounds`, which ascend.

    `values` are the numbers of durations up to each bound, of those beyond, and the sum.
    """

    def __init__(self, counts: Counts, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = list(bounds)
        self.values = counts.values(name, len(bounds) + 2)

    def observe(self, seconds: float) -> None:
        values = self.values
        values[bisect_left(self._bounds, seconds)] += 1.0
        values[-1] += seconds

    def time(self) -> _Timing:
        """A block whose duration is observed, however it ends."""
        return _Timing(self)

    def family(self, sums: Sums) -> Metric:
        *counted, total = sums[self._name].numbers
        buckets: list[tuple[str, float]] = []
        below = 0.0
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for name, count in zip(names, counted, strict=True):
            below += count
            buckets.append((name, below))
        return HistogramMetricFamily(self._name, self._text, buckets, total)


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
    "otlp_traces_dropped_total": MetricInfo("Traces that the OTLP collector did not take in time"),
    "http_connections": MetricInfo("Connections of clients that are open"),
    "http_connections_evicted_total": MetricInfo(
        "Connections without a request that were closed to take new ones"
    ),
    "http_refused_total": MetricInfo(
        "Connections and requests refused before they reached a route", label="reason"
    ),
    "http_responses_total": MetricInfo(
        "Responses by status, of probes and /metrics none; `broken`: those that failed after they "
        "had begun, also counted as 200",
        label="status",
    ),
    "realtime_sessions": MetricInfo("Realtime sessions that are open"),
    "realtime_sessions_total": MetricInfo("Realtime sessions that were opened"),
    "rate_limited_total": MetricInfo(
        "Requests refused because a tenant or key has used what it may", label="limit"
    ),
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
    "state_cache_bytes": MetricInfo("Bytes of snapshots of states beside keys and values"),
    "state_cache_hits_total": MetricInfo("Sequences that began with a snapshot of a state"),
    "state_cache_snapshots_total": MetricInfo("Snapshots of states that were taken"),
    "state_cache_evictions_total": MetricInfo("Snapshots of states that others took the place of"),
    "token_cache_queries_total": MetricInfo("Prompt tokens whose text the token cache looked up"),
    "token_cache_hits_total": MetricInfo("Of those, tokens that were not tokenized again"),
    "token_cache_bytes": MetricInfo("Bytes of the token caches of the API processes"),
    "prefix_cache_queries_total": MetricInfo(
        "Prompt tokens looked up in the prefix cache", vllm="prefix_cache_queries_total"
    ),
    "prefix_cache_hits_total": MetricInfo(
        "Prompt tokens found in the prefix cache", vllm="prefix_cache_hits_total"
    ),
    "pooled_cache_queries_total": MetricInfo("Inputs of a model that gives embeddings or scores"),
    "pooled_cache_hits_total": MetricInfo("Of those, inputs whose whole result was held"),
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
    "kv_tier_loaded_states_total": MetricInfo(
        "States beside keys and values loaded from a KV tier", label="tier"
    ),
    "kv_tier_stored_states_total": MetricInfo(
        "States beside keys and values stored in a KV tier", label="tier"
    ),
    "kv_tier_stored_bytes_total": MetricInfo("Bytes stored in a KV tier", label="tier"),
    "kv_tier_store_seconds_total": MetricInfo("Seconds spent writing a KV tier", label="tier"),
    "kv_tier_dropped_stores_total": MetricInfo("Blocks a KV tier could not take", label="tier"),
    "kv_tier_held_bytes": MetricInfo("Bytes a KV tier holds, as far as known", label="tier"),
    "kv_tier_queue_bytes": MetricInfo("Bytes waiting to be stored in a KV tier", label="tier"),
    "kv_tier_breaker_state": MetricInfo(
        "0: the KV tier is in use, 1: on trial, 2: left alone after failures", label="tier"
    ),
    "kv_tier_failures_total": MetricInfo("Failures of a KV tier", label="tier,reason"),
    "external_encoder_cache_queries_total": MetricInfo(
        "Encoder outputs looked for in external tiers"
    ),
    "external_encoder_cache_hits_total": MetricInfo("Of those, outputs that were loaded"),
    "encoder_tier_outputs_total": MetricInfo("Encoder outputs that a tier gave", label="tier"),
    "encoder_tier_lookups_total": MetricInfo(
        "Pieces of encoder outputs looked up in a tier", label="tier"
    ),
    "encoder_tier_hits_total": MetricInfo(
        "Pieces of encoder outputs found in a tier", label="tier"
    ),
    "encoder_tier_loaded_bytes_total": MetricInfo(
        "Bytes of encoder outputs loaded from a tier", label="tier"
    ),
    "encoder_tier_load_seconds_total": MetricInfo(
        "Seconds spent reading encoder outputs of a tier", label="tier"
    ),
    "encoder_tier_stored_bytes_total": MetricInfo(
        "Bytes of encoder outputs stored in a tier", label="tier"
    ),
    "encoder_tier_store_seconds_total": MetricInfo(
        "Seconds spent writing encoder outputs to a tier", label="tier"
    ),
    "encoder_tier_dropped_stores_total": MetricInfo(
        "Pieces of encoder outputs a tier could not take", label="tier"
    ),
    "encoder_tier_held_bytes": MetricInfo(
        "Bytes of encoder outputs a tier holds, as far as known", label="tier"
    ),
    "encoder_tier_queue_bytes": MetricInfo(
        "Bytes of encoder outputs waiting to be stored in a tier", label="tier"
    ),
    "encoder_tier_breaker_state": MetricInfo(
        "0: the encoder tier is in use, 1: on trial, 2: left alone after failures", label="tier"
    ),
    "encoder_tier_failures_total": MetricInfo("Failures of an encoder tier", label="tier,reason"),
    "encoder_transfer_queue_bytes": MetricInfo(
        "Bytes of encoder outputs waiting to be copied off the device"
    ),
    "encoder_transfer_dropped_stores_total": MetricInfo(
        "Encoder outputs dropped before any tier was asked"
    ),
    "encoder_transfer_staged_bytes": MetricInfo(
        "Bytes of encoder outputs that are loaded from tiers and not on the device yet"
    ),
    "encoder_transfer_requests_loading": MetricInfo(
        "Requests waiting for encoder outputs of external tiers"
    ),
    "kv_transfer_queue_bytes": MetricInfo("Bytes on the device waiting to be copied to KV tiers"),
    "kv_transfer_dropped_stores_total": MetricInfo("Blocks dropped before any KV tier was asked"),
    "kv_transfer_blocks_held": MetricInfo("KV blocks that transfers keep from being reused"),
    "kv_transfer_blocks_quarantined": MetricInfo(
        "Of those, blocks of requests that have ended or given up"
    ),
    "kv_transfer_states_held": MetricInfo(
        "Snapshots of states that are copied to KV tiers or loaded from them, or wait for it"
    ),
    "kv_transfer_requests_loading": MetricInfo("Requests waiting for external KV tiers"),
    "kv_transfer_unknown_completions_total": MetricInfo(
        "Answers of KV tiers for requests that had ended"
    ),
    "engine_steps_total": MetricInfo("Steps of the engine"),
    "lora_adapters_loaded": MetricInfo("LoRA adapters that requests may ask for"),
    "lora_requests_running": MetricInfo("Requests with a LoRA adapter that run or wait"),
    "sessions_open": MetricInfo("Live sessions that are open"),
    "sessions_opened_total": MetricInfo("Live sessions opened"),
    "session_extensions_total": MetricInfo("Extensions of live sessions taken in"),
    "session_tokens_dropped_total": MetricInfo(
        "Tokens that live sessions dropped behind windows or by compaction"
    ),
    "session_compactions_total": MetricInfo("Live sessions that dropped their middle"),
    "session_reanchors_total": MetricInfo("Times that positions of a live session began again"),
    "num_preemptions_total": MetricInfo(
        "Sequences preempted and recomputed", vllm="num_preemptions_total"
    ),
    "media_fetches_total": MetricInfo("Media fetched or read", label="modality"),
    "media_queued_total": MetricInfo("Media the decoding workers' queue took", label="modality"),
    "document_pages_total": MetricInfo(
        "Pages of PDF files, rendered now or held from before", label="source"
    ),
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
    "request_queue_seconds": "request_queue_time_seconds",
    "request_prefill_seconds": "request_prefill_time_seconds",
    "request_decode_seconds": "request_decode_time_seconds",
    "request_success": "request_success",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
}
"""Families counted in `Metrics` → vLLM's name of the same metric."""
