"""Transcription by an encoder-decoder, window after window, as transformers generates with Whisper.

    file ─▶ windows (`render.media.sound_files`)
    window ─▶ prompt: [previous text] start, language, task [no timestamps] ─▶ engine request(s)
           ─▶ text good enough? else again, warmer ─▶ segments ─▶ where the next window begins

The rules are those of `WhisperGenerationMixin.generate` in transformers: language detection,
initial tokens, thresholds and fallback temperatures, segments, seeking in files longer than a
window.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.frontend.frontend import Frontend
from lookonce.frontend.generation import Piece, PromptGeneration, Sample, prepare
from lookonce.frontend.receipt import reuse_receipt, usage
from lookonce.frontend.transcript import (
    EncodedAudio,
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
from lookonce.frontend.words import words_of
from lookonce.render.families.speech import SpeechProcessing
from lookonce.render.media.sound_files import SoundFile
from lookonce.types.request import RenderedPrompt, TokenLogprob
from lookonce.types.sampling import Alignment, SamplingParams, TokenRules

TIME_PRECISION = 0.02
"""Seconds from one timestamp token to the next."""
TIME_PRECISION_FRAMES = 0.01
INPUT_STRIDE = 2
"""Frames of features per encoder position."""


class SpeechSettings(msgspec.Struct, frozen=True):
    """What `generation_config.json`, or else `config.json`, says about transcribing."""

    decoder_start_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    lang_to_id: dict[str, int] = {}
    task_to_id: dict[str, int] = {}
    no_timestamps_token_id: int | None = None
    prev_sot_token_id: int | None = None
    is_multilingual: bool | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    forced_decoder_ids: list[list[int | None]] | None = None
    max_initial_timestamp_index: int | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    alignment_heads: list[list[int]] | None = None
    median_filter_width: int = 7

    @property
    def first_eos(self) -> int:
        found = self.eos_token_id
        ids = found if isinstance(found, list) else [found]
        return next((token for token in ids if token is not None), 0)

    @property
    def timestamp_begin(self) -> int | None:
        """The id of 0.00 seconds; None for a model without timestamps."""
        return None if self.no_timestamps_token_id is None else self.no_timestamps_token_id + 1

    @property
    def is_whisper(self) -> bool:
        """Has Whisper's tokens for languages, tasks and times."""
        return self.no_timestamps_token_id is not None

    @property
    def is_english(self) -> bool:
        """A Whisper that knows English only."""
        return self.is_whisper and (not self.lang_to_id or self.is_multilingual is False)


def read_settings(folder: str) -> SpeechSettings:
    """Raises `ModelLoadError` for a file that is broken."""
    merged: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        try:
            found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ModelLoadError(f"{name}: {error}") from None
        merged |= {key: value for key, value in found.items() if value is not None}
    try:
        return msgspec.convert(merged, SpeechSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"generation_config.json: {error}") from None


@dataclass(slots=True)
class _Heard:
    """What the model wrote for one window."""

    token_ids: list[int]
    """With the end token, if it was written."""
    logprobs: list[TokenLogprob]
    temperature: float
    prompt: list[int]
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    times: list[float] = field(default_factory=list)
    """Seconds in the window at which each token ends, where words are asked for."""


@dataclass(slots=True)
class _Slice:
    """A segment before it has text: positions in a window's tokens, and seconds."""

    start: float
    end: float
    tokens: slice


@dataclass(slots=True)
class _Result:
    """What is known of the whole file so far."""

    language: str = ""
    segments: list[TranscriptSegment] = field(default_factory=list)
    words: list[TranscriptWord] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    generations: list[PromptGeneration] = field(default_factory=list)
    """All engine requests, for the receipt."""
    answers: list[PromptGeneration] = field(default_factory=list)
    """Those whose text was taken, for the usage."""


