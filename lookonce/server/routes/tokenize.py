"""`POST /tokenize` and `/detokenize`, as vLLM's."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.requests import DetokenizeRequest, TokenizeRequest, template_options
from lookonce.frontend.responses import Prompt, Tokens
from lookonce.frontend.tools.calls import read_tools, tool_calling
from lookonce.server.http.auth import Principal
from lookonce.server.http.body import receive
from lookonce.server.http.connection import while_connected
from lookonce.server.http.error_responses import json_response
from lookonce.server.services import Services
from lookonce.types.request import RenderedPrompt


async def tokenize(request: Request) -> Response:
    """Token ids as the engine would get them: with media placeholders expanded."""
    services: Services = request.app.state.services
    body = await receive(request, TokenizeRequest)
    services.require_model(body.model)
    work = _render(services, request.state.principal, body)
    rendered = await while_connected(request.receive, work)
    services.readonly.release(rendered)
    tokens = rendered.token_ids
    return json_response(
        Tokens(
            count=len(tokens),
            max_model_len=services.max_model_len(),
            tokens=tokens,
            token_strs=_strings(services, tokens) if body.return_token_strs else None,
        )
    )


async def _render(
    services: Services, principal: Principal, body: TokenizeRequest
) -> RenderedPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        return await services.readonly.render_chat(
            body.messages, tenant=principal.tenant, options=_options(services, body)
        )
    return await services.readonly.render_completion(
        body.prompt or "",
        tenant=principal.tenant,
        add_special_tokens=body.add_special_tokens is not False,
    )


def _options(services: Services, body: TokenizeRequest) -> dict[str, Any]:
    tools = tool_calling(read_tools(body.tools, None, None), services.tool_dialect)
    options = template_options(body)
    return options if tools is None else {**options, "tools": tools.asked.for_template()}


def _strings(services: Services, tokens: list[int]) -> list[str]:
    return [services.renderer.token_text(token) or "" for token in tokens]


async def detokenize(request: Request) -> Response:
    services: Services = request.app.state.services
    body = await receive(request, DetokenizeRequest)
    services.require_model(body.model)
    _check_length(services, len(body.tokens))
    return json_response(Prompt(services.renderer.decode(body.tokens)))


def _check_length(services: Services, count: int) -> None:
    """No prompt and no answer is longer than the model's context."""
    limit = services.max_model_len()
    if limit is not None and count > limit:
        raise BadRequestError(
            f"tokens: {count} of them, but the model's context is {limit} tokens",
            param="tokens",
            code="context_length_exceeded",
        )
