"""A session's options, checked: what the client sent, and what the rest of the session reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from lookonce.errors import BadRequestError, ModelNotFoundError
from lookonce.frontend.requests import SamplingFields
from lookonce.frontend.transcription import MAX_PROMPT_CHARACTERS
from lookonce.server.http.body import refuse_unsupported, renamed_error
from lookonce.server.routes.realtime.audio import PCM_24K, AudioFormat
from lookonce.server.routes.realtime.events import (
    AnswerOptions,
    AudioInputOptions,
    AudioOptions,
    FormatOptions,
    ResponseOptions,
    SessionKind,
    SessionOptions,
    TranscriptionOptions,
    TurnDetectionOptions,
)

Json = dict[str, Any]
Value = TypeVar("Value")
PCM_RATES = (24_000, 16_000)
LOGPROBS = "item.input_audio_transcription.logprobs"
MAX_INSTRUCTIONS = 1_000_000
MAX_NAME = 256
"""Characters."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
"""OpenAI's limits: pairs, and characters of each."""
MAX_PREFIX_MS = 5_000
MAX_SILENCE_MS = 10_000
TEXT_ONLY = ["text"]
OBJECTS = {"realtime": "realtime.session", "transcription": "realtime.transcription_session"}


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """When speech in the input begins and ends a turn."""

    threshold: float = 0.5
    """Probability of speech from which a frame counts as spoken."""
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    create_response: bool = True
    interrupt_response: bool = True

    def shown(self, kind: SessionKind) -> Json:
        shown: Json = {
            "type": "server_vad",
            "threshold": self.threshold,
            "prefix_padding_ms": self.prefix_padding_ms,
            "silence_duration_ms": self.silence_duration_ms,
        }
        if kind == "realtime":
            shown["idle_timeout_ms"] = None
            shown["create_response"] = self.create_response
            shown["interrupt_response"] = self.interrupt_response
        return shown


