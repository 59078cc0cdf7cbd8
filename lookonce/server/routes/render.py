"""`POST /v1/chat/completions/render` and `/v1/completions/render`: bodies for `generate`.

They never touch the engine, and render beside the main path: nothing there changes.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
)
from lookonce.frontend.sampling_params import chat_sampling, completion_sampling, names_limit
from lookonce.server.http.auth import Principal
from lookonce.server.http.body import receive
from lookonce.server.http.connection import while_connected
from lookonce.server.http.error_responses import encode, json_response
from lookonce.server.routes.chat import chat_options, chat_tools, check_chat
from lookonce.server.routes.completions import named_prompts
from lookonce.server.routes.generate_features import Features, MediaForm, features_of
from lookonce.server.routes.serving_base import check_body, request_id_of
from lookonce.server.services import Services
from lookonce.types.request import RenderedPrompt
from lookonce.types.request_validation import shorten_max_tokens
from lookonce.types.sampling import SamplingParams


class RenderChatRequest(ChatRequest, kw_only=True):
    media: MediaForm = "encoded"


class RenderCompletionRequest(CompletionRequest, kw_only=True):
    media: MediaForm = "encoded"


class RenderedBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What `/inference/v1/generate` takes as it is."""

    request_id: str
    model: str
    token_ids: list[int]
    features: Features | None = None
    sampling_params: SamplingParams
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    reuse_receipt: bool = False
    kv_transfer_params: dict[str, Any] | None = None


async def render_chat(request: Request) -> Response:
    body = await receive(request, RenderChatRequest)
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    services.require_model(body.model)
    check_body(body)
    check_chat(body)
    tools = chat_tools(body, services)
    sampling = chat_sampling(body, services.defaults)
    if tools is not None:
        sampling = tools.constrain(sampling)
    request_id = request_id_of(request, body.request_id)

    async def render() -> RenderedBody:
        rendered = await services.readonly.render_chat(
            body.messages,
            tenant=principal.tenant,
            cache_salt=body.cache_salt,
            options=chat_options(body, tools),
        )
        features = await features_of(rendered, body.media, services.readonly.item_of)
        answer = _body(services, body, request_id, rendered, sampling)
        answer.features = features
        answer.mm_processor_kwargs = body.mm_processor_kwargs if features else None
        return answer

    return json_response(await while_connected(request.receive, render()))


async def render_completion(request: Request) -> Response:
    """One body; for a list of prompts a list of bodies, each with a request id of its own."""
    body = await receive(request, RenderCompletionRequest)
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    services.require_model(body.model)
    check_body(body)
    if body.echo:
        raise BadRequestError(
            "echo is not supported here: tokens are what the engine will answer", param="echo"
        )
    sampling = completion_sampling(body, services.defaults)
    request_id = request_id_of(request, body.request_id)
    prompts = list(named_prompts(body.prompt).values())
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)

    async def render() -> list[RenderedBody]:
        answers = []
        for number, prompt in enumerate(prompts):
            rendered = await services.readonly.render_completion(
                prompt,
                tenant=principal.tenant,
                cache_salt=body.cache_salt,
                add_special_tokens=body.add_special_tokens,
            )
            name = request_id if single else f"{request_id}-{number}"
            answers.append(_body(services, body, name, rendered, sampling))
        return answers

    answers = await while_connected(request.receive, render())
    if single:
        return json_response(answers[0])
    return Response(b"[" + b",".join(map(encode, answers)) + b"]", media_type="application/json")


def _body(
    services: Services,
    body: GenerationFields,
    request_id: str,
    rendered: RenderedPrompt,
    sampling: SamplingParams,
) -> RenderedBody:
    limit = services.max_model_len()
    if limit is not None and not names_limit(body):
        sampling = shorten_max_tokens(sampling, len(rendered.token_ids), limit)
    return RenderedBody(
        request_id=request_id,
        model=services.require_model(body.model),
        token_ids=rendered.token_ids,
        sampling_params=sampling,
        cache_salt=body.cache_salt,
        stream=bool(body.stream),
        stream_options=body.stream_options,
        reuse_receipt=body.reuse_receipt,
        kv_transfer_params=body.kv_transfer_params,
    )
