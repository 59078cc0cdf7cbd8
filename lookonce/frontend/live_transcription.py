"""A live sound without an end, cut into utterances, each with a transcript of its own.

    samples of an utterance ─▶ hear ─┐                            ┌▶ deltas, while it is spoken
    its end                 ─▶ end  ─┴▶ one SoundSession ─▶ tokens ┴▶ done, when its end is written

Its end is a silence in the engine's session, in which the last words are written; the next
utterance follows in the same session. What is heard waits in a queue while the session takes no
more: whoever gives samples waits for `wait_taken`. Where the session ends, the utterances in it
fail, and the next one begins another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import soxr
from numpy.typing import NDArray

from lookonce.errors import LookOnceError
from lookonce.frontend.frontend import Frontend
from lookonce.frontend.receipt import reuse_receipt
from lookonce.frontend.responses import PromptTokensDetails, Usage
from lookonce.frontend.session import SessionPiece, SoundSession
from lookonce.frontend.transcript import (
    TranscriptDelta,
    TranscriptDone,
    TranscriptEvent,
    TranscriptionOptions,
    TrimmedText,
    language_code,
    language_name,
)
from lookonce.frontend.transcription import refuse_instructions
from lookonce.types.request import SESSION_CREDITS, TokenLogprob
from lookonce.types.sampling import SamplingParams

logger = logging.getLogger("lookonce.frontend")

Samples = NDArray[np.int16]
FEW_CREDITS = SESSION_CREDITS // 2
"""Credits from which a session that was slowed counts as not slowed any more."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How many more frames a live sound may be sent now."""

    limit: int
    remaining: int
    seconds: float
    """Of the sound that waits to be computed."""


class TranscriptListener(Protocol):
    """Who is told what becomes of the utterances."""

    async def transcript_event(self, name: str, event: TranscriptEvent) -> None:
        """Deltas of an utterance, and at last the whole. May wait: then the sound does, too."""

    def transcript_failed(self, name: str, error: Exception) -> None:
        """Of an utterance that has ended: nothing more comes of it."""

    def sound_lost(self, error: Exception) -> None:
        """The engine's session ended while an utterance was spoken, which fails at its end."""

    def begin_transcript(self) -> None:
        """An utterance begins. Raises `LookOnceError` for one that is not to be heard."""

    def end_transcript(self, num_tokens: int) -> None:
        """One that `begin_transcript` let begin is over: written, failed or left. It took so many
        tokens, in and out."""

    def pace_changed(self, pace: Pace) -> None:
        """The sound is slowed, or is not any more."""


@dataclass(slots=True)
class _Utterance:
    name: str
    rate: int
    """Hz of its samples."""
    options: TranscriptionOptions
    ended: bool = False
    """All of it is in the queue."""
    dropped: bool = False
    """Nobody wants its text."""
    begun: bool = False
    error: Exception | None = None
    resampler: soxr.ResampleStream | None = None
    last: int | None = None
    """Tokens of the session once all of it is written."""
    text: TrimmedText = field(default_factory=TrimmedText)
    num_samples: int = 0
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    """With log-probabilities, where they are wanted."""
    logprobs: list[TokenLogprob] = field(default_factory=list)


_Taken = Callable[[], None]


