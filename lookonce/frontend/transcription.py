"""Speech → text: one clip or file, by whatever model that hears is served.

An audio chat model is asked for the words by its own transcription prompt, where it has one, or by a
plain instruction; the clip is an `input_audio` part of the message, so that all its caches serve it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from lookonce.errors import BadRequestError, RequestError
from lookonce.frontend.frontend import Frontend
from lookonce.frontend.generation import PromptGeneration, Sample, prepare
from lookonce.frontend.receipt import reuse_receipt, usage
from lookonce.frontend.responses import ReuseReceipt, Usage
from lookonce.frontend.sampling_params import default_sampling
from lookonce.render.media.cost import sound_seconds
from lookonce.render.media.loader import for_part
from lookonce.types.request import RenderedPrompt, TokenLogprob
from lookonce.types.sampling import SamplingParams

Task = Literal["transcribe", "translate"]
Granularity = Literal["segment", "word"]
MAX_PROMPT_CHARACTERS = 10_000
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """An encoded sound (WAV, FLAC, Ogg or MP3); `param` names it in errors."""

    data: bytes
    param: str = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """How to transcribe."""

    language: str | None = None
    """ISO-639-1 code, or the language's English name; None: the model finds out."""
    prompt: str = ""
    """Text that the words may follow: names, spelling, style."""
    temperature: float = 0.0
    task: Task = "transcribe"
    timestamps: frozenset[Granularity] = frozenset()
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A stretch of the transcript; times in seconds from the file's start."""

    id: int
    seek: int
    """Frame of 10 ms where the window it was heard in begins."""
    start: float
    end: float
    text: str
    token_ids: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True)
class TranscriptWord:
    """A word with the time it was spoken, in seconds from the file's start."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """More of the text."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class TranscriptDone:
    """The whole transcript; always the last event."""

    text: str
    language: str
    """English name of the language that was asked for or heard; empty where nobody knows."""
    duration_seconds: float
    segments: list[TranscriptSegment]
    """Empty for models without timestamps."""
    words: list[TranscriptWord]
    """Empty where they were not asked for."""
    usage: Usage
    receipt: ReuseReceipt
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


TranscriptEvent = TranscriptDelta | TranscriptDone


class Transcriber:
    """Transcribes with the served model; one per process."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def transcribe(
        self,
        audio: bytes | EncodedAudio,
        options: TranscriptionOptions,
        *,
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> AsyncGenerator[TranscriptEvent, None]:
        """Deltas as they are heard, and at last the whole. Leaving the iterator aborts.

        Raises a `RequestError` that names the part at fault.
        """
        clip = audio if isinstance(audio, EncodedAudio) else EncodedAudio(audio)
        events = _ChatTranscription(self._frontend, clip, options, tenant, cache_salt).events()
        async with aclosing(events):
            async for event in events:
                yield event


def check_hears(frontend: Frontend, options: TranscriptionOptions) -> None:
    """Raises `BadRequestError` for a model without ears, or for what it cannot do."""
    if "audio" not in frontend.renderer.modalities:
        raise BadRequestError("the model takes no audio", param="model")
    if len(options.prompt) > MAX_PROMPT_CHARACTERS:
        raise BadRequestError(
            f"prompt has more than {MAX_PROMPT_CHARACTERS} characters", param="prompt"
        )


# --- audio chat models ------------------------------------------------------------------------


class _ChatTranscription:
    """One clip, as a chat with the model."""

    def __init__(
        self,
        frontend: Frontend,
        audio: EncodedAudio,
        options: TranscriptionOptions,
        tenant: str,
        cache_salt: str | None,
    ) -> None:
        self._frontend = frontend
        self._audio = audio
        self._options = options
        self._tenant = tenant
        self._cache_salt = cache_salt

    async def events(self) -> AsyncGenerator[TranscriptEvent, None]:
        options = self._options
        check_hears(self._frontend, options)
        if options.timestamps:
            raise BadRequestError(
                "this model gives no timestamps; ask for json or text, without "
                "timestamp_granularities",
                param="timestamp_granularities",
            )
        rendered = await self._render()
        try:
            generation = prepare(self._frontend, rendered, self._sampling(), limit_asked=False)
            sample, before = Sample(), _AnswerFilter(self._marker())
            async with aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    piece.text = before.push(piece.text)
                    sample.take(piece)
                    if piece.text or piece.token_ids:
                        yield TranscriptDelta(piece.text, piece.token_ids, piece.logprobs)
            yield self._done(generation, sample)
        finally:
            self._frontend.renderer.release(rendered)

    def _done(self, generation: PromptGeneration, sample: Sample) -> TranscriptDone:
        longest = self._frontend.config.media.max_audio_seconds
        return TranscriptDone(
            text="".join(sample.text).strip(),
            language=self._options.language or "",
            duration_seconds=sound_seconds(self._audio.data, longest),
            segments=[],
            words=[],
            usage=usage([generation]),
            receipt=reuse_receipt([generation]),
            token_ids=sample.token_ids,
            logprobs=sample.logprobs if self._options.logprobs else None,
        )

    async def _render(self) -> RenderedPrompt:
        frontend = self._frontend
        prompt = transcription_prompt(frontend.engine.model.model_type, self._options)
        sound = {"type": "input_audio", "input_audio": {"data": self._audio.data}}
        content = [sound] if prompt.instruction is None else [sound, _text(prompt.instruction)]
        messages: list[Json] = [{"role": "user", "content": content}]
        if prompt.system is not None:
            messages.insert(0, {"role": "system", "content": prompt.system})
        chat: Json = {}
        if prompt.answer_begins is not None:
            messages.append({"role": "assistant", "content": prompt.answer_begins})
            chat = {"add_generation_prompt": False, "continue_final_message": True}
        try:
            rendered = await frontend.renderer.render_chat(
                messages, tenant=self._tenant, cache_salt=self._cache_salt, options=chat
            )
        except RequestError as error:
            raise _about_file(error, self._audio.param) from None
        rendered.tenant = self._tenant
        return rendered

    def _sampling(self) -> SamplingParams:
        return msgspec.structs.replace(
            default_sampling(self._frontend.defaults),
            n=1,
            temperature=self._options.temperature,
            logprobs=0 if self._options.logprobs else None,
        )

    def _marker(self) -> str | None:
        return ANSWER_MARKERS.get(self._frontend.engine.model.model_type)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What a chat model is told beside the sound."""

    instruction: str | None = None
    system: str | None = None
    answer_begins: str | None = None


