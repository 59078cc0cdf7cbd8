"""Utterances of a live sound whose engine's session ends while its words are not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookonce.errors import EngineDeadError
from lookonce.frontend.live_transcription import LiveTranscription, Pace
from lookonce.frontend.session import SessionPiece, SoundSession
from lookonce.frontend.transcript import TranscriptDone, TranscriptEvent, TranscriptionOptions
from lookonce.types.request import SESSION_CREDITS

RATE = 16_000
SECOND = np.zeros(RATE, np.int16)
PAUSE_TOKENS = 2
OPTIONS = TranscriptionOptions()


class Sound:
    """A `SoundSession` that says what the test lets it say."""

    sampling_rate, frame_seconds, num_waiting = RATE, 0.08, 0

    def __init__(self) -> None:
        self.num_tokens = 0
        self.is_slowed, self.credits = False, SESSION_CREDITS
        self.closed = self._left = False
        self.error: Exception | None = None
        self._said: asyncio.Queue[str | None] = asyncio.Queue()

    def say(self, *texts: str) -> None:
        for text in texts:
            self._said.put_nowait(text)

    def fail(self, error: Exception) -> None:
        self.error, self.closed = error, True
        self._said.put_nowait(None)

    async def append(self, samples: object) -> None:
        if self.error is not None:
            raise self.error

    async def pause(self, on_length: Callable[[int], None]) -> None:
        on_length(self.num_tokens + self._said.qsize() + PAUSE_TOKENS)
        await self.append(None)

    def close(self) -> None:
        self.closed = self._left = True
        self._said.put_nowait(None)

    def __aiter__(self) -> Sound:
        return self

    async def __anext__(self) -> SessionPiece:
        text = None if self._left else await self._said.get()
        if self._left:
            raise StopAsyncIteration
        if text is None:
            assert self.error is not None
            raise self.error
        self.num_tokens += 1
        return SessionPiece(0, text, (7,))


class Listener:
    """Keeps what it is told. While `open` is not set it reads nothing."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.paces: list[Pace] = []
        self.open = asyncio.Event()
        self.open.set()
        self.running = 0
        self.charged: list[int] = []
        self.totals: list[int] = []

    async def transcript_event(self, name: str, event: TranscriptEvent) -> None:
        await self.open.wait()
        if done := isinstance(event, TranscriptDone):
            self.totals.append(event.usage.total_tokens)
        self.told.append((name, f"= {event.text}" if done else event.text))

    def transcript_failed(self, name: str, error: Exception) -> None:
        self.told.append((name, f"! {error}"))

    def sound_lost(self, error: Exception) -> None: ...

    def begin_transcript(self) -> None:
        self.running += 1

    def end_transcript(self, num_tokens: int) -> None:
        self.running -= 1
        self.charged.append(num_tokens)

    def pace_changed(self, pace: Pace) -> None:
        self.paces.append(pace)


@pytest.fixture
def sounds(monkeypatch) -> list[Sound]:
    opened: list[Sound] = []

    async def open_sound(*_: Any, **__: Any) -> Sound:
        opened.append(Sound())
        return opened[-1]

    monkeypatch.setattr(SoundSession, "open", open_sound)
    return opened


def live(listener: Listener) -> LiveTranscription:
    model = SimpleNamespace(eos_token_ids=(2,))
    frontend: Any = SimpleNamespace(engine=SimpleNamespace(model=model))
    return LiveTranscription(frontend, listener, tenant="")


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_words_of_the_next_utterance_are_not_told_of_one_whose_session_ended_unread(sounds):
    async def scenario() -> None:
        listener = Listener()
        heard = live(listener)
        heard.hear("a", SECOND, RATE, OPTIONS)
        heard.end("a")
        await settle()
        listener.open.clear()
        sounds[0].say("one")
        await settle()
        sounds[0].fail(EngineDeadError("the engine died"))
        heard.hear("b", SECOND, RATE, OPTIONS)
        heard.end("b")
        await settle()
        listener.open.set()
        await settle()
        sounds[1].say("two", " three")
        await settle()
        failed = ("a", "! the engine died")
        of_b = [("b", "two"), ("b", " three"), ("b", "= two three")]
        assert listener.told == [("a", "one"), failed, *of_b]
        assert listener.running == 0
        await heard.close()

    asyncio.run(scenario())


def test_a_session_that_was_left_completes_no_utterance_of_the_next_one(sounds):
    async def scenario() -> None:
        listener = Listener()
        heard = live(listener)
        heard.hear("a", SECOND, RATE, OPTIONS)
        sounds_before = ["one", " two", " three", " four"]
        await settle()
        sounds[0].say(*sounds_before[:-1])
        await settle()
        listener.open.clear()
        sounds[0].say(sounds_before[-1])
        await settle()
        sounds[0].fail(EngineDeadError("the engine died"))
        heard.hear("a", SECOND, RATE, OPTIONS)  # here it is noticed
        heard.end("a")
        heard.hear("b", SECOND, RATE, OPTIONS)
        heard.end("b")
        await settle()
        listener.open.set()
        await settle()
        sounds[1].say("five", " six")
        await settle()
        assert [text for name, text in listener.told if name == "b"] == [
            "five", " six", "= five six",
        ]  # fmt: skip
        await heard.close()

    asyncio.run(scenario())


def test_that_the_sound_is_not_slowed_any_more_is_told_of_the_next_session_too(sounds):
    async def scenario() -> None:
        listener = Listener()
        heard = live(listener)
        heard.hear("a", SECOND, RATE, OPTIONS)
        await settle()
        sounds[0].is_slowed, sounds[0].credits = True, 0
        heard.hear("a", SECOND, RATE, OPTIONS)
        await settle()
        sounds[0].fail(EngineDeadError("the engine died"))
        heard.end("a")
        heard.hear("b", SECOND, RATE, OPTIONS)
        await settle()
        assert [pace.remaining for pace in listener.paces] == [0, SESSION_CREDITS]
        await heard.close()

    asyncio.run(scenario())


def test_an_utterance_is_charged_what_its_usage_says_also_one_that_nobody_wants(sounds):
    async def scenario() -> None:
        listener = Listener()
        heard = live(listener)
        heard.hear("a", SECOND, RATE, OPTIONS)
        heard.end("a")
        await settle()
        sounds[0].say("one", " two")
        await settle()
        heard.hear("b", SECOND, RATE, OPTIONS)
        await settle()
        heard.drop("b")
        await settle()
        sounds[0].say("three", " four")
        await settle()
        assert listener.totals == [4]
        assert listener.charged == [4, 4]
        await heard.close()

    asyncio.run(scenario())
