"""Voices: espeak-ng where it is installed. Without it, the world has no speech."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import soxr

SAMPLE_RATE = 16_000
ESPEAK = "espeak-ng"

DIGIT_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
)  # fmt: skip
COLOUR_WORDS = (
    "red", "green", "blue", "yellow", "orange", "purple", "black", "white",
)  # fmt: skip
SHAPE_WORDS = (
    "circle", "square", "triangle", "star", "cross",
)  # fmt: skip
OTHER_WORDS = (
    "yes", "no", "stop", "hello", "left", "right", "up", "down",
)  # fmt: skip
WORDS = DIGIT_WORDS + COLOUR_WORDS + SHAPE_WORDS + OTHER_WORDS

VARIANTS = (
    "",
    *(f"+m{i}" for i in range(1, 8)),
    *(f"+f{i}" for i in range(1, 6)),
    "+klatt",
    "+klatt2",
)
HELDOUT_VOICES = ("en-us+m5", "en-gb+f3", "en-us+f2", "en-gb+m1")
ALL_VOICES = tuple(accent + variant for accent in ("en-us", "en-gb") for variant in VARIANTS)
TRAINING_VOICES = tuple(voice for voice in ALL_VOICES if voice not in HELDOUT_VOICES)


@dataclass(frozen=True, slots=True)
class Segment:
    """What sounds from sample `start` to sample `end`."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class Utterance:
    wave: np.ndarray
    """float32 [samples] at `SAMPLE_RATE`."""
    segments: tuple[Segment, ...] | None
    """None where nobody knows when which word is said."""


class Speaker(Protocol):
    def say(self, rng: random.Random, words: Sequence[str]) -> Utterance: ...


@dataclass(frozen=True, slots=True)
class Espeak:
    """Whole sentences in one of `voices`."""

    voices: Sequence[str]

    def say(self, rng: random.Random, words: Sequence[str]) -> Utterance:
        voice = rng.choice(self.voices)
        speed, pitch = rng.randint(115, 190), rng.randint(30, 70)
        return Utterance(espeak(" ".join(words), voice, speed=speed, pitch=pitch), None)


def heldout_speaker() -> Speaker | None:
    """Voices no training sound is spoken in; None without espeak-ng."""
    return Espeak(HELDOUT_VOICES) if shutil.which(ESPEAK) else None


def espeak(text: str, voice: str, *, speed: int, pitch: int) -> np.ndarray:
    """float32 [samples], silence around it cut off. Raises `OSError` without espeak-ng."""
    command = [ESPEAK, "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text]
    made = subprocess.run(command, capture_output=True, check=True).stdout
    rate = int.from_bytes(made[24:28], "little")
    start = made.index(b"data") + 8  # the header's sizes are unset in a stream
    samples = np.frombuffer(made[start : start + (len(made) - start) // 2 * 2], np.int16)
    wave = soxr.resample(samples.astype(np.float32) / 32768, rate, SAMPLE_RATE)
    return _trimmed(np.asarray(wave, np.float32))


def _trimmed(wave: np.ndarray) -> np.ndarray:
    loud = np.flatnonzero(np.abs(wave) > 0.01)
    return wave[max(0, loud[0] - 160) : loud[-1] + 320] if len(loud) else wave
