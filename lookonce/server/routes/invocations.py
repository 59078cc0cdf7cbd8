"""`POST /invocations`: SageMaker's one route, which serves what the body is a request for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from lookonce.errors import BadRequestError
from lookonce.server.http.body import decoded_body, read_body
from lookonce.server.routes.chat import chat_completions
from lookonce.server.routes.completions import completions
from lookonce.server.routes.generate import generate
from lookonce.server.routes.pooling import embeddings, pool, rerank, score
from lookonce.server.routes.responses_api.route import create_response
from lookonce.server.services import Services

Handler = Callable[[Request], Awaitable[Response]]
HANDLERS: dict[str, Handler] = {
    "messages": chat_completions,
    "prompt": completions,
    "input": create_response,
    "token_ids": generate,
}
"""A field that only one kind of request has → the route that serves it."""
POOLING_HANDLERS: dict[str, Handler] = {
    "messages": embeddings,
    "input": embeddings,
    "query": rerank,
    "queries": score,
    "text_1": score,
    "data_1": score,
}
"""The same of a model that gives embeddings or scores; `pool` in the place of `embeddings` where it
gives no vector of an input."""


async def invocations(request: Request) -> Response:
    """Raises `BadRequestError` for a body that is a request for none of the routes."""
    services: Services = request.app.state.services
    body = await read_body(request, services.config.media.max_body_bytes)
    try:
        fields = await decoded_body(request, body, lambda: _fields(body))
    except (ValueError, RecursionError) as error:
        raise BadRequestError(
            f"the body is not a JSON object: {error}", code="invalid_json"
        ) from None
    services.require_ready()
    pooling = services.engine.model.pooling
    handlers = HANDLERS if pooling is None else POOLING_HANDLERS
    for name, handler in handlers.items():
        if name in fields:
            if handler is embeddings and pooling is not None and not pooling.embeds:
                handler = pool
            return await handler(_with_body(request, body))
    raise BadRequestError(f"the body has none of {', '.join(handlers)}")


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw])


def _with_body(request: Request, body: bytes) -> Request:
    """The request, whose body was read, with its body to be read again."""
    pending = [body]

    async def receive() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await request.receive()

    return Request(request.scope, receive)
