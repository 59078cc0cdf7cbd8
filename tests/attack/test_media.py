"""One tenant sends pictures that are dear to decode; another one is served meanwhile.

Run by `make attack`. The canaries are new small pictures of the other tenant, one after another,
each of which must be decoded.
"""

from __future__ import annotations

import base64
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from tests.support.attacked_server import (
    SLOWEST,
    SMALL_CACHES,
    Memory,
    check_memory,
    note_canaries,
    settled_memory,
)
from tests.support.drawing import encoded, picture, text_part
from tests.support.live_server import LiveServer, until
from tests.support.raw_sockets import HEAD, connect
from tests.support.render.bombs import Scan, gif_film, progressive_jpeg

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="with one core all share one worker"),
]
SIDE = 6900
"""47.6 megapixels: below `--max-image-pixels`."""
REFINING = Scan(refining=True)
NUM_ATTACKS = 8
CLIENT = httpx.Client(verify=False, timeout=300)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    keys = ("--api-key", "villain:v", "--api-key", "canary:c")
    with LiveServer(*keys, *SMALL_CACHES) as live:
        with ThreadPoolExecutor(1) as other:  # one worker is busy: the canary needs the second one
            heavy = other.submit(post, live, "v", progressive_jpeg(2400, [REFINING] * 98))
            canaries_until(live, [heavy])
        yield live


@pytest.fixture(scope="module")
def film_server(folder: Callable[[str], Path]) -> Iterator[LiveServer]:
    """A model that takes films."""
    keys = ("--api-key", "villain:v", "--api-key", "canary:c", "--served-model-name", "nano")
    with LiveServer(str(folder("qwen2_5_vl")), *keys, *SMALL_CACHES) as live:
        canaries_until(live, [])
        yield live


