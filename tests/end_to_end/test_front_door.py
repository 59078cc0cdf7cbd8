"""Strangers at the door: what they send costs them their connection, and others nothing.

Everything here comes over real sockets, most of it as bytes that no client library would send. An
honest client asks beside it, and its answers are known.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import FIRST, SECOND
from tests.support.drawing import ask, picture
from tests.support.live_server import LiveServer, samples, until
from tests.support.raw_sockets import (
    HEAD,
    VERSION,
    Answer,
    connect,
    held,
    is_open,
    read_all,
    read_answer,
    send_raw,
)

TOKENIZE = {"prompt": "a red circle"}
TEXT = b"POST /v1/completions" + HEAD


def control(url: str, **how: object) -> None:
    """An honest client, whose answer is known."""
    answer = httpx.post(url + "/tokenize", json=TOKENIZE, timeout=30, **how)
    assert answer.status_code == 200, answer.text
    assert answer.json()["count"] == len(answer.json()["tokens"]) == 3


# --- what is no request -------------------------------------------------------------------------

NO_REQUESTS = [
    b"garbage\r\n\r\n",
    b"GET /version HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /version HTTP/1.1\r\nHost localhost\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    TEXT + b"Content-Length: ten\r\n\r\n",
    TEXT + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    TEXT + b"Transfer-Encoding: chunked\r\n\r\nnothex\r\n",
    TEXT + b"Transfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


@pytest.mark.parametrize("sent", NO_REQUESTS)
def test_what_is_no_request_is_refused_as_json(server, sent):
    answer = send_raw(server.url, sent)
    assert (answer.status, answer.closed) == (400, True)
    assert answer.headers["content-type"] == "application/json"
    assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", "invalid_http")
    control(server.url)


MEGABYTE = b"a" * 1_000_000
TOO_LARGE = {
    "one field": (VERSION[:-2] + b"X-A: " + MEGABYTE + b"\r\n\r\n",),
    "one field without end": (VERSION[:-2] + b"X-A: ", *[MEGABYTE] * 50),
    "many fields": (VERSION[:-2] + b"X: y\r\n" * 129 + b"\r\n",),
    "very many fields": (VERSION[:-2], *[b"X: y\r\n" * 10_000] * 10),
    "the path": (b"GET /" + MEGABYTE + HEAD + b"\r\n",),
    "trailers": (TEXT + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nT: ", *[MEGABYTE] * 50),
    "an extension of a chunk": (TEXT + b"Transfer-Encoding: chunked\r\n\r\n1;", *[MEGABYTE] * 50),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_a_header_too_large_is_431_and_not_kept(server, what):
    answer = send_raw(server.url, *TOO_LARGE[what])
    assert (answer.status, answer.closed) == (431, True)
    assert answer.error["code"] == "headers_too_large"
    control(server.url)


def test_a_header_just_within_the_limits_is_served(server):
    fields = b"".join(b"X-%d: %s\r\n" % (n, b"v" * 500) for n in range(126))
    assert len(fields) > 60_000
    answer = send_raw(server.url, VERSION[:-2] + fields + b"Connection: close\r\n\r\n")
    assert answer.status == 200


def test_a_body_of_many_small_chunks_is_served(server):
    """Its framing is larger than any header may be."""
    body = b'{"prompt": "a red circle"' + b" " * 30_000 + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /tokenize" + HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = send_raw(server.url, head + chunks)
    assert (answer.status, b'"count":3' in answer.body) == (200, True)


UPGRADE = HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
VERSION_13 = b"Sec-WebSocket-Version: 13\r\n"
KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
LENGTH = b"Content-Length: 1\r\n"
REALTIME = b"GET /v1/realtime" + UPGRADE
NO_WEBSOCKETS = {
    "another path": b"GET /v1/chat/completions" + UPGRADE + VERSION_13 + KEY,
    "another method": b"POST /v1/realtime" + UPGRADE + VERSION_13 + KEY,
    "no version": REALTIME + KEY,
    "no key": REALTIME + VERSION_13,
    "a short key": REALTIME + VERSION_13 + KEY.replace(b"ZQ==", b""),
    "two keys": REALTIME + VERSION_13 + KEY + KEY,
    "a body": REALTIME + VERSION_13 + KEY + LENGTH,
}


@pytest.mark.parametrize("what", NO_WEBSOCKETS)
def test_what_begins_no_websocket_is_refused_as_json(server, what):
    answer = send_raw(server.url, NO_WEBSOCKETS[what] + b"\r\n")
    code = "websocket_not_supported" if what == "another path" else "invalid_websocket"
    assert (answer.status, answer.error["code"], answer.closed) == (400, code, True)
    control(server.url)


def test_more_requests_than_may_wait_on_a_connection_end_it(server):
    assert send_raw(server.url, VERSION * 1000).closed
    with connect(server.url) as client:
        for _ in range(2):
            client.sendall(VERSION * 20)
            answers = b""
            while answers.count(b'{"version"') < 20:
                more = client.recv(1 << 16)
                assert more, "it was closed"
                answers += more


def test_garbage_after_a_request_ends_its_answer_and_is_not_written_into_it(server):
    body = b'{"prompt": "hi", "stream": true, "max_tokens": 3000, "ignore_eos": true}'
    head = TEXT + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(server.url) as client:
        client.sendall(head + body)
        assert b"200 OK" in client.recv(1 << 16)
        client.sendall(b"garbage\r\n\r\n")
        rest, closed = read_all(client, 60)
    assert closed
    assert b"HTTP/1.1" not in rest
    until(lambda: server.metrics()["num_requests_running"] == 0, 60, server.log)


def test_abandoned_bodies_and_websocket_attempts_do_not_fill_the_log(server):
    upgrade = b"GET /v1/realtime" + HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    before = len(server.output)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: send_raw(server.url, upgrade), range(100)))
        list(pool.map(lambda _: abandon(server.url), range(100)))
        list(pool.map(lambda _: send_raw(server.url, b"garbage\r\n\r\n"), range(100)))
    control(server.url)
    assert len(server.output) - before <= 40, "".join(server.output[before:])


def abandon(url: str) -> None:
    with connect(url) as client:
        client.sendall(TEXT + b"Content-Length: 1000\r\n\r\n{")


# --- names and origins on a server without keys ---------------------------------------------------

SIMPLE = b"Content-Type: text/plain\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("path", ["/v1/completions", "/reset_prefix_cache", "/v1/chat/completions"])
def test_pages_of_strangers_reach_nothing(server, path):
    line = b"POST " + path.encode() + b" HTTP/1.1\r\n"
    rebound = send_raw(server.url, line + b"Host: rebind.example.com:8000\r\n" + SIMPLE)
    assert (rebound.status, rebound.error["code"]) == (403, "host_not_allowed")
    page = b"Host: localhost\r\nOrigin: https://example.com\r\n"
    crossing = send_raw(server.url, line + page + SIMPLE)
    assert (crossing.status, crossing.error["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in crossing.headers
    typed = send_raw(server.url, line + b"Host: localhost\r\n" + SIMPLE)
    assert (typed.status, typed.error["code"]) == (415, "unsupported_media_type")
    assert server.metrics()["num_requests_running"] == 0


def test_local_names_and_addresses_reach_everything(server):
    port = server.url.rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "192.168.1.7:8000", "gpu-box"):
        control(server.url, headers={"Host": host, "Origin": f"http://{host}"})


# --- time ---------------------------------------------------------------------------------------

DEADLINE = 2
PER_ADDRESS = 30
DESCRIPTORS = 200
STRANGERS = [f"127.0.0.{number}" for number in range(2, 10)]


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """Where servers have the folders of their sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="lo-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """A server with short deadlines and few descriptors. It needs no engine for that."""
    options = (
        *("--header-timeout", str(DEADLINE), "--body-timeout", str(DEADLINE)),
        *("--keep-alive-timeout", str(DEADLINE), "--max-connections-per-address", str(PER_ADDRESS)),
    )
    with LiveServer(*options, command="render", max_descriptors=DESCRIPTORS) as live:
        until(lambda: live.get("/ready").status_code == 200, 60, live.log)
        yield live


SLOW = {
    "nothing": ((), 0, None),
    "half a header": ((b"GET /ver",), 408, "header_timeout"),
    "a header byte by byte": (tuple(b"%c" % byte for byte in VERSION[:-2]), 408, "header_timeout"),
    "no body": ((TEXT + b"Content-Length: 9\r\n\r\n",), 408, "body_timeout"),
    "half a body": ((TEXT + b"Content-Length: 9\r\n\r\n{",), 408, "body_timeout"),
}
SLOW["a body byte by byte"] = (
    (b"POST /tokenize" + HEAD + b"Content-Length: 1000\r\n\r\n", *[b" "] * 40),
    408,
    "body_timeout",
)


@pytest.fixture(scope="module")
def slow(small: LiveServer) -> dict[str, Answer]:
    """What the server answers to each of these clients, which come side by side."""

    def send(what: str) -> Answer:
        pieces = SLOW[what][0]
        if pieces:
            pieces = (pieces[0].replace(b"/v1/completions", b"/tokenize"), *pieces[1:])
        return send_raw(small.url, *pieces, pause=0.1 if len(pieces) > 1 else 0)

    with ThreadPoolExecutor(len(SLOW)) as clients:
        return dict(zip(SLOW, clients.map(send, SLOW), strict=True))


@pytest.mark.parametrize("what", SLOW)
def test_who_is_too_slow_is_told_and_closed(small, slow, what):
    _, status, code = SLOW[what]
    assert (slow[what].status, slow[what].closed) == (status, True)
    assert code is None or slow[what].error["code"] == code
    control(small.url)


def test_an_idle_connection_is_closed_and_an_answered_one_is_served_again(small):
    with connect(small.url) as client:
        for _ in range(3):
            client.sendall(VERSION)
            assert b"200 OK" in client.recv(1 << 16)
        last = read_answer(client, 60)
        assert (last.status, last.body, last.closed) == (0, b"", True)


def test_hundreds_of_half_open_connections_end_by_themselves(small):
    with held(small.url, STRANGERS[:3], 25, b"GET /half") as clients:
        until(lambda: not any(map(is_open, clients)), 100, small.log)
    until(lambda: small.metrics()["http_connections"] <= 2, 60, small.log)


# --- numbers ------------------------------------------------------------------------------------


def test_an_address_has_so_many_connections_and_no_more(small):
    with held(small.url, STRANGERS[:1], PER_ADDRESS, VERSION):
        one_more = send_raw(small.url, b"", source=STRANGERS[0])
        assert (one_more.status, one_more.error["code"]) == (429, "too_many_connections")
        assert one_more.headers["retry-after"] == "1"
        control(small.url)


SENDING = b"POST /tokenize" + HEAD + b"Content-Length: 9\r\n\r\n{"
HELD = {"silent": b"", "half": b"GET /half", "idle": VERSION, "sending": SENDING}


@pytest.mark.parametrize("first", HELD.values(), ids=HELD)
def test_connections_that_are_held_lock_nobody_out(small, first):
    """More are held than the process has descriptors; new and known clients are answered."""
    with httpx.Client(base_url=small.url) as known:
        known.get("/version")
        with held(small.url, STRANGERS, PER_ADDRESS - 1, first):
            for _ in range(5):
                control(small.url)
                assert known.get("/version").status_code == 200
                folder = Path(f"/proc/{small.process.pid}/fd")
                assert len(list(folder.iterdir())) <= DESCRIPTORS - 32
    assert small.metrics()["http_connections_evicted_total"] > 0


# --- keys, TLS, signals, and the end --------------------------------------------------------------


def at(port: int) -> str:
    return f"https://localhost:{port}"


class Guarded:
    """A server with keys and TLS, and a client of it for every key."""

    def __init__(self, live: LiveServer, folder: Path, sockets: Path) -> None:
        self.live, self.folder, self.sockets = live, folder, sockets
        self.certificate = FIRST
        self.url = at(int(live.url.rpartition(":")[2]))

    def status(self, key: str, path: str = "/v1/models") -> int:
        """Over a connection of its own: any of the API processes may answer."""
        headers = {"Authorization": f"Bearer {key}"}
        context = self.certificate.client_context()
        return httpx.get(self.url + path, headers=headers, verify=context, timeout=30).status_code

    def statuses(self, key: str) -> set[int]:
        return {self.status(key) for _ in range(12)}

    def client(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        context = self.certificate.client_context()
        return httpx.Client(base_url=self.url, headers=headers, verify=context, timeout=60)


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, sockets: Path, left: Path
) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    certificate, key = FIRST.write(folder)
    keys = folder / "keys"
    keys.write_text("# who may\nacme:filed-key\n\nold:old-key:expires=2001-01-01\n")
    limits = folder / "limits.yaml"
    limits.write_text("tenants: {few: {tokens_per_minute: 40}}\n")
    options = (
        *("--api-key-file", str(keys), "--limits", str(limits), "--api-processes", "2"),
        *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
    )
    environment = {"LOOKONCE_API_KEY": "one:environment-key two:second-key:admin few:few-key"}
    with LiveServer(*options, env={**environment, "TMPDIR": str(sockets)}) as live:
        yield Guarded(live, folder, sockets)


STRANGER = "lookonce-none-of-ours"
USE = """
import sys
from lookonce.engine.supervisor.socket_folder import socket_folder
with socket_folder(sys.argv[1]):
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def left(sockets: Path) -> Path:
    """A folder of sockets whose only process was killed, so that nobody removed it."""
    (sockets / STRANGER).mkdir()
    folder = sockets / "lookonce-left"
    with subprocess.Popen(
        [sys.executable, "-c", USE, folder / "engine.sock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"in\n"
        process.kill()
    assert folder.exists()
    return folder


def socket_folders(guarded: Guarded) -> list[Path]:
    found = guarded.sockets.glob("lookonce-*")
    return [folder for folder in found if folder.name != STRANGER]


def test_what_is_left_when_everything_was_killed_is_removed_at_the_next_start(guarded, left):
    assert not left.exists()
    assert len(socket_folders(guarded)) == 1
    assert (guarded.sockets / STRANGER).exists()


def test_keys_come_from_file_and_environment(guarded):
    for key in ("filed-key", "environment-key", "second-key"):
        assert guarded.statuses(key) == {200}
    for key in ("old-key", "acme:filed-key", "x"):
        assert guarded.status(key) == 401


def test_no_process_shows_a_key(guarded):
    for pid in guarded.live.pids(b"lookonce"):
        shown = Path(f"/proc/{pid}/cmdline").read_bytes()
        inherited = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"-key\0" not in shown.replace(b"--api-key-file", b"")
        assert pid == guarded.live.process.pid or b"environment-key" not in inherited


def test_without_a_key_a_body_is_not_kept(guarded):
    """100 MB come; the process that drops them does not grow by a tenth of that."""
    pids = guarded.live.pids(b"lookonce.server.process")
    before = [resident(pid) for pid in pids]
    context = guarded.certificate.client_context()
    for _ in range(4):
        answer = httpx.post(
            guarded.url + "/v1/completions",
            content=(MEGABYTE for _ in range(100)),
            headers={"Content-Type": "application/json"},
            verify=context,
            timeout=60,
        )
        assert answer.status_code == 401
    grown = [resident(pid) - size for pid, size in zip(pids, before, strict=True)]
    assert max(grown) < 10_000_000, grown


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


LONG = {
    "model": "nano",
    "messages": ask(picture(("red", "circle"), background="white"), "What is in the picture?"),
    "stream": True,
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 2000,
}


def test_limits_hold_over_api_processes_and_are_read_again(guarded):
    log, limits = guarded.live.log, guarded.folder / "limits.yaml"

    def complete(key: str) -> httpx.Response:
        """On a connection of its own, so that every API process gets some."""
        with guarded.client(key) as client:
            return client.post("/v1/completions", json={"prompt": "a red", "max_tokens": 1})

    began = time.monotonic()
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: complete("few-key"), range(40)))
    statuses = Counter(answer.status_code for answer in answers)
    each = answers[0].json()["usage"]["total_tokens"]
    assert statuses.keys() == {200, 429}
    most = 40 + 40 / 60 * (time.monotonic() - began)
    assert 40 // each <= statuses[200] <= most / each
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["x-ratelimit-limit-tokens"] == "40"
    assert int(refused.headers["retry-after"]) >= 1
    assert all(complete("environment-key").status_code == 200 for _ in range(3))
    with guarded.client("second-key") as admin:
        found = samples(admin.get("/metrics").text)
    assert found["rate_limited_total:tokens"] == statuses[429]

    limits.write_text("tenants: {few: {tokens_per_minut: 40}}\n")
    guarded.live.process.send_signal(signal.SIGHUP)
    until(lambda: "tenants.few.tokens_per_minut: no such limit" in log(), 100, log)
    limits.write_text("tenants: {few: {}}\n")
    guarded.live.process.send_signal(signal.SIGHUP)
    until(lambda: complete("few-key").status_code == 200, 100, log)
    until(lambda: {complete("few-key").status_code for _ in range(8)} == {200}, 100, log)
    told = r"\d API keys, limits \(sections of tenants: 1, of keys: 0\)"
    until(lambda: len(re.findall(f"from now on: {told}", log())) == 2, 60, log)
    assert re.search(f"SIGHUP: {told}", log())


