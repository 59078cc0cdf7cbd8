"""`lookonce top` on what a server says: rates, shares, quantiles, and servers that say less."""

from __future__ import annotations

import io
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import UnixStreamServer
from threading import Thread

import httpx
import pytest
from rich.console import Console

from lookonce.cli.top import Snapshot, View, render, run_top, take_snapshot
from lookonce.errors import ConfigError, UnavailableError

METRICS = """\
# TYPE lookonce_num_requests_running gauge
lookonce_num_requests_running 3
# TYPE lookonce_num_requests_waiting gauge
lookonce_num_requests_waiting 7
# TYPE lookonce_http_responses_total counter
lookonce_http_responses_total{status="200"} 90
lookonce_http_responses_total{status="400"} 6
lookonce_http_responses_total{status="503"} 2
lookonce_http_responses_total{status="broken"} 1
# TYPE lookonce_prefix_cache_queries_total counter
lookonce_prefix_cache_queries_total 200
# TYPE lookonce_prefix_cache_hits_total counter
lookonce_prefix_cache_hits_total 150
# TYPE lookonce_kv_tier_lookups_total counter
lookonce_kv_tier_lookups_total{tier="disk"} 10
# TYPE lookonce_kv_tier_hits_total counter
lookonce_kv_tier_hits_total{tier="disk"} 5
# TYPE lookonce_kv_tier_breaker_state gauge
lookonce_kv_tier_breaker_state{tier="disk"} 2
# TYPE lookonce_time_to_first_token_seconds histogram
lookonce_time_to_first_token_seconds_bucket{le="0.1"} 50
lookonce_time_to_first_token_seconds_bucket{le="0.2"} 100
lookonce_time_to_first_token_seconds_bucket{le="+Inf"} 100
lookonce_time_to_first_token_seconds_sum 10
lookonce_time_to_first_token_seconds_count 100
"""
STATE = {
    "version": "1.2.3",
    "model": "a model",
    "engine": "ready",
    "processes": [
        {"index": 0, "pid": 1, "serving": 1, "draining": False, "tenants": {"red": 2, "": 1}},
        {"index": 1, "pid": 2, "serving": 1, "draining": False, "tenants": {"red": 3}},
    ],
}


def server(admin: bool = True) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/ready":
                return httpx.Response(200, json={"status": "ready"})
            case "/metrics":
                return httpx.Response(200, text=METRICS)
            case "/debug/state" if admin:
                return httpx.Response(200, json=STATE)
        return httpx.Response(403, json={})

    return httpx.MockTransport(answer)


def taken(admin: bool = True) -> Snapshot:
    with httpx.Client(transport=server(admin), base_url="http://server") as client:
        return take_snapshot(client)


def shown(view: View) -> str:
    file = io.StringIO()
    Console(file=file, width=120).print(render(view))
    return file.getvalue()


def later(snapshot: Snapshot, seconds: float, **changes: float) -> Snapshot:
    samples = dict(snapshot.samples)
    for name, more in changes.items():
        samples[name, ()] = samples.get((name, ()), 0.0) + more
    return Snapshot(snapshot.taken + seconds, snapshot.ready, samples, snapshot.state)


def test_it_shows_requests_tenants_reuse_and_tiers():
    text = shown(View(taken(), url="http://server"))
    assert "a model, LookOnce 1.2.3 at http://server: ready" in text
    assert "running 3  waiting 7" in text
    assert "failed 3  refused 6 (by limits 0)" in text
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert "75%" in lines["prefix cache"]
    assert lines["red"].split() == ["red", "5"]
    assert "(no tenant)" in text
    assert lines["disk"].split()[1] == "50%"
    assert "left alone" in lines["disk"]


def test_without_an_admin_key_it_says_that_tenants_are_not_shown():
    text = shown(View(taken(admin=False)))
    assert "an admin key shows tenants" in text
    assert "75%" in text


