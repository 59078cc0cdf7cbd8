"""Sounds: speech, beeps, tones, noise and silence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.nano.world.speech import (
    COLOUR_WORDS,
    DIGIT_WORDS,
    SAMPLE_RATE,
    SHAPE_WORDS,
    WORDS,
    Segment,
    Speaker,
    Utterance,
)

KINDS = {"speech": 6.0, "beeps": 2.0, "tone": 2.0, "noise": 0.4, "silence": 0.4}
"""Kind → relative frequency."""

TONES = ("low", "high", "rising", "falling")
NOISE = "noise"
LABELS = (*WORDS, *TONES, NOISE)
"""All labels that a segment may have."""

LOW_BELOW_HZ = 600


@dataclass(frozen=True, slots=True)
class Sound:
    kind: str
    wave: np.ndarray
    """float32 [samples] at 16 kHz, within ±1."""
    segments: tuple[Segment, ...] | None
    words: tuple[str, ...] = ()
    beeps: int = 0
    tone: str = ""

    def caption(self) -> str:
        match self.kind:
            case "speech":
                return f"a voice saying {' '.join(self.words)}"
            case "beeps":
                return f"{self.beeps} beep{'s' if self.beeps > 1 else ''}"
            case "tone":
                return f"a {self.tone} tone"
            case _:
                return self.kind


def make_sound(rng: random.Random, speaker: Speaker | None) -> Sound:
    """A random sound; without a speaker no speech."""
    kinds = {kind: weight for kind, weight in KINDS.items() if speaker or kind != "speech"}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    match kind:
        case "speech":
            assert speaker is not None
            return _speech(rng, speaker)
        case "beeps":
            return _beeps(rng)
        case "tone":
            return _tone(rng)
        case "noise":
            return _recorded(
                rng, kind, _whole(_hiss(rng, _samples(rng.uniform(0.5, 1.5)), 0.3), NOISE)
            )
        case _:
            return _recorded(rng, kind, Utterance(_silence(rng.uniform(0.5, 1.5)), ()))


def _speech(rng: random.Random, speaker: Speaker) -> Sound:
    words = _words(rng)
    said = speaker.say(rng, words)
    loud = said.wave / (np.abs(said.wave).max() + 1e-6)
    return _recorded(rng, "speech", Utterance(loud, said.segments), words=tuple(words))


def _words(rng: random.Random) -> list[str]:
    """A spoken sound, in most cases a number digit by digit."""
    choice = rng.random()
    if choice < 0.55:
        return rng.choices(DIGIT_WORDS, k=rng.choices([1, 2, 3, 4], [2, 3, 4, 1])[0])
    if choice < 0.75:
        return [rng.choice(COLOUR_WORDS), rng.choice(SHAPE_WORDS)]
    return rng.choices(WORDS, k=rng.choices([1, 2], [3, 1])[0])


def _beeps(rng: random.Random) -> Sound:
    number, pitch = rng.randint(1, 6), rng.uniform(300, 2000)
    beep, gap = rng.uniform(0.08, 0.2), rng.uniform(0.08, 0.2)
    label = "low" if pitch < LOW_BELOW_HZ else "high"
    parts = [Utterance(glide(rng, pitch, pitch, beep), None) for _ in range(number)]
    joined = join([_whole(part.wave, label) for part in parts], [_samples(gap)] * number)
    return _recorded(rng, "beeps", joined, beeps=number)


def _tone(rng: random.Random) -> Sound:
    name = rng.choice(TONES)
    start = end = rng.uniform(130, 380) if name == "low" else rng.uniform(900, 2500)
    if name in ("rising", "falling"):
        start = rng.uniform(200, 700)
        end = start * rng.uniform(1.8, 4)
        start, end = (start, end) if name == "rising" else (end, start)
    wave = glide(rng, start, end, rng.uniform(0.5, 1.5))
    return _recorded(rng, "tone", _whole(wave, name), tone=name)


def glide(rng: random.Random, start_hz: float, end_hz: float, seconds: float) -> np.ndarray:
    """A tone from one pitch to another, sometimes with an overtone, faded at both ends."""
    count = _samples(seconds)
    pitch = start_hz * (end_hz / start_hz) ** (np.arange(count) / count)
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    wave = np.sin(phase)
    if rng.random() < 0.4:
        wave = 0.7 * wave + 0.3 * np.sin(2 * phase)
    fade = min(160, count // 4)
    wave[:fade] *= np.linspace(0, 1, fade)
    wave[-fade:] *= np.linspace(1, 0, fade)
    return wave.astype(np.float32)


def join(parts: Sequence[Utterance], gaps: Sequence[int]) -> Utterance:
    """The parts one after another, each followed by its number of `gaps` samples of silence."""
    waves, segments, at = [], [], 0
    for part, gap in zip(parts, gaps, strict=True):
        segments += [Segment(s.start + at, s.end + at, s.label) for s in part.segments or ()]
        waves += [part.wave, np.zeros(gap, np.float32)]
        at += len(part.wave) + gap
    return Utterance(np.concatenate(waves), tuple(segments))


def _whole(wave: np.ndarray, label: str) -> Utterance:
    return Utterance(wave, (Segment(0, len(wave), label),))


def _samples(seconds: float) -> int:
    return int(seconds * SAMPLE_RATE)


def _silence(seconds: float) -> np.ndarray:
    return np.zeros(_samples(seconds), np.float32)


def _hiss(rng: random.Random, samples: int, loudness: float) -> np.ndarray:
    noise = np.random.default_rng(rng.getrandbits(32))
    return np.asarray(noise.standard_normal(samples) * loudness, np.float32)


def _recorded(
    rng: random.Random, kind: str, made: Utterance, *,
    words: tuple[str, ...] = (), beeps: int = 0, tone: str = "",
) -> Sound:  # fmt: skip
    """As a microphone has it: silence around, some loudness, often a little noise."""
    before, after = _silence(rng.uniform(0, 0.25)), _silence(rng.uniform(0.02, 0.25))
    wave = np.concatenate([before, made.wave * rng.uniform(0.25, 0.95), after])
    if kind != "silence" and rng.random() < 0.6:
        wave = wave + _hiss(rng, len(wave), rng.uniform(0, 0.006))
    segments = made.segments
    if segments is not None:
        shift = len(before)
        segments = tuple(Segment(s.start + shift, s.end + shift, s.label) for s in segments)
    clipped = np.clip(wave, -1, 1).astype(np.float32)
    return Sound(kind, clipped, segments, words, beeps, tone)
