"""Routes that render and do not generate: `/v1/.../render`, `/tokenize` and `/detokenize`.

They need no engine, and render with a read-only renderer: no cache and no counter changes. The body
that a render route answers is a request for `/inference/v1/generate`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.reasoning import AnswerReaders
from lookonce.frontend.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    StreamOptions,
    TokenizeRequest,
)
from lookonce.frontend.responses import Prompt, Tokens
from lookonce.frontend.sampling_params import completion_sampling, limit_name, names_limit
from lookonce.frontend.tools.calls import tool_calling
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.body import receive, renaming_errors
from lookonce.server.http.responses import encode, json_response, while_connected
from lookonce.server.rate_limits import RequestUsage, count_media
from lookonce.server.routes.chat import (
    chat_options,
    checked_chat,
    continued_text,
    requested_tools,
)
from lookonce.server.routes.completions import named_prompts
from lookonce.server.routes.generate import Features, MediaForm, features_of
from lookonce.server.routes.serving_base import apply_controls, check_body, request_id_of
from lookonce.server.services import Services
from lookonce.types.request import RenderedPrompt
from lookonce.types.request_validation import shorten_max_tokens
from lookonce.types.sampling import SamplingParams


class RenderChatRequest(ChatRequest, kw_only=True):
    media: MediaForm = "encoded"


class RenderCompletionRequest(CompletionRequest, kw_only=True):
    media: MediaForm = "encoded"


class RenderedBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request for `/inference/v1/generate`."""

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
    apply_controls(request, body)
    sampling, tools = checked_chat(body, services)
    request_id = request_id_of(request, body.request_id)
    usage: RequestUsage = request.state.usage
    sampling = _limited(usage, body, sampling)
    usage.take_media(count_media(body.messages))
    usage.take_tokens(0, 1)  # how many there will be is not known
    answers = AnswerReaders(tools, services.reasoning, services.renderer)
    continued = continued_text(body)

    async def render() -> RenderedBody:
        rendered = await services.readonly.render_chat(
            body.messages,
            tenant=principal.tenant,
            cache_salt=body.cache_salt,
            options=chat_options(body, tools),
        )
        usage.generated(rendered.num_tokens)
        has_film = any(feature.modality == "video" for feature in rendered.features)
        if has_film and body.media != "reference" and not services.readonly.takes_arrays:
            raise BadRequestError(
                "films of this model are carried to /inference/v1/generate by reference alone: say "
                '"media": "reference", once the film was sent to /v1/chat/completions',
                param="media",
            )
        features = await features_of(rendered, body.media, services.readonly.item_of)
        begun = answers.begin(rendered, sampling, continued)
        answer = _body(services, body, request_id, rendered, begun)
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
    usage: RequestUsage = request.state.usage
    sampling = _limited(usage, body, sampling)
    usage.take_tokens(0, 1)  # how many there will be is not known

    async def render() -> list[RenderedBody]:
        answers = []
        for number, prompt in enumerate(prompts):
            if number:
                await asyncio.sleep(0)  # each may take milliseconds: others have turns between
            rendered = await services.readonly.render_completion(
                prompt,
                tenant=principal.tenant,
                cache_salt=body.cache_salt,
                add_special_tokens=body.add_special_tokens,
            )
            usage.generated(rendered.num_tokens)
            name = request_id if single else f"{request_id}-{number}"
            answers.append(_body(services, body, name, rendered, sampling))
        return answers

    answers = await while_connected(request.receive, render())
    if single:
        return json_response(answers[0])
    return Response(b"[" + b",".join(map(encode, answers)) + b"]", media_type="application/json")


def _limited(
    usage: RequestUsage, body: GenerationFields, sampling: SamplingParams
) -> SamplingParams:
    """With no more tokens than the key may have, for what generates from this is limited, too.
    Raises `BadRequestError` where more are asked for."""
    with renaming_errors(lambda _: limit_name(body)):
        most = usage.limit_answer(sampling.max_tokens, asked=names_limit(body))
    return msgspec.structs.replace(sampling, max_tokens=most)


def _body(
    services: Services,
    body: GenerationFields,
    request_id: str,
    rendered: RenderedPrompt,
    sampling: SamplingParams,
) -> RenderedBody:
    limit = services.max_model_len()
    if limit is not None and not names_limit(body):
        sampling = shorten_max_tokens(sampling, rendered.num_tokens, limit)
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


async def tokenize(request: Request) -> Response:
    """The token ids that the engine would get: media placeholders are expanded."""
    services: Services = request.app.state.services
    body = await receive(request, TokenizeRequest)
    services.require_model(body.model)
    apply_controls(request, body)
    usage: RequestUsage = request.state.usage
    usage.take_media(count_media(body.messages or ()))
    usage.take_tokens(0, 1)  # how many there will be is not known
    work = _rendered(services, request.state.principal, body)
    rendered = await while_connected(request.receive, work)
    services.readonly.release(rendered)
    usage.generated(rendered.num_tokens)
    tokens = rendered.token_ids
    answer = Tokens(count=len(tokens), max_model_len=services.max_model_len(), tokens=tokens)
    if body.return_token_strs:
        answer.token_strs = [services.renderer.token_text(token) or "" for token in tokens]
    return json_response(answer)


async def _rendered(
    services: Services, principal: Principal, body: TokenizeRequest
) -> RenderedPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        asked = requested_tools(body, close=services.defaults.closed_schemas)
        tools = tool_calling(asked, services.tool_dialect)
        return await services.readonly.render_chat(
            body.messages, tenant=principal.tenant, options=chat_options(body, tools)
        )
    return await services.readonly.render_completion(
        body.prompt or "",
        tenant=principal.tenant,
        add_special_tokens=body.add_special_tokens is not False,
    )


async def detokenize(request: Request) -> Response:
    services: Services = request.app.state.services
    body = await receive(request, DetokenizeRequest)
    services.require_model(body.model)
    count, limit = len(body.tokens), services.max_model_len()
    if limit is not None and count > limit:
        raise BadRequestError(
            f"tokens: {count} of them, but the model's context is {limit} tokens",
            param="tokens",
            code="context_length_exceeded",
        )
    request.state.usage.take_tokens(count, 0)
    return json_response(Prompt(services.renderer.decode(body.tokens)))
