"""The front-end over engines that fail as engines do: one server to its clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import errno
import json
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lookonce.cache.identity import item_key, media_hash, scope_digest
from lookonce.config import ITEM_TOPIC, Options, resolve
from lookonce.errors import ConfigError
from lookonce.fleet.engine_http import EngineClient, IdleConnections
from lookonce.fleet.frontend import Frontend
from lookonce.fleet.index import short
from lookonce.fleet.members import EngineAddress, EngineKeys, Fleet
from lookonce.fleet.router import Router
from lookonce.fleet.server import FrontendServer, ListenerOwner, listening, shared_listener
from lookonce.fleet.subscriber import Added, Gone
from lookonce.server.http import uvicorn_server
from tests.support.fake_engine import (
    FINGERPRINT,
    Answer,
    FakeEngine,
    Received,
    begin_stream,
    reply,
    send_chunk,
)

pytestmark = pytest.mark.anyio


class Served:
    """A front-end on a real socket over fake engines."""

    def __init__(
        self,
        engines: list[FakeEngine],
        frontend: Frontend,
        fleet: Fleet,
        server: FrontendServer,
        url: str,
    ):
        self.engines, self.frontend, self.fleet, self.server = engines, frontend, fleet, server
        self.client = httpx.AsyncClient(base_url=url, timeout=30)
        host, _, port = url.removeprefix("http://").partition(":")
        self.address = host, int(port)
        self.key_file = Path()

    def write_keys(self, *keys: str) -> None:
        self.key_file.write_text("\n".join(keys))

    def named(self, name: str) -> FakeEngine:
        return next(engine for engine in self.engines if engine.name == name)

    async def ask(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": "nano", "messages": messages, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    *engines: FakeEngine,
    wait: bool = True,
    listener: socket.socket | None = None,
    drain_timeout: float = 30.0,
    **options: Any,
) -> AsyncIterator[Served]:
    config = resolve(Options(port=0, **options)).server
    config = dataclasses.replace(config, drain_timeout=drain_timeout)
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        keys = None
        if options:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            file = folder / "keys"
            file.write_text("\n".join(options["api_key"]))
            keys = EngineKeys(str(file))
        fleet = Fleet(Router(), keys)
        fleet.update({e.name: EngineAddress(e.name, e.model, e.address) for e in engines})
        frontend = Frontend(fleet, config)
        server = FrontendServer(frontend, config)
        with listener or socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            served = Served(list(engines), frontend, fleet, server, url)
            served.key_file = file if options else Path()
            if wait:
                await served.until(lambda: len(fleet.ready()) == len(engines))
            task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
            try:
                yield served
            finally:
                await served.client.aclose()
                fleet.close()
                await server.stop()
                await task
        fleet.router.check_integrity()


def failing(name: str, how: Answer) -> Answer:
    """`how` for one engine; the others answer."""

    async def answer(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if engine.name == name:
            await how(engine, request, writer)
        else:
            reply(writer, 200, {"engine": engine.name})

    return answer


async def test_an_answer_is_the_engines_own_with_its_name_and_the_reason() -> None:
    async with serving(FakeEngine("a"), FakeEngine("b")) as served:
        response = await served.ask("x" * 100_000)
        assert response.json()["engine"] == response.headers["x-lookonce-engine"]
        assert response.headers["x-lookonce-route"].startswith("least_loaded; prompt 0/")
        (request,) = served.named(response.json()["engine"]).received
        assert request.headers["x-request-id"]
        assert request.json["messages"][0]["content"] == "x" * 100_000


async def test_pictures_are_sent_to_where_they_are() -> None:
    async with serving(FakeEngine("a"), FakeEngine("b"), FakeEngine("c")) as served:
        for name in (b"cat", b"dog", b"owl", b"cat", b"dog", b"owl"):
            data = base64.b64encode(name).decode()
            url = f"data:image/png;base64,{data}"
            await served.ask([{"type": "image_url", "image_url": {"url": url}}])
        for engine in served.engines:
            asked = [r.json["messages"][0]["content"][0]["image_url"] for r in engine.received]
            for url in asked:
                assert asked.count(url) == 2


def large_picture() -> tuple[str, str]:
    """A data URL from which base64 is cut out of a body, and what names it."""
    data = bytes(range(256)) * 300
    digest = media_hash(data, modality="image", fingerprint=bytes.fromhex(FINGERPRINT))
    return f"data:image/png;base64,{base64.b64encode(data).decode()}", f"lookonce:{digest.hex()}"


async def test_an_engine_that_holds_a_picture_gets_its_name_alone() -> None:
    url, name = large_picture()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "ü?"}]
    named = [{"type": "image_url", "image_url": {"url": name}}, content[1]]
    async with serving(FakeEngine("a")) as served:
        (state,) = served.fleet.router.engines.values()
        digest = bytes.fromhex(name.removeprefix("lookonce:"))
        key = short(item_key(scope_digest("", None), digest))
        await served.ask(content)
        served.fleet.router.apply(state, [Added(ITEM_TOPIC, [key])])
        await served.ask(content)
        await served.ask(content, mm_processor_kwargs={"max_pixels": 1000})
        body = {"model": "nano", "input": [{"role": "user", "content": content}]}
        await served.client.post("/v1/responses", json=body)
        served.fleet.router.apply(state, [Gone(ITEM_TOPIC, [key])])
        await served.ask(content)
        first, second, optioned, stored, last = (r.json for r in served.engines[0].received)
        for sent in (first, optioned, last):
            assert sent["messages"][0]["content"] == content
        assert stored["input"][0]["content"] == content
        assert second["messages"][0]["content"] == named
        assert second | {"messages": 0} == first | {"messages": 0}


async def test_a_client_that_reads_slowly_gets_all_in_order() -> None:
    pieces = [bytes([number]) * 200_000 for number in range(100)]

    async def streams(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        for piece in pieces:
            send_chunk(writer, piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with serving(FakeEngine("a", answer=streams)) as served:
        got = bytearray()
        async with served.client.stream("POST", "/v1/chat/completions", json={}) as response:
            async for part in response.aiter_raw(1 << 20):
                got += part
                await asyncio.sleep(0.005)
        assert got == b"".join(pieces)


async def test_the_length_of_answers_is_learned_with_and_without_usage() -> None:
    event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    usage = b'data: {"usage":{"prompt_tokens":3,"completion_tokens":40}}\n\ndata: [DONE]\n\n'

    async def streams(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if not request.json.get("stream"):
            reply(writer, 200, {"usage": {"completion_tokens": 20}})
            return
        begin_stream(writer)
        for number in range(13):
            send_chunk(writer, event)
            await writer.drain()
            if number in (3, 6):
                await asyncio.sleep(0.01)
        if request.json.get("stream_options"):
            send_chunk(writer, usage)
        writer.write(b"0\r\n\r\n")

    async with serving(FakeEngine("a", answer=streams)) as served:

        async def usual() -> float:
            found: float = (await served.client.get("/fleet")).json()["answer_tokens"]
            return found

        assert await usual() == 64
        response = await served.ask(stream=True)
        assert response.content == 13 * event
        assert await usual() == 58.6  # a tenth of the way to the 10 events that are text
        response = await served.ask(stream=True, stream_options={"include_usage": True})
        assert response.content == 13 * event + usage
        assert await usual() == 56.74
        await served.ask()
        assert await usual() == 53.066


async def test_an_engine_that_does_not_know_the_name_gets_the_picture() -> None:
    async def forgets(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if b"lookonce:" in request.body:
            reply(writer, 422, {"error": {"code": "media_not_cached"}})
        else:
            reply(writer, 200, {"engine": engine.name})

    url, name = large_picture()
    async with serving(FakeEngine("a", answer=forgets), FakeEngine("b")) as served:
        state = served.fleet.router.engines["a"]
        key = short(item_key(scope_digest("", None), bytes.fromhex(name[9:])))
        served.fleet.router.apply(state, [Added(ITEM_TOPIC, [key])])
        response = await served.ask([{"type": "image_url", "image_url": {"url": url}}])
        assert response.json() == {"engine": "a"}
        assert [len(r.body) > 100_000 for r in served.named("a").received] == [False, True]


async def test_an_engine_that_dies_before_its_answer_has_begun_is_replaced() -> None:
    async def die(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        engine.kill()

    engines = [FakeEngine(name) for name in "ab"]
    async with serving(*engines) as served:
        first = (await served.ask()).json()["engine"]
        for engine in engines:
            engine.answer = failing(first, die)
        response = await served.ask()
        assert response.status_code == 200
        assert response.json()["engine"] != first
        assert served.frontend.retried == 1
        await served.until(lambda: len(served.fleet.ready()) == 1)
        assert (await served.ask()).status_code == 200


async def test_an_engine_that_says_503_is_replaced_and_the_last_answer_stays() -> None:
    async def refuse(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 503, {"error": {"message": f"{engine.name} is dead"}})

    engines = [FakeEngine(name, answer=refuse) for name in "abc"]
    async with serving(*engines) as served:
        response = await served.ask()
        assert response.status_code == 503
        assert [len(engine.received) for engine in engines] == [1, 1, 1]
        assert served.frontend.retried == 1


async def test_what_no_second_engine_got_is_not_counted_as_retried_nor_are_probes() -> None:
    async def refuse(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 503, {})

    async with serving(FakeEngine("a", answer=refuse)) as served:
        assert (await served.ask()).status_code == 503
        served.engines[0].ready = False
        await served.until(lambda: not served.fleet.ready())
        assert (await served.client.get("/ready")).status_code == 503
        told = (await served.client.get("/metrics")).text
        assert "lookonce_fleet_retried_total 0\n" in told
        assert 'lookonce_fleet_responses_total{status="503"} 1\n' in told
        assert 'status="200"' not in told


async def test_a_prompt_that_an_engine_refused_is_not_taken_for_computed() -> None:
    async def refuse(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 429, {})

    async with serving(FakeEngine("a", answer=refuse)) as served:
        for _ in range(2):
            response = await served.ask("x" * 5000)
            assert response.status_code == 429
            assert response.headers["x-lookonce-route"].startswith("only; prompt 0/")


def dying(*chunks: bytes) -> Answer:
    """It streams these, and dies."""

    async def die(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        for chunk in chunks:
            send_chunk(writer, chunk)
            await writer.drain()
            await asyncio.sleep(0.05)  # so that each is read, by itself
        engine.kill()

    return die


async def rest_of(served: Served, path: str, body: dict[str, Any]) -> list[str]:
    """Lines of a stream that are not empty."""
    async with served.client.stream("POST", path, json=body | {"stream": True}) as response:
        return [line async for line in response.aiter_lines() if line]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
async def test_a_death_in_the_middle_ends_its_own_stream_with_an_error(path: str) -> None:
    async with serving(FakeEngine("a", answer=dying(b"data: 1\n\n"))) as served:
        first, error, done = await rest_of(served, path, {"model": "nano", "prompt": "x"})
        assert first == "data: 1"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert done == "data: [DONE]"


async def test_anthropics_clients_pass_over_events_without_a_name() -> None:
    event = b"event: ping\ndata: 1\n\n"
    async with serving(FakeEngine("a", answer=dying(event))) as served:
        *_, name, error = await rest_of(served, "/v1/messages", {"model": "nano"})
        assert name == "event: error"
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("path", ["/v1/responses", "/invocations"])
async def test_a_response_ends_with_its_own_event_for_an_error(path: str) -> None:
    event = b'event: response.created\ndata: {"sequence_number":%d}\n\n'
    async with serving(FakeEngine("a", answer=dying(event % 7, event % 8))) as served:
        *_, name, error = await rest_of(served, path, {"model": "nano", "input": "x"})
        assert name == "event: error"
        told = json.loads(error.removeprefix("data: "))
        assert (told["type"], told["code"], told["sequence_number"]) == ("error", "engine_dead", 9)


async def test_a_response_ends_so_after_a_part_of_a_long_event_too() -> None:
    event = b'event: response.created\ndata: {"sequence_number":7}\n\n'
    answer = dying(event, b'event: response.completed\ndata: {"a', b"long answer")
    async with serving(FakeEngine("a", answer=answer)) as served:
        *_, name, error = await rest_of(served, "/v1/responses", {"model": "nano", "input": "x"})
        assert name == "event: error"
        assert json.loads(error.removeprefix("data: "))["code"] == "engine_dead"


async def test_an_error_is_an_event_of_its_own_after_one_that_was_cut_off() -> None:
    async with serving(FakeEngine("a", answer=dying(b"data: 1\n\ndata: 2"))) as served:
        lines = await rest_of(served, "/v1/completions", {"model": "nano", "prompt": "x"})
        assert lines[:2] == ["data: 1", "data: 2"]
        assert json.loads(lines[2].removeprefix("data: "))["error"]["code"] == "engine_dead"


async def test_a_stream_that_is_whole_ends_without_an_error_where_its_engine_dies() -> None:
    async with serving(FakeEngine("a", answer=dying(b"data: 1\n\ndata: [DONE]\n\n"))) as served:
        lines = await rest_of(served, "/v1/completions", {"model": "nano", "prompt": "x"})
        assert lines == ["data: 1", "data: [DONE]"]


@pytest.mark.parametrize("process", ["api", "engine"])
async def test_a_stopped_engine_is_given_up_and_taken_back_when_it_continues(
    monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    """One that hangs would hold its requests for ever: connections to it stay open."""

    async def stop(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.json.get("stream"):
            begin_stream(writer)
            send_chunk(writer, b"data: 1\n\n")
            await writer.drain()
        await asyncio.Event().wait()

    monkeypatch.setattr("lookonce.fleet.members.PROBE_TIMEOUT", 0.3)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 0.01)
    async with serving(FakeEngine("a"), FakeEngine("b")) as served:
        asked: dict[str, Any] = {"prompt_cache_key": "one"}
        first = (await served.ask(**asked)).json()["engine"]  # over a connection that stays open
        engine = served.named(first)
        engine.answer = stop
        body = {"model": "nano", "messages": [], "stream": True, **asked}
        async with served.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == "data: 1"
            task = asyncio.create_task(served.ask(**asked))
            await served.until(lambda: len(engine.received) == 3)
            if process == "api":
                engine.stopped = True
            else:
                engine.engine_silent = 60.0
            waiting = await task
            rest = [line async for line in lines if line]
        assert waiting.json()["engine"] != first
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert served.frontend.retried == 1
        assert [each.address.name for each in served.fleet.ready()] == [waiting.json()["engine"]]
        engine.stopped, engine.engine_silent = False, 0.0
        await served.until(lambda: len(served.fleet.ready()) == 2)


@pytest.mark.parametrize("process", ["api", "engine"])
async def test_an_engine_that_answers_late_is_avoided_and_keeps_its_requests(
    monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    release = asyncio.Event()

    async def wait(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        reply(writer, 200, {"engine": engine.name})

    monkeypatch.setattr("lookonce.fleet.members.LATE_SECONDS", 0.05)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_TIMEOUT", 60.0)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 0.01)
    async with serving(FakeEngine("a"), FakeEngine("b")) as served:
        asked: dict[str, Any] = {"prompt_cache_key": "one"}
        first = (await served.ask(**asked)).json()["engine"]
        engine, state = served.named(first), served.fleet.router.engines[first]
        engine.answer = wait
        waiting = asyncio.create_task(served.ask(**asked))
        await served.until(lambda: len(engine.received) == 2)
        if process == "api":
            engine.stopped = True
        else:
            engine.engine_silent = 3.0
        await served.until(lambda: state.late)
        for name in ("one", "two", "three"):
            assert (await served.ask(prompt_cache_key=name)).json()["engine"] != first
        engine.stopped, engine.engine_silent = False, 0.0
        await served.until(lambda: not state.late)
        release.set()
        assert (await waiting).json()["engine"] == first
        assert served.frontend.retried == 0


async def test_an_engine_that_answers_late_serves_where_there_is_no_other_one() -> None:
    async with serving(FakeEngine("a")) as served:
        served.engines[0].engine_silent = 3.0
        await served.until(lambda: served.fleet.router.engines["a"].late)
        assert (await served.ask()).status_code == 200


async def test_one_silent_probe_alone_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    release = asyncio.Event()

    async def wait(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        reply(writer, 200, {"engine": engine.name})

    monkeypatch.setattr("lookonce.fleet.members.PROBE_TIMEOUT", 0.5)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 0.01)
    async with serving(FakeEngine("a", answer=wait)) as served:
        (engine,) = served.engines
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: engine.received)
        engine.stopped = True
        await served.until(lambda: engine.unanswered_probes == 2)
        engine.stopped = False
        assert served.fleet.ready()
        release.set()
        assert (await asked).status_code == 200
        assert served.frontend.retried == 0


@pytest.mark.parametrize("target", ["/v1/models", "/inference/v1/media_cache"])
async def test_an_engine_that_is_slow_to_tell_what_it_is_is_not_taken_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    monkeypatch.setattr("lookonce.fleet.members.LATE_SECONDS", 0.05)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_TIMEOUT", 0.2)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 0.01)
    engine = FakeEngine("a", unanswered={target})
    async with serving(engine, wait=False) as served:
        state = served.fleet.router.engines["a"]
        await served.until(lambda: engine.num_unanswered >= 4)
        assert not state.late
        engine.unanswered.clear()
        await served.until(lambda: served.fleet.ready())
        engine.answer = answer_later
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: engine.received)
        engine.unanswered.add("/inference/v1/media_cache")  # one that serves
        before = engine.num_unanswered
        await served.until(lambda: engine.num_unanswered >= before + 4)
        assert not state.late
        assert (await asked).status_code == 200
    assert "has stopped answering" not in caplog.text


async def answer_later(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1.5)
    reply(writer, 200, {"engine": engine.name})


async def test_an_engine_that_cannot_be_reached_loses_requests_whose_connections_do_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its machine is gone: nothing ends what is open."""

    async def unreachable(*_: Any) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    def lose(_: IdleConnections, connection: Any) -> None:
        connection.abort()

    async def hang(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 0.01)
    async with serving(FakeEngine("a", answer=hang)) as served:
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: served.engines[0].received)
        monkeypatch.setattr("lookonce.fleet.engine_http.EngineClient._connect", unreachable)
        monkeypatch.setattr("lookonce.fleet.engine_http.IdleConnections.keep", lose)
        for member in served.fleet.members.values():
            member.client.close()
        assert (await asked).status_code == 503
        assert not served.fleet.ready()


