"""A front-end that renders over engines that fail, refuse and forget: one server to its clients."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from PIL import Image

from lookonce.cache.identity import item_key, media_hash, scope_digest
from lookonce.config import EMBEDDED_MODELS, ITEM_TOPIC, NANO
from lookonce.fleet import generate_events, rendering, routed_engine
from lookonce.fleet.config import RenderedModel
from lookonce.fleet.engine_http import EngineAnswer
from lookonce.fleet.generate_events import events_of
from lookonce.fleet.identity import MAX_VALUES
from lookonce.fleet.index import short
from lookonce.fleet.rendering import MAX_QUOTES
from lookonce.fleet.subscriber import Added, Gone
from lookonce.render.families.registry import load_family
from lookonce.render.prompt.encoder import digest_of_files, template_sources
from lookonce.render.prompt.tokenizer import Tokenizer
from tests.support.drawing import encoded, image_part, picture, text_part
from tests.support.fake_engine import (
    Answer,
    FakeEngine,
    Received,
    begin_stream,
    reply,
    send_chunk,
)
from tests.support.fleet_frontends import RunningFrontend, running_frontend
from tests.support.live_server import until

pytestmark = pytest.mark.timeout(120)
WORDS = {89: "o", 82: "h", 83: "i"}
"""Tokens of the embedded model."""
FACTS = {"max_model_len": 4096, "vocab_size": 1024, "modalities": ["image", "audio"]}
ODD_TOKEN = (
    b'data: {"choices": [{"index": 0, "token_ids": [82],'
    b' "logprobs": {"content": [{"token": "h", "logprob": 0, "top_logprobs":'
    b' [{"token": "h", "logprob": 0}]}]}}]}\n\n'
)
"""Its log-probabilities name no token id."""
NO_EVENTS = (
    *(b"nonsense\n\n", b"data: \xff\n\n", b'data: {"choices": 3}\n\n', ODD_TOKEN),
    b"x" * 1000,
    b'data: {"choices": [{"index": 0, "token_ids": [82]}]}\n\n',
)
"""The last ones are never complete, and never end."""
LONG = 100_000
"""Tokens of an answer."""
GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
CHAT = "/v1/chat/completions"


def fingerprint() -> bytes:
    family = load_family(Path(EMBEDDED_MODELS[NANO]), "float32")
    assert family is not None
    return family.fingerprint()


def renders_as_here(name: str, model: str = "nano") -> FakeEngine:
    """An engine with the files of the embedded model."""
    digest = files_digest(Path(EMBEDDED_MODELS[NANO]))
    return FakeEngine(
        name, model, fingerprint=fingerprint().hex(), files_digest=digest, facts=FACTS
    )


def files_digest(folder: Path) -> str:
    return digest_of_files(folder, template_sources(folder, Tokenizer.load(folder)))


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[RunningFrontend, list[FakeEngine]]]:
    fakes = [renders_as_here(name) for name in "abc"]
    models = [RenderedModel(name="nano", model=NANO)]
    with running_frontend([], models, fakes=fakes) as frontend:
        yield frontend, fakes


class Fleet:
    """The front-end and its engines, as one test sees them."""

    def __init__(self, frontend: RunningFrontend, fakes: list[FakeEngine]) -> None:
        self.frontend, self.fakes = frontend, fakes
        for fake in fakes:
            fake.answer, fake.received = generates(82, 83), []
        until(lambda: len(frontend.fleet.ready()) == len(fakes), 30)

    def answered_by(self, answer: Answer, name: str | None = None) -> None:
        """By all engines, or one."""
        for fake in self.fakes:
            if name in (None, fake.name):
                fake.answer = answer

    @property
    def received(self) -> list[Received]:
        return [each for fake in self.fakes for each in fake.received]

    def ask(self, content: Any = "hello", path: str = CHAT, **fields: Any) -> httpx.Response:
        body = {"model": "nano", "messages": [{"role": "user", "content": content}], **fields}
        headers = {"authorization": "Bearer x", "x-request-id": "mine"}
        return httpx.post(self.frontend.url + path, json=body, headers=headers, timeout=30)


@pytest.fixture
def fleet(running: tuple[RunningFrontend, list[FakeEngine]]) -> Fleet:
    return Fleet(*running)


def event(*tokens: int, end: str | None = None, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "token_ids": tokens, "finish_reason": end}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def generates(*tokens: int) -> Answer:
    """An event for each token, then the end."""

    async def answer(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.target != GENERATE:
            reply(writer, 200, {"engine": engine.name})
            return
        begin_stream(writer)
        for token in tokens:
            send_chunk(writer, event(token))
            await writer.drain()
        send_chunk(writer, event(end="stop") + b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    return answer


def dies(*tokens: int) -> Answer:
    """After these tokens the connection is gone."""

    async def answer(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if tokens:
            begin_stream(writer)
        for token in tokens:
            send_chunk(writer, event(token))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.transport.abort()

    return answer


def refuses(status: int, **error: Any) -> Answer:
    async def answer(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        reply(writer, status, {"error": error})

    return answer


def text_of(response: httpx.Response) -> str:
    found: str = response.json()["choices"][0]["message"]["content"]
    return found


def last_event(response: httpx.Response) -> dict[str, Any]:
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    found: dict[str, Any] = json.loads(lines[-1][6:])
    return found


def test_engines_get_tokens_and_what_belongs_to_them(fleet: Fleet) -> None:
    answer = fleet.ask(cache_salt="apart", max_tokens=7, temperature=0.5, stop=["zz"], n=1)
    assert text_of(answer) == "hi"
    assert answer.headers["x-lookonce-engine"] in "abc"
    assert answer.headers["x-request-id"] == "mine"
    (request,) = fleet.received
    assert request.target == GENERATE
    assert request.headers["authorization"] == "Bearer x"
    body = request.json
    assert len(body["token_ids"]) == answer.json()["usage"]["prompt_tokens"]
    told = {name: body.get(name) for name in ("model", "request_id", "cache_salt", "features")}
    assert told == {"model": "nano", "request_id": "mine", "cache_salt": "apart", "features": None}
    assert body["sampling_params"] == {"max_tokens": 7, "temperature": 0.5, "stop": ["zz"]}
    fleet.ask("no limit")
    told = [each.json.get("shorten_max_tokens", False) for each in fleet.received]
    assert sorted(told) == [False, True]


def test_arguments_of_the_processor_go_with_media(fleet: Fleet) -> None:
    """Their names depend on them."""
    arguments = {"max_pixels": 4000, "min_pixels": 3136}
    content = [image_part(picture(("green", "circle"))), text_part("?")]
    told = {}
    for salted in (False, True):
        fields = {"mm_processor_kwargs": arguments, "cache_salt": "x"} if salted else {}
        assert text_of(fleet.ask(content, **fields)) == "hi"
        (request,) = fleet.received
        assert request.target == GENERATE
        assert request.json.get("mm_processor_kwargs") == fields.get("mm_processor_kwargs")
        told[salted] = request.json["features"]["mm_hashes"]["image"]
        fleet = Fleet(fleet.frontend, fleet.fakes)
    assert told[True] != told[False]


def test_anthropics_messages_have_a_salt_and_no_arguments_of_the_processor(fleet: Fleet) -> None:
    fields = {"mm_processor_kwargs": {"max_pixels": 1}, "cache_salt": "x", "max_tokens": 4}
    url = image_part(picture(("green", "square")))["image_url"]["url"]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    answer = fleet.ask([{"type": "image", "source": source}], "/v1/messages", **fields)
    assert answer.status_code == 200
    (request,) = fleet.received
    assert request.target == GENERATE
    assert request.json["cache_salt"] == "x"
    assert "mm_processor_kwargs" not in request.json


def test_a_completion_of_several_prompts_stays_one_request(fleet: Fleet) -> None:
    """An engine counts what it gets to the limits of a tenant."""
    for prompt, target in (
        ("a", GENERATE),
        (["a"], GENERATE),
        ([72, 73], GENERATE),
        ([[72, 73]], GENERATE),
        (["a", "b"], "/v1/completions"),
        ([[72], [73]], "/v1/completions"),
    ):
        fleet = Fleet(fleet.frontend, fleet.fakes)
        assert fleet.ask(path="/v1/completions", prompt=prompt).status_code == 200
        assert [each.target for each in fleet.received] == [target]


@pytest.mark.parametrize("size", range(1, 80))
def test_events_are_read_wherever_they_are_cut(size: int) -> None:
    sent = event(72) + event(73, end="stop") + b"data: [DONE]\n\n"

    class Cut:
        async def chunks(self) -> AsyncIterator[bytes]:
            for at in range(0, len(sent), size):
                yield sent[at : at + size]

    async def read() -> list[list[int]]:
        return [each.choices[0].token_ids async for each in events_of(cast(EngineAnswer, Cut()))]

    assert asyncio.run(read()) == [[72], [73]]


def test_a_model_that_cannot_be_opened_keeps_no_other_waiting() -> None:
    fakes = [renders_as_here("a", "gone"), renders_as_here("b")]
    models = [RenderedModel(name="gone", model="/gone"), RenderedModel(name="nano", model=NANO)]
    with running_frontend([], models, fakes=fakes) as frontend:
        assert Fleet(frontend, fakes).ask().status_code == 200
        assert [each.target for each in fakes[1].received] == [GENERATE]


@contextmanager
def serving(data: bytes, hold: threading.Event | None = None) -> Iterator[tuple[Any, Any]]:
    """A content part by the URL of these bytes, which come once `hold` is set, and an event: they
    were asked for."""
    asked = threading.Event()

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            if hold is not None:
                hold.wait(30)
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{site.server_address[1]}/it.png"
            yield {"type": "image_url", "image_url": {"url": url}}, asked
        finally:
            site.shutdown()
            thread.join()


@contextmanager
def fetching(**options: Any) -> Iterator[Fleet]:
    """A front-end that fetches from this machine, before one engine."""
    fake = renders_as_here("a")
    options = {"allow_private_media": True} | options
    models = [RenderedModel(name="nano", model=NANO, options=options)]
    with running_frontend([], models, fakes=[fake]) as frontend:
        yield Fleet(frontend, [fake])


def test_a_request_that_no_engine_has_yet_is_aborted_here() -> None:
    """It waits for a picture. An engine knows nothing of it."""

    async def knows_none(
        engine: FakeEngine, request: Received, writer: asyncio.StreamWriter
    ) -> None:
        if request.target == ABORT:
            reply(writer, 200, {"aborted": []})
        else:
            await generates(82)(engine, request, writer)

    go_on = threading.Event()
    shown = encoded(picture(("red", "square")))
    with (
        fetching() as fleet,
        ThreadPoolExecutor(1) as thread,
        serving(shown, hold=go_on) as (part, asked),
    ):
        fleet.answered_by(knows_none)
        answered = thread.submit(fleet.ask, [part])
        try:
            assert asked.wait(30)
            ids = {"request_ids": ["mine", "another"]}
            told = httpx.post(fleet.frontend.url + ABORT, json=ids)
            assert told.json() == {"aborted": ["mine"]}
        finally:
            go_on.set()
        (choice,) = answered.result(30).json()["choices"]
        assert choice["finish_reason"] == "abort"
        assert [each.target for each in fleet.received] == [ABORT]


def test_more_media_than_a_body_takes_are_fetched_by_engines() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise))
    options = {"max_media_bytes": len(data), "limit_mm_per_prompt": "image=16"}
    with fetching(**options) as fleet, serving(data) as (part, _):
        for number, target in ((1, GENERATE), (14, CHAT)):
            fleet = Fleet(fleet.frontend, fleet.fakes)
            assert fleet.ask([part] * number).status_code == 200
            assert [each.target for each in fleet.received] == [target]


def test_a_stop_string_is_found_here_and_ends_the_stream_at_the_engine(fleet: Fleet) -> None:
    async def goes_on(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        while True:  # fails once nobody reads it
            send_chunk(writer, event(82))
            send_chunk(writer, event(83))
            await writer.drain()
            await asyncio.sleep(0.01)

    fleet.answered_by(goes_on)
    for fake in fleet.fakes:
        fake.left.clear()
    answer = fleet.ask(stream=True, stop=["ih"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in events) == "h"
    assert events[-1]["choices"][0]["stop_reason"] == "ih"
    (request,) = fleet.received
    assert "stop" not in request.json["sampling_params"]
    until(lambda: any(fake.left.is_set() for fake in fleet.fakes), 30)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_before_its_answer_has_begun_is_replaced(
    fleet: Fleet, stream: bool
) -> None:
    first = fleet.ask("die").headers["x-lookonce-engine"]
    fleet.answered_by(dies(), first)
    answer = fleet.ask("die", stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-lookonce-engine"] != first


def test_an_answer_that_is_not_streamed_begins_anew_where_an_engine_dies(fleet: Fleet) -> None:
    first = fleet.ask("anew").headers["x-lookonce-engine"]
    fleet.answered_by(dies(89, 89), first)
    answer = fleet.ask("anew")
    assert text_of(answer) == "hi"
    assert answer.headers["x-lookonce-engine"] != first


def test_a_death_in_the_middle_ends_its_own_stream_with_an_error(fleet: Fleet) -> None:
    fleet.answered_by(dies(82))
    answer = fleet.ask(stream=True)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    assert json.loads(lines[-1][6:])["error"]["code"] == "engine_dead"
    assert any('"content":"h"' in line for line in lines)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_cut_off_as_the_fleet_ends_says_so(stream: bool) -> None:
    async def cut_off(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        send_chunk(writer, event(82))
        await writer.drain()
        await asyncio.sleep(0.1)  # so that it is handed on
        frontend.frontend.cut_off()

    fakes, models = [renders_as_here("a")], [RenderedModel(name="nano", model=NANO)]
    with running_frontend([], models, fakes=fakes) as frontend:
        fleet = Fleet(frontend, fakes)
        fleet.answered_by(cut_off)
        answer = fleet.ask(stream=stream)
        assert answer.status_code == (200 if stream else 503)
        told = last_event(answer) if stream else answer.json()
        assert told["error"]["code"] == "draining"


def test_engines_that_say_503_are_asked_in_turn_and_the_last_answer_stays(fleet: Fleet) -> None:
    fleet.answered_by(refuses(503, message="I drain", type="x", code="draining"))
    answer = fleet.ask()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "I drain"
    assert sorted(len(fake.received) for fake in fleet.fakes) == [1, 1, 1]


def test_a_refusal_is_handed_on(fleet: Fleet) -> None:
    async def limited(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(
            {"error": {"message": "too many", "type": "x", "code": "rate_limit_exceeded"}}
        ).encode()
        writer.write(
            b"HTTP/1.1 429 X\r\nretry-after-ms: 2500\r\nx-ratelimit-limit-requests: 3\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

    fleet.answered_by(limited)
    answer = fleet.ask()
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["x-ratelimit-limit-requests"] == "3"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    fleet.answered_by(
        refuses(400, message="response_format: no", param="response_format", code="bad_request")
    )
    answer = fleet.ask()
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert len(fleet.received) == 2


def test_an_error_about_a_medium_names_its_part(fleet: Fleet) -> None:
    param = "features.mm_hashes.image[1]"
    fleet.answered_by(
        refuses(422, message=f"{param}: is cut off", param=param, code="unprocessable")
    )
    parts = [image_part(picture(("red", kind))) for kind in ("circle", "square")]
    answer = fleet.ask([text_part("these"), *parts])
    error = answer.json()["error"]
    assert answer.status_code == 422
    assert error["param"] == "messages[0].content[2]"
    assert error["message"] == "messages[0].content[2]: is cut off"


def test_a_picture_that_the_engine_holds_is_named_and_sent_where_it_was_forgotten(
    fleet: Fleet,
) -> None:
    shown = picture(("blue", "circle"))
    digest = media_hash(encoded(shown), modality="image", fingerprint=fingerprint())
    key = short(item_key(scope_digest("", None), digest))
    router = fleet.frontend.fleet.router
    content = [image_part(shown), text_part("?")]
    fleet.ask(content)
    for state in router.engines.values():
        router.apply(state, [Added(ITEM_TOPIC, [key])])
    fleet.ask(content)

    async def forgets(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.json["features"]["media_data"]["image"] == [None]:
            reply(writer, 422, {"error": {"message": "gone", "code": "media_not_cached"}})
        else:
            await generates(82)(engine, request, writer)

    fleet.answered_by(forgets)
    assert text_of(fleet.ask(content)) == "h"
    sent = [each.json["features"] for each in fleet.received]
    assert all(each["mm_hashes"]["image"] == [digest.hex()] for each in sent)
    assert (
        sorted(each["media_data"]["image"] == [None] for each in sent) == [False] * 2 + [True] * 2
    )
    for state in router.engines.values():
        router.apply(state, [Gone(ITEM_TOPIC, [key])])


def test_a_client_that_leaves_ends_its_request_at_the_engine(fleet: Fleet) -> None:
    async def waits(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        send_chunk(writer, event(82))
        await writer.drain()

    fleet.answered_by(waits)
    for fake in fleet.fakes:
        fake.left.clear()
    body = {"model": "nano", "prompt": "x", "stream": True}
    with httpx.stream("POST", f"{fleet.frontend.url}/v1/completions", json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
    until(lambda: any(fake.left.is_set() for fake in fleet.fakes), 30)
    until(lambda: fleet.frontend.frontend.active == 0, 30)
    assert not any(state.num_requests for state in fleet.frontend.fleet.router.engines.values())


def test_films_files_uuids_and_what_is_stored_go_to_engines_as_they_came(fleet: Fleet) -> None:
    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    fleet.ask([film])
    fleet.ask([{**image_part(picture(("red", "circle"))), "uuid": "it"}])
    fleet.ask([{"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}}])
    httpx.post(f"{fleet.frontend.url}/v1/responses", json={"model": "nano", "input": "x"})
    assert [each.target for each in fleet.received].count(CHAT) == 3
    assert {each.target for each in fleet.received} == {CHAT, "/v1/responses"}


def test_what_an_engine_has_to_refuse_is_not_in_the_front_ends_audit(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lookonce.audit")
    fleet.ask([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])
    assert [each.target for each in fleet.received] == [CHAT]
    assert not [line for line in caplog.records if line.name == "lookonce.audit"]
    assert fleet.ask(max_tokens=-1).status_code == 400

    def told() -> list[logging.LogRecord]:
        return [line for line in caplog.records if line.name == "lookonce.audit"]

    until(told, 30)  # it is written once the answer is
    (line,) = told()
    assert (line.__dict__["status"], line.__dict__["client"]) == (400, "127.0.0.1")


def test_a_film_that_is_named_otherwise_goes_there_too(fleet: Fleet) -> None:
    """JSON may write a name with escapes."""
    part = b'{"type": "video\\u005furl", "video\\u005furl": {"url": "data:video/mp4;base64,AAAA"}}'
    body = b'{"model": "nano", "messages": [{"role": "user", "content": [%b]}]}' % part
    headers = {"content-type": "application/json"}
    answer = httpx.post(fleet.frontend.url + CHAT, content=body, headers=headers)
    assert answer.status_code in (200, 400)
    assert all(each.target == CHAT for each in fleet.received)


@pytest.mark.parametrize("many", [b'"",' * (MAX_QUOTES // 2), b"0," * MAX_VALUES])
def test_a_body_whose_look_takes_long_goes_there_too(fleet: Fleet, many: bytes) -> None:
    """512 MiB of quotes held the event loop of all tenants for 16 seconds."""
    body = b'{"model": "nano", "messages": [{"role": "user", "content": "x"}], "x": [%b0]}' % many
    headers = {"content-type": "application/json"}
    httpx.post(fleet.frontend.url + CHAT, content=body, headers=headers, timeout=30)
    assert [(each.target, len(each.body)) for each in fleet.received] == [(CHAT, len(body))]


def test_a_long_answer_costs_by_its_length(fleet: Fleet) -> None:
    """Each event was looked for in all that came before it: these took minutes."""

    async def long(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        for index in range(LONG // 1000):
            send_chunk(writer, event(82, index=index) * 999 + event(82, index=index, end="length"))
            await writer.drain()
        send_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    fleet.answered_by(long)
    assert fleet.ask(n=LONG // 1000, max_tokens=1000).json()["usage"]["completion_tokens"] == LONG


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sent", NO_EVENTS)
def test_an_engine_that_sends_no_events_ends_its_own_request(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, sent: bytes, stream: bool
) -> None:
    monkeypatch.setattr(generate_events, "MAX_EVENT_BYTES", 5000)

    async def endless(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        while True:  # fails once nobody reads it
            send_chunk(writer, sent)
            await writer.drain()
            await asyncio.sleep(0.001)

    fleet.answered_by(endless)
    answer = fleet.ask(stream=stream, logprobs=True, top_logprobs=1, max_tokens=50)
    error = answer.json() if answer.status_code != 200 else last_event(answer)
    assert (answer.status_code, "error" in error) in ((500, True), (200, True))
    assert not any(state.num_requests for state in fleet.frontend.fleet.router.engines.values())
    fleet.answered_by(generates(82))
    assert text_of(fleet.ask()) == "h"


@pytest.mark.parametrize("status", [400, 422, 503])
def test_an_engine_whose_refusal_never_ends_is_not_read_to_its_end(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(routed_engine, "MAX_ERROR_BYTES", 5000)

    async def endless(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % status)
        while True:
            send_chunk(writer, b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0.001)

    fleet.answered_by(endless)
    assert fleet.ask().status_code in (status, 500, 503)
    assert not any(state.num_requests for state in fleet.frontend.fleet.router.engines.values())


def test_an_adapter_is_asked_for_where_it_is(fleet: Fleet) -> None:
    try:
        fleet.fakes[1].adapters["letters"] = "22" * 32
        until(lambda: "letters" in fleet.frontend.fleet.router.models(), 30)
        until(lambda: "letters" in fleet.frontend.fleet.processor_of("letters").adapters, 30)
        answer = fleet.ask(model="letters")
        assert answer.headers["x-lookonce-engine"] == "b"
        assert answer.json()["model"] == "letters"
        (request,) = fleet.received
        assert (request.target, request.json["model"]) == (GENERATE, "letters")
    finally:
        fleet.fakes[1].adapters.clear()
        until(lambda: "letters" not in fleet.frontend.fleet.router.models(), 30)


@pytest.mark.parametrize("field", ["fingerprint", "files_digest"])
def test_engines_with_other_files_render_themselves(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    """One was replaced by another with a processor, or a tokenizer, of its own."""
    told = getattr(fleet.fakes[2], field)

    def known() -> set[Any]:
        listed = fleet.frontend.fleet.processors_of("nano").values()
        return {getattr(each, field) for each in listed}

    try:
        setattr(fleet.fakes[2], field, "ab" * 32)
        until(lambda: len(known()) == 2, 30)
        for _ in range(3):
            fleet.ask()
            assert fleet.received[-1].target == CHAT
        assert caplog.text.count("c has other files") == 1
    finally:
        setattr(fleet.fakes[2], field, told)
        until(lambda: len(known()) == 1, 30)
    fleet = Fleet(fleet.frontend, fleet.fakes)
    fleet.ask()
    assert [each.target for each in fleet.received] == [GENERATE]


def test_a_model_is_opened_once_its_files_are_those_of_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "OPEN_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(rendering, "MAX_OPEN_AGAIN_SECONDS", 0.1)
    folder = tmp_path / "nano"
    shutil.copytree(EMBEDDED_MODELS[NANO], folder)
    config = folder / "tokenizer_config.json"
    right = config.read_bytes()
    config.write_bytes(right + b" ")
    fakes = [renders_as_here("a")]
    models = [RenderedModel(name="nano", model=str(folder))]
    with running_frontend([], models, fakes=fakes) as frontend:
        fleet = Fleet(frontend, fakes)
        fleet.ask()
        assert [each.target for each in fleet.received] == [CHAT]
        config.write_bytes(right)

        def is_rendered() -> bool:
            fleet.ask()
            return fleet.received[-1].target == GENERATE

        until(is_rendered, 30)


def test_a_model_is_opened_anew_once_all_its_engines_have_other_files(tmp_path: Path) -> None:
    """What is being answered meanwhile goes on."""
    folder = tmp_path / "nano"
    shutil.copytree(EMBEDDED_MODELS[NANO], folder)
    fakes = [renders_as_here(name) for name in "ab"]
    models = [RenderedModel(name="nano", model=str(folder))]
    release = threading.Event()

    async def held(engine: FakeEngine, request: Received, writer: asyncio.StreamWriter) -> None:
        while not release.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await generates(82, 83)(engine, request, writer)

    with running_frontend([], models, fakes=fakes) as frontend, ThreadPoolExecutor(1) as thread:
        fleet = Fleet(frontend, fakes)
        fleet.answered_by(held)
        waiting = thread.submit(fleet.ask)
        until(lambda: fleet.received, 30)
        assert fleet.received[0].target == GENERATE
        fleet.answered_by(generates(82, 83))
        config = folder / "tokenizer_config.json"
        config.write_bytes(config.read_bytes() + b" ")
        for fake in fakes:
            fake.files_digest = files_digest(folder)

        def known() -> set[str]:
            listed = frontend.fleet.processors_of("nano").values()
            return {each.files_digest for each in listed}

        until(lambda: known() == {files_digest(folder)}, 30)

        def is_rendered() -> bool:
            before = [each.target for each in fleet.received].count(GENERATE)
            fleet.ask()
            return [each.target for each in fleet.received].count(GENERATE) > before

        until(is_rendered, 30)
        release.set()
        assert waiting.result().status_code == 200


def test_engines_that_tell_nothing_keep_no_front_end_waiting() -> None:
    fakes = [FakeEngine("a")]
    models = [RenderedModel(name="nano", model=NANO)]
    with running_frontend([], models, fakes=fakes) as frontend:
        fleet = Fleet(frontend, fakes)
        fleet.ask()
        assert [each.target for each in fleet.received] == [CHAT]
