"""`POST /inference/v1/generate`: tokens in, tokens out; media placed by whoever rendered."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import Piece, Sample
from lookonce.frontend.logprobs import chat_logprobs
from lookonce.frontend.requests import (
    NOTHING,
    Raw,
    StreamOptions,
    StructuredFields,
    TokenId,
    raw_bytes,
)
from lookonce.frontend.responses import (
    ChatLogprobs,
    KVTransferParams,
    PromptEntries,
    ReuseReceipt,
    StopReason,
    Usage,
)
from lookonce.frontend.sampling_params import grammar_of
from lookonce.server.http.body import parse, receive
from lookonce.server.routes.generate_features import Features, given_media
from lookonce.server.routes.serving_base import Exchange, answer, open_exchange
from lookonce.types.request import TokenLogprob
from lookonce.types.sampling import SamplingParams


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What the render routes answer, or any frontend makes itself."""

    token_ids: list[TokenId]
    features: Features | None = None
    sampling_params: Raw = NOTHING
    mm_processor_kwargs: dict[str, Any] | None = None
    """Those the media was rendered with: they are part of its MediaHash."""
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    reuse_receipt: bool = False
    kv_transfer_params: dict[str, Any] | None = None


class SamplingExtras(StructuredFields, kw_only=True):
    """Of vLLM's sampling parameters those that are refused, and those that make a grammar."""


OF_OTHER_ENGINES = frozenset(
    {
        "detokenize", "output_kind", "output_text_buffer_length", "skip_clone", "flat_logprobs",
        "spaces_between_special_tokens", "skip_reading_prefix_cache", "stream_interval",
        "routed_experts_prompt_start",
    }
)  # fmt: skip
"""What frontends made for vLLM send along; nothing about the tokens depends on it."""
NOTHING_ASKED: tuple[object, ...] = (False, "", [], {})
KNOWN_PARAMS = OF_OTHER_ENGINES.union(
    SamplingParams.__struct_fields__, SamplingExtras.__struct_fields__
)


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None


class GenerateResponse(msgspec.Struct, kw_only=True):
    """A whole answer, and each chunk of a streamed one."""

    request_id: str
    object: Literal["generate"] = "generate"
    created: int
    model: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptEntries | UnsetType | None = UNSET
    reuse_receipt: ReuseReceipt | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


async def generate(request: Request) -> Response:
    arrival = time.monotonic()
    body = await receive(request, GenerateRequest)
    exchange = open_exchange(request, body, arrival)
    return await answer(request, exchange, TokensFormat(exchange, body))


def sampling_of(raw: bytes) -> SamplingParams:
    """`sampling_params` as it stands: no default of the model's. Raises `BadRequestError`."""
    if raw in (b"", b"null"):
        return SamplingParams()
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise BadRequestError(f"sampling_params: {error}", param="sampling_params") from None
    grammar = grammar_of(parse(raw, SamplingExtras))
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if name not in KNOWN_PARAMS and value not in NOTHING_ASKED:
            raise BadRequestError(
                f"sampling_params: {name[:60]!r} is no sampling parameter", param="sampling_params"
            )
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        sampling = msgspec.convert(given, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"sampling_params: {error}", param="sampling_params") from None
    return sampling if grammar is None else msgspec.structs.replace(sampling, grammar=grammar)


class TokensFormat:
    """Token ids, whole and in chunks."""

    def __init__(self, exchange: Exchange, body: GenerateRequest) -> None:
        self._exchange = exchange
        self._body = body
        self._sampling = sampling_of(raw_bytes(body.sampling_params))
        if body.stream and self._sampling.prompt_logprobs is not None:
            raise BadRequestError(
                "sampling_params: prompt_logprobs needs stream to be false", param="sampling_params"
            )
        self._media = given_media(body.features)

    async def render(self) -> None:
        exchange, body = self._exchange, self._body
        media, self._media, body.features = self._media, [], None  # not kept for the whole answer
        with exchange.services.metrics.render.time():
            rendered = await exchange.services.renderer.render_tokens(
                body.token_ids,
                media,
                tenant=exchange.principal.tenant,
                cache_salt=body.cache_salt,
                mm_processor_kwargs=body.mm_processor_kwargs,
                trusted=exchange.principal.inject,
            )
        exchange.add_prompt(rendered, self._sampling)

    def whole(self, samples: Sequence[Sample]) -> GenerateResponse:
        body = self._envelope([self._choice(i, sample) for i, sample in enumerate(samples)])
        body.usage = self._exchange.usage()
        body.prompt_logprobs = self._exchange.prompt_entries(0, self._sampling.prompt_logprobs)
        return self._with_facts(body)

    def _choice(self, index: int, sample: Sample) -> GenerateChoice:
        return GenerateChoice(
            index=index,
            token_ids=sample.token_ids,
            logprobs=self._logprobs(sample.token_ids, sample.logprobs),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )

    def chunks(self, piece: Piece) -> Iterator[GenerateResponse]:
        choice = GenerateChoice(
            index=piece.index,
            token_ids=piece.token_ids,
            logprobs=self._logprobs(piece.token_ids, piece.logprobs),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if piece.token_ids or piece.finish_reason is not None:
            chunk = self._envelope([choice])
            last = self._exchange.finished and piece.finish_reason is not None
            yield self._with_facts(chunk) if last and not self._exchange.include_usage else chunk

    def usage_chunk(self) -> GenerateResponse:
        chunk = self._envelope([])
        chunk.usage = self._exchange.usage()
        return self._with_facts(chunk)

    def _with_facts(self, body: GenerateResponse) -> GenerateResponse:
        body.reuse_receipt = self._exchange.receipt()
        body.kv_transfer_params = self._exchange.kv_transfer()
        return body

    def _envelope(self, choices: list[GenerateChoice]) -> GenerateResponse:
        exchange = self._exchange
        return GenerateResponse(
            request_id=exchange.request_id,
            created=exchange.created,
            model=exchange.model,
            choices=choices,
            usage=None if exchange.include_usage else UNSET,
        )

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> ChatLogprobs | None:
        if self._sampling.logprobs is None or not logprobs:
            return None
        return chat_logprobs(token_ids, logprobs, self._exchange.services.renderer.token_bytes)