class OneTranscription(ABC):
    """One clip being transcribed: whose it is, and its requests to the engine."""

    def __init__(
        self,
        frontend: Frontend,
        audio: EncodedAudio,
        options: TranscriptionOptions,
        *,
        tenant: str,
        cache_salt: str | None,
        on_tokens: Callable[[int], None],
        on_generation: Callable[[PromptGeneration], None],
    ) -> None:
        self._frontend = frontend
        self._audio = audio
        self._options = options
        self._tenant = tenant
        self._cache_salt = cache_salt
        self._on_tokens = on_tokens
        self._on_generation = on_generation

    @abstractmethod
    def events(self) -> AsyncGenerator[TranscriptEvent, None]:
        """Deltas, and at last the whole."""

    def _begin(
        self, rendered: RenderedPrompt, sampling: SamplingParams, *, limit_asked: bool = True
    ) -> PromptGeneration:
        generation = prepare(self._frontend, rendered, sampling, limit_asked=limit_asked)
        self._on_generation(generation)
        return generation

    async def _pieces(self, generation: PromptGeneration) -> AsyncGenerator[Piece, None]:
        """Raises `BadRequestError` where the generation was aborted by its request's id."""
        try:
            async with aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._on_tokens(generation.rendered.num_tokens + generation.completion_tokens)
        if generation.aborted:
            raise BadRequestError("the transcription was aborted by its request_id", code="aborted")


