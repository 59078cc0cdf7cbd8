"""`lookonce top`: what a running server does now: requests, tenants, reuse, memory, KV tiers.

Reads `/metrics`, `/ready` and, with an admin key, `/debug/state`. On a terminal it goes on until
Ctrl-C; elsewhere it prints once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lookonce.cli.chat import open_client
from lookonce.errors import LookOnceError, UnavailableError

Labels = tuple[tuple[str, str], ...]
PREFIX = "lookonce_"
REUSE = {
    "processor cache": ("mm_cache", "mm_store_bytes"),
    "encoder cache": ("encoder_cache", "encoder_cache_bytes"),
    "prefix cache": ("prefix_cache", None),
    "KV tiers": ("external_prefix_cache", None),
    "encoder tiers": ("external_encoder_cache", None),
    "token cache": ("token_cache", "token_cache_bytes"),
}
"""Row → the metric's name before `_queries_total` and `_hits_total`, and of its bytes."""
LATENCIES = {
    "first token": "time_to_first_token_seconds",
    "between tokens": "inter_token_latency_seconds",
    "queue": "request_queue_seconds",
    "prefill": "request_prefill_seconds",
    "whole request": "e2e_request_latency_seconds",
}
RESPONSES = "http_responses_total"
ENGINE_LABEL = "engine"
MAX_TENANTS = 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a server said at one moment."""

    taken: float
    """`time.monotonic()`."""
    ready: str
    samples: dict[tuple[str, Labels], float]
    """(name without prefix, labels) → value."""
    state: dict[str, Any] | None = None
    """Of `/debug/state`; None without an admin key."""

    def total(self, name: str) -> float:
        return sum(value for (known, _), value in self.samples.items() if known == name)

    def by_label(self, name: str) -> dict[str, float]:
        """Value of the one label → value."""
        return {
            labels[0][1]: value
            for (known, labels), value in self.samples.items()
            if known == name and labels
        }

    def has(self, name: str) -> bool:
        return any(known == name for known, _ in self.samples)


def take_snapshot(
    client: httpx.Client, *, url: str | None = None, with_state: bool = True
) -> Snapshot:
    """Raises `UnavailableError` where no LookOnce server answers.

    Each `/debug/state` that is refused is a line of the server's audit: `with_state` says whether
    it is asked for. `url`: what the server is called where it does not answer.
    """
    try:
        ready = client.get("/ready")
        shown = client.get("/metrics")
        state = client.get("/debug/state") if with_state else None
        status = ready.json()["status"]
        families = list(text_string_to_metric_families(shown.raise_for_status().text))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            reason += " (SSL_CERT_FILE names the file of a certificate of your own)"
        raise UnavailableError(
            f"no LookOnce server answers at {url or client.base_url}: {reason}"
        ) from None
    samples = _of_all_engines(families)
    known = state.json() if state is not None and state.status_code == 200 else None
    return Snapshot(time.monotonic(), status, samples, known)


def _of_all_engines(families: Iterable[Metric]) -> dict[tuple[str, Labels], float]:
    """A fleet's front-end says whose each sample is: they are added up, and shares averaged."""
    found: dict[tuple[str, Labels], list[float]] = {}
    for family in families:
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != ENGINE_LABEL}
            name = sample.name.removeprefix(PREFIX)
            found.setdefault((name, tuple(sorted(labels.items()))), []).append(sample.value)
    return {
        key: max(values)
        if key[0].endswith("_state")
        else sum(values) / (len(values) if key[0].endswith("_ratio") else 1)
        for key, values in found.items()
    }


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot, and what has changed since an earlier one (None: since the server started)."""

    now: Snapshot
    before: Snapshot | None = None
    url: str = ""

    def change(self, name: str, labels: Labels | None = None) -> float:
        if labels is None:
            earlier = 0.0 if self.before is None else self.before.total(name)
            return self.now.total(name) - earlier
        earlier = 0.0 if self.before is None else self.before.samples.get((name, labels), 0.0)
        return self.now.samples.get((name, labels), 0.0) - earlier

    @property
    def seconds(self) -> float:
        return 0.0 if self.before is None else max(1e-9, self.now.taken - self.before.taken)

    def rate(self, name: str) -> str:
        """A second; the total where there is no earlier snapshot."""
        return self._rate(self.change(name))

    def failed(self) -> str:
        """As `rate`, of responses for whose failure the server is to blame."""
        return self._rate(self._responses("5") + self._responses("broken"))

    def refused(self) -> str:
        """As `rate`, of requests and connections for whose failure the client is to blame."""
        return self._rate(self._responses("4") + self.change("http_refused_total"))

    def _responses(self, prefix: str) -> float:
        statuses = self.now.by_label(RESPONSES)
        wanted = [status for status in statuses if status.startswith(prefix)]
        return sum(self.change(RESPONSES, (("status", status),)) for status in wanted)

    def _rate(self, changed: float) -> str:
        return f"{changed:,.0f}" if self.before is None else f"{changed / self.seconds:,.1f}/s"

    def quantile(self, name: str, share: float) -> float | None:
        """Seconds, interpolated in the histogram's bucket; None where nothing was counted."""
        bucket = f"{name}_bucket"
        bounds = sorted(
            (float(dict(labels)["le"]), labels)
            for known, labels in self.now.samples
            if known == bucket
        )
        counts = [(bound, self.change(bucket, labels)) for bound, labels in bounds]
        if not counts or counts[-1][1] <= 0:
            return None
        wanted, low, below = share * counts[-1][1], 0.0, 0.0
        for bound, count in counts:
            if count >= wanted and count > below:
                if bound == float("inf"):
                    return low
                return low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return low


