"""Speech with the time of each word, from espeak-ng's library, and rooms and noise around it."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import soxr
from numpy.typing import NDArray

from tools.ear.folder import SAMPLE_RATE

LIBRARY = "espeak-ng"

ACCENTS = ("en-us", "en", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-029")
VARIANTS = (
    "", "+m1", "+m2", "+m3", "+m4", "+m5", "+m6", "+m7", "+f1", "+f2", "+f3", "+f4", "+f5",
    "+Alex", "+Annie", "+Andy", "+Mike", "+Lee", "+adam", "+anika", "+belinda", "+benjamin",
    "+boris", "+caleb", "+david", "+edward", "+gustave", "+john", "+linda", "+max", "+michael",
    "+paul", "+robert", "+steph", "+travis", "+victor", "+zac", "+klatt", "+klatt3",
)  # fmt: skip
HELD_OUT_VARIANTS = ("+m5", "+f2", "+Lee", "+linda", "+paul", "+steph")
VOICES = tuple(a + v for a in ACCENTS for v in VARIANTS if v not in HELD_OUT_VARIANTS)
HELD_OUT_VOICES = tuple(a + v for a in ACCENTS[:3] for v in HELD_OUT_VARIANTS)

WORD_EVENT, PHONEME_EVENT, LAST_EVENT = 1, 7, 0
SYNCHRONOUS, WITH_PHONEMES = 2, 1
"""`espeak_Initialize`: samples and events of phonemes go to a callback, before `espeak_Synth`
returns."""
RATE, PITCH, RANGE = 1, 3, 4
"""Numbers of `espeak_SetParameter`."""
CHARS_UTF8 = 1


@dataclass(frozen=True, slots=True)
class Spoken:
    """A sentence as sound. `ends`: for each word, the second at which it has been said."""

    words: tuple[str, ...]
    wave: NDArray[np.float32]
    """[samples] at `SAMPLE_RATE`."""
    ends: tuple[float, ...]
    phonemes: tuple[tuple[float, str], ...] = ()
    """The second at which each begins, and its name; the last is silence."""


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),  # a phoneme's name
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class Mouth:
    """espeak-ng in this process. Raises `OSError` without it; one instance per process."""

    def __init__(self) -> None:
        name = ctypes.util.find_library(LIBRARY) or f"lib{LIBRARY}.so.1"
        self._library = ctypes.CDLL(name)
        self._rate = int(self._library.espeak_Initialize(SYNCHRONOUS, 0, None, WITH_PHONEMES))
        self._samples: list[NDArray[np.int16]] = []
        self._starts: list[tuple[int, int]] = []  # (first character from 1, milliseconds)
        self._phonemes: list[tuple[float, str]] = []
        self._callback = _Callback(self._receive)  # kept: the library holds no reference
        self._library.espeak_SetSynthCallback(self._callback)

    def _receive(self, wave: ctypes._Pointer[ctypes.c_short], count: int, events: object) -> int:
        if wave and count:
            self._samples.append(np.ctypeslib.as_array(wave, (count,)).copy())
        number = 0
        while events[number].type != LAST_EVENT:  # type: ignore[index]
            event = events[number]  # type: ignore[index]
            if event.type == WORD_EVENT:
                self._starts.append((event.text_position, event.audio_position))
            elif event.type == PHONEME_EVENT:
                self._phonemes.append((event.audio_position / 1000, _phoneme(event.id)))
            number += 1
        return 0

    def say(
        self, words: Sequence[str], voice: str, *, speed: int, pitch: int, pitch_range: int = 50
    ) -> Spoken:
        """`speed` in words per minute; `pitch` and its range 0 to 100."""
        self._samples, self._starts, self._phonemes = [], [], []
        set_parameter = self._library.espeak_SetParameter
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice}")
        for parameter, value in ((RATE, speed), (PITCH, pitch), (RANGE, pitch_range)):
            set_parameter(parameter, value, 0)
        text = " ".join(words).encode() + b"\0"
        self._library.espeak_Synth(text, len(text), 0, 1, 0, CHARS_UTF8, None, None)
        spoken = np.concatenate(self._samples).astype(np.float32) / np.float32(32768)
        wave = np.asarray(soxr.resample(spoken, self._rate, SAMPLE_RATE), np.float32)
        loud = np.flatnonzero(np.abs(wave) > 0.01)
        last = (int(loud[-1]) + 1) / SAMPLE_RATE if len(loud) else len(wave) / SAMPLE_RATE
        ends = _ends(words, self._starts, last)
        return Spoken(tuple(words), wave, ends, tuple(self._phonemes))


@functools.cache
def mouth() -> Mouth:
    return Mouth()


def _ends(words: Sequence[str], starts: list[tuple[int, int]], last: float) -> tuple[float, ...]:
    """A word ends where the next one begins. Words that espeak-ng joins end together."""
    at = {position - 1: ms / 1000 for position, ms in starts}
    begins: list[float | None] = []
    character = 0
    for word in words:
        begins.append(at.get(character))
        character += len(word) + 1
    ends, following = [], last
    for begin in reversed(begins):
        ends.append(following)
        if begin is not None:
            following = begin
    return tuple(reversed(ends))


def _phoneme(name: bytes) -> str:
    """Without the marks of its variants."""
    return re.sub(r"(?<=.)[0-9#:;\[-]+$", "", name.decode(errors="replace"))


def any_voice(rng: random.Random, words: Sequence[str], voices: Sequence[str]) -> Spoken:
    return said_by(rng, words, rng.choice(voices))


def said_by(rng: random.Random, words: Sequence[str], voice: str) -> Spoken:
    return mouth().say(
        words, voice, speed=rng.randint(110, 210), pitch=rng.randint(20, 80),
        pitch_range=rng.randint(20, 80),
    )  # fmt: skip


def heard(rng: random.Random, spoken: Spoken, *, before: float, after: float) -> Spoken:
    """The sentence in a room: loudness, echo, noise, and silence in seconds around it."""
    noise = np.random.default_rng(rng.getrandbits(32))
    wave = spoken.wave
    if rng.random() < 0.4:
        wave = _room(noise, wave, rng.uniform(0.05, 0.35), rng.uniform(0.1, 0.5))
    front, back = int(before * SAMPLE_RATE), int(after * SAMPLE_RATE)
    wave = np.concatenate((np.zeros(front), wave, np.zeros(back))).astype(np.float32)
    wave *= rng.uniform(0.15, 0.9) / max(1e-3, float(np.abs(wave).max()))
    if rng.random() < 0.6:
        behind = loudness(wave) * 10 ** (-rng.uniform(8, 40) / 20)
        wave = wave + (_noise(noise, len(wave), rng.random()) * behind).astype(np.float32)
    return Spoken(spoken.words, wave, tuple(e + before for e in spoken.ends))


def loudness(wave: NDArray[np.float32]) -> float:
    """Root mean square of what sounds."""
    sounding = wave[np.abs(wave) > 0.01]
    return float(np.sqrt(np.mean(sounding**2))) if len(sounding) else 0.0


def _noise(noise: np.random.Generator, samples: int, colour: float) -> NDArray[np.float64]:
    """Unit loudness; `colour` from 0, white, to 1, whose power falls with the frequency squared."""
    spectrum = np.fft.rfft(noise.standard_normal(samples))
    spectrum /= np.maximum(1, np.arange(len(spectrum)) * SAMPLE_RATE / samples / 60) ** colour
    made = np.fft.irfft(spectrum, samples)
    return np.asarray(made / max(1e-9, float(np.sqrt(np.mean(made**2)))))


def _room(
    noise: np.random.Generator, wave: NDArray[np.float32], seconds: float, share: float
) -> NDArray[np.float32]:
    """Echoes that fall by 60 dB in `seconds`."""
    length = int(seconds * SAMPLE_RATE)
    echo = noise.standard_normal(length) * 10 ** (-3 * np.arange(length) / length)
    echo *= share / np.sqrt(np.sum(echo**2))
    echo[0] = 1.0
    size = len(wave) + length
    made = np.fft.irfft(np.fft.rfft(wave, size) * np.fft.rfft(echo, size), size)
    return made[: len(wave)].astype(np.float32)
