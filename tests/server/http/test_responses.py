"""Every refusal: its status, its shape, and the part it names.

Then clients that leave, and servers that shut down; at last the head of an answer, which goes out
with what follows it, and never later than that.
"""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from lookonce.errors import (
    ConflictError,
    EngineDeadError,
    MediaForbiddenError,
    QueueFullError,
    RequestFailedError,
    UnprocessableMediaError,
)
from lookonce.server.http.app import build_app
from lookonce.server.http.connections import HeadBufferingTransport

HELLO = [{"role": "user", "content": "hello"}]
MALFORMED = [
    (b"", None, "invalid_json"),
    (b"{", None, "invalid_json"),
    (b'{"messages": [NaN]}', None, "invalid_json"),
    (b'{"messages": "\xff"}', None, "invalid_json"),
    (b"[" * 100_000, None, "invalid_json"),
    (b"[]", None, "invalid_value"),
    (b"{}", "messages", "invalid_value"),
    (
        b'{"messages": [], "response_format": {"type": "json_schema", "json_schema": 3}}',
        "response_format.json_schema",
        "invalid_value",
    ),
    (b'{"messages": "hi"}', "messages", "invalid_value"),
    (b'{"messages": [{"role": "user"}, 3]}', "messages[1]", "invalid_value"),
]


@pytest.mark.parametrize(("body", "param", "code"), MALFORMED)
def test_a_malformed_body_is_400_and_names_its_part(on_site, body, param, code):
    async def scenario(site):
        response = await site.client.post("/v1/chat/completions", content=body)
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error", param, code,
        )  # fmt: skip

    on_site(scenario)


WRONG_FIELDS = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -3}, "max_completion_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"stop": ["ok", 3]}, "stop[1]"),
    ({"stop": ""}, "stop"),
    ({"seed": 2**80}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "much"}}, "logit_bias['5']"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"request_id": "with space"}, "request_id"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_FIELDS)
def test_a_wrong_field_is_400_and_named(on_site, fields, param):
    async def scenario(site):
        body = {"messages": HELLO, **fields}
        response = await site.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert error["message"]
        assert site.engine.tokens_made == {}

    on_site(scenario)


RAISED = [
    (QueueFullError("too many"), 429, "rate_limit_error", "queue_full"),
    (MediaForbiddenError("no", param="messages[0].content[0]"), 403, "permission_error",
     "media_not_allowed"),
    (ConflictError("other bytes"), 409, "conflict_error", "uuid_conflict"),
    (UnprocessableMediaError("broken"), 422, "invalid_request_error", "unprocessable_media"),
    (EngineDeadError("gone"), 503, "service_unavailable_error", "engine_dead"),
    (RequestFailedError("broke"), 500, "server_error", "request_failed"),
]  # fmt: skip


