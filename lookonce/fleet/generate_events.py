"""The way from an engine's `POST /inference/v1/generate` back to token deltas, and to errors.

data: {"choices": [{"index": 0, "token_ids": [7], …}], "reuse_receipt": {…}}  ─▶  TokenDelta
503 {"error": {"message": …}}                                                  ─▶  an error to raise
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

import msgspec

from lookonce.errors import (
    BadRequestError,
    ConflictError,
    EngineDeadError,
    ForbiddenError,
    LookOnceError,
    ModelNotFoundError,
    QueueFullError,
    RateLimitedError,
    RequestError,
    RequestFailedError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnprocessableMediaError,
    UnsupportedMediaTypeError,
)
from lookonce.fleet.engine_http import EngineAnswer, Headers
from lookonce.frontend.responses import (
    KVTransferParams,
    PromptEntries,
    PromptEntry,
    ReuseReceipt,
    StopReason,
)
from lookonce.types.kv import ExternalCacheStats
from lookonce.types.request import (
    FinishReason,
    PrefillStats,
    PromptLogprob,
    RenderedItem,
    TokenDelta,
    TokenLogprob,
)
from lookonce.types.sampling import SamplingParams

TOKEN_NAME = "token_id:"
"""What tokens of log-probabilities are called (`return_tokens_as_token_ids`)."""
LIMIT_HEADERS = b"x-ratelimit-"
EVENT_END = b"\n\n"
MAX_EVENT_BYTES = 64 << 20
"""Far more than the log-probabilities of the longest prompt."""
NO_EVENTS = "the engine sent no token events"
DATA = b"data: "
DONE = b"[DONE]"
FEATURE_PARAM = re.compile(r"features\.\w+\.(\w+)\[(\d+)\]")
ERRORS: dict[int, type[RequestError]] = {
    400: BadRequestError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: ModelNotFoundError,
    409: ConflictError,
    413: TooLargeError,
    415: UnsupportedMediaTypeError,
    422: UnprocessableMediaError,
    429: QueueFullError,
}
"""Status → what is raised here, with the engine's message and code."""
STATUSES = {"invalid_request_error": 400, "rate_limit_error": 429, "service_unavailable_error": 503}
"""Type of an error in a stream → the status that it would have had."""


class _Top(msgspec.Struct):
    token: str
    logprob: float

    @property
    def id(self) -> int:
        return int(self.token.removeprefix(TOKEN_NAME))


class _Entry(_Top):
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Entry]


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None


class _Error(msgspec.Struct):
    message: str = "the engine failed to answer this request"
    type: str | None = None
    param: str | None = None
    code: str | None = None


class GenerateEvent(msgspec.Struct):
    """What is read of an event, or of an error's body."""

    choices: list[_Choice] = []
    reuse_receipt: ReuseReceipt | None = None
    kv_transfer_params: KVTransferParams | None = None
    prompt_logprobs: PromptEntries | None = None
    error: _Error | None = None


_EVENT = msgspec.json.Decoder(GenerateEvent)


async def events_of(answer: EngineAnswer) -> AsyncGenerator[GenerateEvent, None]:
    """Raises `EngineLostError`, and `RequestFailedError` for what is no event."""
    waiting = bytearray()  # of an event that is not complete
    async for chunk in answer.chunks():
        searched = max(0, len(waiting) - len(EVENT_END) + 1)
        waiting += chunk
        if waiting.find(EVENT_END, searched) < 0:
            if len(waiting) > MAX_EVENT_BYTES:
                raise RequestFailedError(NO_EVENTS)
            continue
        *events, waiting = waiting.split(EVENT_END)
        for event in events:
            data = event.removeprefix(DATA)
            if data != DONE:
                try:
                    yield _EVENT.decode(data)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    raise RequestFailedError(NO_EVENTS) from None


# --- deltas ---------------------------------------------------------------------------------------