ANSWER_MARKERS = {"qwen3_asr": "<asr_text>"}
"""Models that write other things first → the text after which the words begin."""


def transcription_prompt(model_type: str, options: TranscriptionOptions) -> _Prompt:
    """The model's own transcription prompt, where it has one; else a plain instruction."""
    if options.task == "transcribe" and model_type == "voxtral":
        # As transformers' `VoxtralProcessor.apply_transcription_request` (mistral_common) writes it.
        language = f"lang:{options.language}" if options.language else ""
        return _Prompt(answer_begins=f"{language}[TRANSCRIBE]")
    if options.task == "transcribe" and model_type == "qwen3_asr":
        return _Prompt(system=options.prompt or None)
    if options.task == "translate":
        told = "Translate the speech into English. Answer with the translation only."
    elif options.language:
        told = (
            f"Transcribe the speech, which is in {_language_name(options.language)}. "
            "Answer with the words only."
        )
    else:
        told = "Transcribe the speech. Answer with the words only."
    if options.prompt:
        told = f"{told} Context: {options.prompt}"
    return _Prompt(told)


def _language_name(language: str) -> str:
    return LANGUAGES.get(language.lower(), language)


class _AnswerFilter:
    """Drops what a model writes up to a marker; without a marker everything stays."""

    def __init__(self, marker: str | None) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> str:
        if self._marker is None:
            return text
        self._held += text
        before, found, after = self._held.partition(self._marker)
        if not found:
            return ""
        self._marker = None
        return after


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _about_file(error: RequestError, param: str) -> RequestError:
    """The same error about the request's file, which is the only part of a message."""
    named = error.param or ""
    if not named.startswith("messages"):
        return error
    if error.message.startswith(f"{named}: "):
        error.message = error.message[len(named) + 2 :]
    return for_part(error, param)


LANGUAGES: dict[str, str] = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian",
    "ko": "korean", "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish",
    "pl": "polish", "ca": "catalan", "nl": "dutch", "ar": "arabic", "sv": "swedish",
    "it": "italian", "id": "indonesian", "hi": "hindi", "fi": "finnish", "vi": "vietnamese",
    "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay", "cs": "czech",
    "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian",
    "la": "latin", "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak",
    "te": "telugu", "fa": "persian", "lv": "latvian", "bn": "bengali", "sr": "serbian",
    "az": "azerbaijani", "sl": "slovenian", "kn": "kannada", "et": "estonian",
    "mk": "macedonian", "br": "breton", "eu": "basque", "is": "icelandic", "hy": "armenian",
    "ne": "nepali", "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian",
    "sw": "swahili", "gl": "galician", "mr": "marathi", "pa": "punjabi", "si": "sinhala",
    "km": "khmer", "sn": "shona", "yo": "yoruba", "so": "somali", "af": "afrikaans",
    "oc": "occitan", "ka": "georgian", "be": "belarusian", "tg": "tajik", "sd": "sindhi",
    "gu": "gujarati", "am": "amharic", "yi": "yiddish", "lo": "lao", "uz": "uzbek",
    "fo": "faroese", "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk",
    "mt": "maltese", "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan",
    "tl": "tagalog", "mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian",
    "ln": "lingala", "ha": "hausa", "ba": "bashkir", "jw": "javanese", "su": "sundanese",
    "yue": "cantonese",
}  # fmt: skip
"""ISO code → English name, as Whisper's tokenizer knows them."""
