"""Many concurrent requests about one item: one fetch, decode, processing and encoder run."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import httpx
import pytest

from tests.support.drawing import encoded, picture, tone, wav
from tests.support.live_server import LiveServer
from tests.support.render.origin import Answer, Origin, origin
from tests.support.traffic import drawn

NUM_ASKERS = 64
COUNTED = (
    "mm_cache_queries_total",
    "mm_cache_hits_total",
    "mm_cache_resends_total",
    "media_fetches_total:image",
    "media_decodes_total:image",
    "media_processed_total:image",
    "encoder_runs_total",
)


@pytest.fixture
def server(cache_server: LiveServer) -> LiveServer:
    return cache_server


@pytest.fixture
def web() -> Iterator[Origin]:
    """A web server with a different picture on every path, cacheable for a minute."""
    started: Future[Origin] = Future()
    done = threading.Event()

    async def serve() -> None:
        headers = {"Cache-Control": "max-age=60"}
        answers = {f"/{n}.png": Answer(on_the_web(n), headers=headers) for n in range(3)}
        answers["/tone.wav"] = Answer(wav(tone(430, 1430)), headers=headers)
        async with origin(answers) as site:
            started.set_result(site)
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield started.result(60)
    done.set()
    thread.join()


def on_the_web(number: int) -> bytes:
    return encoded(picture(("red", "circle"), *[("blue", "square")] * number))


def by_url(web: Origin, number: int) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": web.url(f"/{number}.png")}}


def body(*parts: dict[str, object], question: str = "What shape is red?", **fields: object):
    content = [*parts, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}


class Counting:
    """`moved`: the differences of the counters over the block."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self.moved: dict[str, float] = {}

    def __enter__(self):
        self._before = self._server.metrics()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._server.metrics()
        self.moved = {name: after[name] - self._before.get(name, 0) for name in COUNTED}


def all_at_once(server: LiveServer, requests: list[object]) -> list[httpx.Response]:
    async def everybody() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=len(requests))
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            posts = (client.post("/v1/chat/completions", json=request) for request in requests)
            return await asyncio.gather(*posts)

    return asyncio.run(everybody())


def test_64_requests_for_one_new_picture_fetch_decode_process_and_encode_it_once(server, web):
    with Counting(server) as counting:
        answers = all_at_once(server, [body(by_url(web, 0))] * NUM_ASKERS)
    assert {a.json()["choices"][0]["message"]["content"] for a in answers} == {"the circle"}
    assert len(web.requests) == 1
    assert counting.moved == {
        "mm_cache_queries_total": NUM_ASKERS,
        "mm_cache_hits_total": NUM_ASKERS - 1,
        "mm_cache_resends_total": 0,
        "media_fetches_total:image": 1,
        "media_decodes_total:image": 1,
        "media_processed_total:image": 1,
        "encoder_runs_total": 1,
    }


def test_the_same_when_every_request_brings_the_bytes(server):
    medium = drawn(100)
    request = body(medium.part, question=medium.question)
    with Counting(server) as counting:
        answers = all_at_once(server, [request] * NUM_ASKERS)
    assert {a.json()["choices"][0]["message"]["content"] for a in answers} == {medium.answer}
    assert counting.moved["media_fetches_total:image"] == 0
    assert counting.moved["media_decodes_total:image"] == 1
    assert counting.moved["media_processed_total:image"] == 1
    assert counting.moved["encoder_runs_total"] == 1
    assert counting.moved["mm_cache_hits_total"] == NUM_ASKERS - 1


def test_8_copies_in_one_request_are_one_picture(server, web):
    with Counting(server) as counting:
        [answer] = all_at_once(server, [body(*[by_url(web, 1)] * 8, reuse_receipt=True)])
    items = answer.json()["reuse_receipt"]["items"]
    assert [item["processor"] for item in items] == ["miss"] + ["hit"] * 7
    assert len({item["hash"] for item in items}) == 1
    assert len(web.requests) == 1
    assert counting.moved == {
        "mm_cache_queries_total": 8,
        "mm_cache_hits_total": 7,
        "mm_cache_resends_total": 0,
        "media_fetches_total:image": 1,
        "media_decodes_total:image": 1,
        "media_processed_total:image": 1,
        "encoder_runs_total": 1,
    }


def test_a_sound_behind_a_url_is_fetched_once_and_counted_as_a_sound(server, web):
    part = {"type": "audio_url", "audio_url": {"url": web.url("/tone.wav")}}
    before = server.metrics().get("media_fetches_total:audio", 0)
    question = "Is the tone rising or falling?"
    with Counting(server) as counting:
        answers = all_at_once(server, [body(part, question=question)] * 8)
    assert {a.json()["choices"][0]["message"]["content"] for a in answers} == {"rising"}
    assert len(web.requests) == 1
    assert server.metrics()["media_fetches_total:audio"] == before + 1
    assert counting.moved["media_fetches_total:image"] == 0
    assert counting.moved["mm_cache_hits_total"] == 7


def test_a_url_and_the_same_bytes_in_line_are_one_picture(server, web):
    data = on_the_web(2)
    [first] = all_at_once(server, [body(by_url(web, 2), reuse_receipt=True)])
    with Counting(server) as counting:
        [second] = all_at_once(server, [body(_inline(data), reuse_receipt=True)])
    receipts = [answer.json()["reuse_receipt"]["items"][0] for answer in (first, second)]
    assert receipts[0]["hash"] == receipts[1]["hash"]
    assert receipts[1]["processor"] == "hit"
    assert counting.moved["media_decodes_total:image"] == 0


def _inline(data: bytes) -> dict[str, object]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}
