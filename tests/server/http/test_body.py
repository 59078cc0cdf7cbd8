"""Bodies: whatever comes, a struct or a 400 that names a part of it.

Bodies of very many values are refused before they are made, or read beside the event loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from lookonce.config import MediaConfig
from lookonce.errors import BadRequestError, TooLargeError
from lookonce.frontend.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from lookonce.server.http.body import (
    FEW_VALUES,
    MAX_VALUES,
    SMALL_BODY_BYTES,
    parse,
    read_body,
    receive,
)
from lookonce.server.http.responses import ClientLeftError
from lookonce.types.held_bytes import TenantBytes
from tests.support.nodes import engine_node, run
from tests.support.server.doubles import ByteRenderer

KINDS = [ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest]
FIELDS = sorted({f.name for kind in KINDS for f in msgspec.structs.fields(kind)})
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6) | values


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(KINDS), bodies)
def test_any_json_is_taken_or_refused_by_name(kind, body):
    try:
        raw = json.dumps(body, allow_nan=False).encode("utf-8", "surrogatepass")
    except ValueError:  # infinite floats are no JSON
        return
    try:
        request, param = parse(raw, kind), ""
    except BadRequestError as error:
        request, param = None, error.param or ""
    top = param.partition("[")[0].partition(".")[0]
    assert isinstance(request, kind) or top in {"", *(f.name for f in msgspec.structs.fields(kind))}


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(KINDS), st.binary(max_size=200).filter(lambda b: b.strip() != b"{}"))
def test_any_bytes_are_refused_without_breaking(kind, body):
    with pytest.raises(BadRequestError):
        parse(body, kind)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatRequest, {"messages": [{}, 3]}, "messages[1]"),
        (ChatRequest, {"messages": [], "stop": ["a", None]}, "stop[1]"),
        (ChatRequest, {"messages": [], "stream_options": {"include_usage": 1}},
         "stream_options.include_usage"),
        (CompletionRequest, {"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
        (DetokenizeRequest, {"tokens": [1, 2, -3]}, "tokens[2]"),
        (TokenizeRequest, {"prompt": ["a"]}, "prompt"),
    ],
)  # fmt: skip
def test_the_exact_part_is_named(kind, body, param):
    with pytest.raises(BadRequestError) as refused:
        parse(json.dumps(body).encode(), kind)
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param}: expected ")


@pytest.mark.parametrize(
    ("number", "why"),
    [
        ("9" * 4301, "a number of more than 4300 digits, which is the limit"),
        ("1e999", "a number beyond 1.8e+308, which is the limit"),
    ],
)
def test_a_number_that_cannot_be_read_is_no_fault_in_the_json(number, why):
    body = f'{{"messages": [{{"role": "user", "n": {{"a": [1, {number}]}}}}]}}'
    with pytest.raises(BadRequestError) as refused:
        parse(body.encode(), ChatRequest)
    assert refused.value.param == "messages[0].n.a[1]"
    assert refused.value.message == f"messages[0].n.a[1]: {why}"
    assert refused.value.code == "invalid_value"


def test_a_field_that_asks_for_nothing_is_no_reason_to_refuse():
    for nothing in ("null", "false", "[]", "{}", '""'):
        body = f'{{"messages": [], "moderation": {nothing}, "echo": {nothing}}}'
        assert parse(body.encode(), ChatRequest).messages == []
    for nothing in ("null", "[]"):
        body = f'{{"messages": [], "functions": {nothing}, "tools": {nothing}}}'
        assert not parse(body.encode(), ChatRequest).functions


class Body(msgspec.Struct):
    """Remembers which thread made it."""

    values: list[int] = []
    media: str = ""
    nested: object = None
    made_in: int = 0

    def __post_init__(self) -> None:
        self.made_in = threading.get_ident()


def received(body: bytes) -> Body:
    """What a route gets of such a body, on an event loop in this thread."""

    async def sent() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    config = SimpleNamespace(media=MediaConfig())
    services = SimpleNamespace(config=config, renderer=ByteRenderer())
    app = SimpleNamespace(state=SimpleNamespace(services=services))
    state = {"principal": SimpleNamespace(tenant="")}
    request = Request({"type": "http", "headers": [], "app": app, "state": state}, sent)
    return asyncio.run(receive(request, Body))


@pytest.mark.parametrize("mark", [b",", b"[", b"{"])
def test_more_values_than_any_model_takes_are_refused_before_they_are_made(mark):
    no_json = b"," * FEW_VALUES + mark * MAX_VALUES
    with pytest.raises(TooLargeError, match=str(MAX_VALUES)):
        received(no_json)


def test_a_body_of_many_values_is_read_beside_the_loop():
    many = received(json.dumps({"values": [1] * SMALL_BODY_BYTES}).encode())
    assert len(many.values) == SMALL_BODY_BYTES
    assert many.made_in != threading.get_ident()


def test_bodies_of_many_values_are_read_in_turn_by_tenant(on_site):
    async def scenario(site):
        begun, may_end = threading.Event(), threading.Event()

        def first() -> None:
            begun.set()
            may_end.wait()

        def post(tenant):
            body = {"tokens": [5] * SMALL_BODY_BYTES}  # refused once it is read
            headers = {"Authorization": f"Bearer {tenant}"}
            return asyncio.create_task(site.client.post("/detokenize", json=body, headers=headers))

        turn = asyncio.create_task(site.renderer.in_turn_if(True, "a", first))
        await asyncio.to_thread(begun.wait)
        own, other = post("a"), post("b")
        assert (await other).status_code == 400
        assert not own.done()
        may_end.set()
        assert (await own).status_code == 400
        await turn

    on_site(scenario, api_key=("a:a", "b:b"))


def test_bodies_of_one_tenant_together_leave_room_for_those_of_another(on_site):
    """What counts is what has come; it is given back when the request ends."""

    async def scenario(site):
        held = site.services.held_bytes = TenantBytes(1_000_000, lambda: True)
        goes_on = asyncio.Event()

        async def slow():
            yield b'{"tokens": [1], "a": "' + b"a" * 400_000
            await goes_on.wait()
            yield b'"}'

        async def post(tenant, content):
            headers = {"Authorization": f"Bearer {tenant}"}
            return await site.client.post("/detokenize", content=content, headers=headers)

        async def status(tenant):
            return await post(tenant, b'{"tokens": [1], "a": "' + b"a" * 200_000 + b'"}')

        first = asyncio.create_task(post("a", slow()))
        while not held.of("a"):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)
        refused = await status("a")
        assert refused.status_code == 429
        assert "your requests" in refused.json()["error"]["message"]
        assert (await status("b")).status_code != 429
        goes_on.set()
        assert (await first).status_code != 429
        assert held.total == 0
        assert (await status("a")).status_code != 429

    on_site(scenario, api_key=("a:a", "b:b"))


def test_so_is_what_is_wrong_with_it_found():
    with pytest.raises(BadRequestError) as caught:
        received(json.dumps({"values": [*[1] * SMALL_BODY_BYTES, None]}).encode())
    assert caught.value.param == f"values[{SMALL_BODY_BYTES}]"


@pytest.mark.parametrize("body", [{"values": [1, 2]}, {"media": "A" * 10_000_000, "values": [1]}])
def test_small_bodies_and_media_are_read_on_the_loop_without_a_detour(body):
    assert received(json.dumps(body).encode()).made_in == threading.get_ident()


LONG = "A" * 1_000_000


@pytest.mark.parametrize(
    "body",
    [
        f'{{"nested": {{"{LONG}": 1}}}}',
        f'{{"nested": {{"{LONG}"{" " * 100}: 1}}}}',
        f'{{"nested": {{"{LONG}\\"": 1}}}}',
        f'{{"media": "{LONG}", "nested": {{"{LONG}": 1}}}}',
        f'{{"nested": [{{"{LONG}": 1}}]}}',
        f'{{"media": "{LONG}é"}}',
        f'{{"media": "{LONG}\\n"}}',
        f'{{"media": "{LONG}"{" " * 1_000_000}}}',
    ],
    ids=[
        "a key", "spaces behind it", "a quote in it", "beside media", "in a list", "no ASCII",
        "escapes", "spaces alone",
    ],
)  # fmt: skip
def test_a_body_of_long_keys_or_of_texts_that_take_long_is_read_beside_the_loop(body):
    assert received(body.encode()).made_in != threading.get_ident()


def test_many_small_media_are_read_on_the_loop():
    """Frames of a film."""
    body = json.dumps({"values": [1], "nested": ["A" * 60_000] * 40})
    assert received(body.encode()).made_in == threading.get_ident()


def test_media_beside_words_of_another_script_are_read_on_the_loop():
    body = f'{{"media": "{LONG}", "nested": "é", "values": [1]}}'
    assert received(body.encode()).made_in == threading.get_ident()


def test_what_a_thread_has_decoded_is_not_nested_too_deeply_for_the_loop_to_encode():
    """The stack of a thread is shallower than the event loop's."""
    outcomes = set()
    for depth in range(600, 1000, 20):
        many = ("1," * SMALL_BODY_BYTES)[:-1]
        body = f'{{"values": [{many}], "nested": {"[" * depth}{"]" * depth}}}'
        try:
            msgspec.json.encode(received(body.encode()).nested)
            outcomes.add("read")
        except BadRequestError as refused:
            outcomes.add(refused.message)
    assert outcomes == {"read", "the body is nested too deeply"}


