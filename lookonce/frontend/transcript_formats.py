"""Transcripts as OpenAI's clients read them: json, verbose_json, text, srt, vtt, events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from lookonce.frontend.logprobs import TokenBytes
from lookonce.frontend.responses import ReuseReceipt
from lookonce.frontend.transcript import (
    TranscriptDelta,
    TranscriptDone,
    TranscriptSegment,
)
from lookonce.types.request import TokenLogprob

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]


class LogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class InputTokenDetails(msgspec.Struct):
    audio_tokens: int
    text_tokens: int


class TokenUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails
    type: str = "tokens"


class DurationUsage(msgspec.Struct):
    seconds: int
    type: str = "duration"


class Transcription(msgspec.Struct, kw_only=True):
    """`response_format` "json"."""

    text: str
    usage: TokenUsage
    logprobs: list[LogprobEntry] | UnsetType = UNSET
    reuse_receipt: ReuseReceipt | UnsetType = UNSET


class Segment(msgspec.Struct, kw_only=True):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Word(msgspec.Struct):
    word: str
    start: float
    end: float


class VerboseTranscription(msgspec.Struct, kw_only=True):
    """`response_format` "verbose_json"."""

    task: str
    language: str
    duration: float
    text: str
    usage: DurationUsage
    segments: list[Segment] | UnsetType = UNSET
    words: list[Word] | UnsetType = UNSET
    reuse_receipt: ReuseReceipt | UnsetType = UNSET


class TextDeltaEvent(msgspec.Struct, kw_only=True):
    delta: str
    type: str = "transcript.text.delta"
    logprobs: list[LogprobEntry] | UnsetType = UNSET


class TextDoneEvent(msgspec.Struct, kw_only=True):
    text: str
    usage: TokenUsage
    type: str = "transcript.text.done"
    logprobs: list[LogprobEntry] | UnsetType = UNSET
    reuse_receipt: ReuseReceipt | UnsetType = UNSET


def transcription(done: TranscriptDone, token_bytes: TokenBytes) -> Transcription:
    return Transcription(
        text=done.text,
        usage=token_usage(done),
        logprobs=logprob_entries(done.token_ids, done.logprobs, token_bytes),
    )


def verbose_transcription(
    done: TranscriptDone, task: str, *, segments: bool, words: bool
) -> VerboseTranscription:
    return VerboseTranscription(
        task=task,
        language=done.language,
        duration=round(done.duration_seconds, 3),
        text=done.text,
        usage=DurationUsage(math.ceil(done.duration_seconds)),
        segments=[_segment(segment) for segment in done.segments] if segments else UNSET,
        words=[Word(word.word, word.start, word.end) for word in done.words] if words else UNSET,
    )


def delta_event(delta: TranscriptDelta, token_bytes: TokenBytes) -> TextDeltaEvent:
    return TextDeltaEvent(
        delta=delta.text,
        logprobs=logprob_entries(delta.token_ids, delta.logprobs, token_bytes),
    )


def done_event(done: TranscriptDone, token_bytes: TokenBytes) -> TextDoneEvent:
    return TextDoneEvent(
        text=done.text,
        usage=token_usage(done),
        logprobs=logprob_entries(done.token_ids, done.logprobs, token_bytes),
    )


def token_usage(done: TranscriptDone) -> TokenUsage:
    """An encoder-decoder's sound is no part of its prompt, and counts all the same."""
    used = done.usage
    audio = used.prompt_tokens_details.audio_tokens
    text = used.prompt_tokens
    if audio <= text:
        text -= audio
    return TokenUsage(
        input_tokens=audio + text,
        output_tokens=used.completion_tokens,
        total_tokens=audio + text + used.completion_tokens,
        input_token_details=InputTokenDetails(audio_tokens=audio, text_tokens=text),
    )


def logprob_entries(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, token_bytes: TokenBytes
) -> list[LogprobEntry] | UnsetType:
    if logprobs is None:
        return UNSET
    entries = []
    for token, scored in zip(token_ids, logprobs, strict=False):
        plain = token_bytes(token)
        entries.append(LogprobEntry(plain.decode("utf-8", "replace"), scored.logprob, list(plain)))
    return entries


def srt(segments: Iterable[TranscriptSegment]) -> str:
    """SubRip: numbered blocks, times with a comma."""
    blocks = [
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_line(each)}\n"
        for number, each in enumerate(segments, 1)
    ]
    return "\n".join(blocks)


def vtt(segments: Iterable[TranscriptSegment]) -> str:
    """WebVTT."""
    blocks = [
        f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{_line(each)}\n"
        for each in segments
    ]
    return "WEBVTT\n\n" + "\n".join(blocks)


def _line(segment: TranscriptSegment) -> str:
    """A cue's text: no empty line, which would end it, and no arrow, which begins another."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    total = round(seconds * 1000)
    hours, rest = divmod(total, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    whole, millis = divmod(rest, 1000)
    return f"{hours:02d}:{minutes:02d}:{whole:02d}{point}{millis:03d}"


def _segment(segment: TranscriptSegment) -> Segment:
    return Segment(
        id=segment.id,
        seek=segment.seek,
        start=segment.start,
        end=segment.end,
        text=segment.text,
        tokens=segment.token_ids,
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
    )
