"""Names, origins and types of bodies: who may use a server, with and without keys."""

from __future__ import annotations

import pytest

from lookonce.config import Options, ServerConfig, resolve
from lookonce.errors import BadRequestError, ConfigError, ForbiddenError, UnsupportedMediaTypeError
from lookonce.server.http.request_guard import RequestGuard

OURS = "https://app.example.org"
KEY = {"Authorization": "Bearer secret"}


def scope(method="GET", path="/v1/models", version="1.1", **headers):
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"method": method, "path": path, "http_version": version, "headers": sent}


def guard(**options) -> RequestGuard:
    return RequestGuard.of(resolve(Options(**options)).server)


LOCAL = [
    "localhost",
    "localhost:8000",
    "LOCALHOST:8000",
    "localhost.",
    "app.localhost:3000",
    "127.0.0.1:8000",
    "10.1.2.3",
    "[::1]:8000",
    "[fe80::1%25eth0]:8000",
    "lookonce",
    "gpu-box:8000",
    "gpu-box.local",
    "host.docker.internal:8000",
    "lookonce.default.svc.cluster.local:8000",
]
STRANGE = [
    "example.com",
    "example.com:8000",
    "example.com.",
    "127.0.0.1.example.com",
    "localhost.example.com",
    "127.0.0.1@example.com",
    "10.1.2.3.4",
    "[::1].example.com.x",
    "local.example",
    "evil.xn--internal",
    "",
    ":8000",
    "...",
]


@pytest.mark.parametrize("host", LOCAL)
def test_names_that_no_stranger_can_have_are_answered_to(host):
    assert guard().admit(scope(host=host)) == []


@pytest.mark.parametrize("host", STRANGE)
def test_names_that_a_stranger_may_have_are_not(host):
    with pytest.raises(ForbiddenError) as raised:
        guard().admit(scope(host=host))
    assert raised.value.code == "host_not_allowed"
    assert "--allowed-hosts" in raised.value.message


def test_brackets_hold_an_address_and_nothing_follows_but_a_port():
    with pytest.raises(ForbiddenError):
        guard().admit(scope(host="[::1].example.com"))
    with pytest.raises(ForbiddenError):
        guard().admit(scope(host="[example.com]"))


def test_more_names_may_be_allowed():
    ours = guard(allowed_hosts=("Api.Example.org", "*.lab.example.org"))
    for host in ("api.example.org:8000", "a.lab.example.org", "a.b.lab.example.org", "localhost"):
        ours.admit(scope(host=host))
    for host in ("example.org", "xapi.example.org", "lab.example.org", "notlab.example.org"):
        with pytest.raises(ForbiddenError):
            ours.admit(scope(host=host))
    guard(allowed_hosts=("*",)).admit(scope(host="example.com"))


def test_the_name_it_is_bound_to_is_its_own():
    guard(host="gpu.example.org").admit(scope(host="gpu.example.org:8000"))


def test_probes_reach_it_by_any_name():
    for path in ("/health", "/ready"):
        guard().admit(scope(path=path, host="example.com"))
    with pytest.raises(ForbiddenError):
        guard().admit(scope(path="/metrics", host="example.com"))


def test_with_keys_names_are_checked_only_when_some_are_given():
    guard(api_key=("secret",)).admit(scope(host="example.com"))
    with pytest.raises(ForbiddenError):
        guard(api_key=("secret",), allowed_hosts=("a.org",)).admit(scope(host="example.com"))


def test_a_unix_socket_has_no_name():
    guard(uds="/run/s").admit(scope(host="example.com"))


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
@pytest.mark.parametrize("options", [{}, {"api_key": ("secret",)}, {"uds": "/run/s"}], ids=str)
def test_one_host_and_only_one_is_sent(options, path):
    ours = guard(**options)
    with pytest.raises(BadRequestError, match="missing"):
        ours.admit(scope(path=path))
    ours.admit(scope(path=path, version="1.0"))  # no browser
    twice = scope(path=path, host="localhost")
    twice["headers"].append((b"host", b"localhost"))
    with pytest.raises(BadRequestError, match="more than one"):
        ours.admit(twice)


def test_only_so_many_names_are_remembered():
    ours = guard()
    for number in range(3000):
        ours.admit(scope(host=f"box{number}"))
    assert len(ours._known) <= 1024


# --- origins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("https://gpu-box", "gpu-box"),
        ("http://gpu-box", "gpu-box:80"),
        ("https://gpu-box", "GPU-box:443"),
    ],
)
def test_its_own_page_may_use_it(origin, host):
    assert guard().admit(scope("POST", host=host, origin=origin)) == []