@pytest.mark.parametrize(("raised", "status", "kind", "code"), RAISED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_gets_its_status(on_site, raised, status, kind, code, stream):
    async def scenario(site):
        site.engine.refusal = raised
        response = await site.chat("hi", stream=stream)
        assert response.status_code == status
        assert response.json()["error"] == {
            "message": raised.message, "type": kind, "code": code,
            "param": getattr(raised, "param", None),
        }  # fmt: skip
        assert ("retry-after" in response.headers) == (status in (429, 503))

    on_site(scenario)


def test_a_failure_midway_ends_a_stream_with_an_error_event(on_site):
    async def scenario(site):
        site.engine.failure = EngineDeadError("the engine ended")
        response = await site.chat("hi", stream=True)
        assert response.status_code == 200
        *_, error, done = response.text.strip().split("\n\n")
        assert '"code":"engine_dead"' in error
        assert done == "data: [DONE]"

        whole = await site.chat("hi")
        assert whole.status_code == 503

    on_site(scenario)


def test_an_unexpected_failure_is_500_and_tells_nothing(on_site):
    async def scenario(site):
        site.engine.refusal = ValueError("secret path /srv/x")  # type: ignore[assignment]
        response = await site.chat("hi")
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.json()["error"]["type"] == "server_error"

    on_site(scenario)


def test_no_generation_before_the_engine_is_ready(on_site):
    async def scenario(site):
        for state, code in [("starting", "not_ready"), ("dead", "engine_dead"),
                            ("stuck", "engine_dead")]:  # fmt: skip
            site.engine.state = state
            response = await site.chat("hi")
            assert (response.status_code, response.json()["error"]["code"]) == (503, code)

    on_site(scenario)


def test_another_model_is_404(on_site):
    async def scenario(site):
        response = await site.chat("hi", model="gpt-4o")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert (await site.client.get("/v1/models/gpt-4o")).status_code == 404

    on_site(scenario)


def test_an_unknown_route_or_method_has_the_same_shape(on_site):
    async def scenario(site):
        lost = await site.client.get("/v2/nothing")
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "not_found")
        wrong = await site.client.get("/v1/chat/completions")
        assert wrong.status_code == 405
        assert wrong.json()["error"]["type"] == "invalid_request_error"

    on_site(scenario)


def test_a_body_above_the_limit_is_413(on_site):
    async def scenario(site):
        async def endless():
            while True:
                yield b"x" * 1_000_000

        url = "/v1/chat/completions"
        declared = await site.client.post(url, content=b"x", headers={"Content-Length": "9" * 12})
        assert declared.status_code == 413
        streamed = await site.client.post(url, content=endless())
        assert streamed.status_code == 413
        assert streamed.json()["error"]["code"] == "too_large"

    on_site(scenario, max_media_bytes=1000)


def test_a_prompt_beyond_the_context_says_so(on_site):
    async def scenario(site):
        response = await site.chat("x" * 500)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"

    on_site(scenario)


def test_keys_are_asked_for_where_they_are_set(on_site):
    async def scenario(site):
        assert (await site.chat("hi")).status_code == 401
        wrong = await site.chat("hi")
        assert wrong.headers["www-authenticate"] == "Bearer"
        for header in ("Bearer nope", "Basic one", "one", "Bearer é"):
            site.client.headers["Authorization"] = header
            assert (await site.chat("hi")).status_code == 401
        assert (await site.client.get("/health")).status_code == 200
        assert (await site.client.get("/metrics")).status_code == 200
        site.client.headers["Authorization"] = "Bearer one"
        assert (await site.chat("hi")).status_code == 200

    on_site(scenario, api_key=("one", "acme:two"))


def test_caches_are_reset_by_admins_only(on_site):
    async def scenario(site):
        for key, status in [("one", 403), ("two", 200)]:
            site.client.headers["Authorization"] = f"Bearer {key}"
            for tier in ("mm", "encoder", "prefix"):
                response = await site.client.post(f"/reset_{tier}_cache")
                assert response.status_code == status
        assert site.engine.resets == ["mm", "encoder", "prefix"]

    on_site(scenario, api_key=("one", "acme:two:admin"))


