"""Decoding workers that are stopped or killed: only their own jobs fail."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count as count_from
from itertools import islice

import httpx

from tests.support.live_server import LiveServer, until
from tests.support.traffic import Medium, drawn

MAX_QUEUE = 256
"""The limit of the pool's queue; each worker may have one more job."""
MAX_WORKERS = 4

_warming = count_from(1_000_000)
"""Numbers of garbage that only starts workers."""


def body(medium: Medium) -> dict[str, object]:
    content = [medium.part, {"type": "text", "text": medium.question}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}


def ask(server: LiveServer, medium: Medium) -> httpx.Response:
    return server.post("/v1/chat/completions", body(medium))


def garbage(number: int) -> Medium:
    """A body that costs a worker almost nothing, since it is no picture."""
    url = "data:image/png;base64," + base64.b64encode(b"garbage %d" % number).decode()
    return Medium({"type": "image_url", "image_url": {"url": url}}, "?", "")


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def workers(server: LiveServer) -> list[int]:
    """The decoding workers of the server's API process."""
    return server.pids(b"lookonce.render.media.worker")


@contextmanager
def standing_still(server: LiveServer) -> Iterator[list[int]]:
    """Waits until all workers have started, and stops them (SIGSTOP) inside the block."""
    count = min(MAX_WORKERS, os.cpu_count() or 1)

    def all_started() -> bool:
        # The pool starts a worker for a job that finds all others busy, so a quick one may have
        # done a whole burst alone.
        with ThreadPoolExecutor(2 * count) as pool:
            list(pool.map(partial(ask, server), map(garbage, islice(_warming, 2 * count))))
        return len(workers(server)) == count

    until(all_started, 100, server.log)
    stopped = workers(server)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield stopped
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_worker_killed_before_it_begins_a_job_takes_nothing_along(server):
    known, struck = drawn(200), drawn(201)
    assert said(ask(server, known)) == known.answer
    with ThreadPoolExecutor(1) as pool, standing_still(server) as stopped:
        before = server.metrics()["media_queued_total:image"]
        answer = pool.submit(ask, server, struck)
        until(lambda: server.metrics()["media_queued_total:image"] > before, 60, server.log)
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
        assert said(answer.result(60)) == struck.answer  # it had not begun: another worker made it
    assert server.get("/health").status_code == 200
    assert said(ask(server, known)) == known.answer
    assert said(ask(server, struck)) == struck.answer


def test_a_full_queue_refuses_new_pictures_and_delays_no_known_one(server):
    known, count = drawn(200), MAX_QUEUE + MAX_WORKERS + 30
    assert said(ask(server, known)) == known.answer

    async def everybody() -> tuple[Counter[int], dict[str, float]]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            with standing_still(server):
                before = await asyncio.to_thread(server.metrics)
                posts = [
                    asyncio.create_task(client.post("/v1/chat/completions", json=body(garbage(n))))
                    for n in range(count)
                ]
                await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
                hit = await asyncio.to_thread(ask, server, known)
                assert said(hit) == known.answer
                health = await asyncio.to_thread(server.get, "/health")
                assert health.status_code == 200
            return Counter([(await post).status_code for post in posts]), before

    statuses, before = asyncio.run(everybody())
    assert statuses.keys() == {422, 429}
    assert MAX_QUEUE < statuses[422] <= MAX_QUEUE + MAX_WORKERS
    after = server.metrics()
    overtaking, queued = "mm_cache_overtaking_hits_total:image", "media_queued_total:image"
    assert after[overtaking] == before[overtaking] + 1
    assert after[queued] == before[queued] + statuses[422]
