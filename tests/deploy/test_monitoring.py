"""What is in deploy/: metrics that exist, alerts with tests, files that load."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lookonce.frontend.metrics import COUNTED_ELSEWHERE, Metrics
from lookonce.server.tracing import HISTOGRAMS

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/lookonce.json").read_text())
RULES = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
RULE_TESTS = yaml.safe_load((DEPLOY / "alerts_test.yml").read_text())["tests"]
PROMISED = frozenset(
    {
        "mm_cache_queries_total",
        "mm_cache_hits_total",
        "mm_cache_evictions_total",
        "mm_cache_bytes",
        "mm_cache_resends_total",
        "encoder_cache_queries_total",
        "encoder_cache_hits_total",
        "encoder_cache_bytes",
        "encoder_runs_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "external_prefix_cache_queries_total",
        "external_prefix_cache_hits_total",
        "media_fetches_total",
        "media_decodes_total",
        "media_processed_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "render_seconds",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_ratio",
        "request_success_total",
        "prompt_tokens_total",
        "generation_tokens_total",
    }
)
"""Names that users rely on."""
NAME = re.compile(r"\b((?:lookonce|gen_ai)_\w+|up)\b(?=[{\[]| [=<>]=? | and |$)")


def exported() -> dict[str, str]:
    """Every name that a query may use → the labels of its samples, comma-separated."""
    names = {f"lookonce_{name}": about.label or "" for name, about in COUNTED_ELSEWHERE.items()}
    for family in Metrics("x").families():
        if family.type == "histogram":
            names |= {f"{family.name}_{part}": "" for part in ("count", "sum")}
            names[f"{family.name}_bucket"] = "le"
        else:
            names[family.name + "_total"] = ""
    names["lookonce_request_success_total"] = "finished_reason"
    for name in HISTOGRAMS:  # as a collector's Prometheus exporter writes them
        base = name.replace(".", "_") + "_seconds"
        names[base + "_bucket"] = "le,gen_ai_operation_name,gen_ai_request_model,error_type"
    return {**names, "up": "job"}


def queries() -> list[tuple[str, str]]:
    found = [
        (panel["title"], target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]
    found += [(rule["alert"], rule["expr"]) for rule in RULES]
    return found


def test_every_name_that_users_rely_on_is_exported():
    names = exported()
    for name in PROMISED:
        ending = "_bucket" if name.endswith("_seconds") else ""
        assert f"lookonce_{name}{ending}" in names


@pytest.mark.parametrize(("where", "query"), queries())
def test_a_query_names_metrics_and_labels_that_there_are(where, query):
    names, used = exported(), NAME.findall(query)
    assert used, where
    assert set(used) <= names.keys()
    labels = {"instance", "job"} | {x for name in used for x in names[name].split(",")}
    for listed in re.findall(r"\b(?:by|on) ?\(([^)]*)\)", query):
        assert {label.strip() for label in listed.split(",")} <= labels
    assert set(re.findall(r"[{,](\w+)[=!]", query)) <= labels


def test_legends_name_labels_that_the_query_keeps():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert any(label in listed for listed in kept), target


def test_the_dashboard_is_one_that_grafana_lays_out():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/lookonce.yml").read_text())
    known = {source["uid"] for source in sources["datasources"]}
    assert {p["datasource"]["uid"] for p in DASHBOARD["panels"] if "datasource" in p} <= known


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not():
    tested = {each["name"]: each["alert_rule_test"] for each in RULE_TESTS}
    assert tested.keys() == {rule["alert"] for rule in RULES}
    for name, times in tested.items():
        assert {bool(at["exp_alerts"]) for at in times} == {True, False}, name


def test_every_alert_says_what_to_do():
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "what_to_do"}


def test_the_services_fit_together():
    """Ports, mounted files, and that nothing listens beyond loopback."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services: dict[str, Any] = compose["services"]
    assert services.keys() == {"lookonce", "valkey", "prometheus", "grafana", "collector", "jaeger"}
    for service in services.values():
        pinned = re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-alpine)?", service["image"])
        assert pinned or "build" in service
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            known = (DEPLOY / source).exists() or source in compose["volumes"]
            assert known, volume
    collector = yaml.safe_load((DEPLOY / "collector.yaml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        assert set(pipeline["receivers"]) <= collector["receivers"].keys()
        assert set(pipeline["processors"]) <= collector["processors"].keys()
        assert set(pipeline["exporters"]) <= collector["exporters"].keys()
    jaeger = services["jaeger"]["environment"]["COLLECTOR_OTLP_HTTP_HOST_PORT"]
    assert collector["exporters"]["otlphttp/jaeger"]["endpoint"] == f"http://{jaeger}"
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for target in job["static_configs"][0]["targets"]]
    assert collector["exporters"]["prometheus"]["endpoint"] in targets
    # A pod has an address of its own; what compose starts is in the host's network.
    ours = [path for path in DEPLOY.rglob("*.y*ml") if "kubernetes" not in path.parts]
    written = "\n".join(path.read_text() for path in ours)
    assert "0.0.0.0" not in written


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool(arguments):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's package prometheus) is not installed")
    ran = subprocess.run(
        [promtool, *arguments], cwd=DEPLOY, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
