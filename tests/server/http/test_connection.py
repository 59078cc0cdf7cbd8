"""Clients that leave, and servers that shut down.

The head of an answer goes out with what follows it, and never later than that.
"""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from lookonce.server.http.app import build_app
from lookonce.server.http.connection import HeadBufferingTransport


class RawClient:
    """One HTTP request spoken as bare ASGI, so that it can be cut off anywhere."""

    def __init__(self, app: Any, body: dict[str, Any]) -> None:
        self._app = app
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self.sent: list[dict[str, Any]] = []
        self.got_something = asyncio.Event()

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_something.set()

    def start(self) -> asyncio.Task[None]:
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [],
            "query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        return asyncio.create_task(self._app(scope, self._inbox.get, self._send))

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


async def settled(condition) -> None:
    """Until `condition()` holds; the event loop gets all the turns it needs."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_leaving_a_stream_midway_aborts_in_the_engine(on_site):
    async def scenario(site):
        client = RawClient(build_app(site.services), body(stream=True))
        task = client.start()
        await client.got_something.wait()
        site.engine.gate.clear()
        client.leave()
        await task
        assert site.engine.running == {}
        assert not any(b"[DONE]" in message.get("body", b"") for message in client.sent)

    on_site(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_aborts_in_the_engine(on_site, stream):
    async def scenario(site):
        site.engine.gate.clear()
        client = RawClient(build_app(site.services), body(stream=stream))
        task = client.start()
        await settled(lambda: site.engine.running)
        client.leave()
        await task
        assert site.engine.running == {}
        assert client.sent[0]["status"] == 499

    on_site(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_the_prompt_is_rendered_stops_that_too(on_site, stream):
    async def scenario(site):
        site.renderer.gate.clear()
        client = RawClient(build_app(site.services), body(stream=stream))
        task = client.start()
        await settled(lambda: site.renderer.rendering)
        client.leave()
        await task
        assert site.renderer.rendering == 0
        assert site.engine.prompts == []

    on_site(scenario)


def test_of_many_clients_those_that_leave_disturb_no_other(on_site):
    async def scenario(site):
        app = build_app(site.services)
        clients = [RawClient(app, body(stream=True, n=2)) for _ in range(60)]
        tasks = [client.start() for client in clients]
        for number, client in enumerate(clients):
            if number % 3 == 0:
                await client.got_something.wait()
                client.leave()
        await asyncio.gather(*tasks)
        for number, client in enumerate(clients):
            whole = b"".join(message.get("body", b"") for message in client.sent)
            assert whole.endswith(b"[DONE]\n\n") or number % 3 == 0
            assert b'"error"' not in whole

    on_site(scenario)


def test_draining_refuses_new_requests_and_lets_running_ones_end(on_site):
    async def scenario(site):
        site.engine.gate.clear()
        running = asyncio.create_task(site.chat("hi"))
        await settled(lambda: site.engine.running)
        assert "connection" not in (await site.client.get("/health")).headers
        site.services.drain.draining = True

        refused = await site.chat("hi")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"  # the next one goes where it is served
        assert (await site.client.get("/ready")).status_code == 503
        assert (await site.client.get("/health")).status_code == 200
        idle = asyncio.create_task(site.services.drain.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()

        site.engine.gate.set()
        served = await running
        assert (served.status_code, served.headers["connection"]) == (200, "close")
        await idle

    on_site(scenario)


URL = "data:image/png;base64," + "A" * 1_000_003


def kept_urls() -> int:
    """Texts of just that length that something still refers to."""
    gc.collect()
    containers = gc.get_objects()
    inside = gc.get_referents(*containers)
    inside += gc.get_referents(*(one for one in inside if not gc.is_tracked(one)))
    return sum(type(one) is str and len(one) == len(URL) for one in inside)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_the_media_of_a_body_is_not_kept_while_the_answer_is_made(on_site, route, stream):
    def content() -> bytes:
        url = f"{URL[:22]}{URL[22:]}"  # one of its own
        if route == "/v1/responses":
            part: dict[str, object] = {"type": "input_image", "image_url": url}
            body: dict[str, object] = {"input": [{"role": "user", "content": [part]}]}
        else:
            part = {"type": "image_url", "image_url": {"url": url}}
            body = {"messages": [{"role": "user", "content": [part]}]}
        return json.dumps({**body, "stream": stream}).encode()

    async def scenario(site):
        before = kept_urls()
        site.renderer.gate.clear()
        asking = asyncio.create_task(site.client.post(route, content=content()))
        await settled(lambda: site.renderer.rendering)
        assert kept_urls() > before
        site.engine.gate.clear()
        site.renderer.gate.set()
        await settled(lambda: site.engine.running)
        assert kept_urls() == before
        site.engine.gate.set()
        assert (await asking).status_code == 200

    on_site(scenario)


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> str:
        return f"the {name}"


@pytest.fixture
def on_wire():
    def run(scenario) -> list[bytes]:
        async def whole() -> list[bytes]:
            wire = Wire()
            await scenario(HeadBufferingTransport(wire), wire)
            return wire.written

        return asyncio.run(whole())

    return run


def test_head_and_body_are_one_write_and_what_follows_its_own(on_wire):
    async def scenario(holder, wire):
        for data in (HEAD, b"2\r\nhi\r\n", b"0\r\n\r\n"):
            holder.write(data)

    assert on_wire(scenario) == [HEAD + b"2\r\nhi\r\n", b"0\r\n\r\n"]


def test_a_head_alone_waits_for_nobody(on_wire):
    async def scenario(holder, wire):
        holder.write(HEAD)
        await asyncio.sleep(0)
        assert wire.written == [HEAD]
        holder.write(b"later")

    assert on_wire(scenario) == [HEAD, b"later"]


def test_closing_sends_what_is_held_first(on_wire):
    async def scenario(holder, wire):
        holder.write(HEAD)
        holder.close()
        assert wire.closed

    assert on_wire(scenario) == [HEAD]


def test_a_head_for_a_connection_that_is_gone_is_dropped(on_wire):
    async def scenario(holder, wire):
        holder.write(HEAD)
        wire.closed = True
        await asyncio.sleep(0)

    assert on_wire(scenario) == []


def test_all_else_is_the_transport_s_own(on_wire):
    async def scenario(holder, wire):
        assert holder.get_extra_info("peername") == "the peername"

    on_wire(scenario)