def test_between_two_looks_it_shows_what_changed():
    first = taken()
    second = later(first, 2.0, prefix_cache_queries_total=100, prefix_cache_hits_total=10)
    line = next(x for x in shown(View(second, first)).splitlines() if x.startswith("prefix cache"))
    assert line.split()[2:] == ["10%", "53%", "50.0/s"]


def test_quantiles_are_interpolated_and_absent_without_requests():
    view = View(taken())
    assert view.quantile("time_to_first_token_seconds", 0.5) == pytest.approx(0.1)
    assert view.quantile("time_to_first_token_seconds", 0.75) == pytest.approx(0.15)
    assert View(taken(), taken()).quantile("time_to_first_token_seconds", 0.5) is None
    assert view.quantile("request_queue_seconds", 0.5) is None


def test_of_a_fleet_it_adds_up_what_all_engines_say():
    """A front-end labels each engine's metrics; one's name may begin as a status does."""

    def of_engine(line: str, name: str) -> str:
        metric, value = line.split()
        name = f'engine="{name}"'
        labelled = metric.replace("{", "{" + name + ",") if "{" in metric else f"{metric}{{{name}}}"
        return f"{labelled} {value}"

    lines = METRICS.splitlines()
    told = [
        each if each.startswith("#") else f"{of_engine(each, '5a')}\n{of_engine(each, 'idle0')}"
        for each in [*lines, "lookonce_kv_cache_usage_ratio 0.5"]
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text="\n".join(told) + "\n")
        return httpx.Response(
            200, json={"status": "ready"} if "ready" in str(request.url) else STATE
        )

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://fleet") as client:
        view = View(take_snapshot(client))
    text = shown(view)
    assert "running 6  waiting 14" in text
    assert "failed 6  refused 12 (by limits 0)" in text
    assert "KV blocks in use 50%" in text
    assert view.quantile("time_to_first_token_seconds", 0.5) == pytest.approx(0.1)
    assert next(line for line in text.splitlines() if line.startswith("disk")).split()[1] == "50%"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://there", "http://"])
def test_what_is_no_url_is_refused_as_an_option(url):
    with pytest.raises(ConfigError, match="--url must be http://HOST:PORT"):
        run_top(url, None, interval=1.0, once=True)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = {"/ready": '{"status": "ready"}', "/metrics": METRICS}
        body = known.get(self.path, "").encode()
        self.send_response(200 if body else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_a_server_on_a_unix_socket_is_asked_there(tmp_path):
    path = str(tmp_path / "http")
    file = io.StringIO()
    with UnixStreamServer(path, Answers) as listening:
        thread = Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        run_top(f"unix:{path}", None, interval=1.0, once=True, console=Console(file=file))
        listening.shutdown()
        thread.join()
    assert f"LookOnce at unix:{path}: ready" in file.getvalue().replace("\n", "")


def test_what_is_no_server_is_one_clear_line():
    with pytest.raises(UnavailableError, match="no LookOnce server answers at http://127"):
        run_top("http://127.0.0.1:9", None, interval=1.0, once=True)


def test_a_certificate_of_one_s_own_is_told_how_to_be_trusted():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")

    with (
        httpx.Client(transport=httpx.MockTransport(refuse), base_url="https://own") as client,
        pytest.raises(UnavailableError, match="SSL_CERT_FILE"),
    ):
        take_snapshot(client)


def test_another_server_is_told_apart():
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    with (
        httpx.Client(transport=transport, base_url="http://other") as client,
        pytest.raises(UnavailableError, match="no LookOnce server"),
    ):
        take_snapshot(client)


@pytest.mark.parametrize("admin", [True, False])
def test_a_state_that_is_refused_is_asked_for_once(monkeypatch, admin):
    asked: Counter[str] = Counter()
    answering, looks = server(admin), iter(range(3))

    def count(request: httpx.Request) -> httpx.Response:
        asked[request.url.path] += 1
        return answering.handle_request(request)

    def sleep(_: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(
        httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(count))
    )
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        run_top("http://server", None, interval=1.0, once=False, console=console, sleep=sleep)
    assert asked["/metrics"] == 4
    assert asked["/debug/state"] == (4 if admin else 1)
