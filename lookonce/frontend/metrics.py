"""Prometheus metrics: what this process counts itself, and what others count for it.

Counters that live elsewhere (renderer, directory, engine) are read when somebody asks: a source is
a function that answers `{name: value}`, where a name may carry label values as `name:a,b`.
Names have no prefix inside LookOnce; `lookonce_`, and `vllm:` where asked for, come on at the door.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lookonce.frontend.counters import Counted, Durations, Total, TotalByLabel

Counts = Mapping[str, float]
Source = Callable[[], Counts]

LATENCY_BUCKETS = (
    .001, .0025, .005, .01, .02, .04, .06, .08, .1, .15, .25, .5, .75, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Described:
    help: str
    label: str | None = None
    """Label names, separated by commas."""
    vllm: str | None = None
    """The name of the same figure in vLLM, without its prefix."""


COUNTED_ELSEWHERE: dict[str, Described] = {
    "mm_cache_queries_total": Described(
        "Media parts looked up in the processor cache", vllm="mm_cache_queries_total"
    ),
    "mm_cache_hits_total": Described(
        "Media parts that caused no processing", vllm="mm_cache_hits_total"
    ),
    "mm_cache_overtaking_hits_total": Described(
        "Hits settled at once while other media waited for decoding workers", label="modality"
    ),
    "mm_cache_waiting_hits_total": Described(
        "Hits that waited for decoding workers, having joined what these did for others",
        label="modality",
    ),
    "mm_cache_evictions_total": Described("Items the processor cache dropped for room"),
    "mm_cache_bytes": Described("Bytes of items the API processes list in the processor cache"),
    "mm_store_bytes": Described("Bytes of items the engine holds, each counted once"),
    "mm_store_listed_bytes": Described("Bytes the engine accounts to the API processes' lists"),
    "mm_store_requests": Described("Requests the engine holds items for"),
    "mm_cache_resends_total": Described("Items the engine should have held and asked for again"),
    "mm_cache_asks_total": Described("Items the engine asked for after their references came"),
    "encoder_cache_queries_total": Described("Encoder outputs looked up"),
    "encoder_cache_hits_total": Described("Encoder outputs found"),
    "encoder_cache_bytes": Described("Bytes of encoder outputs held"),
    "encoder_cache_holders": Described("Sequences that hold encoder outputs"),
    "encoder_cache_host_bytes": Described("Bytes of encoder outputs kept in host memory"),
    "encoder_cache_restores_total": Described("Encoder outputs brought back from host memory"),
    "encoder_prefetches_total": Described("Media items encoded before a chunk needed them"),
    "encoder_runs_total": Described("Media items the encoder was run on"),
    "prefix_cache_queries_total": Described(
        "Prompt tokens looked up in the prefix cache", vllm="prefix_cache_queries_total"
    ),
    "prefix_cache_hits_total": Described(
        "Prompt tokens found in the prefix cache", vllm="prefix_cache_hits_total"
    ),
    "external_prefix_cache_queries_total": Described(
        "Prompt tokens the device did not hold, while there were external KV tiers",
        vllm="external_prefix_cache_queries_total",
    ),
    "external_prefix_cache_matched_total": Described("Of those, tokens external KV tiers held"),
    "external_prefix_cache_hits_total": Described(
        "Of those, tokens loaded and used", vllm="external_prefix_cache_hits_total"
    ),
    "kv_tier_lookups_total": Described("Tokens looked up in a KV tier", label="tier"),
    "kv_tier_hits_total": Described("Tokens found in a KV tier", label="tier"),
    "kv_tier_loaded_tokens_total": Described("Tokens loaded from a KV tier", label="tier"),
    "kv_tier_loaded_bytes_total": Described("Bytes loaded from a KV tier", label="tier"),
    "kv_tier_load_seconds_total": Described("Seconds spent reading a KV tier", label="tier"),
    "kv_tier_stored_tokens_total": Described("Tokens stored in a KV tier", label="tier"),
    "kv_tier_stored_bytes_total": Described("Bytes stored in a KV tier", label="tier"),
    "kv_tier_store_seconds_total": Described("Seconds spent writing a KV tier", label="tier"),
    "kv_tier_dropped_stores_total": Described("Blocks a KV tier could not take", label="tier"),
    "kv_tier_held_bytes": Described("Bytes a KV tier holds, as far as known", label="tier"),
    "kv_tier_queue_bytes": Described("Bytes waiting to be stored in a KV tier", label="tier"),
    "kv_tier_breaker_state": Described(
        "0: the KV tier is in use, 1: on trial, 2: left alone after failures", label="tier"
    ),
    "kv_tier_failures_total": Described("Failures of a KV tier", label="tier,reason"),
    "kv_transfer_queue_bytes": Described("Bytes on the device waiting to be copied to KV tiers"),
    "kv_transfer_dropped_stores_total": Described("Blocks dropped before any KV tier was asked"),
    "kv_transfer_blocks_held": Described("KV blocks that transfers keep from being reused"),
    "kv_transfer_blocks_quarantined": Described(
        "Of those, blocks of requests that have ended or given up"
    ),
    "kv_transfer_requests_loading": Described("Requests waiting for external KV tiers"),
    "kv_transfer_unknown_completions_total": Described(
        "Answers of KV tiers for requests that had ended"
    ),
    "num_preemptions_total": Described(
        "Sequences preempted and recomputed", vllm="num_preemptions_total"
    ),
    "media_fetches_total": Described("Media fetched or read", label="modality"),
    "media_queued_total": Described("Media the decoding workers' queue took", label="modality"),
    "media_decodes_total": Described("Media decoded", label="modality"),
    "media_processed_total": Described("Media run through the processor", label="modality"),
    "readonly_media_fetches_total": Described(
        "Media fetched for render and tokenize routes", label="modality"
    ),
    "readonly_media_decodes_total": Described(
        "Media decoded for render and tokenize routes", label="modality"
    ),
    "readonly_media_processed_total": Described(
        "Media processed for render and tokenize routes", label="modality"
    ),
    "num_requests_running": Described("Sequences being computed", vllm="num_requests_running"),
    "num_requests_waiting": Described(
        "Requests waiting to be computed", vllm="num_requests_waiting"
    ),
    "kv_cache_usage_ratio": Described(
        "Share of KV blocks in use, 0 to 1", vllm="kv_cache_usage_perc"
    ),
}
"""Every figure another part counts, and what it means. Others are not exported."""

VLLM_NAMES = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_success": "request_success",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
}
"""Families counted here → vLLM's name of the same figure."""


@dataclass(slots=True)
class Metrics:
    """One per API process."""

    served_name: str
    vllm_names: bool = False
    sources: list[Source] = field(default_factory=list)
    """Counted in this process: summed over all API processes of a server."""
    time_to_first_token: Durations = field(init=False)
    inter_token_latency: Durations = field(init=False)
    request_latency: Durations = field(init=False)
    render: Durations = field(init=False)
    success: TotalByLabel = field(init=False)
    prompt_tokens: Total = field(init=False)
    generation_tokens: Total = field(init=False)
    _own: list[Counted] = field(init=False)

    def __post_init__(self) -> None:
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
        self._own = [
            self.time_to_first_token, self.inter_token_latency, self.request_latency, self.render,
            self.success, self.prompt_tokens, self.generation_tokens,
        ]  # fmt: skip

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
        if self.vllm_names:
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
                labels = {"model_name": self.served_name, **sample.labels}
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


def _family(name: str, described: Described) -> Metric:
    labels = described.label.split(",") if described.label else []
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(f"lookonce_{name}", described.help, labels=labels)
