"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: a file in a form → its text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lookonce.errors import BadRequestError, RequestFailedError
from lookonce.frontend import transcript_formats as formats
from lookonce.frontend.responses import ReuseReceipt
from lookonce.frontend.transcript import (
    EncodedAudio,
    Fallback,
    Granularity,
    Task,
    TranscriptDelta,
    TranscriptDone,
    TranscriptEvent,
    TranscriptionOptions,
)
from lookonce.frontend.transcription import Transcriber, check_hears
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.headers import header
from lookonce.server.http.multipart import Form, read_form
from lookonce.server.http.responses import (
    ChunkGroup,
    ChunkGroups,
    EventStream,
    json_response,
    while_connected,
)
from lookonce.server.http.unknown_fields import UnknownFields, note_ignored
from lookonce.server.rate_limits import RequestUsage
from lookonce.server.routes.serving_base import ServingContext, request_id_of
from lookonce.server.services import Services

LISTS = ("timestamp_granularities", "include")
UNSUPPORTED = ("keywords", "known_speaker_names", "known_speaker_references", "languages")
ACCEPTED = ("chunking_strategy", "user", "metadata")
"""Fields that change nothing; the answer's header names them."""
TIMED_FORMATS = ("srt", "vtt", "verbose_json")


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """The fields of the form, beside the file."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: formats.ResponseFormat = "json"
    temperature: float = 0.0
    timestamp_granularities: list[Granularity] = []
    include: list[Literal["logprobs"]] = []
    stream: bool = False
    cache_salt: str | None = None
    request_id: str | None = None
    reuse_receipt: bool = False


async def transcriptions(request: Request) -> Response:
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response:
    return await _answer(request, "translate")


async def _answer(request: Request, task: Task) -> Response:
    services: Services = request.app.state.services
    services.require_ready()
    form = await read_form(request, services.config.media.max_bytes)
    asked = _fields(form)
    _note_unread(request, form)
    context = _context(request, asked)
    if not form.file:
        raise BadRequestError("file: the form needs a file that is not empty", param="file")
    usage: RequestUsage = request.state.usage
    options = replace(_options(asked, task), max_tokens=usage.limit_answer(None, asked=False))
    check_hears(services, options)
    usage.take_media(1)
    usage.take_tokens(0, 1)  # how many there will be is not known
    if header(request.scope, b"x-reuse-receipt") == "1":
        asked.reuse_receipt = True
    principal: Principal = request.state.principal
    transcriber = Transcriber(services, usage.generated, context.watch)
    events = _abortable(
        context,
        transcriber.transcribe(
            EncodedAudio(form.file),
            options,
            tenant=principal.tenant,
            cache_salt=asked.cache_salt,
        ),
    )
    form.file = None  # the transcriber alone holds it
    if asked.stream:
        return EventStream(_streamed(events, asked, services))
    done = await while_connected(request.receive, _whole(events))
    return _response(done, asked, task, services)


def _note_unread(request: Request, form: Form) -> None:
    """Have the answer's header name the fields that nothing reads. Raises `BadRequestError` where
    unknown ones are refused."""
    fields: UnknownFields = request.app.state.services.unknown_fields
    unread = [name for name in form.fields if name not in TranscriptionRequest.__struct_fields__]
    if unknown := [name for name in unread if name not in ACCEPTED]:
        request.state.warning = fields.judge(unknown, TranscriptionRequest)
    if ignored := [name for name in unread if name in ACCEPTED and any(form.fields[name])]:
        note_ignored(request, fields, ignored)


def _context(request: Request, asked: TranscriptionRequest) -> ServingContext:
    """By which the client aborts the request, and a trace knows what the engine did."""
    services: Services = request.app.state.services
    context = ServingContext(
        services=services,
        principal=request.state.principal,
        model=services.require_base_model(asked.model),
        request_id=request_id_of(request, asked.request_id),
        stream=asked.stream,
        wants_receipt=asked.reuse_receipt,  # no limits: the transcriber counts what is used
    )
    if (trace := request.scope["state"].get("trace")) is not None:
        trace.serving = context
    return context


async def _abortable(
    context: ServingContext, events: AsyncGenerator[TranscriptEvent, None]
) -> AsyncGenerator[TranscriptEvent, None]:
    with context:
        async with aclosing(events):
            async for event in events:
                yield event


def _fields(form: Form) -> TranscriptionRequest:
    """The fields that are read. Raises `BadRequestError`."""
    known = TranscriptionRequest.__struct_fields__
    given: dict[str, str | list[str]] = {}
    for name, values in form.fields.items():
        if name in UNSUPPORTED:
            raise BadRequestError(
                f"{name} is not supported; leave it out", param=name, code="unsupported_parameter"
            )
        if name in LISTS:
            given[name] = values
        elif name in known and values[-1] != "":
            given[name] = values[-1]
    asked = {}
    for name, value in given.items():
        try:
            one = msgspec.convert({name: value}, TranscriptionRequest, strict=False)
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at ")[0]
            raise BadRequestError(f"{name}: {reason}", param=name) from None
        asked[name] = getattr(one, name)
    return TranscriptionRequest(**asked)


def _options(asked: TranscriptionRequest, task: Task) -> TranscriptionOptions:
    """Raises `BadRequestError` for fields that contradict each other."""
    if not 0.0 <= asked.temperature <= 2.0:
        raise BadRequestError("temperature: must be in [0, 2]", param="temperature")
    if asked.timestamp_granularities and asked.response_format != "verbose_json":
        raise BadRequestError(
            "timestamp_granularities needs response_format verbose_json",
            param="timestamp_granularities",
        )
    if asked.stream and asked.response_format in TIMED_FORMATS:
        raise BadRequestError("stream needs response_format json or text", param="response_format")
    if asked.include and asked.response_format != "json":
        raise BadRequestError("include needs response_format json", param="include")
    timestamps: set[Granularity] = set(asked.timestamp_granularities)
    if asked.response_format in TIMED_FORMATS:
        timestamps.add("segment")
    return TranscriptionOptions(
        language=asked.language,
        prompt=asked.prompt,
        temperature=asked.temperature,
        # OpenAI's: at 0 the temperature rises by itself where the text is doubtful.
        fallback=Fallback() if asked.temperature == 0.0 else None,
        task=task,
        timestamps=frozenset(timestamps),
        logprobs="logprobs" in asked.include,
    )


async def _whole(events: AsyncGenerator[TranscriptEvent, None]) -> TranscriptDone:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, TranscriptDone):
                return event
    raise RequestFailedError("the transcription ended without a result")


def _response(
    done: TranscriptDone, asked: TranscriptionRequest, task: Task, services: Services
) -> Response:
    match asked.response_format:
        case "text":
            return PlainTextResponse(done.text + "\n")
        case "srt":
            return PlainTextResponse(formats.srt(done.segments))
        case "vtt":
            return PlainTextResponse(formats.vtt(done.segments), media_type="text/vtt")
        case "verbose_json":
            wanted = asked.timestamp_granularities or ["segment"]
            verbose = formats.verbose_transcription(
                done, task, segments="segment" in wanted, words="word" in wanted
            )
            verbose.reuse_receipt = _receipt(done, asked)
            return json_response(verbose)
    plain = formats.transcription(done, services.renderer.token_bytes)
    plain.reuse_receipt = _receipt(done, asked)
    return json_response(plain)


def _receipt(done: TranscriptDone, asked: TranscriptionRequest) -> ReuseReceipt | msgspec.UnsetType:
    return done.receipt if asked.reuse_receipt else UNSET


async def _streamed(
    events: AsyncGenerator[TranscriptEvent, None], asked: TranscriptionRequest, services: Services
) -> ChunkGroups:
    token_bytes = services.renderer.token_bytes
    async with aclosing(events):
        async for event in events:
            if isinstance(event, TranscriptDelta):
                yield ChunkGroup([formats.delta_event(event, token_bytes)], last=False)
            else:
                done = formats.done_event(event, token_bytes)
                done.reuse_receipt = _receipt(event, asked)
                yield ChunkGroup([done], last=True)