@pytest.mark.parametrize("digits", [19, 25, 400])
@pytest.mark.parametrize(
    "field", ["seed", "n", "max_tokens", "top_k", "temperature", "min_tokens", "prompt_logprobs"]
)
def test_a_number_of_many_digits_is_refused_in_few_words(on_site, field, digits):
    async def scenario(site):
        body = b'{"messages": [{"role": "user", "content": "hi"}], "%s": %s}'
        content = body % (field.encode(), b"9" * digits)
        answer = await site.client.post("/v1/chat/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert len(answer.content) < 300

    on_site(scenario)


def test_a_token_id_of_many_digits_is_refused_in_few_words(on_site):
    async def scenario(site):
        for field in (b'"stop_token_ids": [%s]', b'"logit_bias": {"%s": 1}'):
            body = b'{"messages": [{"role": "user", "content": "hi"}], ' + field % (b"9" * 400)
            answer = await site.client.post("/v1/chat/completions", content=body + b"}")
            assert answer.status_code == 400
            assert len(answer.content) < 300

    on_site(scenario)


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
            "type": "http", "method": "POST", "path": "/v1/chat/completions",
            "headers": [(b"host", b"localhost")],
            "query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        return asyncio.create_task(self._app(scope, self._inbox.get, self._send))

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


async def settled(condition) -> None:
    """Until `condition()` holds; the event loop gets all the turns it needs."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_a_refusal_whose_client_never_takes_it_is_audited(on_site, caplog):
    caplog.set_level("INFO", logger="lookonce.audit")

    async def scenario(site):
        sending = asyncio.Event()

        class Stuck(RawClient):
            async def _send(self, message):
                sending.set()
                await asyncio.Event().wait()

        task = Stuck(build_app(site.services), body(temperature="hot")).start()
        await sending.wait()
        task.cancel()
        await asyncio.wait([task])

    on_site(scenario)
    assert [line.status for line in caplog.records if line.name == "lookonce.audit"] == [400]


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
        site.services.drain.begin()

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


LONG = 1_000_003
ASKED = [
    (route, stream)
    for route in ("/v1/chat/completions", "/v1/responses")
    for stream in (False, True)
]


def with_url(length: int, route: str, stream: bool) -> bytes:
    """A body with a picture's URL of that length."""
    url = "data:image/png;base64,".ljust(length, "A")
    if route == "/v1/responses":
        part: dict[str, object] = {"type": "input_image", "image_url": url}
        body: dict[str, object] = {"input": [{"role": "user", "content": [part]}]}
    else:
        part = {"type": "image_url", "image_url": {"url": url}}
        body = {"messages": [{"role": "user", "content": [part]}]}
    return json.dumps({**body, "stream": stream}).encode()


def kept_urls() -> list[tuple[str, bool]]:
    """Of which of `ASKED` something still refers to the URL: all differ in length."""
    gc.collect()
    containers = gc.get_objects()
    inside = gc.get_referents(*containers)
    inside += gc.get_referents(*(one for one in inside if not gc.is_tracked(one)))
    found = {len(one) - LONG for one in inside if type(one) is str}
    return [asked for number, asked in enumerate(ASKED) if number in found]


def test_the_media_of_a_body_is_not_kept_while_the_answer_is_made(on_site):
    async def scenario(site):
        site.renderer.gate.clear()
        asking = [
            asyncio.create_task(site.client.post(asked[0], content=with_url(LONG + number, *asked)))
            for number, asked in enumerate(ASKED)
        ]
        await settled(lambda: site.renderer.rendering == len(ASKED))
        assert kept_urls() == ASKED
        site.engine.gate.clear()
        site.renderer.gate.set()
        await settled(lambda: len(site.engine.running) == len(ASKED))
        assert kept_urls() == []
        site.engine.gate.set()
        assert [(await each).status_code for each in asking] == [200] * len(ASKED)

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


def test_responses_are_counted_by_status_and_broken_ones_besides(on_site):
    async def scenario(site):
        await site.chat()
        await site.client.post("/v1/chat/completions", content=b"{")
        await site.client.get("/v1/nowhere")
        await site.client.get("/health")
        site.engine.failure = RequestFailedError("broken")
        await site.chat(stream=True)
        await site.chat()
        found = site.services.metrics.counts.read()
        counted = {
            name.partition(":")[2]: values.numbers[0]
            for name, values in found.items()
            if name.startswith("http_responses_total:")
        }
        assert counted == {"200": 2, "400": 1, "404": 1, "500": 1, "503": 0, "broken": 1}
        shown = (await site.client.get("/metrics")).text
        assert 'lookonce_http_responses_total{status="broken"} 1.0' in shown

    on_site(scenario)