def test_token_ids_outside_of_the_vocabulary_are_named_and_not_left_out_of_the_text(folder):
    async def scenario() -> None:
        async with engine_node(folder("nano")) as node:
            answer = await node.post("/detokenize", {"tokens": [5, 999_999]})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tokens[1]"

    run(scenario())


def test_more_tokens_than_the_model_takes_are_not_decoded(folder):
    async def scenario() -> None:
        async with engine_node(folder("nano")) as node:
            limit = node.services.max_model_len()
            assert limit is not None
            decoded: list[int] = []
            renderer = node.services.renderer
            tokenizer = renderer.tokenizer  # type: ignore[attr-defined]
            real = tokenizer.decode

            def counted(token_ids, **options):
                decoded.append(len(token_ids))
                return real(token_ids, **options)

            tokenizer.decode = counted
            answer = await node.post("/detokenize", {"tokens": [5] * (limit + 1)})
            assert (answer.status_code, decoded) == (400, [])
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("tokens", "context_length_exceeded")
            await node.ok("/detokenize", {"tokens": [5] * limit})
            assert decoded == [limit]

    run(scenario())


def request_of(messages):
    async def receives():
        return next(messages)

    services = SimpleNamespace(renderer=ByteRenderer())
    app = SimpleNamespace(state=SimpleNamespace(services=services))
    request = Request({"type": "http", "headers": [], "app": app}, receives)
    request.state.principal = SimpleNamespace(tenant="tenant")
    return request


PART_BYTES = 2 * SMALL_BODY_BYTES


def parts(count):
    """Of a body whose client leaves then."""
    for _ in range(count):
        yield {"type": "http.request", "body": bytes(PART_BYTES), "more_body": True}
    yield {"type": "http.disconnect"}


def test_nothing_of_a_body_is_held_once_its_client_has_left():
    async def scenario():
        with pytest.raises(ClientLeftError) as left:  # which has the frames that read the body
            await read_body(request_of(parts(50)), 1 << 30)
        return left, tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        _left, held = asyncio.run(scenario())
    finally:
        tracemalloc.stop()
    assert held < 3 * PART_BYTES