def new_picture(number: int) -> bytes:
    image = picture(("red", "circle"))
    image.putpixel((0, 0), (number % 256, number // 256 % 256, 1))
    return encoded(image)


def chat(data: bytes) -> dict[str, object]:
    """About a picture, or two frames of a GIF film."""
    kind = "video_url" if data.startswith(b"GIF") else "image_url"
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    content = [{"type": kind, kind: {"url": url}}, text_part("What?")]
    options = {"mm_processor_kwargs": {"num_frames": 2}} if kind == "video_url" else {}
    message = {"role": "user", "content": content}
    return {"model": "nano", "messages": [message], "max_tokens": 1, **options}


def post(server: LiveServer, key: str, data: bytes, timeout: float = 300) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return CLIENT.post(
        f"{server.url}/v1/chat/completions", json=chat(data), headers=headers, timeout=timeout
    )


def post_each(server: LiveServer, files: list[bytes]) -> Counter[int]:
    """The statuses of the villain's requests, all at once."""
    with ThreadPoolExecutor(len(files)) as villains:
        return Counter(villains.map(lambda data: post(server, "v", data).status_code, files))


def flood(server: LiveServer, files: list[bytes]) -> Counter[int]:
    """The same from one thread: what hundreds of clients cost in this process, with its one lock,
    would delay the canaries, not the server."""
    statuses = Counter[int]()
    with ExitStack() as stack, selectors.DefaultSelector() as waiting:
        for data in files:
            client = stack.enter_context(connect(server.url))
            client.sendall(request_bytes("v", msgspec.json.encode(chat(data))))
            waiting.register(client, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select(timeout=300):
                client = cast(socket.socket, key.fileobj)
                statuses[int(client.recv(1 << 16).split()[1])] += 1  # the head comes at once
                waiting.unregister(client)
    return statuses


def request_bytes(key: str, body: bytes) -> bytes:
    head = f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    length = f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return b"POST /v1/chat/completions" + HEAD + (head + length).encode() + body


def canaries_until(server: LiveServer, attacks: Sequence[Future[Any]]) -> list[float]:
    """The latencies of one canary after another, until all attacks have been answered."""
    latencies: list[float] = []
    while not all(each.done() for each in attacks) or not latencies:
        start = time.monotonic()
        answer = post(server, "c", new_picture(hash((start, len(latencies))) & 0xFFFF))
        latencies.append(time.monotonic() - start)
        assert answer.status_code == 200, answer.text
        time.sleep(0.1)
    note_canaries(len(latencies), 0, max(latencies))
    return latencies


def attack(
    server: LiveServer,
    make: Callable[[int], bytes],
    count: int,
    send: Callable[[LiveServer, list[bytes]], Counter[int]] = post_each,
) -> Counter[int]:
    """The statuses of `count` attacks, during which no canary was slow, and which left no memory
    beyond what as many before them had left. `make` gives for each number another file."""
    statuses: Counter[int] = Counter()
    before: dict[int, Memory] = {}
    for first in (0, count):
        files = [make(number) for number in range(first, first + count)]
        with ThreadPoolExecutor(1) as villain:
            attacks = villain.submit(send, server, files)
            latencies = canaries_until(server, [attacks])
            statuses = attacks.result()
        assert max(latencies) < SLOWEST, latencies
        if before:
            check_memory(server, before)
        before = settled_memory(server)
    return statuses


def test_scan_bombs_are_refused(server: LiveServer) -> None:
    """600 scans of 47.6 megapixels in 300 KB: they held both workers for a minute."""
    statuses = attack(server, lambda n: progressive_jpeg(SIDE + n, [REFINING] * 600), NUM_ATTACKS)
    assert statuses == {413: NUM_ATTACKS}


def test_the_dearest_legal_pictures_delay_nobody_else(server: LiveServer) -> None:
    statuses = attack(server, lambda n: progressive_jpeg(SIDE + n, [REFINING] * 98), 4)
    assert statuses == {200: 4}


def test_large_plain_pictures_delay_nobody_else(server: LiveServer) -> None:
    statuses = attack(server, lambda n: progressive_jpeg(SIDE + n, []), NUM_ATTACKS)
    assert statuses == {200: NUM_ATTACKS}


def test_a_flood_of_small_pictures_is_shared_fairly(server: LiveServer) -> None:
    """More than the tenant's part of the queue: what is too much is refused, to it alone."""
    statuses = attack(server, lambda n: new_picture(70_000 + n), 300, flood)
    assert set(statuses) <= {200, 429}
    assert statuses[200]


def test_film_bombs_are_refused(film_server: LiveServer) -> None:
    """Frames of 23 bytes, each of which needs all before it. Half as many, of which more were
    looked at, held a worker for 40 s."""
    statuses = attack(film_server, lambda n: gif_film(200_000 + n), NUM_ATTACKS)
    assert statuses == {413: NUM_ATTACKS}


def test_the_dearest_legal_films_delay_nobody_else(film_server: LiveServer) -> None:
    statuses = attack(film_server, lambda n: gif_film(65_000 + n), 4)
    assert statuses == {200: 4}


def test_villains_that_leave_do_not_keep_workers_busy(server: LiveServer) -> None:
    pictures = [
        progressive_jpeg(SIDE + 20 + number, [REFINING] * 98) for number in range(NUM_ATTACKS)
    ]

    def leave(data: bytes) -> httpx.Response:
        try:
            return post(server, "v", data, timeout=0.5)
        except httpx.TimeoutException:
            return httpx.Response(499)

    before = server.metrics()["media_decodes_total:image"]
    with ThreadPoolExecutor(len(pictures)) as villains:
        attacks = [villains.submit(leave, data) for data in pictures]
        latencies = canaries_until(server, attacks)
    until(lambda: server.metrics()["media_waiting"] == 0, 20, server.log)
    latencies += canaries_until(server, [])  # the workers take what comes next
    metrics = server.metrics()
    assert metrics["media_decodes_total:image"] - before == len(latencies)
    assert metrics["media_workers_lost_total:abandoned"] <= 2