@dataclass(frozen=True, slots=True)
class Transcription:
    """How input sound is transcribed."""

    model: str
    language: str | None = None
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How a response is made."""

    instructions: str = ""
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    cache_salt: str | None = None
    reuse_receipt: bool = False

    @property
    def limit_shown(self) -> int | str:
        return "inf" if self.max_output_tokens is None else self.max_output_tokens

    def sampling_fields(self) -> SamplingFields:
        return SamplingFields(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """All options of a session, resolved."""

    kind: SessionKind
    format: AudioFormat
    transcription: Transcription | None
    turn_detection: TurnDetection | None
    answer: AnswerSettings
    logprobs: bool = False

    def shown(self, session_id: str, model: str) -> Json:
        """The session object of events."""
        audio: Json = {
            "format": _format_shown(self.format),
            "noise_reduction": None,
            "transcription": None,
            "turn_detection": self.turn_detection and self.turn_detection.shown(self.kind),
        }
        if (asked := self.transcription) is not None:
            shown: Json = {"model": asked.model, "language": asked.language, "prompt": asked.prompt}
            audio["transcription"] = shown
        shared: Json = {
            "id": session_id,
            "type": self.kind,
            "object": OBJECTS[self.kind],
            "expires_at": None,
            "include": [LOGPROBS] if self.logprobs else None,
            "audio": {"input": audio},
        }
        if self.kind == "transcription":
            return shared
        return {
            **shared,
            "model": model,
            "output_modalities": TEXT_ONLY,
            "instructions": self.answer.instructions,
            "max_output_tokens": self.answer.limit_shown,
            "tools": [],
            "tool_choice": "auto",
            "truncation": "disabled",
            "tracing": None,
            "reuse_receipt": self.answer.reuse_receipt,
        }


def _format_shown(format: AudioFormat) -> Json:
    shown: Json = {"type": format.encoding}
    return {**shown, "rate": format.rate} if format.encoding == "audio/pcm" else shown


def given(value: Value | UnsetType | None, default: Value) -> Value:
    return default if value is UNSET or value is None else value


# --- reading ------------------------------------------------------------------------------------


def read_session(options: SessionOptions, kind: SessionKind, model: str) -> SessionSettings:
    """Raises `BadRequestError` naming the option, `ModelNotFoundError` for another model."""
    if options.type not in (UNSET, None, "realtime", "transcription"):
        raise BadRequestError(
            "session.type is realtime or transcription", param="session.type", code="invalid_value"
        )
    kind = "transcription" if given(options.type, kind) == "transcription" else "realtime"
    if options.truncation not in (UNSET, None, "auto", "disabled"):
        raise _unsupported("session.truncation", "a conversation is never shortened")
    check_model(options.model, model, "session.model")
    audio = given(options.audio, AudioOptions())
    return SessionSettings(
        kind=kind,
        answer=read_answer(options, AnswerSettings(), "session"),
        logprobs=_read_include(options),
        **_read_input(given(audio.input, AudioInputOptions()), kind, model),
    )


def check_supported(update: SessionOptions) -> None:
    """Raises `BadRequestError` for what is declared as not supported and asks for something."""
    _refuse(update, "session")
    audio = given(update.audio, AudioOptions())
    transcription = given(audio.input, AudioInputOptions()).transcription
    if isinstance(transcription, TranscriptionOptions):
        _refuse(transcription, "session.audio.input.transcription")


def read_response(
    options: ResponseOptions | None, session: AnswerSettings
) -> tuple[ResponseOptions, AnswerSettings]:
    """Raises `BadRequestError` naming the option."""
    options = options or ResponseOptions()
    _refuse(options, "response")
    if options.conversation not in (None, "auto", "none"):
        raise BadRequestError(
            "response.conversation is auto or none",
            param="response.conversation",
            code="invalid_value",
        )
    _check_metadata(options.metadata or {})
    return options, read_answer(options, session, "response")


def _check_metadata(metadata: dict[str, str]) -> None:
    too_long = any(
        len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE
        for key, value in metadata.items()
    )
    if too_long or len(metadata) > MAX_METADATA:
        raise BadRequestError(
            f"response.metadata has at most {MAX_METADATA} pairs, of {MAX_METADATA_KEY} and "
            f"{MAX_METADATA_VALUE} characters",
            param="response.metadata",
            code="invalid_value",
        )


def read_answer(options: AnswerOptions, base: AnswerSettings, where: str) -> AnswerSettings:
    """`base` where `options` are silent. Raises `BadRequestError`."""
    if given(options.output_modalities, TEXT_ONLY) != TEXT_ONLY:
        raise BadRequestError(
            f"{where}.output_modalities: this server answers in text alone, no speech; ask for "
            '["text"]',
            param=f"{where}.output_modalities",
            code="audio_output_not_supported",
        )
    limit = base.max_output_tokens
    if options.max_output_tokens not in (UNSET, None):
        limit = _read_limit(options.max_output_tokens, f"{where}.max_output_tokens")
    _check_length(options.instructions, MAX_INSTRUCTIONS, f"{where}.instructions")
    _check_length(options.cache_salt, MAX_NAME, f"{where}.cache_salt")
    return AnswerSettings(
        instructions=given(options.instructions, base.instructions),
        max_output_tokens=limit,
        temperature=_or(options.temperature, base.temperature),
        top_p=_or(options.top_p, base.top_p),
        top_k=_or(options.top_k, base.top_k),
        seed=_or(options.seed, base.seed),
        cache_salt=_or(options.cache_salt, base.cache_salt),
        reuse_receipt=given(options.reuse_receipt, base.reuse_receipt),
    )


def check_model(asked: str | UnsetType | None, served: str, param: str) -> None:
    """Raises `ModelNotFoundError`."""
    if given(asked, served) != served:
        raise ModelNotFoundError(
            f"{param}: the model {str(asked)[:200]!r} is not served here; {served!r} is",
            param=param,
        )


def _or(value: Value | UnsetType | None, default: Value | None) -> Value | None:
    return default if value is UNSET or value is None else value


def _read_limit(limit: int | str | UnsetType | None, param: str) -> int | None:
    if limit == "inf":
        return None
    if not isinstance(limit, int) or limit < 1:
        raise BadRequestError(
            f'{param} is a number of at least 1, or "inf"', param=param, code="invalid_value"
        )
    return limit


def _read_include(options: SessionOptions) -> bool:
    for number, name in enumerate(given(options.include, [])):
        if name != LOGPROBS:
            param = f"session.include[{number}]"
            raise BadRequestError(f"{param}: {name[:60]!r} is not supported", param=param)
    return bool(given(options.include, []))


def _read_input(options: AudioInputOptions, kind: SessionKind, model: str) -> Json:
    where = "session.audio.input"
    transcription = None
    if isinstance(options.transcription, TranscriptionOptions):
        transcription = _read_transcription(options.transcription, model, f"{where}.transcription")
    elif kind == "transcription":
        transcription = Transcription(model)
    if given(options.noise_reduction, None) is not None:
        raise _unsupported(f"{where}.noise_reduction", "sound is heard as it is sent")
    return {
        "format": _read_format(given(options.format, FormatOptions()), f"{where}.format"),
        "transcription": transcription,
        "turn_detection": _read_turns(options.turn_detection, f"{where}.turn_detection"),
    }


def _read_format(options: FormatOptions, param: str) -> AudioFormat:
    match options.type, options.rate:
        case "audio/pcm", None:
            return PCM_24K
        case "audio/pcm", rate if rate in PCM_RATES:
            return AudioFormat("audio/pcm", rate)
        case ("audio/pcmu" | "audio/pcma") as encoding, (None | 8000):
            return AudioFormat(encoding, 8_000)
    raise BadRequestError(
        f"{param}: the formats are audio/pcm with a rate of 24000 or 16000, audio/pcmu and "
        "audio/pcma",
        param=param,
        code="invalid_value",
    )


def _read_transcription(options: TranscriptionOptions, model: str, where: str) -> Transcription:
    check_model(options.model, model, f"{where}.model")
    _check_length(options.prompt, MAX_PROMPT_CHARACTERS, f"{where}.prompt")
    _check_length(options.language, MAX_NAME, f"{where}.language")
    return Transcription(model, _or(options.language, None), given(options.prompt, ""))


def _check_length(text: str | UnsetType | None, most: int, param: str) -> None:
    if isinstance(text, str) and len(text) > most:
        raise BadRequestError(
            f"{param} has more than {most} characters", param=param, code="invalid_value"
        )


def _read_turns(
    options: TurnDetectionOptions | UnsetType | None, where: str
) -> TurnDetection | None:
    if options is None:
        return None
    if options is UNSET:
        return TurnDetection()
    if options.type != "server_vad":
        raise _unsupported(f"{where}.type", "turns are detected by server_vad, or not at all: null")
    if given(options.idle_timeout_ms, 0):
        raise _unsupported(f"{where}.idle_timeout_ms", "responses begin after speech alone")
    default = TurnDetection()
    return TurnDetection(
        threshold=_between(
            given(options.threshold, default.threshold), 0.0, 1.0, f"{where}.threshold"
        ),
        prefix_padding_ms=_between(
            given(options.prefix_padding_ms, default.prefix_padding_ms),
            0,
            MAX_PREFIX_MS,
            f"{where}.prefix_padding_ms",
        ),
        silence_duration_ms=_between(
            given(options.silence_duration_ms, default.silence_duration_ms),
            32,
            MAX_SILENCE_MS,
            f"{where}.silence_duration_ms",
        ),
        create_response=given(options.create_response, True),
        interrupt_response=given(options.interrupt_response, True),
    )


Number = TypeVar("Number", int, float)


def _between(value: Number, least: Number, most: Number, param: str) -> Number:
    if not least <= value <= most:
        raise BadRequestError(
            f"{param} is at least {least} and at most {most}", param=param, code="invalid_value"
        )
    return value


def _refuse(options: AnswerOptions | TranscriptionOptions, where: str) -> None:
    try:
        refuse_unsupported(options)
    except BadRequestError as error:
        raise renamed_error(error, f"{where}.{error.param}") from None


def _unsupported(param: str, why: str) -> BadRequestError:
    return BadRequestError(
        f"{param} is not supported: {why}", param=param, code="unsupported_parameter"
    )
