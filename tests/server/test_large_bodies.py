"""Bodies of very many values: refused before they are made, or read beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import msgspec
import pytest
from starlette.requests import Request

from lookonce.config import MediaConfig
from lookonce.errors import BadRequestError, TooLargeError
from lookonce.server.http.body import FEW_VALUES, MAX_VALUES, SMALL_BODY_BYTES, receive
from tests.support.nodes import engine_node, run


class Body(msgspec.Struct):
    """Remembers which thread made it."""

    values: list[int] = []
    media: str = ""
    made_in: int = 0

    def __post_init__(self) -> None:
        self.made_in = threading.get_ident()


def received(body: bytes) -> Body:
    """What a route gets of such a body, on an event loop in this thread."""

    async def sent() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    services = SimpleNamespace(config=SimpleNamespace(media=MediaConfig()))
    app = SimpleNamespace(state=SimpleNamespace(services=services))
    request = Request({"type": "http", "headers": [], "app": app}, sent)
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


def test_so_is_what_is_wrong_with_it_found():
    with pytest.raises(BadRequestError) as caught:
        received(json.dumps({"values": [*[1] * SMALL_BODY_BYTES, None]}).encode())
    assert caught.value.param == f"values[{SMALL_BODY_BYTES}]"


@pytest.mark.parametrize("body", [{"values": [1, 2]}, {"media": "A" * 10_000_000, "values": [1]}])
def test_small_bodies_and_media_are_read_on_the_loop_without_a_detour(body):
    assert received(json.dumps(body).encode()).made_in == threading.get_ident()


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