class SpeechTranscription(OneTranscription):
    """One file, transcribed by an encoder-decoder."""

    def __init__(self, frontend: Frontend, *given: Any, **named: Any) -> None:
        super().__init__(frontend, *given, **named)
        self._settings = read_settings(frontend.config.model.folder)
        family = frontend.renderer.speech
        assert family is not None, "the model is an encoder-decoder"
        self._family: SpeechProcessing = family
        self._result = _Result()

    async def events(self) -> AsyncGenerator[TranscriptEvent, None]:
        """Deltas, one per segment, and at last the whole. Raises a `RequestError`."""
        self._check()
        file = await self._frontend.renderer.open_sound(
            self._audio.data,
            tenant=self._tenant,
            cache_salt=self._cache_salt,
            param=self._audio.param,
        )
        text = TrimmedText()
        timestamps = self._uses_timestamps(file)
        init = await self._initial_tokens(file, timestamps=timestamps)
        before = self._previous_tokens()
        seek = 0
        while seek < file.num_frames:
            frames = min(self._family.window_frames, file.num_frames - seek)
            heard = await self._hear(file, seek, [*before, *init], len(before), timestamps)
            if heard is None:
                seek += frames
                continue
            slices, step = self._sliced(heard, seek, frames)
            if "word" in self._options.timestamps:
                heard.times = await self._token_times(file, seek, heard)
            for piece in slices:
                for delta in self._take(piece, heard, seek, text):
                    yield delta
            seek += step if step > 0 else frames
        yield self._done(file, text)

    def _check(self) -> None:
        """Raises `BadRequestError` for what the model cannot do."""
        options, settings = self._options, self._settings
        if options.timestamps and settings.timestamp_begin is None:
            raise BadRequestError(
                "this model gives no timestamps; ask for json or text, without "
                "timestamp_granularities",
                param="timestamp_granularities",
            )
        if "word" in options.timestamps and not settings.alignment_heads:
            raise BadRequestError(
                "the model's generation_config.json names no alignment_heads, which word "
                "timestamps need",
                param="timestamp_granularities",
            )
        code = language_code(options.language)
        if options.task == "translate" and not settings.task_to_id:
            raise BadRequestError("the model translates nothing", param="model")
        if not settings.is_whisper:
            return  # whatever language it knows, nothing can be said to it about that
        if settings.is_english:
            if code not in (None, "en"):
                raise BadRequestError("the model knows English only", param="language")
        elif code is not None and f"<|{code}|>" not in settings.lang_to_id:
            known = ", ".join(sorted(name.strip("<|>") for name in settings.lang_to_id))
            raise BadRequestError(
                f"language {options.language!r:.40} is not known to the model; it knows {known}",
                param="language",
            )

    def _uses_timestamps(self, file: SoundFile) -> bool:
        if self._settings.timestamp_begin is None:
            return False
        return bool(self._options.timestamps) or file.num_frames > self._family.window_frames

    # --- the decoder's prompt -----------------------------------------------------------------

    async def _initial_tokens(self, file: SoundFile, *, timestamps: bool) -> list[int]:
        """transformers' `_retrieve_init_tokens`."""
        settings = self._settings
        tokens = [settings.decoder_start_token_id or 0]
        if not settings.is_whisper:
            self._result.language = language_name(language_code(self._options.language) or "")
        elif not settings.is_english:
            tokens.append(await self._language_token(file))
            task = settings.task_to_id.get(self._options.task)
            if task is not None:
                tokens.append(task)
        else:
            self._result.language = "english"
            tokens += self._forced_tokens()
        if settings.no_timestamps_token_id is not None:
            if not timestamps and tokens[-1] != settings.no_timestamps_token_id:
                tokens.append(settings.no_timestamps_token_id)
            elif timestamps and tokens[-1] == settings.no_timestamps_token_id:
                tokens.pop()
        return tokens

    def _forced_tokens(self) -> list[int]:
        """The tokens after the first that an older config forces."""
        forced = self._settings.forced_decoder_ids or []
        return [
            token
            for place, (at, token) in enumerate(forced, 1)
            if at == place and token is not None
        ]

    async def _language_token(self, file: SoundFile) -> int:
        settings = self._settings
        code = language_code(self._options.language)
        if code is None:
            token = await self._detect_language(file)
            names = {found: name for name, found in settings.lang_to_id.items()}
            code = names[token].strip("<|>")
        else:
            token = settings.lang_to_id[f"<|{code}|>"]
        self._result.language = language_name(code)
        return token

    async def _detect_language(self, file: SoundFile) -> int:
        """The likeliest language token after the first token, for the first window."""
        start = self._settings.decoder_start_token_id or 0
        rules = TokenRules(only=tuple(sorted(self._settings.lang_to_id.values())))
        sampling = SamplingParams(temperature=0.0, max_tokens=1, token_rules=rules, ignore_eos=True)
        sample, _ = await self._generate(file, 0, [start], sampling)
        return sample.token_ids[0]

    def _previous_tokens(self) -> list[int]:
        """The client's prompt as text that came before; its last tokens, if it is long."""
        before = self._settings.prev_sot_token_id
        text = self._options.prompt.strip()
        if before is None:
            suppressed = self._settings.suppress_tokens or []
            before = suppressed[-2] if len(suppressed) >= 2 else None
        if not text or before is None:
            return []
        encode = self._frontend.renderer.tokenizer.encode
        ids = encode(" " + text, add_special_tokens=False)
        most = self._longest // 2 - 1
        return [before, *ids[-(most - 1) :]]

    @property
    def _longest(self) -> int:
        return self._frontend.engine.model.max_model_len

    # --- one window ---------------------------------------------------------------------------

    async def _hear(
        self, file: SoundFile, seek: int, prompt: list[int], start: int, timestamps: bool
    ) -> _Heard | None:
        """What the model hears in the window at frame `seek`; None where nobody speaks.

        `start` is the index of the first initial token in the prompt.
        """
        fallback = self._options.fallback
        temperatures = [self._options.temperature]
        if fallback is not None:
            temperatures += [t for t in fallback.temperatures if t > self._options.temperature]
        for attempt, temperature in enumerate(temperatures):
            heard, generation = await self._try(
                file, seek, prompt, temperature, attempt, timestamps
            )
            doubtful = fallback is not None and heard.avg_logprob < fallback.logprob_threshold
            if self._settings.no_timestamps_token_id and (doubtful or self._options.timestamps):
                heard.no_speech_prob = await self._no_speech(file, seek, prompt[: start + 1])
            if fallback is None:
                break
            if doubtful and heard.no_speech_prob > fallback.no_speech_threshold:
                return None
            if not doubtful and heard.compression_ratio <= fallback.compression_ratio_threshold:
                break
        self._result.answers.append(generation)
        return heard

    async def _try(
        self,
        file: SoundFile,
        seek: int,
        prompt: list[int],
        temperature: float,
        attempt: int,
        timestamps: bool,
    ) -> tuple[_Heard, PromptGeneration]:
        sampling = SamplingParams(
            temperature=temperature,
            # The same file again gets the same text, so that its windows are held already.
            seed=attempt,
            max_tokens=self._max_new_tokens(len(prompt)),
            logprobs=0,
            skip_special_tokens=False,
            token_rules=self._rules(timestamps),
        )
        sample, generation = await self._generate(file, seek, prompt, sampling)
        heard = _Heard(sample.token_ids, sample.logprobs, temperature, prompt)
        heard.compression_ratio = compression_ratio(heard.token_ids, self._vocab_size)
        total = sum(entry.logprob for entry in heard.logprobs)
        heard.avg_logprob = total / max(1, len(heard.token_ids))
        return heard, generation

    async def _no_speech(self, file: SoundFile, seek: int, prompt: list[int]) -> float:
        """The probability of the token that says that nobody speaks, after the first token."""
        token = (self._settings.no_timestamps_token_id or 0) - 1
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=0,
            ignore_eos=True,
            token_rules=TokenRules(only=(token,)),
        )
        sample, _ = await self._generate(file, seek, prompt, sampling)
        return math.exp(sample.logprobs[0].logprob)

    def _rules(self, timestamps: bool) -> TokenRules:
        settings = self._settings
        return TokenRules(
            suppressed=tuple(settings.suppress_tokens or ()),
            suppressed_first=tuple(settings.begin_suppress_tokens or ()),
            timestamp_begin=settings.timestamp_begin if timestamps else None,
            max_initial_timestamp=settings.max_initial_timestamp_index,
            text_end=settings.first_eos,
        )

    def _max_new_tokens(self, num_prompt: int) -> int:
        """transformers' `_set_max_new_tokens_and_length`."""
        room = self._longest - num_prompt
        if room < 1:
            raise BadRequestError("prompt leaves the model no room for text", param="prompt")
        if self._settings.max_new_tokens is not None:
            return min(room, self._settings.max_new_tokens)
        if self._settings.max_length is None:
            return room
        counted = min(self._longest // 2 - 1, num_prompt) if self._settings.is_whisper else 0
        return max(1, min(room, self._settings.max_length + counted - num_prompt))

    @property
    def _vocab_size(self) -> int:
        return self._frontend.engine.model.vocab_size

    async def _generate(
        self, file: SoundFile, seek: int, prompt: Sequence[int], sampling: SamplingParams
    ) -> tuple[Sample, PromptGeneration]:
        frontend = self._frontend
        item = await file.window(seek)
        rendered = frontend.renderer.speech_prompt(
            prompt, item, tenant=self._tenant, cache_salt=self._cache_salt
        )
        try:
            generation = self._begin(rendered, sampling)
            self._result.generations.append(generation)
            sample = Sample()
            async with aclosing(self._pieces(generation)) as pieces:
                async for piece in pieces:
                    sample.take(piece)
        finally:
            frontend.renderer.release(rendered)
        return sample, generation

    # --- segments -----------------------------------------------------------------------------

    def _sliced(self, heard: _Heard, seek: int, frames: int) -> tuple[list[_Slice], int]:
        """The segments of a window, and by how many frames to go on: transformers'
        `_retrieve_segment`."""
        tokens = self._without_end(heard.token_ids)
        begin = self._settings.timestamp_begin
        if begin is None:
            begin = self._vocab_size + 1
        offset = seek / self._family.frames_per_second
        is_time = [token >= begin for token in tokens]
        single_end = is_time[-2:] == [False, True]
        cuts = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
        if not cuts:
            steps = int(frames * TIME_PRECISION_FRAMES / TIME_PRECISION)
            times = [token for token in tokens if token >= begin]
            if times and times[-1] != begin:
                steps = times[-1] - begin
            whole = slice(0, len(tokens))
            return [_Slice(offset, offset + steps * TIME_PRECISION, whole)], frames
        if single_end:
            cuts.append(len(tokens))
        else:
            cuts[-1] += 1  # with the second of two timestamps, so that it is known to be no single
        slices, last = [], 0
        for number, cut in enumerate(cuts):
            part = tokens[last:cut]
            is_last = number == len(cuts) - 1
            closing = part[-1 if not is_last or single_end else -2]
            start, end = ((token - begin) * TIME_PRECISION for token in (part[0], closing))
            slices.append(_Slice(offset + start, offset + end, slice(last, cut)))
            last = cut
        if single_end:
            return slices, frames
        return slices, (tokens[last - 2] - begin) * INPUT_STRIDE

    def _without_end(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] == self._settings.first_eos else tokens

    def _take(
        self, piece: _Slice, heard: _Heard, seek: int, text: TrimmedText
    ) -> list[TranscriptDelta]:
        """Add a segment to the result; its delta, if it has text."""
        result, tokens = self._result, heard.token_ids[piece.tokens]
        written = self._text(tokens)
        if not self._settings.is_whisper and text.whole:
            written = " " + written.lstrip()  # such tokenizers drop the space before a text
        segment = TranscriptSegment(
            id=len(result.segments),
            seek=seek,
            start=round(piece.start, 3),
            end=round(piece.end, 3),
            text=written,
            token_ids=tokens,
            temperature=heard.temperature,
            avg_logprob=heard.avg_logprob,
            compression_ratio=heard.compression_ratio,
            no_speech_prob=heard.no_speech_prob,
        )
        result.segments.append(segment)
        shown = self._shown(tokens)
        if heard.times:
            result.words += self._words(piece, heard, seek, shown)
        logprobs = [heard.logprobs[piece.tokens][index] for index in shown]
        ids = [tokens[index] for index in shown]
        result.token_ids += ids
        result.logprobs += logprobs
        added = text.push(written)
        if not added and not ids:
            return []
        return [TranscriptDelta(added, ids, logprobs if self._options.logprobs else None)]

    async def _token_times(self, file: SoundFile, seek: int, heard: _Heard) -> list[float]:
        """When each token of a window ends: transformers' `_extract_token_timestamps`.

        The last token written is never read by the decoder; its time is that of the one before.
        """
        written = heard.token_ids[:-1]
        frames = min(file.num_frames, file.sound_frames) - seek
        if not written or frames < INPUT_STRIDE:
            return [0.0] * len(heard.token_ids)
        alignment = Alignment(
            heads=tuple((layer, head) for layer, head in self._settings.alignment_heads or ()),
            start=len(heard.prompt),
            positions=frames // INPUT_STRIDE,
            filter_width=self._settings.median_filter_width,
        )
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, alignment=alignment
        )
        _, generation = await self._generate(file, seek, [*heard.prompt, *written], sampling)
        times = [position * TIME_PRECISION for position in generation.alignment or ()]
        return [*times, times[-1]] if times else [0.0] * len(heard.token_ids)

    def _words(
        self, piece: _Slice, heard: _Heard, seek: int, shown: list[int]
    ) -> list[TranscriptWord]:
        """The words of a segment, each from where the token before it ends."""
        tokens, first = heard.token_ids[piece.tokens], piece.tokens.start
        offset = seek / self._family.frames_per_second
        text_tokens = [tokens[index] for index in shown]
        words = words_of(text_tokens, self._frontend.renderer.decode, self._result.language)
        found = []
        for word in words:
            if not word.text.strip():
                continue
            begin, end = first + shown[word.indices[0]], first + shown[word.indices[-1]]
            start = heard.times[begin - 1] if begin else 0.0
            times = (round(offset + start, 2), round(offset + heard.times[end], 2))
            found.append(TranscriptWord(word.text.strip(), *times))
        return found

    def _shown(self, tokens: Sequence[int]) -> list[int]:
        """Indices of the tokens that are text."""
        begin = self._settings.timestamp_begin
        special = self._frontend.renderer.tokenizer.special_ids_except(())
        return [
            index
            for index, token in enumerate(tokens)
            if token not in special and (begin is None or token < begin)
        ]

    def _text(self, tokens: Sequence[int]) -> str:
        return self._frontend.renderer.decode([tokens[index] for index in self._shown(tokens)])

    def _done(self, file: SoundFile, text: TrimmedText) -> TranscriptDone:
        result = self._result
        return TranscriptDone(
            text=text.whole,
            language=result.language,
            duration_seconds=file.seconds,
            segments=result.segments,
            words=result.words,
            usage=usage(result.answers),
            receipt=reuse_receipt(result.generations),
            token_ids=result.token_ids,
            logprobs=result.logprobs if self._options.logprobs else None,
        )


def compression_ratio(token_ids: Sequence[int], vocab_size: int) -> float:
    """Bytes of the tokens over those of the same compressed by zlib: high for a repetition.

    transformers' `_retrieve_compression_ratio`.
    """
    width = int(math.log2(vocab_size) / 8) + 1
    plain = b"".join(token.to_bytes(width, "little") for token in token_ids)
    return len(plain) / len(zlib.compress(plain))
