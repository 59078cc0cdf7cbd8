"""The events of `/v1/realtime`, under OpenAI's names: what clients send, and what is answered.

A session's options are one struct, `SessionOptions`: an update has only the fields that the client
sent, the session's own has all that were set. Fields that are declared and never read are harmless
beside text: they are taken and change nothing.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from lookonce.frontend.requests import NOTHING, Raw, RefusesUnsupported
from lookonce.frontend.responses import ErrorBody, ReuseReceipt

SessionKind = Literal["realtime", "transcription"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
Json = dict[str, Any]
Ignored = msgspec.Raw
"""A field that is taken and changes nothing; nothing of it is kept."""


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


# --- a session's options ------------------------------------------------------------------------


class FormatOptions(msgspec.Struct, kw_only=True):
    type: str = "audio/pcm"
    rate: int | None = None


class TranscriptionOptions(RefusesUnsupported, kw_only=True):
    model: str | UnsetType | None = UNSET
    language: str | UnsetType | None = UNSET
    prompt: str | UnsetType | None = UNSET

    delay: Raw = NOTHING
    keywords: Raw = NOTHING
    languages: Raw = NOTHING


class TurnDetectionOptions(msgspec.Struct, kw_only=True):
    type: str = "server_vad"
    threshold: float | UnsetType | None = UNSET
    prefix_padding_ms: int | UnsetType | None = UNSET
    silence_duration_ms: int | UnsetType | None = UNSET
    create_response: bool | UnsetType | None = UNSET
    interrupt_response: bool | UnsetType | None = UNSET
    idle_timeout_ms: int | UnsetType | None = UNSET
    eagerness: str | UnsetType | None = UNSET


class NoiseReductionOptions(msgspec.Struct, kw_only=True):
    type: str | None = None
    strength: float | None = None


class AudioInputOptions(msgspec.Struct, kw_only=True):
    format: FormatOptions | UnsetType | None = UNSET
    noise_reduction: NoiseReductionOptions | UnsetType | None = UNSET
    transcription: TranscriptionOptions | UnsetType | None = UNSET
    turn_detection: TurnDetectionOptions | UnsetType | None = UNSET


class AudioOptions(msgspec.Struct, kw_only=True):
    input: AudioInputOptions | UnsetType | None = UNSET
    output: Ignored = Ignored()
    """Of speech, which is not served."""


class AnswerOptions(RefusesUnsupported, kw_only=True):
    """How responses are made; in a session and in `response.create`, which overrides it."""

    output_modalities: list[str] | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    max_output_tokens: int | str | UnsetType | None = UNSET
    temperature: float | UnsetType | None = UNSET
    """Ours, as all to `reuse_receipt`."""
    top_p: float | UnsetType | None = UNSET
    top_k: int | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET
    cache_salt: str | UnsetType | None = UNSET
    reuse_receipt: bool | UnsetType = UNSET
    tool_choice: Ignored = Ignored()
    """Without tools it says nothing."""
    parallel_tool_calls: Ignored = Ignored()

    tools: Raw = NOTHING
    prompt: Raw = NOTHING
    reasoning: Raw = NOTHING
    modalities: Raw = NOTHING


class SessionOptions(AnswerOptions, kw_only=True):
    type: str | UnsetType | None = UNSET
    model: str | UnsetType | None = UNSET
    audio: AudioOptions | UnsetType | None = UNSET
    include: list[str] | UnsetType | None = UNSET
    truncation: str | Json | UnsetType | None = UNSET
    tracing: Ignored = Ignored()

    input_audio_format: Raw = NOTHING
    """The names of the beta, as the two below."""
    input_audio_transcription: Raw = NOTHING
    turn_detection: Raw = NOTHING


class ResponseOptions(AnswerOptions, kw_only=True):
    conversation: str | None = None
    input: list[Json] | None = None
    metadata: dict[str, str] | None = None
    audio: Ignored = Ignored()


Options = TypeVar("Options", bound=msgspec.Struct)
REPLACED_WHOLE = (FormatOptions, NoiseReductionOptions)
"""Structs of which no field outlives an update."""


def merged(current: Options, update: Options) -> Options:
    """`current` with the fields that `update` sets."""
    changes: Json = {}
    for name in update.__struct_fields__:
        new = getattr(update, name)
        if new is UNSET or isinstance(new, msgspec.Raw):  # raw JSON would keep its whole message
            continue
        old = getattr(current, name)
        if type(old) is type(new) and isinstance(new, msgspec.Struct):
            changes[name] = new if isinstance(new, REPLACED_WHOLE) else merged(old, new)
        else:
            changes[name] = new
    return msgspec.structs.replace(current, **changes)


# --- items --------------------------------------------------------------------------------------


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | UnsetType | None = UNSET
    image_url: str | UnsetType | None = UNSET
    detail: str | UnsetType | None = UNSET
    audio: str | UnsetType | None = UNSET
    transcript: str | UnsetType | None = UNSET


class ConversationItem(msgspec.Struct, kw_only=True):
    id: str | None = None
    object: str | None = None
    type: str = "message"
    status: str | None = None
    role: str | None = None
    content: list[ContentPart] = []


# --- client events ------------------------------------------------------------------------------


class EventHead(msgspec.Struct):
    """What every client event has."""

    type: str
    event_id: str | None = None


class SessionUpdate(msgspec.Struct):
    session: SessionOptions


class AudioAppend(msgspec.Struct):
    audio: str


class NoFields(msgspec.Struct):
    pass


class ItemCreate(msgspec.Struct):
    item: ConversationItem
    previous_item_id: str | None = None


class ItemNamed(msgspec.Struct):
    item_id: str


class ResponseCreate(msgspec.Struct):
    response: ResponseOptions | None = None


class ResponseCancel(msgspec.Struct):
    response_id: str | None = None


CLIENT_EVENTS: dict[str, type[msgspec.Struct]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": NoFields,
    "input_audio_buffer.clear": NoFields,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemNamed,
    "conversation.item.delete": ItemNamed,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}
SPEECH_EVENTS = ("conversation.item.truncate", "output_audio_buffer.clear")
"""Client events about speech that is answered, which is not served."""


# --- server events ------------------------------------------------------------------------------


class ServerEvent(msgspec.Struct, kw_only=True):
    type: str
    event_id: str = msgspec.field(default_factory=lambda: new_id("event"))


class ErrorDetail(msgspec.Struct, kw_only=True):
    type: str
    code: str | None
    message: str
    param: str | None
    event_id: str | None
    """Of the client's event that is at fault."""

    @classmethod
    def of(cls, body: ErrorBody, event_id: str | None) -> ErrorDetail:
        return cls(
            type=body.type,
            code=body.code,
            message=body.message,
            param=body.param,
            event_id=event_id,
        )