@pytest.mark.parametrize(
    "origin",
    ["http://example.com", "http://localhost:3000", "http://localhost", "null", "", "file://",
     "http://localhost:8000.example.com", "chrome-extension://abc"],
)  # fmt: skip
def test_pages_of_others_may_not(origin):
    with pytest.raises(ForbiddenError) as raised:
        guard().admit(scope("POST", host="localhost:8000", origin=origin))
    assert raised.value.code == "origin_not_allowed"


def test_behind_a_proxy_that_changes_the_name_browsers_tell_where_a_page_is_from():
    asked = {"host": "127.0.0.1:8000", "origin": "https://chat.example.org"}
    guard().admit(scope("POST", **asked, sec_fetch_site="same-origin"))
    for told in ("cross-site", "same-site", "none"):
        with pytest.raises(ForbiddenError):
            guard().admit(scope("POST", **asked, sec_fetch_site=told))


def test_with_keys_others_are_served_but_their_pages_cannot_read_it():
    assert guard(api_key=("secret",)).admit(scope("POST", host="x.org", origin=OURS)) == []


def test_forms_are_no_requests():
    for kind in ("text/plain", "TEXT/PLAIN; charset=utf-8", "multipart/form-data; boundary=x",
                 "application/x-www-form-urlencoded"):  # fmt: skip
        with pytest.raises(UnsupportedMediaTypeError, match="application/json"):
            guard(api_key=("k",)).admit(scope("POST", host="localhost", content_type=kind))
    plain = "application/x-www-form-urlencoded"
    with pytest.raises(
        UnsupportedMediaTypeError, match=r"with a file: .* multipart/form-data, not"
    ):
        guard().admit(
            scope("POST", "/v1/audio/transcriptions", host="localhost", content_type=plain)
        )
    for kind in ("application/json", "application/json; charset=utf-8", "application/x-ndjson"):
        guard().admit(scope("POST", host="localhost", content_type=kind))
    guard().admit(scope("GET", host="localhost", content_type="text/plain"))


# --- CORS, through the application ----------------------------------------------------------------

PREFLIGHT = {
    "Origin": OURS,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_a_browser_that_asks_first_is_told_yes_without_a_key(on_site, keys):
    async def scenario(site):
        answer = await site.client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == OURS
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers

    on_site(scenario, allowed_origins=(OURS,), api_key=keys)


def test_answers_and_errors_may_be_read_by_pages_that_are_allowed(on_site):
    async def scenario(site):
        for headers, status in ((KEY, 200), ({}, 401)):
            answer = await site.client.get("/v1/models", headers={"Origin": OURS, **headers})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == OURS
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            told = {"x-request-id", "retry-after-ms", "x-ratelimit-remaining-tokens"}
            assert told | {"x-lookonce-warning"} <= set(exposed)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        stream = await site.client.post(
            "/v1/chat/completions", json=body, headers={"Origin": OURS, **KEY}
        )
        assert stream.headers["access-control-allow-origin"] == OURS
        other = await site.client.get("/v1/models", headers={"Origin": "https://b.org", **KEY})
        assert other.status_code == 200
        assert "access-control-allow-origin" not in other.headers

    on_site(scenario, allowed_origins=(OURS,), api_key=("secret",))


def test_every_origin_may_be_allowed(on_site):
    async def scenario(site):
        answer = await site.client.get("/v1/models", headers={"Origin": "https://b.org"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")

    on_site(scenario, allowed_origins=("*",))


def test_others_are_refused_when_they_ask_first(on_site):
    async def scenario(site):
        asked = {**PREFLIGHT, "Origin": "https://b.org"}
        answer = await site.client.options("/v1/chat/completions", headers=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers

    on_site(scenario, allowed_origins=(OURS,))


@pytest.mark.parametrize("host", ["http://x", "a b", "a:8000", "a/b", "*.", "a*"])
def test_a_name_that_is_none_is_refused_at_the_start(host):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        resolve(Options(allowed_hosts=(host,)))


@pytest.mark.parametrize("origin", ["example.org", "https://", "https://a/b", "https://*.a", "a b"])
def test_an_origin_that_is_none_is_refused_at_the_start(origin):
    with pytest.raises(ConfigError, match="--allowed-origins"):
        resolve(Options(allowed_origins=(origin,)))


def test_a_guard_of_a_configuration_without_options_is_that_of_a_local_server():
    with pytest.raises(ForbiddenError):
        RequestGuard.of(ServerConfig()).admit(scope(host="example.com"))