async def test_rates_of_each_engine_are_listed() -> None:
    async with serving(FakeEngine("a")) as served:
        (state,) = served.fleet.router.engines.values()
        state.rates.beside = 0.25
        (engine,) = (await served.client.get("/fleet")).json()["engines"]
        assert engine["rates"] == {
            "prompt_token": state.rates.prompt_token,
            "encoder_run": state.rates.encoder_run,
            "processing": state.rates.processing,
            "processing_megabyte": state.rates.processing_megabyte,
            "decoded_token": state.rates.decoded_token,
            "beside": 0.25,
        }


async def test_a_client_that_leaves_ends_its_request_at_the_engine() -> None:
    async def begin(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        send_chunk(writer, b"data: 1\n\n")
        await writer.drain()
        while True:  # fails once nobody reads it
            send_chunk(writer, b"data: 2\n\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(FakeEngine("a", answer=begin)) as served:
        (engine,) = served.engines
        body = {"model": "nano", "prompt": "x", "stream": True}
        async with served.client.stream("POST", "/v1/completions", json=body) as response:
            assert await anext(response.aiter_lines()) == "data: 1"
            engine.left.clear()
        async with asyncio.timeout(30):
            await engine.left.wait()
        await served.until(lambda: served.frontend.active == 0)
        (state,) = served.fleet.router.engines.values()
        assert state.num_requests == 0


async def test_a_client_that_leaves_while_models_are_told_says_nothing_of_the_engine() -> None:
    async def begin(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        await writer.drain()
        await asyncio.Event().wait()

    async with serving(FakeEngine("a", answer=begin)) as served:
        (engine,) = served.engines
        asked = asyncio.create_task(served.client.get("/v1/models?begin"))
        await served.until(lambda: engine.received)
        await asyncio.sleep(0.05)  # the front-end has the answer's head
        asked.cancel()
        await served.until(lambda: served.frontend.active == 0)
        assert served.fleet.router.engines["a"].accepts


async def test_media_that_came_by_name_are_looked_for_at_all_engines() -> None:
    async def unknown(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if engine.name == "c":
            reply(writer, 200, {"engine": "c"})
        else:
            reply(writer, 422, {"error": {"code": "media_not_cached"}})

    async with serving(*(FakeEngine(name, answer=unknown) for name in "abc")) as served:
        for _ in range(3):
            response = await served.ask([{"type": "image_url", "uuid": "cat"}])
            assert response.json() == {"engine": "c"}
    async with serving(*(FakeEngine(name, answer=unknown) for name in "ab")) as served:
        response = await served.ask([{"type": "image_url", "uuid": "cat"}])
        assert response.status_code == 422
        assert response.json()["error"]["code"] == "media_not_cached"


async def test_stored_responses_are_found_where_they_are() -> None:
    async def store(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        name = f"resp_{engine.name}"
        if request.method == "POST":
            reply(writer, 200, {"id": name})
        elif request.target.endswith(name):
            reply(writer, 200, {"id": name, "held": True})
        else:
            reply(writer, 404, {"error": {}})

    async with serving(*(FakeEngine(name, answer=store) for name in "abc")) as served:
        for name in ("resp_a", "resp_c"):
            assert (await served.client.get(f"/v1/responses/{name}")).json()["held"]
        assert (await served.client.get("/v1/responses/resp_x")).status_code == 404
        body = {"model": "nano", "input": "and?", "previous_response_id": "resp_c"}
        response = await served.client.post("/v1/responses", json=body)
        assert response.json() == {"id": "resp_c"}
        assert response.headers["x-lookonce-route"].startswith("stored;")


async def test_aborts_reach_every_engine() -> None:
    async def abort(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 200, {"aborted": [engine.name]})

    async with serving(*(FakeEngine(name, answer=abort) for name in "ab")) as served:
        body = {"request_ids": ["x"]}
        response = await served.client.post("/inference/v1/abort_requests", json=body)
        assert response.json() == {"aborted": ["a", "b"]}


async def test_what_was_saved_and_what_runs_is_told_of_all_engines() -> None:
    saved = {
        "a": {"day": "2026-01-31", "saved": {"media": 1, "media_seconds": 0.5}, "tenants": {}},
        "b": {"day": "2026-02-01", "saved": {"media": 2, "media_seconds": 0.25}},
        "c": {"day": "2026-02-01", "saved": {"media": 4, "media_seconds": 0.25}},
    }
    saved["b"]["tenants"] = {"one": {"media": 2}}
    saved["c"]["tenants"] = {"one": {"media": 3}, "two": {"media": 1}}

    async def tell(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.headers.get("authorization") == "Bearer wrong":
            reply(writer, 401, {"error": {}})
        else:
            told = {"server_load": 2} if request.target == "/load" else saved[engine.name]
            reply(writer, 200, told)

    engines = [FakeEngine(name, answer=tell, model=f"of {name}") for name in "abc"]
    async with serving(*engines) as served:
        assert (await served.client.get("/load")).json() == {"server_load": 6}
        assert (await served.client.get("/savings")).json() == {
            "day": "2026-02-01",
            "saved": {"media": 6, "media_seconds": 0.5},
            "tenants": {"one": {"media": 5}, "two": {"media": 1}},
        }
        headers = {"authorization": "Bearer wrong"}
        assert (await served.client.get("/savings", headers=headers)).status_code == 401


async def test_models_are_listed_and_served_by_name() -> None:
    async with serving(FakeEngine("a"), FakeEngine("b", model="other")) as served:
        listed = (await served.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["nano", "other"]
        assert (await served.ask(model="other")).json()["engine"] == "b"
        missing = await served.ask(model="third")
        assert missing.status_code == 404
        assert "nano, other" in missing.json()["error"]["message"]


async def test_of_several_models_one_has_to_be_named() -> None:
    chat, stored = {"messages": []}, {"previous_response_id": "resp_1"}
    form: Any = {"file": ("a.wav", b"a")}
    async with serving(FakeEngine("a"), FakeEngine("b", model="other")) as served:
        refused = [
            await served.client.post("/v1/chat/completions", json=chat),
            await served.client.post("/tokenize", json={"prompt": "x", "model": None}),
            await served.client.post("/v1/audio/transcriptions", files=form),
        ]
        for answer in refused:
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "model"
            assert "nano, other" in answer.json()["error"]["message"]
        assert not any(engine.received for engine in served.engines)
        for path, body in (("/v1/conversations", {}), ("/v1/responses", stored), ("/other", chat)):
            assert (await served.client.post(path, json=body)).status_code == 200
    async with serving(FakeEngine("a"), FakeEngine("b")) as served:
        assert (await served.client.post("/v1/chat/completions", json=chat)).status_code == 200


async def test_a_stranger_is_not_told_the_models() -> None:
    async def refuse(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 401, {})

    engines = FakeEngine("a", answer=refuse), FakeEngine("b", model="other", answer=refuse)
    async with serving(*engines, api_key=("key",)) as served:
        answer = await served.client.post("/v1/chat/completions", json={"messages": []})
        assert (answer.status_code, answer.json()) == (401, {})


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_clients_get_errors_of_their_shape(path: str) -> None:
    async with serving(FakeEngine("a")) as served:
        headers = {"x-request-id": "mine"}
        missing = await served.client.post(path, json={"model": "third"}, headers=headers)
        assert missing.status_code == 404
        message = "there is no model 'third'; there is: nano"
        assert missing.json() == {
            "type": "error",
            "error": {"type": "not_found_error", "message": message},
        }
        assert missing.headers["request-id"] == missing.headers["x-request-id"] == "mine"
        form = await served.client.post(path, data={"a": "b"})
        assert (form.status_code, form.json()["type"]) == (415, "error")


async def test_an_answer_of_the_front_end_has_the_requests_id() -> None:
    async with serving(FakeEngine("a")) as served:
        for path in ("/ready", "/metrics", "/fleet"):
            answer = await served.client.get(path, headers={"x-request-id": "mine"})
            assert answer.headers.get_list("x-request-id") == ["mine"]
            assert (await served.client.get(path)).headers["x-request-id"]
        refused = await served.client.post("/v1/completions", data={"a": "b"})
        assert refused.status_code == 415
        assert refused.headers["x-request-id"]


async def test_a_redirect_stays_at_the_front_end() -> None:
    async def redirect(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        place = b"http://" + request.headers["host"].encode() + b"/v1/completions"
        head = b"HTTP/1.1 307 X\r\ncontent-length: 0\r\nlocation: %b\r\n\r\n"
        writer.write(head % place)

    async with serving(FakeEngine("a", answer=redirect)) as served:
        answer = await served.client.post("/v1/completions/", json={"model": "nano"})
        assert (answer.status_code, answer.headers["location"]) == (307, "/v1/completions")


@pytest.mark.parametrize("named_first", [True, False])
async def test_a_form_goes_to_the_model_that_it_names(named_first: bool) -> None:
    sound = ("file", ("a.wav", b'\r\n--x\r\nname="model"\r\n\r\nnano' * 1000))
    fields = [("model", (None, "ear")), ("response_format", (None, "text"))]
    form: Any = [*fields, sound] if named_first else [sound, *fields]
    async with serving(FakeEngine("a"), FakeEngine("b", model="ear")) as served:
        for path in ("transcriptions", "translations"):
            answer = await served.client.post(f"/v1/audio/{path}", files=form)
            assert answer.json()["engine"] == "b"
        form[form.index(fields[0])] = ("model", (None, "third"))
        missing = await served.client.post("/v1/audio/transcriptions", files=form)
        assert missing.status_code == 404
        assert "ear, nano" in missing.json()["error"]["message"]


@pytest.mark.parametrize("sent_as", ["Application/JSON; charset=utf-8", "application/x-mine", None])
async def test_what_is_no_form_is_read_as_json(sent_as: str | None) -> None:
    headers = {} if sent_as is None else {"content-type": sent_as}
    async with serving(FakeEngine("a"), FakeEngine("b", model="other")) as served:
        answer = await served.client.post(
            "/v1/chat/completions", content=b'{"model": "other"}', headers=headers
        )
        assert answer.json()["engine"] == "b"


async def test_adapters_are_listed_and_asked_for_where_they_are() -> None:
    engines = FakeEngine("a"), FakeEngine("b", adapters={"invoices": "11" * 32})
    async with serving(*engines) as served:
        await served.until(lambda: served.fleet.router.models() == ["invoices", "nano"])
        listed = (await served.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("parent")) for card in listed] == [
            ("nano", None),
            ("invoices", "nano"),
        ]
        for number in range(3):
            assert (await served.ask(f"bill {number}", model="invoices")).json()["engine"] == "b"
        shown = await served.client.get("/v1/models/invoices")
        assert shown.headers["x-lookonce-engine"] == "b"
        missing = await served.ask(model="letters")
        assert missing.status_code == 404
        assert "invoices, nano" in missing.json()["error"]["message"]


async def test_a_load_reaches_all_engines_that_take_adapters_and_is_known_when_it_is_answered() -> (
    None
):
    async def load(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if "lora_adapter" not in request.target:
            reply(writer, 200, {"engine": engine.name})
        elif engine.name == "fixed":
            reply(writer, 403, {"error": {"message": "started without --lora-dir"}})
        elif engine.name == "full":
            reply(writer, 400, {"error": {"message": "8 adapters are loaded"}})
        else:
            name = request.json["lora_name"]
            if request.target.endswith("unload_lora_adapter"):
                del engine.adapters[name]
            else:
                engine.adapters[name] = "22" * 32
            reply(writer, 200, {})

    engines = [FakeEngine(name, answer=load) for name in ("fixed", "a", "b")]
    body = {"lora_name": "letters", "lora_path": "letters"}
    async with serving(*engines) as served:
        assert (await served.client.post("/v1/load_lora_adapter", json=body)).status_code == 200
        found = {(await served.ask(str(n), model="letters")).json()["engine"] for n in range(8)}
        assert found <= {"a", "b"}
        assert (await served.client.post("/v1/unload_lora_adapter", json=body)).status_code == 200
        refused = await served.ask(model="letters")
        assert refused.status_code == 404
        assert refused.json()["error"]["param"] == "model"
    async with serving(FakeEngine("a", answer=load), FakeEngine("full", answer=load)) as served:
        refused = await served.client.post("/v1/load_lora_adapter", json=body)
        assert (refused.status_code, "8 adapters" in refused.text) == (400, True)
    async with serving(FakeEngine("fixed", answer=load)) as served:
        assert (await served.client.post("/v1/load_lora_adapter", json=body)).status_code == 403


async def test_an_engine_that_starts_later_loads_what_was_loaded_before_it_gets_requests() -> None:
    loaded = asyncio.Event()

    async def load(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if "lora_adapter" not in request.target:
            reply(writer, 200, {"engine": engine.name})
            return
        if engine.name == "later":
            await loaded.wait()
        if request.headers.get("authorization") != "Bearer one":
            reply(writer, 403, {"error": {}})
        elif request.target.endswith("unload_lora_adapter"):
            engine.adapters.pop(request.json["lora_name"], None)
            reply(writer, 200, {})
        else:
            content = "33" if engine.name == "other" else "22"
            engine.adapters[request.json["lora_name"]] = content * 32
            reply(writer, 200, {})

    later, other = FakeEngine("later", answer=load), FakeEngine("other", answer=load)
    body = {"lora_name": "letters", "lora_path": "letters"}
    keys = {"api_key": ("a:none", "a:one:admin")}
    headers = {"authorization": "Bearer one"}
    async with (
        serving(FakeEngine("a", answer=load), **keys) as served,
        later,
        other,
    ):
        served.client.headers.update(headers)

        def start(*engines: FakeEngine) -> None:
            told = [EngineAddress(e.name, e.model, e.address) for e in (*served.engines, *engines)]
            served.fleet.update({each.name: each for each in told})

        assert (await served.client.post("/v1/load_lora_adapter", json=body)).status_code == 200
        start(later)
        await served.until(lambda: later.received)
        assert len(served.fleet.ready()) == 1
        loaded.set()
        await served.until(lambda: len(served.fleet.ready()) == 2)
        assert later.adapters == served.engines[0].adapters
        assert later.received[0].json == body | {"load_inplace": True}
        start(later, other)
        await served.until(lambda: len(served.fleet.ready()) == 3)
        asked = [(await served.ask(str(n), model="letters")).json()["engine"] for n in range(9)]
        answers = await asyncio.gather(*(served.ask(str(n)) for n in range(9)))
        assert "other" in {answer.json()["engine"] for answer in answers}
        assert set(asked) <= {"a", "later"}
        await served.client.post("/v1/unload_lora_adapter", json=body)
        assert (await served.ask(model="letters")).status_code == 404
        start()
        start(later)
        await served.until(lambda: len(served.fleet.ready()) == 2)
        assert not later.adapters


def keeping(
    before: Callable[[FakeEngine, Received], Awaitable[None]] | None = None, key: str = "one"
) -> Answer:
    """Loads and unloads adapters for one key, when `before` is done; contents are the path's."""

    async def answer(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if "lora_adapter" not in request.target:
            reply(writer, 200, {"engine": engine.name})
            return
        if before is not None:
            await before(engine, request)
        if request.headers.get("authorization") != f"Bearer {key}":
            reply(writer, 401, {"error": {}})
        elif request.target.endswith("unload_lora_adapter"):
            engine.adapters.pop(request.json["lora_name"], None)
            reply(writer, 200, {})
        else:
            engine.adapters[request.json["lora_name"]] = request.json["lora_path"] * 32
            reply(writer, 200, {})

    return answer


ADMIN = {"api_key": ("a:none", "a:one:admin")}


async def load(served: Served, name: str, path: str) -> None:
    body = {"lora_name": name, "lora_path": path}
    headers = {"authorization": "Bearer one"}
    done = await served.client.post("/v1/load_lora_adapter", json=body, headers=headers)
    assert done.status_code == 200


def start(served: Served, *engines: FakeEngine) -> None:
    """Beside those that there are."""
    all_engines = [*served.engines, *engines]
    served.fleet.update({e.name: EngineAddress(e.name, e.model, e.address) for e in all_engines})


async def test_a_probe_that_fails_takes_no_adapter_from_engines_that_start_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 0.01)
    later = FakeEngine("later", answer=keeping())
    async with serving(FakeEngine("a", answer=keeping()), **ADMIN) as served, later:
        (first,) = served.engines
        await load(served, "letters", "22")
        first.probes["/inference/v1/media_cache"] = 0
        await served.until(lambda: first.probes["/inference/v1/media_cache"] > 2)
        assert served.fleet.ready()  # nothing else is wrong with it
        first.probes.clear()
        start(served, later)
        await served.until(lambda: len(served.fleet.ready()) == 2)
        assert later.adapters == {"letters": "22" * 32}


async def test_what_is_loaded_is_changed_by_engines_alone_and_at_all_whether_the_client_stays() -> (
    None
):
    asked, release = asyncio.Event(), asyncio.Event()

    async def wait(engine: FakeEngine, request: Received) -> None:
        if engine.name == "a" and engine.adapters:
            asked.set()
            await release.wait()

    engines = [FakeEngine(name, answer=keeping(wait)) for name in ("a", "b")]
    later, last = FakeEngine("later", answer=keeping()), FakeEngine("last", answer=keeping())
    async with serving(*engines, **ADMIN) as served, later, last:

        async def leave(route: str, path: str, key: str) -> None:
            body = {"lora_name": "letters", "lora_path": path, "load_inplace": True}
            headers = {"authorization": f"Bearer {key}"}
            asked.clear()
            release.clear()
            sent = asyncio.create_task(served.client.post(route, json=body, headers=headers))
            await asked.wait()
            sent.cancel()
            await asyncio.wait({sent})

        await load(served, "letters", "22")
        await leave("/v1/unload_lora_adapter", "", "wrong")
        start(served, later)
        await served.until(lambda: len(served.fleet.ready()) == 3)
        assert later.adapters == {"letters": "22" * 32}
        release.set()
        await served.until(lambda: served.frontend.active == 0)
        await leave("/v1/load_lora_adapter", "33", "one")
        release.set()
        await served.until(lambda: served.frontend.active == 0)
        start(served, later, last)
        await served.until(lambda: len(served.fleet.ready()) == 4)
        for engine in (*engines, later, last):
            assert engine.adapters == {"letters": "33" * 32}


async def test_an_engine_that_was_lost_while_it_loaded_adapters_loads_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 0.01)
    tries = 0

    async def lose(engine: FakeEngine, request: Received) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionError

    later = FakeEngine("later", answer=keeping(lose))
    async with serving(FakeEngine("a", answer=keeping()), **ADMIN) as served, later:
        await load(served, "letters", "22")
        start(served, later)
        await served.until(lambda: len(served.fleet.ready()) == 2)
        assert served.fleet.router.engines["later"].serves("letters")


async def test_an_engine_that_could_not_load_adapters_tries_again_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 0.01)
    full = True

    async def answer(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if full:
            reply(writer, 400, {"error": {}})
        else:
            await keeping()(engine, request, writer)

    later = FakeEngine("later", answer=answer)
    async with serving(FakeEngine("a", answer=keeping()), **ADMIN) as served, later:
        await load(served, "letters", "22")
        start(served, later)
        await served.until(lambda: len(served.fleet.ready()) == 2)
        assert not served.fleet.router.engines["later"].serves("letters")
        later.ready = full = False
        await served.until(lambda: len(served.fleet.ready()) == 1)
        later.ready = True
        await served.until(lambda: len(served.fleet.ready()) == 2)
        assert served.fleet.router.engines["later"].serves("letters")


async def test_what_is_loaded_while_an_engine_starts_is_loaded_there_too() -> None:
    loading, loaded = asyncio.Event(), asyncio.Event()

    async def wait(engine: FakeEngine, request: Received) -> None:
        loading.set()
        await loaded.wait()

    later = FakeEngine("later", answer=keeping(wait))
    async with serving(FakeEngine("a", answer=keeping()), **ADMIN) as served, later:
        await load(served, "letters", "22")
        start(served, later)
        await loading.wait()
        await load(served, "bills", "33")
        await load(served, "letters", "44")
        loaded.set()
        await served.until(lambda: len(served.fleet.ready()) == 2)
        assert later.adapters == {"letters": "44" * 32, "bills": "33" * 32}
        assert served.fleet.router.engines["later"].serves("letters")


async def test_what_is_loaded_again_is_loaded_with_an_admin_key_that_is_valid_now(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The key that it was loaded with may be revoked by then."""
    second = keeping(key="three")
    later, last = FakeEngine("later", answer=second), FakeEngine("last", answer=second)
    keys = {"api_key": ("a:none", "a:one:admin", "a:three:admin")}
    async with serving(FakeEngine("a", answer=keeping()), **keys) as served, later, last:
        await load(served, "letters", "22")
        served.write_keys("a:none", "a:three:admin")
        start(served, later)
        await served.until(lambda: len(served.fleet.ready()) == 2)
        assert later.adapters == {"letters": "22" * 32}
        served.write_keys("a:none")
        start(served, later, last)
        await served.until(lambda: len(served.fleet.ready()) == 3)
        assert not last.adapters
        assert "no admin key" in caplog.text


def test_engines_are_asked_with_the_first_key_that_is_valid_now(tmp_path: Path) -> None:
    file, moment = tmp_path / "keys", 0.0
    file.write_text("# ops\n\n  a:one:expires=1970-01-01T00:00:10Z\ntwo\na:three:admin\n")
    keys = EngineKeys(str(file), lambda: moment)
    assert (keys.first(), keys.first(admin=True)) == ("one", "three")
    moment = 10.0
    assert (keys.first(), keys.first(admin=True)) == ("two", "three")
    file.write_text("four\n")
    assert (keys.first(), keys.first(admin=True)) == ("four", None)
    file.write_text("five\nfour\n")
    assert keys.first() == "four"  # engines may not know the other one yet
    file.write_text("a:b:wizard\n")
    assert keys.first() == "four"  # as it was
    file.unlink()
    assert keys.first() == "four"
    with pytest.raises(ConfigError, match="cannot be read"):
        EngineKeys(str(file))
    assert EngineKeys(None).first() is None


async def test_what_engines_do_is_shown_to_admins_and_metrics_to_all() -> None:
    keys = {"api_key": ("a:one:admin", "b:two")}
    async with serving(FakeEngine("a"), **keys) as served:
        found = {}
        for key in ("", "three", "two", "one"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            for path in ("/fleet", "/metrics", "/ready"):
                answer = await served.client.get(path, headers=headers)
                found[key, path] = answer.status_code
        assert [found[key, "/fleet"] for key in ("", "three", "two", "one")] == [401, 401, 403, 200]
        assert {found[each] for each in found if each[1] != "/fleet"} == {200}


async def test_engines_are_asked_for_metrics_once_for_all_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookonce.fleet.frontend.METRICS_SECONDS", 3600)
    async with serving(FakeEngine("a"), FakeEngine("b")) as served:
        asked = await asyncio.gather(*(served.client.get("/metrics") for _ in range(8)))
        asked.append(await served.client.get("/metrics"))
        for answer in asked:
            assert 'lookonce_encoder_runs_total{engine="b"} 3' in answer.text
        assert [engine.metrics_told for engine in served.engines] == [1, 1]


async def test_a_front_end_without_descriptors_says_so_of_itself_and_closes_what_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    release = asyncio.Event()

    async def wait(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        reply(writer, 200, {"engine": engine.name})

    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 0.01)
    async with serving(FakeEngine("a", answer=wait), FakeEngine("b", answer=wait)) as served:
        with monkeypatch.context() as full:
            full.setattr("lookonce.fleet.engine_http.EngineClient._connect", refuse)
            for member in served.fleet.members.values():
                member.client.close()
            refused = await served.ask()
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "unavailable"
            for member in served.fleet.members.values():
                member.look()
        await served.until(lambda: len(served.fleet.ready()) == 2)
        release.set()
        assert (await served.ask()).status_code == 200


async def test_connections_that_wait_are_few_over_all_engines_and_give_way() -> None:
    idle = IdleConnections(3)
    async with FakeEngine("a") as one, FakeEngine("b") as other:
        clients = [EngineClient(engine.address, idle) for engine in (one, other)]
        answers = [await client.request("GET", "/x") for client in clients for _ in range(3)]
        for answer in answers:
            await answer.body()
            answer.close()
        assert len(idle) == 3
        assert [len(client.idle) for client in clients] == [0, 3]  # those used last
        assert idle.close()
        assert (len(idle), len(clients[1].idle)) == (0, 0)


async def test_what_goes_on_with_another_models_conversation_is_told_both_models() -> None:
    async def store(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        kind = "conv" if request.target.endswith("conversations") else "resp"
        reply(writer, 200, {"id": f"{kind}_{engine.name}"})

    engines = FakeEngine("a", answer=store), FakeEngine("b", model="other", answer=store)
    async with serving(*engines) as served:
        made = await served.client.post("/v1/conversations", json={"model": "other"})
        assert made.json() == {"id": "conv_b"}
        body = {"model": "other", "input": "hello", "conversation": "conv_b"}
        assert (await served.client.post("/v1/responses", json=body)).json() == {"id": "resp_b"}
        refused = await served.client.post("/v1/responses", json=body | {"model": "nano"})
        assert refused.status_code == 400
        assert "'other'" in refused.text
        assert "'nano'" in refused.text
        assert not served.named("a").received


async def test_a_refused_websocket_is_answered_as_any_other_request() -> None:
    async def refuse(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 401, {"error": {"code": "invalid_api_key"}})

    engines = FakeEngine("a", answer=refuse), FakeEngine("b", model="other", answer=refuse)
    async with serving(*engines) as served:

        async def refused(origin: str = "", model: str = "other") -> tuple[bytes, bytes]:
            reader, writer = await asyncio.open_connection(*served.address)
            writer.write(
                f"GET /v1/realtime?model={model} HTTP/1.1\r\n".encode() + b"host: localhost\r\n"
                b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
                b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
                + (f"origin: {origin}\r\n" if origin else "").encode()
                + b"\r\n"
            )
            status = (await reader.readline()).split()[1]
            told = await reader.readuntil(b"}}")
            writer.close()
            return status, told.partition(b"\r\n\r\n")[2]

        status, told = await refused(model="")
        assert (status, json.loads(told)["error"]["param"]) == (b"400", "model")
        status, told = await refused()
        assert (status, json.loads(told)) == (b"401", {"error": {"code": "invalid_api_key"}})
        assert [len(engine.received) for engine in engines] == [0, 1]
        status, told = await refused("https://evil.example")
        assert (status, json.loads(told)["error"]["code"]) == (b"403", "origin_not_allowed")
        served.fleet.update({})
        status, told = await refused()
        assert (status, json.loads(told)["error"]["code"]) == (b"503", "not_ready")


async def test_tenants_are_apart() -> None:
    keys = {"api_key": ("a:one:admin", "b:two")}
    async with serving(FakeEngine("a"), FakeEngine("b"), **keys) as served:
        data = base64.b64encode(b"cat").decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        body = {"model": "nano", "messages": [{"role": "user", "content": [part]}]}
        known = []
        for key in ("one", "one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            answer = await served.client.post("/v1/chat/completions", json=body, headers=headers)
            known.append("media 1/1" in answer.headers["x-lookonce-route"])
        assert known == [False, True, False]


async def test_of_a_stranger_s_request_no_more_is_read_than_engines_read_to_refuse_it() -> None:
    async with serving(FakeEngine("a"), api_key=("a:one:admin", "b:two")) as served:
        for key in ("three", "", "two"):
            reader, writer = await asyncio.open_connection(*served.address)
            head = f"authorization: Bearer {key}\r\n" if key else ""
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n{head}"
                "content-type: application/json\r\ncontent-length: 100000\r\n\r\n".encode()
            )
            if key == "two":
                writer.write(b'{"messages":"%b"}' % (b"x" * (100_000 - 15)))
            status = (await reader.readline()).split()[1]  # not all of the body has come
            assert status == (b"200" if key == "two" else b"401")
            writer.close()
        assert len(served.engines[0].received) == 1
        small = await served.client.post("/v1/chat/completions", json={"session": "x"})
        assert small.json()["engine"] == "a"  # which refuses it in its own words


async def test_bodies_that_wait_have_a_limit_by_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    release = asyncio.Event()

    async def wait(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        reply(writer, 200, {})

    monkeypatch.setattr("lookonce.fleet.frontend.MAX_HELD_BYTES", 1 << 20)
    async with serving(FakeEngine("a", answer=wait), api_key=("a:one:admin", "b:two")) as served:

        async def ask(key: str) -> int:
            body = {"prompt": "x" * 400_000}
            headers = {"authorization": f"Bearer {key}"}
            return (
                await served.client.post("/v1/completions", json=body, headers=headers)
            ).status_code

        first = asyncio.create_task(ask("one"))
        await served.until(lambda: served.engines[0].received)
        assert await ask("one") == 429
        other = asyncio.create_task(ask("two"))
        await served.until(lambda: len(served.engines[0].received) == 2)
        release.set()
        assert (await first, await other) == (200, 200)
        assert await ask("one") == 200


async def test_each_connection_may_have_one_to_an_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant's streams left no descriptor to reach engines for anybody."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (1000, 1000))
    async with serving(FakeEngine("a")) as served:
        assert (await served.ask()).status_code == 200
        told = re.search(r"at most (\d+) connections", caplog.text)
        assert told
        assert int(told[1]) <= (1000 - 64) // 2


async def test_an_answer_to_head_ends_with_its_head() -> None:
    async with serving(FakeEngine("a", answer=head_alone)) as served:
        for _ in range(2):
            answer = await served.client.head("/version")
            assert (answer.status_code, answer.headers["content-length"]) == (200, "5")
        assert served.fleet.ready()


async def head_alone(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")


@pytest.mark.parametrize("depth", [500, 970, 2000])
async def test_what_is_nested_too_deeply_is_the_engines_to_refuse(depth: int) -> None:
    async with serving(FakeEngine("a")) as served:
        content = b'{"messages":' + b"[" * depth + b"]" * depth + b"}"
        headers = {"content-type": "application/json"}
        answer = await served.client.post("/v1/completions", content=content, headers=headers)
        assert answer.json()["engine"] == "a"


async def test_a_websocket_that_cannot_be_opened_is_refused_and_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):  # engines are not asked through these
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    async with serving(FakeEngine("a")) as served:
        for query, status in (("model=a#b", b"400"), ("model=a", b"503")):
            reader, writer = await asyncio.open_connection(*served.address)
            writer.write(
                f"GET /v1/realtime?{query} HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\n"
                "upgrade: websocket\r\nsec-websocket-version: 13\r\n"
                "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
            )
            assert (await reader.readline()).split()[1] == status
            assert b'"error"' in await reader.readuntil(b"}}")
            writer.close()
        assert not [record for record in caplog.records if record.exc_info]
        assert [each.target for each in served.engines[0].received] == ["/v1/realtime?model=a"]


async def test_counting_tokens_of_a_response_asks_an_engine_of_its_model() -> None:
    async with serving(FakeEngine("a"), FakeEngine("b", model="other")) as served:
        body = {"model": "other", "input": "hello"}
        counted = await served.client.post("/v1/responses/input_tokens", json=body)
        assert counted.json()["engine"] == "b"
        assert not served.named("a").received


async def test_only_an_answer_binds_what_is_stored_to_an_engine() -> None:
    """A stranger, or a limit, could send what follows to an engine that knows nothing of it."""

    async def store(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.headers.get("authorization") != "Bearer one":
            reply(writer, 401, {})
        elif engine.name == "c":
            reply(writer, 200, {"id": "resp_c"})
        else:
            reply(writer, 404, {"error": {}})

    keys = {"api_key": ("a:one:admin", "b:two")}
    async with serving(*(FakeEngine(name, answer=store) for name in "abc"), **keys) as served:
        assert (await served.client.get("/v1/responses/resp_c")).status_code == 401
        body = {"model": "nano", "input": "and?", "previous_response_id": "resp_c"}
        headers = {"authorization": "Bearer one"}
        for _ in range(3):
            answer = await served.client.post("/v1/responses", json=body, headers=headers)
            assert answer.json() == {"id": "resp_c"}
        assert answer.headers["x-lookonce-engine"] == "c"
        body["previous_response_id"] = "resp_gone"
        served.named("c").answer = failing("c", lambda e, r, w: not_found(w))
        answer = await served.client.post("/v1/responses", json=body, headers=headers)
        assert answer.status_code == 404


async def not_found(writer: asyncio.StreamWriter) -> None:
    reply(writer, 404, {"error": {}})


async def test_without_an_engine_it_says_so_and_engines_may_come_later() -> None:
    async with serving(FakeEngine("a", ready=False), wait=False) as served:
        assert (await served.ask()).status_code == 503
        assert (await served.client.get("/ready")).status_code == 503
        served.engines[0].ready = True
        await served.until(served.fleet.ready)
        assert (await served.ask()).status_code == 200
        assert (await served.client.get("/ready")).status_code == 200
        assert (await served.client.get("/health")).status_code == 200
        metrics = (await served.client.get("/metrics")).text
        assert 'lookonce_fleet_engine_ready{engine="a",model="nano"} 1' in metrics
        assert 'lookonce_encoder_runs_total{engine="a"} 3' in metrics
        assert 'lookonce_media_total{engine="a",modality="image"} 2' in metrics
        found = {family.name for family in text_string_to_metric_families(metrics)}
        assert {"lookonce_encoder_runs", "lookonce_fleet_routed"} <= found
        (engine,) = (await served.client.get("/fleet")).json()["engines"]
        assert engine["ready"]


async def test_a_draining_engine_finishes_and_gets_nothing_new() -> None:
    release = asyncio.Event()

    async def wait(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        reply(writer, 200, {"engine": engine.name})

    engines = [FakeEngine(name, answer=wait) for name in "ab"]
    async with serving(*engines) as served:
        first = asyncio.get_running_loop().create_task(served.ask())
        await served.until(lambda: any(engine.received for engine in engines))
        busy = next(engine for engine in engines if engine.received)
        other = next(engine for engine in engines if engine is not busy)
        served.fleet.update({other.name: EngineAddress(other.name, "nano", other.address)})
        release.set()
        assert (await first).json()["engine"] == busy.name
        for _ in range(3):
            assert (await served.ask()).json()["engine"] == other.name


async def test_broken_requests_are_the_engines_to_refuse() -> None:
    async with serving(FakeEngine("a")) as served:
        headers = {"content-type": "application/json"}
        broken = await served.client.post("/v1/completions", content=b"{", headers=headers)
        assert broken.json() == {"engine": "a", "bytes": 1}
        assert (await served.client.get("/version?x=1")).json()["engine"] == "a"
        assert served.engines[0].received[-1].target == "/version?x=1"
        evil = await served.client.get("/version", headers={"origin": "https://evil.example"})
        assert evil.status_code in (200, 403)
        posted = await served.client.post(
            "/v1/completions", json={}, headers={"origin": "https://evil.example"}
        )
        assert posted.status_code == 403


# --- front-ends that are replaced ----------------------------------------------------------------


async def test_a_front_end_that_drains_answers_open_connections_and_closes_them() -> None:
    async with serving(FakeEngine("a")) as served:
        assert "connection" not in (await served.ask()).headers
        stopping = asyncio.create_task(served.server.stop())
        await served.until(lambda: served.frontend.draining)
        assert (await served.client.get("/ready")).status_code == 503
        await stopping  # no connection is open any more


async def test_a_request_on_an_open_connection_is_served_while_draining() -> None:
    async with serving(FakeEngine("a")) as served:
        await served.ask()
        stopping = asyncio.create_task(served.server.stop())
        await served.until(lambda: served.frontend.draining)
        response = await served.ask()
        assert response.status_code == 200
        assert response.headers["connection"] == "close"
        await stopping


async def streaming_until(
    released: asyncio.Event, engine: FakeEngine, writer: asyncio.StreamWriter
) -> None:
    begin_stream(writer)
    send_chunk(writer, b"data: 1\n\n")
    await writer.drain()
    await released.wait()
    send_chunk(writer, b"data: [DONE]\n\n")
    send_chunk(writer, b"")


@contextlib.asynccontextmanager
async def draining_fleet(
    served: Served, released: asyncio.Event
) -> AsyncIterator[tuple[AsyncIterator[str], asyncio.Task[None]]]:
    """A fleet that drains at its end: lines of a stream that goes on until `released`, and the
    task of `drain`."""
    served.named("a").answer = lambda engine, _, writer: streaming_until(released, engine, writer)
    body = {"model": "nano", "messages": [], "stream": True}
    async with served.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == "data: 1"
        draining = asyncio.create_task(served.server.drain())
        await served.until(lambda: served.frontend.refusing)
        yield lines, draining


async def test_while_the_fleet_drains_probes_are_told_and_what_runs_goes_on() -> None:
    released = asyncio.Event()
    async with serving(FakeEngine("a")) as served:
        async with draining_fleet(served, released) as (lines, draining):
            # The connection that is open is taken, so this is a new one.
            answer = await served.client.get("/ready")
            assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
            refused = await served.ask()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["connection"] == "close"
            assert not draining.done()
            released.set()
            assert [line async for line in lines if line] == ["data: [DONE]"]
            await draining
        assert len(served.named("a").received) == 1


async def test_what_runs_longer_than_the_drain_timeout_is_cut_off_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="lookonce.audit")
    async with serving(FakeEngine("a"), drain_timeout=0.3) as served:
        async with draining_fleet(served, asyncio.Event()) as (lines, draining):
            await draining
            stopping = asyncio.create_task(served.server.stop())
            rest = [line async for line in lines if line]
            error = json.loads(rest[0].removeprefix("data: "))["error"]
            assert error["code"] == "draining"
            await stopping
        assert served.frontend.retried == 0
    assert not [each for each in caplog.records if each.name == "lookonce.audit"]  # it was served


async def test_what_waits_to_be_accepted_is_served_by_the_next_front_end() -> None:
    owner = ListenerOwner(listening("127.0.0.1", 0))
    try:
        port = owner.port
        first, none = shared_listener("127.0.0.1", port)
        assert none is None
        async with serving(FakeEngine("a"), listener=first) as served:
            assert (await served.ask()).json()["engine"] == "a"
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            body = {"model": "nano", "messages": [{"role": "user", "content": "hello"}]}
            once = {"connection": "close"}
            asked = client.post("/v1/chat/completions", json=body, headers=once)
            waiting = asyncio.create_task(asked)
            await asyncio.sleep(0)  # nobody accepts now
            second, _ = shared_listener("127.0.0.1", port)
            async with serving(FakeEngine("b"), listener=second):
                assert (await waiting).json()["engine"] == "b"
    finally:
        owner.close()


async def test_the_first_front_end_of_a_machine_owns_the_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first, owner = shared_listener("127.0.0.1", port)
    assert owner is not None
    second, none = shared_listener("127.0.0.1", port)
    assert none is None
    with first, second:
        assert first.getsockname() == second.getsockname()
        owner.close()
        third, again = shared_listener("127.0.0.1", port)
        assert again is not None
        again.close()
        third.close()


async def test_memory_is_given_back_once_nothing_more_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: list[int] = []
    monkeypatch.setattr(uvicorn_server, "give_memory_back", lambda: times.append(1))
    async with serving(FakeEngine("a")) as served:
        await served.ask("x" * 2 * uvicorn_server.REST_BYTES)
        await served.until(lambda: times)


async def test_what_the_front_end_refuses_itself_is_in_its_audit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="lookonce.audit")
    async with serving(FakeEngine("a"), api_key=("team:secret",)) as served:
        served.client.headers["authorization"] = "Bearer secret"
        assert (await served.ask(model="none")).status_code == 404
        assert (await served.client.get("/fleet")).status_code == 403
        served.client.headers["authorization"] = "Bearer other"
        assert (await served.ask("x" * 100_000)).status_code == 401
        assert (await served.ask()).status_code == 200  # the engine's own to refuse
        (engine,) = served.engines
        engine.ready = False
        await served.until(lambda: not served.fleet.ready())
        served.client.headers["authorization"] = "Bearer secret"
        assert (await served.ask()).status_code == 503
    told = [
        {name: getattr(line, name, None) for name in ("tenant", "status", "code", "client")}
        for line in caplog.records
        if line.name == "lookonce.audit"
    ]
    known = {"tenant": "team", "client": "127.0.0.1"}
    assert told == [
        known | {"status": 404, "code": "model_not_found"},
        known | {"status": 403, "code": "forbidden"},
        {"tenant": None, "client": "127.0.0.1", "status": 401, "code": "invalid_api_key"},
        known | {"status": 503, "code": "no_engine"},
    ]


async def test_a_refusal_that_another_engine_makes_good_is_in_nobodys_audit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Engines are told which refusals are kept back, and by nobody else."""
    caplog.set_level("INFO", logger="lookonce.audit")

    async def drain(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 503, {"error": {"code": "draining"}})

    async with serving(FakeEngine("a", answer=failing("a", drain)), FakeEngine("b")) as served:
        served.client.headers["x-lookonce-audited"] = "*"
        assert (await served.ask(prompt_cache_key="one")).status_code == 200
        assert (await served.ask(prompt_cache_key="two")).status_code == 200
        sent = {each.headers["x-lookonce-audited"] for e in served.engines for each in e.received}
        assert sent == {"502 503"}
        assert not caplog.records
        served.named("b").answer = drain
        assert (await served.ask()).status_code == 503
    (line,) = (record.__dict__ for record in caplog.records if record.name == "lookonce.audit")
    assert (line["event"], line["status"], line["code"]) == ("refused", 503, "draining")


async def test_engines_are_told_who_asks_and_not_who_somebody_claims_to_be() -> None:
    async with serving(FakeEngine("a")) as served:
        served.client.headers["x-forwarded-for"] = "6.6.6.6"
        await served.ask()
        await served.client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "y"})
        sent = [request.headers["x-forwarded-for"] for request in served.engines[0].received]
        assert sent == ["127.0.0.1", "127.0.0.1"]


async def test_models_are_told_by_another_engine_where_the_one_that_was_asked_dies() -> None:
    async with serving(FakeEngine("a"), FakeEngine("b")) as served:
        served.named("a").kill()
        answer = await served.client.get("/v1/models")
        assert [card["id"] for card in answer.json()["data"]] == ["nano"]


async def test_what_any_engine_can_tell_is_not_asked_of_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookonce.fleet.members.LATE_SECONDS", 0.05)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_TIMEOUT", 60.0)
    async with serving(FakeEngine("a"), FakeEngine("b")) as served:
        served.named("a").stopped = True
        await served.until(lambda: served.fleet.router.engines["a"].late)
        answer = await served.client.get("/v1/models")
        assert [card["id"] for card in answer.json()["data"]] == ["nano"]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/inference/v1/abort_requests"),
        ("POST", "/reset_mm_cache"),
        ("GET", "/load"),
        ("GET", "/savings"),
        ("GET", "/v1/models"),
    ],
)
async def test_what_all_engines_are_asked_waits_for_none_that_hangs(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, known: bool
) -> None:
    """`known`: it is known to be late before they are asked; and what it was asked it reads once
    it goes on."""
    monkeypatch.setattr("lookonce.fleet.members.LATE_SECONDS", 0.3)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_TIMEOUT", 60.0)
    told: dict[str, Any] = {"/load": {"server_load": 2}, "/savings": {"day": "2026-01-31"}}
    told["/inference/v1/abort_requests"] = {"aborted": ["mine"]}

    async def tell(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 200, told.get(request.target, {}))

    async with serving(*(FakeEngine(name, answer=tell) for name in "abc")) as served:
        engine, state = served.named("a"), served.fleet.router.engines["a"]
        assert "x-lookonce-missing" not in (await served.client.get("/load")).headers
        num_received = len(engine.received)
        engine.stopped = True
        if known:
            await served.until(lambda: state.late)
        body = {"request_ids": ["mine", "other"]} if path.endswith("requests") else None
        answer = await served.client.request(method, path, json=body)
        assert engine.stopped
        assert state.late
        assert answer.status_code == 200
        if path == "/v1/models":
            assert [card["id"] for card in answer.json()["data"]] == ["nano"]
            return
        assert answer.headers["x-lookonce-missing"] == "a"
        if path == "/load":
            assert answer.json() == {"server_load": 4}
        engine.stopped = False
        await served.until(lambda: len(engine.received) > num_received)
        assert engine.received[-1].target == path


async def test_an_engine_whose_answer_is_late_is_probed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its next probe would come too late for those who wait."""
    monkeypatch.setattr("lookonce.fleet.members.LATE_SECONDS", 0.3)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_TIMEOUT", 60.0)
    monkeypatch.setattr("lookonce.fleet.members.PROBE_SECONDS", 60.0)

    async def tell(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 200, {"server_load": 2})

    async with serving(FakeEngine("a", answer=tell), FakeEngine("b", answer=tell)) as served:
        served.named("a").stopped = True
        answer = await served.client.get("/load")
        assert answer.json() == {"server_load": 2}
        assert answer.headers["x-lookonce-missing"] == "a"


async def test_engines_that_take_no_requests_are_told_to_be_missing() -> None:
    async with serving(FakeEngine("a"), FakeEngine("b")) as served:
        served.named("b").ready = False
        await served.until(lambda: len(served.fleet.ready()) == 1)
        answer = await served.client.post("/reset_prefix_cache")
        assert answer.headers["x-lookonce-missing"] == "b"


@pytest.mark.parametrize("path", ["/load", "/reset_prefix_cache"])
async def test_refusals_name_no_missing_engines(path: str) -> None:
    """Nothing was put together from engines' answers."""

    async def refuse(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, 403, {"error": {"code": "forbidden"}})

    async with serving(FakeEngine("a", answer=refuse), FakeEngine("b")) as served:
        served.named("b").ready = False
        await served.until(lambda: len(served.fleet.ready()) == 1)
        method = "GET" if path == "/load" else "POST"
        refused = await served.client.request(method, path)
        served.named("a").ready = False
        await served.until(lambda: not served.fleet.ready())
        nobody = await served.client.request(method, path)
        assert [refused.status_code, nobody.status_code] == [403, 503]
        for answer in (refused, nobody):
            assert "x-lookonce-missing" not in answer.headers