class ErrorEvent(ServerEvent, kw_only=True):
    type: str = "error"
    error: ErrorDetail


class SessionEvent(ServerEvent, kw_only=True):
    """`session.created`, `session.updated`."""

    session: Json


class Conversation(msgspec.Struct, kw_only=True):
    id: str
    object: str = "realtime.conversation"


class ConversationCreated(ServerEvent, kw_only=True):
    type: str = "conversation.created"
    conversation: Conversation


class ItemEvent(ServerEvent, kw_only=True):
    """`conversation.item.created`, `.added`, `.done`."""

    previous_item_id: str | None
    item: ConversationItem


class ItemRetrieved(ServerEvent, kw_only=True):
    type: str = "conversation.item.retrieved"
    item: ConversationItem


class ItemDeleted(ServerEvent, kw_only=True):
    type: str = "conversation.item.deleted"
    item_id: str


class BufferCommitted(ServerEvent, kw_only=True):
    type: str = "input_audio_buffer.committed"
    item_id: str
    previous_item_id: str | None


class BufferCleared(ServerEvent, kw_only=True):
    type: str = "input_audio_buffer.cleared"


class SpeechStarted(ServerEvent, kw_only=True):
    type: str = "input_audio_buffer.speech_started"
    audio_start_ms: int
    item_id: str


class SpeechStopped(ServerEvent, kw_only=True):
    type: str = "input_audio_buffer.speech_stopped"
    audio_end_ms: int
    item_id: str


class RateLimit(msgspec.Struct, kw_only=True):
    """Frames of a live sound that may be sent before the server reads more slowly."""

    name: str = "tokens"
    limit: int
    remaining: int
    reset_seconds: float
    """Of sound that waits to be computed."""


class RateLimitsUpdated(ServerEvent, kw_only=True):
    type: str = "rate_limits.updated"
    rate_limits: list[RateLimit]


class TranscriptionTokenDetails(msgspec.Struct, kw_only=True):
    audio_tokens: int
    text_tokens: int


class TranscriptionUsage(msgspec.Struct, kw_only=True):
    type: str = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: TranscriptionTokenDetails


class Logprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TranscriptionDelta(ServerEvent, kw_only=True):
    type: str = "conversation.item.input_audio_transcription.delta"
    item_id: str
    content_index: int = 0
    delta: str
    logprobs: list[Logprob] | None = None


class TranscriptionCompleted(ServerEvent, kw_only=True):
    type: str = "conversation.item.input_audio_transcription.completed"
    item_id: str
    content_index: int = 0
    transcript: str
    usage: TranscriptionUsage
    logprobs: list[Logprob] | None = None
    reuse_receipt: ReuseReceipt | UnsetType = UNSET


class TranscriptionFailed(ServerEvent, kw_only=True):
    type: str = "conversation.item.input_audio_transcription.failed"
    item_id: str
    content_index: int = 0
    error: ErrorBody


# --- responses ----------------------------------------------------------------------------------


class CachedTokenDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    text_tokens: int
    audio_tokens: int
    image_tokens: int


class OutputTokenDetails(msgspec.Struct, kw_only=True):
    text_tokens: int
    audio_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: CachedTokenDetails
    output_token_details: OutputTokenDetails


class StatusDetails(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    reason: str | None = None
    error: ErrorBody | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "realtime.response"
    status: ResponseStatus = "in_progress"
    status_details: StatusDetails | None = None
    output: list[ConversationItem] = []
    conversation_id: str | None = None
    output_modalities: tuple[str, ...] = ("text",)
    max_output_tokens: int | str = "inf"
    metadata: dict[str, str] | None = None
    usage: ResponseUsage | None = None
    reuse_receipt: ReuseReceipt | UnsetType = UNSET


class ResponseEvent(ServerEvent, kw_only=True):
    """`response.created`, `response.done`."""

    response: ResponseObject


class OutputItemEvent(ServerEvent, kw_only=True):
    """`response.output_item.added`, `.done`."""

    response_id: str
    output_index: int = 0
    item: ConversationItem


class TextPart(msgspec.Struct, kw_only=True):
    type: str = "text"
    text: str = ""


class OutputPartEvent(ServerEvent, kw_only=True):
    """What is about the one part of a response's one item."""

    response_id: str
    item_id: str
    output_index: int = 0
    content_index: int = 0


class PartEvent(OutputPartEvent, kw_only=True):
    """`response.content_part.added`, `.done`."""

    part: TextPart


class TextDelta(OutputPartEvent, kw_only=True):
    type: str = "response.output_text.delta"
    delta: str


class TextDone(OutputPartEvent, kw_only=True):
    type: str = "response.output_text.done"
    text: str