def render(view: View) -> Group:
    """Everything on one screen."""
    parts: list[Any] = [_head(view), _reuse(view), _latencies(view)]
    if view.now.has("kv_tier_lookups_total"):
        parts.append(_tiers(view))
    parts.append(_tenants(view))
    return Group(*parts)


def _head(view: View) -> Text:
    now, state = view.now, view.now.state or {}
    name = f"{state['model']}, LookOnce {state['version']}" if state else "LookOnce"
    usage = now.total("kv_cache_usage_ratio")
    lines = [
        f"{name} at {view.url}: {now.ready}",
        f"requests  running {now.total('num_requests_running'):.0f}  "
        f"waiting {now.total('num_requests_waiting'):.0f}  "
        f"finished {view.rate('request_success_total')}  "
        f"failed {view.failed()}  "
        f"refused {view.refused()} (by limits {view.rate('rate_limited_total')})  "
        f"connections {now.total('http_connections'):.0f}",
        f"tokens    prompt {view.rate('prompt_tokens_total')}  "
        f"generated {view.rate('generation_tokens_total')}  "
        f"KV blocks in use {usage:.0%}  preemptions {now.total('num_preemptions_total'):.0f}",
        f"media     fetched {view.rate('media_fetches_total')}  "
        f"decoded {view.rate('media_decodes_total')}  "
        f"encoded {view.rate('encoder_runs_total')}  "
        f"waiting {now.total('media_waiting'):.0f}  "
        f"workers lost {now.total('media_workers_lost_total'):.0f}",
    ]
    return Text("\n".join(lines) + "\n")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _reuse(view: View) -> Table:
    table = _table("reuse", "hits now", "hits in all", "queries", "held")
    whole = View(view.now)
    for row, (name, held) in REUSE.items():
        queries, hits = f"{name}_queries_total", f"{name}_hits_total"
        if not view.now.has(queries):
            continue
        table.add_row(
            row,
            "" if view.before is None else _share(view.change(hits), view.change(queries)),
            _share(whole.change(hits), whole.change(queries)),
            view.rate(queries),
            "" if held is None else _bytes(view.now.total(held)),
        )
    return table


def _latencies(view: View) -> Table:
    table = _table("\nlatency", "\np50", "\np95", "\np99")
    for row, name in LATENCIES.items():
        found = [view.quantile(name, share) for share in (0.5, 0.95, 0.99)]
        table.add_row(row, *("-" if f is None else f"{f * 1000:,.0f} ms" for f in found))
    return table


def _tiers(view: View) -> Table:
    table = _table("\nKV tier", "\nhits", "\nloaded", "\nstored", "\nheld", "\nstate")
    hits, lookups = view.now.by_label("kv_tier_hits_total"), "kv_tier_lookups_total"
    for tier, looked_up in view.now.by_label(lookups).items():
        figures = {
            name: view.now.by_label(f"kv_tier_{name}").get(tier, 0.0)
            for name in ("loaded_bytes_total", "stored_bytes_total", "held_bytes", "breaker_state")
        }
        state = {0: "in use", 1: "on trial", 2: "left alone"}[int(figures.pop("breaker_state"))]
        share = _share(hits.get(tier, 0.0), looked_up)
        table.add_row(tier, share, *map(_bytes, figures.values()), state)
    return table


def _tenants(view: View) -> Table:
    table = _table("\ntenant", "\nrequests")
    if view.now.state is None:
        table.add_row("(an admin key shows tenants: --api-key)", "")
        return table
    running: dict[str, int] = {}
    for process in view.now.state["processes"]:
        for tenant, count in process["tenants"].items():
            running[tenant] = running.get(tenant, 0) + count
    ordered = sorted(running.items(), key=lambda each: (-each[1], each[0]))
    for tenant, count in ordered[:MAX_TENANTS]:
        table.add_row(tenant or "(no tenant)", str(count))
    if len(ordered) > MAX_TENANTS:
        table.add_row(f"({len(ordered) - MAX_TENANTS} more)", "")
    if not ordered:
        table.add_row("(none is served now)", "")
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _bytes(count: float) -> str:
    if count < 1024:
        return f"{count:,.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:,.1f} {unit}"
    return f"{count / 1024:,.1f} GiB"


def run_top(
    url: str,
    api_key: str | None,
    *,
    interval: float,
    once: bool,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """`url` may be unix:PATH. Raises `ConfigError` where it is no URL, and `UnavailableError` where
    no server answers at first; later it says so and goes on."""
    console = Console() if console is None else console
    with open_client(url, api_key) as client:
        client.timeout = httpx.Timeout(10)
        now = take_snapshot(client, url=url)
        with_state = now.state is not None
        if once or not console.is_terminal:
            console.print(render(View(now, url=url)))
            return
        with Live(render(View(now, url=url)), console=console, auto_refresh=False) as live:
            while True:
                sleep(interval)
                try:
                    before, now = now, take_snapshot(client, url=url, with_state=with_state)
                    live.update(render(View(now, before, url)), refresh=True)
                except LookOnceError as error:
                    live.update(Text(error.message), refresh=True)