def deltas_of(
    event: GenerateEvent, request_id: str, sampling: SamplingParams, items: Sequence[RenderedItem]
) -> list[TokenDelta]:
    """The receipt's outcomes are noted in the prompt's `items`."""
    deltas = []
    for choice in event.choices:
        stop = choice.stop_reason
        delta = TokenDelta(request_id, choice.index, choice.token_ids, choice.finish_reason)
        delta.stop_token_id = stop if isinstance(stop, int) else None
        if choice.logprobs is not None:
            delta.logprobs = [_logprob(e, sampling.logprobs) for e in choice.logprobs.content]
        deltas.append(delta)
    if event.reuse_receipt is not None and deltas:
        deltas[0].reuse_stats = _stats(event.reuse_receipt, event.kv_transfer_params)
        for item, told in zip(items, event.reuse_receipt.items, strict=False):
            item.outcome = told.processor  # type: ignore[assignment]  # an engine's own word
            item.decode_ms, item.process_ms = told.decode_ms, told.process_ms
    if event.prompt_logprobs is not None and deltas:
        wanted = sampling.prompt_logprobs or 0
        deltas[0].prompt_logprobs = [_scored(e, wanted) for e in event.prompt_logprobs[1:]]
    return deltas


def _logprob(entry: _Entry, wanted: int | None) -> TokenLogprob:
    """Without alternatives asked for, the route lists the token itself as one."""
    top = entry.top_logprobs if wanted else []
    return TokenLogprob(entry.logprob, tuple((each.id, each.logprob) for each in top))


def _scored(entries: dict[str, PromptEntry] | None, wanted: int) -> PromptLogprob:
    """The first entry is the token itself, which may be one of the `wanted` likeliest, too. A
    medium's tokens have none, and what stands for them is not shown."""
    if not entries:
        return PromptLogprob(0.0, 1)
    (own, first), *others = entries.items()
    listed = others if len(others) >= wanted else [(own, first), *others]
    listed.sort(key=lambda each: each[1].rank)
    top = tuple((int(token), each.logprob) for token, each in listed)
    return PromptLogprob(first.logprob, first.rank, top)


def _stats(receipt: ReuseReceipt, external: KVTransferParams | None) -> PrefillStats:
    return PrefillStats(
        prefix_cached_tokens=receipt.prefix_cached_tokens,
        external_cached_tokens=receipt.external_cached_tokens,
        encoder=tuple(item.encoder for item in receipt.items),  # type: ignore[misc]  # as above
        encode_ms=tuple(item.encode_ms for item in receipt.items),
        encoder_tiers=tuple(
            (number, item.encoder_tier)
            for number, item in enumerate(receipt.items)
            if isinstance(item.encoder_tier, str)
        ),
        external=None if external is None else _external(external),
    )


def _external(told: KVTransferParams) -> ExternalCacheStats:
    return ExternalCacheStats(
        matched=told.num_lmcache_extra_cached_tokens,
        loaded=told.num_external_cached_tokens,
        status=told.external_cache.status,  # type: ignore[arg-type]  # as above
        by_tier=tuple(told.external_cache.by_tier.items()),
    )


# --- errors ---------------------------------------------------------------------------------------


def error_of(
    body: bytes, items: Sequence[RenderedItem], status: int, headers: Headers
) -> LookOnceError:
    """Of an answer with this status."""
    told = _Error()
    with suppress(msgspec.MsgspecError):
        told = _EVENT.decode(body).error or told
    error = raised_for(told, items, status)
    if isinstance(error, RateLimitedError):
        error.headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name.startswith(LIMIT_HEADERS)
        }
        after = dict(headers).get(b"retry-after-ms", b"1000")
        error.retry_after = int(after) / 1000 if after.isdigit() else 1.0
    return error


def raised_for(
    told: _Error, items: Sequence[RenderedItem], status: int | None = None
) -> LookOnceError:
    """`status`: None for an error that ended a stream."""
    status = status or STATUSES.get(told.type or "", 500)
    message, param = _as_sent(told, items)
    if status == 503:
        kind = EngineDeadError if told.code == EngineDeadError.code else UnavailableError
        return kind(message)
    if status == 429 and told.code == RateLimitedError.code:
        return RateLimitedError(message, param=param, code=told.code)
    if status in ERRORS:
        return ERRORS[status](message, param=param, code=told.code)
    return RequestFailedError(message)


def _as_sent(told: _Error, items: Sequence[RenderedItem]) -> tuple[str, str | None]:
    """The message and the parameter with the name that the medium's part has in the client's
    request."""
    found = FEATURE_PARAM.fullmatch(told.param or "")
    if told.param is None or found is None:
        return told.message, told.param
    modality, number = found.groups()
    parts = [item.param for item in items if item.modality == modality]
    if int(number) >= len(parts) or not parts[int(number)]:
        return told.message, told.param
    param = parts[int(number)]
    return told.message.replace(told.param, param, 1), param
