"""Speech → text: one clip or file, by whatever model that hears is served.

An encoder-decoder transcribes window by window (`speech`). An audio chat model is asked for the
words by its own transcription prompt, where it has one, or by a plain instruction; the clip is an
`input_audio` part of the message, so that all its caches serve it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from lookonce.errors import BadRequestError, RequestError
from lookonce.frontend.frontend import Frontend
from lookonce.frontend.generation import PromptGeneration, Sample
from lookonce.frontend.receipt import reuse_receipt, usage
from lookonce.frontend.sampling_params import default_sampling
from lookonce.frontend.speech import OneTranscription, SpeechTranscription
from lookonce.frontend.transcript import (
    EncodedAudio,
    Fallback,
    Granularity,
    Task,
    TranscriptDelta,
    TranscriptDone,
    TranscriptEvent,
    TranscriptionOptions,
    TranscriptSegment,
    TranscriptWord,
    TrimmedText,
    language_code,
    language_name,
)
from lookonce.render.media.cost import sound_seconds
from lookonce.render.media.loader import for_part
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams

__all__ = [
    "EncodedAudio",
    "Fallback",
    "Granularity",
    "Task",
    "Transcriber",
    "TranscriptDelta",
    "TranscriptDone",
    "TranscriptEvent",
    "TranscriptSegment",
    "TranscriptWord",
    "TranscriptionOptions",
    "check_hears",
]
MAX_PROMPT_CHARACTERS = 10_000
Json = dict[str, Any]


class Transcriber:
    """Transcribes with the served model; one per process."""

    def __init__(
        self,
        frontend: Frontend,
        on_tokens: Callable[[int], None] = lambda count: None,
        on_generation: Callable[[PromptGeneration], None] = lambda generation: None,
    ) -> None:
        """`on_tokens` is told the tokens of each prompt and answer, also of those cut short;
        `on_generation` gets each request to the engine before it begins. Aborting one ends the
        transcription with a `BadRequestError`."""
        self._frontend = frontend
        self._on_tokens = on_tokens
        self._on_generation = on_generation

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
        if not clip.data:
            raise BadRequestError(f"{clip.param}: the file is empty", param=clip.param)
        check_hears(self._frontend, options)
        hears_windows = self._frontend.renderer.speech is not None
        kind: type[OneTranscription] = SpeechTranscription if hears_windows else _ChatTranscription
        events = kind(
            self._frontend,
            clip,
            options,
            tenant=tenant,
            cache_salt=cache_salt,
            on_tokens=self._on_tokens,
            on_generation=self._on_generation,
        ).events()
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


class _ChatTranscription(OneTranscription):
    """One clip, as a chat with the model."""

    async def events(self) -> AsyncGenerator[TranscriptEvent, None]:
        options = self._options
        if options.timestamps:
            raise BadRequestError(
                "this model gives no timestamps; ask for json or text, without "
                "timestamp_granularities",
                param="timestamp_granularities",
            )
        rendered = await self._render()
        try:
            generation = self._begin(rendered, self._sampling(), limit_asked=False)
            sample, words = Sample(), _AnswerFilter(self._marker())
            text = TrimmedText()
            async with aclosing(self._pieces(generation)) as pieces:
                async for piece in pieces:
                    sample.take(piece)
                    added = text.push(words.push(piece.text))
                    if added or piece.logprobs:
                        yield TranscriptDelta(added, piece.token_ids, piece.logprobs)
            self._check_whole(generation, sample)
            yield self._done(generation, sample, text.whole)
        finally:
            self._frontend.renderer.release(rendered)

    def _check_whole(self, generation: PromptGeneration, sample: Sample) -> None:
        """Raises `BadRequestError` for a transcript that its limit has cut off: no field of the
        answer could say so."""
        most = self._options.max_tokens
        if most == generation.completion_tokens and sample.finish_reason == "length":
            raise BadRequestError(
                f"the transcript is longer than the {most} tokens that are allowed with this key; "
                "send shorter files",
                param=self._audio.param,
                code="transcript_too_long",
            )

    def _done(self, generation: PromptGeneration, sample: Sample, text: str) -> TranscriptDone:
        longest = self._frontend.config.media.max_audio_seconds
        return TranscriptDone(
            text=text,
            language=language_name(language_code(self._options.language) or ""),
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
        default = default_sampling(self._frontend.defaults)
        limits = [each for each in (default.max_tokens, self._options.max_tokens) if each]
        return msgspec.structs.replace(
            default,
            n=1,
            temperature=self._options.temperature,
            max_tokens=min(limits, default=None),
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
        # As mistral_common writes it for `VoxtralProcessor.apply_transcription_request`.
        language = f"lang:{options.language}" if options.language else ""
        return _Prompt(answer_begins=f"{language}[TRANSCRIBE]")
    if model_type == "voxtral_realtime":
        refuse_instructions(options)
        return _Prompt()
    if options.task == "transcribe" and model_type == "qwen3_asr":
        return _Prompt(system=options.prompt or None)
    if options.task == "translate":
        told = "Translate the speech into English. Answer with the translation only."
    elif options.language:
        spoken = language_name(language_code(options.language) or "")
        told = f"Transcribe the speech, which is in {spoken}. Answer with the words only."
    else:
        told = "Transcribe the speech. Answer with the words only."
    if options.prompt:
        told = f"{told} Context: {options.prompt}"
    return _Prompt(told)


def refuse_instructions(options: TranscriptionOptions) -> None:
    """For a model that takes sound alone. It finds out the language itself: one that is named is
    what the answer says."""
    if options.task == "translate":
        raise BadRequestError("this model transcribes and does not translate", param="model")
    if options.prompt:
        raise BadRequestError("this model takes no prompt beside the sound", param="prompt")


class _AnswerFilter:
    """Drops what a model writes up to a marker; without a marker everything stays."""

    def __init__(self, marker: str | None) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> str:
        if self._marker is None:
            return text
        self._held += text
        _, found, after = self._held.partition(self._marker)
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