class LiveTranscription:
    """Transcribes the utterances of one speaker after the other, as they are spoken.

    For models that hear frame by frame (`Renderer.transcribes_live`). Used on one event loop; ends
    by `close`.
    """

    def __init__(self, frontend: Frontend, listener: TranscriptListener, *, tenant: str) -> None:
        self._frontend = frontend
        self._listener = listener
        self._tenant = tenant
        self._by_name: dict[str, _Utterance] = {}
        """Those that are not over."""
        self._queue: deque[tuple[_Utterance, Samples | None, _Taken]] = deque()
        """Sound to be heard; None: the utterance's end."""
        self._something, self._all_taken = asyncio.Event(), asyncio.Event()
        self._all_taken.set()
        self._sound: SoundSession | None = None
        self._sound_logprobs = False
        self._must_renew = False
        self._in_sound: deque[_Utterance] = deque()
        """Utterances that the engine's session hears, in their order."""
        self._sound_empty = asyncio.Event()
        self._sound_empty.set()
        self._slowed = False
        self._feeder: asyncio.Task[None] | None = None
        self._readers: set[asyncio.Task[None]] = set()

    def hear(
        self,
        name: str,
        samples: Samples,
        rate: int,
        options: TranscriptionOptions,
        taken: _Taken = lambda: None,
    ) -> None:
        """More of an utterance, 16-bit mono; the first call begins it. `taken` is called once the
        samples are not held any more; `options` are those of the first call."""
        utterance = self._by_name.get(name)
        if utterance is None:
            utterance = self._by_name[name] = _Utterance(name, rate, options)
        self._give(utterance, samples, taken)

    def end(self, name: str) -> None:
        """The utterance is over: `TranscriptDone` or a failure follows."""
        utterance = self._by_name[name]
        utterance.ended = True
        self._give(utterance, None, lambda: None)

    def drop(self, name: str) -> None:
        """Nothing more of an utterance is told; one that has not ended ends here."""
        utterance = self._by_name.pop(name, None)
        if utterance is None:
            return
        utterance.dropped = True
        if not utterance.ended:
            utterance.ended = True
            self._give(utterance, None, lambda: None)

    async def wait_taken(self) -> None:
        """Returns once the engine has taken all that was given: it is slowed by credits."""
        await self._all_taken.wait()

    async def close(self) -> None:
        """End the engine's session, and tell nothing any more."""
        tasks = [*self._readers, *([self._feeder] if self._feeder else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sound is not None:
            self._sound.close()
            self._sound = None
        for utterance in (*self._in_sound, *self._by_name.values(), *(u for u, *_ in self._queue)):
            self._leave(utterance)
        self._in_sound.clear()
        self._by_name.clear()
        for _, _, taken in self._queue:
            taken()
        self._queue.clear()
        self._all_taken.set()

    def _give(self, utterance: _Utterance, samples: Samples | None, taken: _Taken) -> None:
        self._queue.append((utterance, samples, taken))
        self._all_taken.clear()
        self._something.set()
        if self._feeder is None:
            self._feeder = asyncio.create_task(self._feed())

    # --- to the engine ------------------------------------------------------------------------

    async def _feed(self) -> None:
        while True:
            while not self._queue:
                self._all_taken.set()
                self._something.clear()
                await self._something.wait()
            utterance, samples, taken = self._queue[0]
            work = self._end(utterance) if samples is None else self._hear(utterance, samples)
            await self._attempt(utterance, work)
            self._queue.popleft()
            taken()

    async def _attempt(self, utterance: _Utterance, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the listener is told
            if self._sound is not None and self._sound.closed:
                self._break(self._sound, error)
            if utterance.error is None:
                self._fail(utterance, error)
            if utterance.ended and utterance not in self._in_sound:
                self._tell_failed(utterance)

    async def _hear(self, utterance: _Utterance, samples: Samples) -> None:
        if utterance.error is not None or utterance.dropped:
            return
        if not utterance.begun:
            await self._begin(utterance)
        for start in range(0, len(samples), utterance.rate):  # a second at a time
            await self._append(utterance, samples[start : start + utterance.rate])
            await asyncio.sleep(0)
        utterance.num_samples += len(samples)

    async def _begin(self, utterance: _Utterance) -> None:
        refuse_instructions(utterance.options)
        self._listener.begin_transcript()
        utterance.begun = True
        ended = self._sound is not None and self._sound.closed  # its reader tells what it heard
        if ended or self._must_renew or self._sound_logprobs != utterance.options.logprobs:
            await self._sound_empty.wait()
            self._leave_sound()
        if self._sound is None:
            self._sound_logprobs = utterance.options.logprobs
            self._sound = await SoundSession.open(
                self._frontend, sampling=self._sampling(), tenant=self._tenant
            )
            reader = asyncio.create_task(self._read(self._sound))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        if utterance.rate != self._sound.sampling_rate:
            utterance.resampler = soxr.ResampleStream(
                utterance.rate, self._sound.sampling_rate, 1, dtype="float32"
            )
        self._in_sound.append(utterance)
        self._sound_empty.clear()

    def _sampling(self) -> SamplingParams:
        """A session has no end, whatever the model takes for one."""
        logprobs = 0 if self._sound_logprobs else None
        return SamplingParams(temperature=0.0, ignore_eos=True, logprobs=logprobs)

    async def _append(self, utterance: _Utterance, samples: Samples, *, last: bool = False) -> None:
        if utterance.error is not None or self._sound is None:
            return
        levels = samples.astype(np.float32) / np.float32(32768)
        if utterance.resampler is not None:
            levels = utterance.resampler.resample_chunk(levels, last=last)
        if len(levels):
            self._watch_pace(self._sound)
            await self._sound.append(levels)

    async def _end(self, utterance: _Utterance) -> None:
        if utterance.resampler is not None:
            await self._append(utterance, np.zeros(0, np.int16), last=True)
        if self._sound is not None and utterance in self._in_sound:
            await self._sound.pause(lambda num_tokens: setattr(utterance, "last", num_tokens))
        elif utterance.error is not None:
            self._tell_failed(utterance)
        elif self._over(utterance):
            await self._listener.transcript_event(utterance.name, self._done(utterance))

    def _watch_pace(self, sound: SoundSession) -> None:
        if sound.is_slowed == self._slowed or (self._slowed and sound.credits < FEW_CREDITS):
            return
        self._slowed = sound.is_slowed
        seconds = sound.num_waiting * sound.frame_seconds
        self._listener.pace_changed(Pace(SESSION_CREDITS, max(0, sound.credits), seconds))

    # --- from the engine ----------------------------------------------------------------------

    async def _read(self, sound: SoundSession) -> None:
        try:
            async for piece in sound:
                if self._in_sound and piece.token_ids:
                    await self._take(self._in_sound[0], piece)
                    if self._sound is not sound:  # it was left while the listener waited
                        return
                    await self._complete(sound)
        except Exception as error:  # noqa: BLE001 - the listener is told
            self._break(sound, error)

    async def _take(self, utterance: _Utterance, piece: SessionPiece) -> None:
        utterance.num_tokens += len(piece.token_ids)
        if set(piece.token_ids) & set(self._frontend.engine.model.eos_token_ids):
            self._must_renew = True  # no model has learnt what follows that
        if utterance.dropped or utterance.error is not None:
            return
        added = utterance.text.push(piece.text)
        token_ids, logprobs = list(piece.token_ids), list(piece.logprobs)
        if utterance.options.logprobs:
            utterance.token_ids += token_ids
            utterance.logprobs += logprobs
        if added or logprobs:
            delta = TranscriptDelta(added, token_ids, logprobs or None)
            await self._listener.transcript_event(utterance.name, delta)

    async def _complete(self, sound: SoundSession) -> None:
        """Tell the whole of what is written."""
        utterance = self._in_sound[0]
        if utterance.last is None or sound.num_tokens < utterance.last:
            return
        self._in_sound.popleft()
        if not self._in_sound:
            self._sound_empty.set()
        if utterance.error is not None:
            self._tell_failed(utterance)
        elif self._over(utterance):
            await self._listener.transcript_event(utterance.name, self._done(utterance))

    def _done(self, utterance: _Utterance) -> TranscriptDone:
        return TranscriptDone(
            text=utterance.text.whole,
            language=language_name(language_code(utterance.options.language) or ""),
            duration_seconds=utterance.num_samples / utterance.rate,
            segments=[],
            words=[],
            usage=_usage(utterance),
            receipt=reuse_receipt([]),
            token_ids=utterance.token_ids,
            logprobs=utterance.logprobs if utterance.options.logprobs else None,
        )

    # --- ends ---------------------------------------------------------------------------------

    def _leave_sound(self) -> None:
        sound, self._sound = self._sound, None
        self._must_renew = False
        if sound is not None:
            sound.close()

    def _break(self, sound: SoundSession, error: Exception) -> None:
        """The engine's session has ended, and what it heard fails."""
        if self._sound is not sound:
            return
        self._leave_sound()
        lost = list(self._in_sound)
        self._in_sound.clear()
        self._sound_empty.set()
        for utterance in lost:
            self._fail(utterance, error)
            if utterance.last is not None:
                self._tell_failed(utterance)

    def _fail(self, utterance: _Utterance, error: Exception) -> None:
        if not isinstance(error, LookOnceError):
            logger.error("a live transcription broke", exc_info=error)
        utterance.error = error
        if not utterance.ended:
            self._listener.sound_lost(error)

    def _tell_failed(self, utterance: _Utterance) -> None:
        if self._over(utterance) and utterance.error is not None:
            self._listener.transcript_failed(utterance.name, utterance.error)

    def _over(self, utterance: _Utterance) -> bool:
        """Nothing more comes of it; whether somebody wants to know."""
        self._leave(utterance)
        return self._by_name.pop(utterance.name, None) is utterance

    def _leave(self, utterance: _Utterance) -> None:
        if utterance.begun:
            utterance.begun = False
            self._listener.end_transcript(_usage(utterance).total_tokens)


def _usage(utterance: _Utterance) -> Usage:
    """One token in and one out for each frame."""
    num_frames = utterance.num_tokens
    return Usage(
        prompt_tokens=num_frames,
        completion_tokens=num_frames,
        total_tokens=2 * num_frames,
        prompt_tokens_details=PromptTokensDetails(audio_tokens=num_frames),
    )
