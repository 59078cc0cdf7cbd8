"""Attacks on connections, headers, bodies and names, over loopback, `ATTACK_SECONDS` each.

An honest client asks all the while. Its answers must be right and quick, and no process may keep
what the attackers sent.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import pytest

from tests.support.attacked_server import (
    SLOWEST,
    check_memory,
    memory_of,
    note_canaries,
    settled_memory,
)
from tests.support.live_server import LiveServer, until
from tests.support.raw_sockets import HEAD, VERSION, connect, held, read_answer

pytestmark = pytest.mark.attack

SECONDS = float(os.environ.get("ATTACK_SECONDS", "20"))
MEGABYTE = b"a" * 1_000_000
CHUNK = b"f4240\r\n" + MEGABYTE + b"\r\n"
ATTACKERS = [f"127.0.0.{number}" for number in range(2, 18)]
TEXT = b"POST /v1/completions" + HEAD


class Honest:
    """Asks on a connection it keeps, and on new ones, until `stop`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(keeps,)) for keeps in (True, False)
        ]

    def __enter__(self) -> Honest:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, keeps: bool) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as known:
            while not self._over.wait(0.02):
                started = time.monotonic()
                try:
                    ask = known.post if keeps else httpx.post
                    where = "/tokenize" if keeps else self.url + "/tokenize"
                    answer = ask(where, json={"prompt": "a red circle"})
                    if answer.status_code != 200 or answer.json()["count"] != 3:
                        self.wrong.append(answer.text)
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                self.seconds.append(time.monotonic() - started)


@pytest.fixture(scope="module")
def target() -> Iterator[LiveServer]:
    """Few descriptors, so that some hundred connections are more than it can hold."""
    with LiveServer("--header-timeout", "5", "--body-timeout", "5", max_descriptors=512) as live:
        yield live


def attacked(live: LiveServer, attack: Callable[[str], None], threads: int = 8) -> None:
    """`attack(source address)` again and again, from several threads, beside an honest client."""
    over = threading.Event()

    def run(number: int) -> None:
        while not over.is_set():
            with suppress(OSError):
                attack(ATTACKERS[number % len(ATTACKERS)])

    def attack_for(seconds: float) -> Honest:
        over.clear()
        attackers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
        with Honest(live.url) as honest:
            for thread in attackers:
                thread.start()
            time.sleep(seconds)
            over.set()
            for thread in attackers:
                thread.join()
        until(lambda: live.metrics()["http_connections"] <= 2, 20, live.log)
        return honest

    attack_for(SECONDS / 4)  # a server that was attacked has its usual size
    before, written = settled_memory(live), len(live.output)
    honest = attack_for(SECONDS)
    note_canaries(len(honest.seconds), len(honest.wrong), max(honest.seconds))
    assert honest.wrong == []
    assert len(honest.seconds) > SECONDS
    assert max(honest.seconds) < SLOWEST, sorted(honest.seconds)[-5:]
    assert memory_of(live).keys() == before.keys()
    check_memory(live, before)
    assert len(live.output) - written < 100 + 5 * SECONDS


def pour(source: str, url: str, first: bytes, piece: bytes, most: int) -> None:
    """Send `first` and then `piece` for as long as it is taken, at most `most` times."""
    with connect(url, source) as client:
        client.sendall(first)
        for _ in range(most):
            client.sendall(piece)
        read_answer(client, 1)


ENDLESS = {
    "one header field": (VERSION[:-2] + b"X: ", MEGABYTE, 300),
    "header fields": (VERSION[:-2], b"X: y\r\n" * 10_000, 300),
    "a path": (b"GET /", MEGABYTE, 300),
    "trailers": (TEXT + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", MEGABYTE, 300),
    "a chunk's extension": (TEXT + b"Transfer-Encoding: chunked\r\n\r\n5;", MEGABYTE, 300),
    "garbage": (b"", b"\x16\x03\x01 garbage\r\n\r\n" * 1000, 30),
    "pipelined requests": (b"", VERSION * 1000, 30),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_without_end(target, what):
    attacked(target, lambda source: pour(source, target.url, *ENDLESS[what]))


HELD = {
    "silent": b"",
    "half a header": b"GET /half",
    "half a body": TEXT + b"Content-Length: 100000\r\n\r\n{",
    "idle": VERSION,
}


@pytest.mark.parametrize("what", HELD)
def test_held_connections(target, what):
    """1,500 at a time, of 16 addresses: three times as many as there are descriptors."""

    def hold(source: str) -> None:
        with held(target.url, [source], 190, HELD[what]):
            time.sleep(3)

    attacked(target, hold)


def test_connections_that_come_and_go(target):
    def knock(source: str) -> None:
        connect(target.url, source).close()

    attacked(target, knock)


def test_bodies_that_are_abandoned_and_websockets(target):
    upgrade = b"GET /v1/realtime" + HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"

    def leave(source: str) -> None:
        with connect(target.url, source) as client:
            client.sendall(TEXT + b"Content-Length: 100000\r\n\r\n" + MEGABYTE[:50_000])
        with connect(target.url, source) as client:
            client.sendall(TEXT + b"Content-Length: 20000000\r\n\r\n" + 4 * MEGABYTE)
        with connect(target.url, source) as client:
            client.sendall(TEXT + b"Transfer-Encoding: chunked\r\n\r\n" + 4 * CHUNK)
        with connect(target.url, source) as client:
            client.sendall(upgrade)
            read_answer(client, 1)

    attacked(target, leave)


def test_answers_that_nobody_reads(target):
    body = b'{"prompt": "hi", "stream": true, "max_tokens": 2000, "ignore_eos": true}'
    asked = (
        TEXT + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )

    def ignore(source: str) -> None:
        with connect(target.url, source) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.sendall(asked)
            time.sleep(2)

    attacked(target, ignore)
    until(lambda: target.metrics()["num_requests_running"] == 0, 30, target.log)


def test_strangers_names_and_pages(target):
    before = target.metrics()

    def ask(source: str) -> None:
        for headers in (b"Host: rebind.example.com", b"Host: localhost\r\nOrigin: http://x.com"):
            with connect(target.url, source) as client:
                client.sendall(
                    b"POST /reset_prefix_cache HTTP/1.1\r\n" + headers + b"\r\n"
                    b"Content-Type: text/plain\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                assert read_answer(client, 5).status == 403

    attacked(target, ask)
    assert target.metrics()["prompt_tokens_total"] == before["prompt_tokens_total"]