def test_sighup_reads_keys_and_certificate_again_and_disturbs_no_stream(guarded):
    keys = guarded.folder / "keys"
    with guarded.client("filed-key") as client:
        with client.stream("POST", "/v1/chat/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            keys.write_text("acme:new-key\n")
            SECOND.write(guarded.folder)
            told = guarded.live.log().count("from now on")
            guarded.live.process.send_signal(signal.SIGHUP)
            until(lambda: guarded.live.log().count("from now on") >= told + 2, 60, guarded.live.log)
            guarded.certificate = SECOND
            until(lambda: guarded.statuses("new-key") == {200}, 60, guarded.live.log)
            assert guarded.statuses("filed-key") == {401}
            assert guarded.statuses("environment-key") == {200}
            rest = list(lines)
        # The connection is the stream's: the certificate that this client trusts is gone.
        assert client.get("/v1/models").status_code == 401
    assert rest[-2] == "data: [DONE]"
    assert not any('"error"' in line for line in rest)


def test_a_broken_key_file_changes_nothing(guarded):
    for broken in ("", "# nobody\n", "a:b:c:d:e\n", "new-key\nnew-key\n"):
        (guarded.folder / "keys").write_text(broken)
        seen = guarded.live.log().count("limits stay")
        guarded.live.process.send_signal(signal.SIGHUP)
        until(lambda: guarded.live.log().count("limits stay") > seen, 60, guarded.live.log)  # noqa: B023
        assert guarded.statuses("new-key") == {200}
    assert "new-key" not in guarded.live.log()


def test_an_api_process_that_is_started_again_has_the_keys_of_now(guarded):
    for pid in guarded.live.pids(b"lookonce.server.process"):
        os.kill(pid, signal.SIGKILL)

    def served() -> bool:
        try:
            return guarded.statuses("new-key") == {200} and guarded.statuses("filed-key") == {401}
        except httpx.TransportError:
            return False

    until(served, 90, guarded.live.log)


def test_who_speaks_no_tls_or_nothing_is_forgotten(guarded):
    port = int(guarded.url.rpartition(":")[2])
    answer = send_raw(f"http://127.0.0.1:{port}", VERSION)
    assert (answer.status, answer.closed) == (0, True)
    with held(f"http://127.0.0.1:{port}", ["127.0.0.2"], 50):
        assert guarded.statuses("new-key") == {200}


def test_a_killed_supervisor_s_streams_end_whole_and_nothing_is_left(guarded):
    """A client that is idle does not agree to the end of its TLS connection, which is no error."""
    assert len(socket_folders(guarded)) == 1
    with (
        guarded.client("new-key") as idle,
        guarded.client("new-key") as client,
        client.stream("POST", "/v1/chat/completions", json=LONG) as stream,
    ):
        assert idle.get("/v1/models").status_code == 200
        lines = stream.iter_lines()
        next(lines)
        guarded.live.process.kill()
        rest = list(lines)
        until(lambda: guarded.live.pids(b"lookonce") == [], 100, guarded.live.log)
    assert rest[-2] == "data: [DONE]", rest[-4:]
    assert not any('"error"' in line for line in rest)
    assert "running task" not in guarded.live.log()
    assert socket_folders(guarded) == []
